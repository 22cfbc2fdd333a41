"""Policies on recorded trees: the growth loop that serves live drafts, fed from a Forest.

A record holds the most probable tokens and the entropy of some distributions, those below EAGLE-2's frontier. A policy
that never asks for another one grows here, node for node, the trees that it grows live. Where it does ask for another
one, the record has no answer: the node stays a leaf, and the state is counted as `missing`. Chains need the recorded
chains: a tree need not hold the greedy path to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from c2t_kernels import DraftStats
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.grow import Distributions, Drafter, Grown, TreePolicy, grow_tree
from c2t_plugin.lab.token_tree import TokenTree
from c2t_plugin.traces.forest import Forest
from c2t_plugin.trees.nodes import ROOT

# Large enough that calls cost little, small enough that the tables stay near the cache.
NODES_PER_CHUNK = 2**18


@dataclass(frozen=True)
class RecordedDistributions:
    """Distributions of a forest. index: (states, width) int64 numbers of distributions, -1 where none is recorded."""

    draft: RecordedDraft
    index: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.index.shape[0], self.index.shape[1]

    def logits(self) -> Tensor:
        raise C2TError("a record holds no logits: policies that sample cannot be replayed, run them live")

    def stats(self, top_m: int, k: int) -> DraftStats:
        """NaN where no distribution is recorded. C2TError if more children or another entropy are asked for."""
        k = self.draft.check(top_m, k)
        forest = self.draft.forest
        known, at = self.index >= 0, self.index.clamp_min(0)
        columns = (at[..., None] * forest.k + torch.arange(k)).flatten(1)
        tokens, log_probs = (
            table.gather(1, columns).unflatten(1, (-1, k)) for table in (forest.token_ids, forest.log_prob)
        )
        entropy, margin = (table.gather(1, at) for table in (forest.entropy, forest.margin))
        return DraftStats(
            tokens.long(),
            log_probs.masked_fill(~known[..., None], torch.nan),
            entropy.masked_fill(~known, torch.nan),
            margin.masked_fill(~known, torch.nan),
        )


class RecordedDraft:
    """A Drafter that answers from a forest."""

    def __init__(self, forest: Forest, top_m: int, vocab: int | None = None) -> None:
        """top_m: of the recorded entropies. vocab: of the draft, if known: beyond it more children or more
        probabilities than recorded are the same."""
        self.forest, self.top_m, self.vocab = forest, top_m, vocab
        states, nodes = forest.accepted.shape
        parents = forest.parent_ids[:, 1:].long()
        numbers = torch.arange(1, 1 + parents.shape[1]).expand_as(parents)
        # the distribution that follows each node
        self.after = torch.full((states, nodes), ROOT).scatter_(1, parents, numbers)
        self.read = torch.zeros(states, 0, dtype=torch.int64)

    def check(self, top_m: int, k: int) -> int:
        """How many children to return for k."""
        limit = self.vocab or max(top_m, self.top_m, k)
        if min(top_m, limit) != min(self.top_m, limit):
            raise C2TError(
                f"the recorded entropies sum over {self.top_m} probabilities, the policy's over {top_m}; "
                f"set the policy's top_m, or collect with --top-m {top_m}"
            )
        if min(k, limit) > self.forest.k:
            raise C2TError(
                f"the policy asks for {k} children of a node, {self.forest.k} are recorded; "
                f"lower its K, or collect with --k {k}"
            )
        return min(k, self.forest.k)

    def root(self) -> RecordedDistributions:
        return RecordedDistributions(self, torch.zeros(len(self.forest), 1, dtype=torch.int64))

    def extend(self, token_ids: Tensor, parents: Tensor) -> RecordedDistributions:
        # the root's distribution is number 0
        above = self.read.gather(1, parents.clamp_min(0)) if self.read.shape[1] else parents
        above = above.masked_fill(parents < 0, 0)
        known, k = above >= 0, self.forest.k
        first = above.clamp_min(0) * k
        siblings = self.forest.token_ids.gather(1, (first[..., None] + torch.arange(k)).flatten(1))
        same = siblings.unflatten(1, (-1, k)) == token_ids[..., None]
        column = first + same.int().argmax(-1)
        index = self.after.gather(1, column).masked_fill(~(known & same.any(-1)), ROOT)
        self.read = torch.cat([self.read, index], dim=1)
        return RecordedDistributions(self, index)


@dataclass(frozen=True)
class Replayed:
    """Trees grown from a record. accepted: (states, nodes) bool, nodes of the tree that the target would keep.
    missing: (states,) int64, nodes that the policy wanted to draft from and the record did not."""

    grown: Grown
    accepted: Tensor
    missing: Tensor

    @property
    def tree(self) -> TokenTree:
        return self.grown.tree

    def outcomes(self) -> Outcomes:
        """What counts of each state."""
        accepted = self.accepted.sum(1)
        return Outcomes(
            self.tree.sizes(), accepted, self.grown.passes, self.grown.wasted_passes(accepted), self.missing
        )


@dataclass(frozen=True)
class Outcomes:
    """Per state, (states,) int64 each: gamma, draft tokens verified; accepted of them, bonus excluded;
    passes, draft forward passes; wasted, passes beyond the first mismatch; missing, see Replayed."""

    gamma: Tensor
    accepted: Tensor
    passes: Tensor
    wasted: Tensor
    missing: Tensor

    def __getitem__(self, rows: Tensor) -> Outcomes:
        """The states of these rows (bool mask or int64 indices)."""
        return Outcomes(*(getattr(self, item.name)[rows] for item in fields(self)))


def concatenate(parts: Sequence[Outcomes]) -> Outcomes:
    """All states of all parts, in order."""
    return Outcomes(*(torch.cat([getattr(part, item.name) for part in parts]) for item in fields(Outcomes)))


def replay_trees(forest: Forest, policy: TreePolicy, top_m: int, vocab: int | None = None) -> Replayed:
    """The trees that the policy grows on all states of a forest at once, with their acceptance.

    top_m, vocab: as in RecordedDraft. Raises C2TError if the policy asks for what no record holds.
    """
    grown = grow_tree(RecordedDraft(forest, top_m, vocab), policy)
    asked = [(columns, _index(distributions)) for columns, distributions in grown.asked]
    # past the first call, which is about the root, -1 is padding
    unknown = [((columns >= 0) & (index < 0)).sum(1) for columns, index in asked[1:]]
    missing = torch.stack(unknown).sum(0) if unknown else torch.zeros_like(grown.passes)
    return Replayed(grown, _labels(forest, grown.tree, asked), missing)


def replay(forest: Forest, policy: TreePolicy, top_m: int, vocab: int | None = None) -> Outcomes:
    """As replay_trees, in chunks of states, without keeping the trees."""
    rows = torch.arange(len(forest)).split(max(1, NODES_PER_CHUNK // forest.accepted.shape[1]))
    return concatenate([replay_trees(forest[chunk], policy, top_m, vocab).outcomes() for chunk in rows])


def grow_live(draft: Drafter, policy: TreePolicy, continuation: Tensor, generator: torch.Generator | None) -> Replayed:
    """The same from a live draft, for policies that a record cannot serve.

    continuation: (states, layers) int64, the target's own next tokens after the root; greedy acceptance follows it.
    generator: as in grow_tree. Raises C2TError if a tree is deeper than the continuation is long.
    """
    grown = grow_tree(draft, policy, generator, keep_distributions=False)
    tree, longest = grown.tree, continuation.shape[1]
    if (tree.alive & (tree.depths > longest)).any():
        raise C2TError(f"a tree is deeper than the {longest} tokens known of the target's text; continue it further")
    hits = tree.token_ids == continuation.gather(1, (tree.depths - 1).clamp(0, longest - 1))
    return Replayed(grown, _one_line(tree, hits), torch.zeros_like(grown.passes))


def _one_line(tree: TokenTree, hits: Tensor) -> Tensor:
    """The accepted nodes among the hits; of equal siblings, which independent draws make, one line only."""
    accepted = tree.closed(hits)
    # a rule may keep no node in any state
    if not tree.nodes or not (accepted.sum(1) > (tree.depths * accepted).amax(1)).any():
        return accepted
    # the deepest hit of the lowest column, and its ancestors
    deepest = (tree.depths * accepted).argmax(1)
    line = tree.ancestors()[torch.arange(tree.batch), deepest]
    return accepted & line


def _index(distributions: Distributions) -> Tensor:
    assert isinstance(distributions, RecordedDistributions)
    return distributions.index


def _labels(forest: Forest, tree: TokenTree, asked: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Which live nodes are accepted: (states, nodes) bool."""
    # one column more, for the root, and one for padding
    after = torch.full((tree.batch, tree.nodes + 2), ROOT)
    after[:, tree.nodes] = 0
    for columns, index in asked[1:]:
        after.scatter_(1, columns.where(columns >= 0, tree.nodes + 1), index)
    above = after.gather(1, tree.parent_ids.where(tree.parent_ids >= 0, tree.nodes))
    alive = tree.alive
    column = (above * forest.k + tree.rank).where(alive, 0)
    recorded = forest.token_ids.gather(1, column)
    if (alive & ((above < 0) | (recorded != tree.token_ids))).any():
        raise C2TError("the policy made children that are not the recorded ones; only top-K policies can be replayed")
    return alive & forest.accepted.gather(1, column)


