"""One decoding step as several policies saw it: which nodes each kept, which it cut, and what the target took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.traces.forest import Forest

Path = tuple[int, ...]

ACCEPTED, REJECTED, CUT, MISSED = "accepted", "rejected", "cut", "missed"
MEANINGS = {
    ACCEPTED: "verified, and the target accepted it",
    REJECTED: "verified for nothing",
    CUT: "not verified, rightly",
    MISSED: "not verified, though the target would have accepted it",
}


@dataclass(frozen=True)
class Node:
    """path: token ids from below the root to the node. prob, joint_prob, entropy (nats), depth: of the node.
    confidence: the classifier's. verdicts: policy -> one of MEANINGS."""

    path: Path
    prob: float
    joint_prob: float
    entropy: float
    depth: int
    confidence: float
    verdicts: Mapping[str, str]


@dataclass(frozen=True)
class Step:
    """All recorded nodes, children by falling probability. gamma: draft tokens verified by each policy.
    tau: of these the accepted ones, bonus excluded."""

    title: str
    nodes: Mapping[Path, Node]
    gamma: Mapping[str, int]
    tau: Mapping[str, int]
    children: Mapping[Path, Sequence[Path]] = field(repr=False)

    def walk(self, cut_children: int, at: Path = ()) -> Iterator[Node]:
        """Nodes, parents first. Of siblings that every policy rightly cut, only the first cut_children, without what
        would follow them."""
        shown = 0
        for path in self.children.get(at, ()):
            node = self.nodes[path]
            if set(node.verdicts.values()) == {CUT}:
                shown += 1
                if shown <= cut_children:
                    yield node
            else:
                yield node
                yield from self.walk(cut_children, path)


def step_of(
    title: str,
    forests: Sequence[Forest],
    confidences: Sequence[Tensor],
    kept: Mapping[str, frozenset[Path]],
    d_max: int,
) -> Step:
    """One recorded state under several policies, down to depth d_max.

    forests: of this one state, the whole tree and the chain. confidences: (1, nodes) of each, the classifier's.
    kept: policy -> paths of what it lets the target verify, all of them recorded and none deeper than d_max.
    """
    found: dict[Path, Node] = {}
    taken: Path = ()
    for forest, confidence in zip(forests, confidences, strict=True):
        columns = zip(
            recorded_paths(forest),
            forest.log_prob[0].exp().tolist(),
            forest.joint_log_prob[0].exp().tolist(),
            forest.stats().entropy[0].tolist(),
            confidence[0].tolist(),
            forest.accepted[0].tolist(),
            strict=True,
        )
        for path, prob, joint, entropy, c, accepted in columns:
            if len(path) > d_max:
                continue
            # the chain is recorded beside the tree, which holds most of it too
            found.setdefault(path, Node(path, prob, joint, entropy, len(path), c, {}))
            taken = path if accepted and len(path) > len(taken) else taken
    unknown = sorted(path for paths in kept.values() for path in paths if path not in found)
    if unknown:
        raise C2TError(f"the record lacks the nodes {unknown[:3]}, which a policy keeps")
    judged = {path: replace(node, verdicts=_verdicts(path, kept, taken)) for path, node in found.items()}
    children: dict[Path, list[Path]] = {}
    for path in sorted(judged, key=lambda path: (len(path), -judged[path].prob, path)):
        children.setdefault(path[:-1], []).append(path)
    gamma = {name: len(paths) for name, paths in kept.items()}
    tau = {name: sum(path == taken[: len(path)] for path in paths) for name, paths in kept.items()}
    return Step(title, judged, gamma, tau, children)


def _verdicts(path: Path, kept: Mapping[str, frozenset[Path]], taken: Path) -> dict[str, str]:
    verified, left_out = (ACCEPTED, MISSED) if path == taken[: len(path)] else (REJECTED, CUT)
    return {name: verified if path in paths else left_out for name, paths in kept.items()}


def recorded_paths(forest: Forest) -> list[Path]:
    """Path of each column of a forest's only tree."""
    tokens, owners = forest.token_ids[0].tolist(), forest.parent_ids[0].tolist()
    found: list[Path] = []
    for column, token in enumerate(tokens):
        owner = owners[column // forest.k]
        found.append((*(found[owner] if owner >= 0 else ()), token))
    return found


def kept_paths(tree: TokenTree) -> frozenset[Path]:
    """Paths of the live nodes of a tree that is a batch of one."""
    tokens, parents = tree.token_ids[0].tolist(), tree.parent_ids[0].tolist()
    found: dict[int, Path] = {}
    for column, alive in enumerate(tree.alive[0].tolist()):
        if alive:
            found[column] = (*(found[parents[column]] if parents[column] >= 0 else ()), tokens[column])
    return frozenset(found.values())
