"""Draft trees of a batch, grown layer by layer between the steps of an engine's draft loop."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from c2t_kernels import DraftStats, GrownLayer, draft_stats
from c2t_plugin.errors import ConfigError
from c2t_plugin.limits import RequestLimits
from c2t_plugin.trees.nodes import ROOT, best
from c2t_plugin.trees.policies import Frontier, SlotPolicy


class _Candidates(NamedTuple):
    """The children of one layer, (bs, slots * k), or those of all layers beside each other, the columns of a tree.

    parent_ids: int64 column, -1 the root. keep: bool. token_ids: int64. key: float32, the lowest confidence on the way
    from the root, so that by it no node goes before one that it needs; not above 0 of what is no node.
    """

    parent_ids: Tensor
    keep: Tensor
    token_ids: Tensor
    key: Tensor

    @classmethod
    def of_nobody(cls, bs: int, columns: int, device: torch.device) -> _Candidates:
        """Columns that no layer has written: dead children of the root."""
        shape = (bs, columns)
        return cls(
            parent_ids=torch.full(shape, ROOT, dtype=torch.int64, device=device),
            keep=torch.zeros(shape, dtype=torch.bool, device=device),
            token_ids=torch.zeros(shape, dtype=torch.int64, device=device),
            key=torch.zeros(shape, dtype=torch.float32, device=device),
        )


class TreeGrower(RequestLimits):
    """The tree of every request of a batch, across the steps of one draft.

    An engine calls, in this order: `write_seed` with the logits after the root of the *next* draft; `begin` when that
    draft starts; `step` with the logits after the nodes that the call before returned; `end`. Between `begin` and `end`
    every shape depends on the batch size alone and nothing synchronises with the host.

    Every layer has `policy.width` places to draft from, or as many as `begin` says. A dead place holds token 0 and is
    drafted from as well; what comes of it belongs to no tree. So `end` may come after fewer than `max_depth` layers:
    columns of the rest are dead, also where the calls were captured in graphs and those of some layers are not replayed
    (segments.py).
    """

    def __init__(
        self,
        policy: SlotPolicy,
        *,
        top_m: int,
        slots: int,
        max_depth: int,
        max_nodes: int,
        beta: float,
        device: torch.device | str,
        vocabulary: Tensor | None = None,
        narrow: SlotPolicy | None = None,
    ) -> None:
        """top_m: how many probabilities the entropy sums over. slots: seeds are kept per request slot.

        max_depth: draft steps. max_nodes: of a tree, the root not counted.

        vocabulary: (draft_vocab,) int64, the target's id of each token of the draft; None where they are the same.

        narrow: the same rule of a smaller width, for drafts of that.
        """
        self.policy = self._rule = policy
        self._narrow = narrow
        super().__init__(slots=slots, max_depth=max_depth, beta=beta, device=device)
        self.top_m = top_m
        self.max_nodes = max_nodes
        self.non_finite = torch.zeros(1, dtype=torch.int64, device=device)
        self._vocabulary = vocabulary
        self._workspace: Any = None
        if torch.device(device).type == "cuda":
            from c2t_kernels.stats.workspace import DraftStatsWorkspace

            self._workspace = DraftStatsWorkspace.create(slots * policy.width, device)
        shape = (slots, policy.width)
        # A slot without a seed has no possible token, so its tree is the root alone.
        self._seeds = DraftStats(
            token_ids=torch.zeros(shape, dtype=torch.int64, device=device),
            log_probs=torch.full(shape, -math.inf, dtype=torch.float32, device=device),
            entropy=torch.zeros(slots, dtype=torch.float32, device=device),
            margin=torch.zeros(slots, dtype=torch.float32, device=device),
        )

    def set_beta(self, beta: float) -> None:
        if beta and not self.policy.cuts:
            raise ConfigError(f"the trees that this server grows are not cut by a threshold: no beta, got {beta}")
        super().set_beta(beta)

    def write_seed(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the statistics of what follows each request's next root.

        slots: (n,) int64 request slots. logits: (n, draft_vocab) any float dtype.
        """
        self._statistics(logits, self.policy.width, out=self._seeds, at=slots)

    @property
    def shape(self) -> str:
        """For the log."""
        return f"trees of at most {self.max_nodes} nodes and depth {self.d_max}, top-k {self.policy.width}"

    def begin(self, slots: Tensor, width: int | None = None) -> GrownLayer:
        """Start a draft for the requests in these slots ((n,) int64): the first layer, (n, width). width: of one of the
        rules; None: of `policy`."""
        self._rule = self.policy if width in (None, self.policy.width) or self._narrow is None else self._narrow
        width = self._rule.width
        self._tree = _Candidates.of_nobody(len(slots), width + (self.d_max - 1) * width**2, slots.device)
        self._drawn = self._columns = 0
        self._beta, self._depth = self.limits_of(slots)
        root = torch.zeros(len(slots), 1, dtype=torch.float32, device=slots.device)
        self._frontier = Frontier(root, root, (self._depth > 0)[:, None])
        self._above, self._key = torch.full_like(root, ROOT, dtype=torch.int64), root + math.inf
        token_ids, log_probs, entropy, margin = (seed[slots] for seed in self._seeds)
        return self._grow(self._in_target_ids(DraftStats(token_ids[:, :width], log_probs[:, :width], entropy, margin)))

    def step(self, logits: Tensor) -> GrownLayer:
        """The next layer, from the logits after the nodes of the layer before: (n * width or more, draft_vocab)."""
        logits = logits[: self._frontier.alive.numel()]
        return self._grow(self._in_target_ids(self._statistics(logits, self._rule.width)))

    def end(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The trees: parent_ids int64, keep bool, token_ids int64, key float32, all (n, columns); parents before their
        children.

        keep is closed under ancestors and has at most max_nodes True entries per row. key is what nodes go by: the
        lowest confidence on the way from the root, infinite where none is known, and not above 0 of what is no node.
        """
        parent_ids, keep, token_ids, key = self._tree
        return parent_ids, best(key, keep, self.max_nodes), token_ids, key

    def layers(self, device: torch.device | str) -> Tensor:
        """(columns,) int64: the layer of each column of the newest draft's trees, 1 for children of the root."""
        width = self._rule.width
        deeper = torch.arange(2, self.d_max + 1, device=device).repeat_interleave(width**2)
        return torch.cat([torch.ones(width, dtype=torch.int64, device=device), deeper])

    @property
    def alive(self) -> Tensor:
        """Whether there is anything to draft from: one bool."""
        return self._frontier.alive.any()

    def _statistics(self, logits: Tensor, width: int, **where: Any) -> DraftStats:
        """draft_stats in one workspace that all captured graphs share, one call after the other."""
        if self._workspace is None or len(logits) > len(self._workspace.partial):
            return draft_stats(logits, self.top_m, width, **where)
        from c2t_kernels.stats import kernel

        return kernel.draft_stats(logits, self.top_m, width, workspace=self._workspace, **where)

    def _in_target_ids(self, stats: DraftStats) -> DraftStats:
        if self._vocabulary is None:
            return stats
        return stats._replace(token_ids=self._vocabulary[stats.token_ids])

    def _grow(self, stats: DraftStats) -> GrownLayer:
        self._drawn += 1
        depth, width = self._drawn, self._rule.width
        layer = self._rule.layer(self._frontier, stats, self._beta, depth)
        # from nodes of the largest depth nothing is drafted
        keep, alive = layer.kept, layer.alive & (self._depth > depth)[:, None]
        confidence, unscored = layer.confidence, layer.kept & layer.confidence.isnan()
        self.non_finite += unscored.sum()
        above = (x[..., None].expand(*x.shape, width).flatten(1) for x in (self._above, self._key))
        parent_ids, key = next(above), next(above)
        sure = confidence.nan_to_num(nan=-math.inf, posinf=math.inf).masked_fill(unscored, math.inf)
        key = torch.minimum(key, sure)
        end = self._columns + keep.shape[1]
        drawn = _Candidates(parent_ids, keep, stats.token_ids.reshape(keep.shape), key)
        for columns, value in zip(self._tree, drawn, strict=True):
            columns[:, self._columns : end] = value
        column = layer.children.clamp_min(0).long()
        self._above, self._key = column + self._columns, key.gather(1, column)
        self._columns = end
        self._frontier = Frontier(layer.joint_log_prob, layer.path_entropy, alive)
        return layer._replace(alive=alive)