@dataclass(frozen=True)
class Visited:
    """Over the states that serving visits. steps: verifications. tau: accepted draft tokens per verification, bonus
    excluded. gamma: verified draft tokens per verification. gamma_per_token: verified draft tokens per output token,
    bonus tokens counted as output. passes, wasted: draft forward passes per verification. missing: share of the
    verifications whose tree the record could not give whole; tau and gamma are too small there."""

    steps: int
    tau: float
    gamma: float
    gamma_per_token: float
    passes: float
    wasted: float
    missing: float


def visited(prompt: Tensor, accepted: Tensor) -> Tensor:
    """The states where a server verifies, greedily: (states,) bool. After a verification that accepts a, the state
    a + 1 tokens later is the next; the first of each prompt is visited.

    prompt: (states,) integer, equal for the consecutive states of one prompt, one token apart. accepted: (states,)
    int64, bonus excluded.
    """
    starts = torch.ones(len(prompt), dtype=torch.bool)
    starts[1:] = prompt[1:] != prompt[:-1]
    at = starts.nonzero().flatten()
    end = torch.cat([at[1:], torch.tensor([len(prompt)])])
    mask = torch.zeros(len(prompt), dtype=torch.bool)
    while len(at):
        mask[at] = True
        at = at + accepted[at] + 1
        at, end = at[at < end], end[at < end]
    return mask


