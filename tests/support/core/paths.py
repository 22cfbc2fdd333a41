"""A draft whose every distribution is known: a function from the path of tokens below the root to logits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from c2t_plugin.lab.grow import LogitDistributions, grow_tree
from tests.support.core.policy_toys import AFTER, ROOT

# a busy machine is no defect
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")

Path_ = tuple[int, ...]
Logits = Callable[[int, Path_], Sequence[float]]


@dataclass
class PathDraft:
    """A Drafter whose logits are a function of the state's number and the path of tokens below the root."""

    states: int
    logits: Logits
    paths: list[list[Path_]] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = [[] for _ in range(self.states)]

    def root(self) -> LogitDistributions:
        return LogitDistributions(torch.tensor([[self.logits(row, ())] for row in range(self.states)]))

    def extend(self, token_ids: Tensor, parents: Tensor) -> LogitDistributions:
        answers = []
        for row, (tokens, above) in enumerate(zip(token_ids.tolist(), parents.tolist(), strict=True)):
            known = list(self.paths[row])
            new = [
                (*(known[parent] if parent >= 0 else ()), token) for token, parent in zip(tokens, above, strict=True)
            ]
            self.paths[row] += new
            answers.append([self.logits(row, path) for path in new])
        return LogitDistributions(torch.tensor(answers))


def table_logits(root: Sequence[float], after: dict[int, Sequence[float]]) -> Logits:
    """Logits from probabilities: after the root, and after a path by its last token."""

    def logits(state: int, path: Path_) -> list[float]:
        return [math.log(p) if p else -math.inf for p in (after[path[-1]] if path else root)]

    return logits


def random_logits(vocab: int, seed: int, spread: float = 2.0) -> Logits:
    def logits(state: int, path: Path_) -> list[float]:
        rng = random.Random(f"{seed} {state} {path}")
        return [rng.gauss(0.0, spread) for _ in range(vocab)]

    return logits


@pytest.fixture(scope="session")
def path_draft() -> type[PathDraft]:
    return PathDraft


@pytest.fixture(scope="session")
def from_table() -> Callable[..., Logits]:
    return table_logits


@pytest.fixture(scope="session")
def at_random() -> Callable[..., Logits]:
    return random_logits


@pytest.fixture(scope="session")
def paths() -> Callable[..., list[Path_]]:
    """Token paths of the live nodes of one tree, in column order, from parent_ids and token_ids alone."""

    def of(tree, row: int = 0) -> list[Path_]:
        found: list[Path_] = []
        for token, parent in zip(tree.token_ids[row].tolist(), tree.parent_ids[row].tolist(), strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return [path for path, alive in zip(found, tree.alive[row].tolist(), strict=True) if alive]

    return of


@pytest.fixture
def grown(path_draft, paths):
    """Paths that a policy verifies on the hand-written draft, and the growth."""

    def run(policy, root=ROOT, after=AFTER):
        found = grow_tree(path_draft(1, table_logits(root, after)), policy)
        return paths(found.tree.validate()), found

    return run
