"""A draft whose every distribution is known, traces grown with it, and a pair of tiny untrained models on disk."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.papers.c2t_v1_common import PAPER_FEATURES_FILE
from benchmarks.papers.experiment import Bench
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.lab.grow import LogitDistributions
from c2t_plugin.lab.plans import DRAFTS, TreeShape
from c2t_plugin.lab.trees import grow
from c2t_plugin.traces.file import Traces

Path_ = tuple[int, ...]
HEADER = {
    "pair": {"target": "toy", "draft": "toy", "draft_vocab_size": 6},
    "top_m": 4,
    "prompts": "train",
    "new_tokens": 4,
    "run": {},
}


@dataclass
class ToyDraft:
    """A Drafter whose logits are a function of the state's number and the path of tokens below the root."""

    states: int
    logits: Callable[[int, Path_], Sequence[float]]
    paths: list[list[Path_]] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = [[] for _ in range(self.states)]

    def root(self) -> LogitDistributions:
        return self._answer([[()]] * self.states)

    def extend(self, token_ids: Tensor, parents: Tensor) -> LogitDistributions:
        new = [
            [(*(known[parent] if parent >= 0 else ()), token) for token, parent in zip(tokens, above, strict=True)]
            for known, tokens, above in zip(self.paths, token_ids.tolist(), parents.tolist(), strict=True)
        ]
        for known, paths in zip(self.paths, new, strict=True):
            known += paths
        return self._answer(new)

    def _answer(self, paths: list[list[Path_]]) -> LogitDistributions:
        rows = [[self.logits(row, path) for path in each] for row, each in enumerate(paths)]
        return LogitDistributions(torch.tensor(rows))


def random_logits(vocab: int, seed: int) -> Callable[[int, Path_], Sequence[float]]:
    def logits(state: int, path: Path_) -> list[float]:
        rng = random.Random(f"{seed} {state} {path}")
        return [rng.gauss(0.0, 2.0) for _ in range(vocab)]

    return logits


@pytest.fixture(scope="session")
def toy_draft() -> type[ToyDraft]:
    return ToyDraft


@pytest.fixture(scope="session")
def toy_logits() -> Callable[[int, int], Callable[[int, Path_], Sequence[float]]]:
    return random_logits


@pytest.fixture(scope="session")
def make_traces() -> Callable[..., Traces]:
    """Traces of a random toy draft whose target follows the draft's most probable token most of the time."""

    def make(prompts: int = 4, steps: int = 5, k: int = 2, layers: int = 4, seed: int = 0) -> Traces:
        states = prompts * steps
        logits = random_logits(6, seed)
        rng = random.Random(seed)
        continuation = [_follow(lambda path, row=row: logits(row, path), layers, rng) for row in range(states)]
        shapes = (TreeShape(k, layers, 4), TreeShape(1, layers, 4))
        tree, chain = (grow(ToyDraft(states, logits), torch.tensor(continuation), shape) for shape in shapes)
        return Traces(
            tree,
            chain,
            prompt=torch.arange(prompts, dtype=torch.int32).repeat_interleave(steps),
            step=torch.arange(steps, dtype=torch.int16).repeat(prompts),
            novel=torch.tensor([rng.random() < 0.7 for _ in range(states)]),
            header=HEADER,
        )

    return make


def _follow(logits: Callable[[Path_], Sequence[float]], layers: int, rng: random.Random) -> list[int]:
    path: Path_ = ()
    for _ in range(layers):
        order = torch.tensor(logits(path)).argsort(descending=True).tolist()
        path = (*path, order[rng.choices((0, 1, 3), (6, 2, 2))[0]])
    return list(path)


@dataclass
class ToyBench(Bench):
    """Random traces of trees 4 wide and 5 deep in place of a pair's, untrained classifiers."""

    make: Callable[..., Traces] = field(kw_only=True)

    def traces(self, draft: str, prompts: str = "held-out") -> Traces:
        key = (draft, prompts)
        if key not in self._traces:
            seed = sum(map(ord, self.prefix + draft + prompts))
            self._traces[key] = self.make(prompts=4, steps=6, k=4, layers=5, seed=seed)
        return self._traces[key]

    def classifier(self, draft: str) -> NodeClassifier:
        torch.manual_seed(len(draft))
        features = ("joint_log_prob", "entropy", "depth")
        spec = ClassifierSpec(features=features, top_m=4, hidden=8, training={"recipe": "default"})
        return NodeClassifier(spec).eval().requires_grad_(False)


@pytest.fixture
def toy_bench(make_traces: Callable[..., Traces], tmp_path: Path) -> Bench:
    found = ToyBench(tmp_path, tmp_path, quick=True, make=make_traces)
    for draft in DRAFTS:
        (tmp_path / draft).mkdir()
        save_classifier(found.classifier(draft), tmp_path / draft / PAPER_FEATURES_FILE)
    return found


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pair directory of untrained models with spread-out weights, and prompts of random tokens."""
    from benchmarks.pairs.toy.load import save_checkpoint
    from benchmarks.pairs.toy.models import new_draft, new_head, new_target
    from benchmarks.pairs.toy.recipe import Recipe
    from benchmarks.pairs.toy.tokenizer import train_tokenizer
    from c2t_plugin.lab.corpus import is_held_out

    directory = tmp_path_factory.mktemp("pair")
    recipe = Recipe(
        vocab_size=300, hidden=128, layers=5, intermediate=64, draft_hidden=64, draft_layers=2, draft_intermediate=64
    )
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 3, recipe.vocab_size)
    target = new_target(recipe)
    modules = {"target": target, "draft": new_draft(recipe, target)}
    modules |= {kind: new_head(kind, recipe, target) for kind in ("eagle3", "eagle1", "mtp")}
    for kind, module in modules.items():
        with torch.no_grad():
            for parameter in module.parameters():
                # untrained logits are almost equal; an EAGLE-1 head, which ends in no norm, needs less
                parameter.mul_((2.0 if kind == "eagle1" else 4.0) if parameter.dim() > 1 else 1.0)
        save_checkpoint(kind, module, recipe, tokenizer, directory / kind)
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 300) for _ in range(rng.choice((12, 12, 15)))] for _ in range(6)]
    listing = {"prompts": [{"file": "held.py", "text": "", "ids": ids} for ids in prompts]}
    (directory / "held_out_prompts.json").write_text(json.dumps(listing), encoding="utf-8")
    # the second would not be held out by its name
    by_name = next(f"held_{i}.py" for i in range(10_000) if is_held_out(f"held_{i}.py", recipe.held_out_one_in))
    (directory / "held_out_files.json").write_text(json.dumps([by_name, "listed.py"]), encoding="utf-8")
    return directory
