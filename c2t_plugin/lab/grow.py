"""One loop grows every draft tree: a drafter says what may follow a node, a policy says which nodes there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from c2t_kernels import DraftStats, draft_stats
from c2t_kernels.network import NodeStats, PathSums, children
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.trees.nodes import ROOT

if TYPE_CHECKING:
    from c2t_plugin.lab.verify import Drafting


class Distributions(Protocol):
    """The draft's distributions after (batch, width) nodes."""

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, width)."""

    def stats(self, top_m: int, k: int) -> DraftStats:
        """The k most probable tokens (all of a smaller vocabulary) and the entropy over the top_m probabilities.

        Fields are (batch, width) and (batch, width, k). Of equally probable tokens the order is that of draft_stats.
        """

    def logits(self) -> Tensor:
        """(batch, width, vocab) any float dtype. C2TError where only statistics are known."""


class Drafter(Protocol):
    """A draft model at a batch of decoding states."""

    def root(self) -> Distributions:
        """(batch, 1): what follows the root."""

    def extend(self, token_ids: Tensor, parents: Tensor) -> Distributions:
        """Read one node per branch and say what follows it.

        token_ids, parents: (batch, branches) int64. Nodes read are numbered in the order of the calls and, in a call,
        of the branches; parents are such numbers, -1 the root. A padded branch has token 0 below the root and counts.
        Returns (batch, branches) distributions.
        """


class TreePolicy(Protocol):
    """A rule that decides which nodes a draft tree has. It keeps no state: that belongs to the growth."""

    @property
    def drafting(self) -> Drafting:
        """How it chooses tokens and what it cuts by: says which verifications are exact for its trees."""

    def branch(self, growth: Growth, distributions: Distributions) -> TokenTree:
        """New columns, whose parent_ids are columns of the growth: mostly children of the frontier, whose
        distributions these are, but any earlier parent will do. Columns that are not alive can never be drafted from.
        """

    def expand(self, growth: Growth) -> Tensor:
        """Columns to draft from next: (batch, width) int64, -1 pads. Growth ends when there is none."""

    def finish(self, tree: TokenTree) -> Tensor:
        """What the target verifies: (batch, nodes) bool, ancestor-closed."""


@dataclass(frozen=True)
class LogitDistributions:
    """Distributions of a live draft; (batch, width, vocab) logits of any float dtype."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def logits(self) -> Tensor:
        return self.values

    def stats(self, top_m: int, k: int) -> DraftStats:
        batch, width, vocab = self.values.shape
        found = draft_stats(self.values.flatten(0, 1), top_m, min(k, vocab))
        return DraftStats(*(value.unflatten(0, (batch, width)) for value in found))