def serve(outcomes: Outcomes, prompt: Tensor) -> Visited:
    """Serve the recorded prompts again. prompt: (states,) as in visited(). Raises C2TError without states."""
    if not len(prompt) or len(prompt) != len(outcomes.gamma):
        raise C2TError(f"{len(outcomes.gamma)} outcomes and {len(prompt)} states; one each is needed, and at least one")
    mask = visited(prompt, outcomes.accepted)
    steps = int(mask.sum())
    gamma, accepted, passes, wasted = (
        int(value[mask].sum()) for value in (outcomes.gamma, outcomes.accepted, outcomes.passes, outcomes.wasted)
    )
    missing = float((outcomes.missing[mask] > 0).float().mean())
    return Visited(
        steps=steps,
        tau=accepted / steps,
        gamma=gamma / steps,
        gamma_per_token=gamma / (accepted + steps),
        passes=passes / steps,
        wasted=wasted / steps,
        missing=missing,
    )


def acceptance_by_rank(forest: Forest) -> Tensor:
    """How often a child of each rank is accepted where its parent is (Sequoia's acceptance vector): (k,) float32.

    Over all recorded nodes that were expanded and whose line is accepted; zeros if there is none.
    """
    hits = forest.accepted.unflatten(1, (-1, forest.k))
    parents = forest.parent_ids[:, 1:].long()
    root = torch.ones(len(forest), 1, dtype=torch.bool)
    reached = torch.cat([root, forest.accepted.gather(1, parents)], dim=1)
    return hits.sum((0, 1)) / reached.sum().clamp_min(1)