@dataclass
class Growth:
    """Trees on their way. Policies read it; only `memory` is theirs to write.

    generator: for policies that sample. frontier: (batch, width) int64 columns last drafted from, -1 the root or
    padding. frontier_alive: (batch, width) bool, False for padding. memory: what a policy keeps between layers.
    asked: per draft call the frontier and its distributions, if they are kept. passes: (batch,) int64 draft calls of
    each state. depth: draft calls so far; layer by layer this is the depth of the newest nodes.
    """

    generator: torch.Generator | None
    frontier: Tensor
    frontier_alive: Tensor
    passes: Tensor
    depth: int = 1
    memory: Any = None
    keep_distributions: bool = True
    asked: list[tuple[Tensor, Distributions]] = field(default_factory=list)
    _blocks: list[TokenTree] = field(default_factory=list)
    _joined: TokenTree | None = None
    _read: Tensor | None = None
    _reads: int = 0

    @classmethod
    def at_root(
        cls, distributions: Distributions, generator: torch.Generator | None, keep_distributions: bool
    ) -> Growth:
        batch = distributions.shape[0]
        frontier = torch.full((batch, 1), ROOT)
        alive, passes = torch.ones(batch, 1, dtype=torch.bool), torch.ones(batch, dtype=torch.int64)
        growth = cls(generator, frontier, alive, passes, keep_distributions=keep_distributions)
        growth._note(frontier, distributions)
        return growth

    @property
    def batch(self) -> int:
        return len(self.passes)

    @property
    def newest(self) -> TokenTree:
        """The columns that the last `branch` made; the first of them is column `first`."""
        return self._blocks[-1]

    @property
    def first(self) -> int:
        """Column of the newest block's first node."""
        return sum(block.nodes for block in self._blocks[:-1])

    @property
    def tree(self) -> TokenTree:
        """All columns so far."""
        if self._joined is None:
            self._joined = TokenTree.join(self._blocks) if self._blocks else TokenTree.empty(self.batch)
        return self._joined

    def of_frontier(self, name: str, root: float) -> Tensor:
        """A field of the frontier's nodes, (batch, width); `root` for the root."""
        if not self._blocks:
            return torch.full_like(self.frontier, root, dtype=torch.float32 if isinstance(root, float) else None)
        return getattr(self.tree, name).gather(1, self.frontier.clamp_min(0)).masked_fill(self.frontier < 0, root)

    def children(self, stats: DraftStats, drawn: tuple[Tensor, Tensor] | None = None) -> TokenTree:
        """A block of children of the frontier, k for each node, in the order of their rank.

        stats: of the frontier's distributions, (batch, width) and (batch, width, k). drawn: token ids and their log
        probabilities, (batch, width, k) each, where they are not those that stats lists.
        Children of padding, of probability 0 or without a finite probability are dead. scores are joint probabilities.
        """
        above = PathSums(self.of_frontier("joint_log_probs", 0.0), self.of_frontier("path_entropy", 0.0))
        depth = self.of_frontier("depths", 0)[..., None] + 1
        token_ids, log_probs = drawn or (stats.token_ids, stats.log_probs)
        alive = self.frontier_alive[..., None] & torch.isfinite(log_probs)
        node = NodeStats(*(value.flatten(1) for value in children(above, stats, depth, log_probs=log_probs)))
        return TokenTree.of_stats(
            node,
            token_ids=token_ids.flatten(1),
            parent_ids=self.frontier[..., None].expand(token_ids.shape).flatten(1),
            alive=alive.flatten(1),
            scores=node.joint_log_prob.exp(),
        )

    def add(self, block: TokenTree) -> None:
        self._blocks.append(block)
        self._joined = None

    def extend(self, drafter: Drafter, frontier: Tensor) -> Distributions:
        """Read the frontier's nodes. Raises C2TError for a node that is dead or was read before."""
        live = frontier >= 0
        tree, columns = self.tree, frontier.clamp_min(0)
        # grown by the columns added since the last call
        read = torch.full((self.batch, tree.nodes), ROOT)
        if self._read is not None:
            read[:, : self._read.shape[1]] = self._read
        if (live & (~tree.alive.gather(1, columns) | (read.gather(1, columns) >= 0))).any():
            raise C2TError("the policy asks to draft from a node that is dead or was drafted from before")
        parents = tree.parent_ids.gather(1, columns)
        above = torch.where(parents >= 0, read.gather(1, parents.clamp_min(0)), ROOT)
        numbers = torch.arange(self._reads, self._reads + frontier.shape[1]).expand_as(frontier)
        rows = live.nonzero(as_tuple=True)
        read[rows[0], frontier[rows]] = numbers[rows]
        if (live & (read.gather(1, columns) != numbers)).any():
            raise C2TError("the policy asks to draft from a node twice at once")
        self._read, self._reads = read, self._reads + frontier.shape[1]
        self.frontier, self.frontier_alive = frontier, live
        self.passes, self.depth = self.passes + live.any(1), self.depth + 1
        distributions = drafter.extend(
            tree.token_ids.gather(1, columns).masked_fill(~live, 0), above.masked_fill(~live, ROOT)
        )
        self._note(frontier, distributions)
        return distributions

    def _note(self, frontier: Tensor, distributions: Distributions) -> None:
        if self.keep_distributions:
            self.asked.append((frontier, distributions))


@dataclass(frozen=True)
class Grown:
    """Grown trees. tree: only what the target verifies is alive. drafted: (batch, nodes) bool, what the policy had at
    hand before `finish`. passes: (batch,) int64 draft forward passes, the one that read the root included.
    asked: per draft call the columns drafted from ((batch, width) int64; -1 the root or padding) and what followed;
    empty if the distributions were not kept. drafting: the policy's, for `verify.compatible`.
    """

    tree: TokenTree
    drafted: Tensor
    passes: Tensor
    asked: list[tuple[Tensor, Distributions]]
    drafting: Drafting

    def wasted_passes(self, accepted: Tensor) -> Tensor:
        """(batch,) int64 passes that lie beyond the first mismatch (entropy-shaped trees, section 4).

        accepted: (batch,) int64, bonus excluded. Pass i proposes the nodes of depth i in a layer-by-layer growth; it
        is of use if depth i - 1 was accepted.
        """
        return (self.passes - accepted - 1).clamp_min(0)

    def logits_after(self, row: int, column: int) -> Tensor:
        """(vocab,) draft logits after one node, -1 the root. C2TError if it was not drafted from."""
        for call, (frontier, distributions) in enumerate(self.asked):
            found = (frontier[row] == column).nonzero()
            # after the first call -1 is padding
            if len(found) and (column >= 0 or call == 0):
                return distributions.logits()[row, int(found[0])]
        kept = "" if self.asked else ": the distributions were not kept"
        raise C2TError(f"node {column} of tree {row} was not drafted from{kept}")


def grow_tree(
    drafter: Drafter, policy: TreePolicy, generator: torch.Generator | None = None, keep_distributions: bool = True
) -> Grown:
    """Grow one tree per decoding state of the drafter, as the policy wants it.

    generator: where a policy that samples takes its randomness from. keep_distributions: verification by rejection
    needs them afterwards; of a live draft they are one logit per token for every node drafted from.
    """
    distributions = drafter.root()
    growth = Growth.at_root(distributions, generator, keep_distributions)
    while True:
        growth.add(policy.branch(growth, distributions))
        frontier = policy.expand(growth)
        if not (frontier >= 0).any():
            break
        distributions = growth.extend(drafter, frontier)
    tree = growth.tree
    return Grown(tree.keep(policy.finish(tree)), tree.alive, growth.passes, growth.asked, policy.drafting)
