"""ChainScorer on a CPU: the same buffers, seeds and limits, with numpy's arithmetic of `host_scorer` in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.engines.host_scorer import HostNetwork, HostStatistics, HostStats, extend
from c2t_plugin.planner.sparing import SparingPlanner
from c2t_plugin.scorer import ChainScorer


class HostChainScorer(ChainScorer):
    """A ChainScorer whose device is the CPU: a tenth of the operations, the same numbers within float32 rounding."""

    def __init__(self, classifier: NodeClassifier, **how: Any) -> None:
        """how: as ChainScorer takes it; the device is the CPU."""
        super().__init__(classifier, **how)
        # whose steps need no scores where it says so
        self.planner: SparingPlanner | None = None
        self._statistics = HostStatistics(how["rows"], classifier.spec.top_m)
        self._host_network = HostNetwork(self.network, how["max_depth"])
        # views: what is written here is read there
        self._joint, self._path, self._confidence = (each.numpy() for each in self._state)
        self._host_seeds = self._seeds.numpy()
        self._host_stats, self._host_log_prob = (
            None if each is None else each.numpy() for each in (self._stats, self._log_prob)
        )

    def take(self, parameters: Sequence[Tensor]) -> None:
        super().take(parameters)
        self._host_network = HostNetwork(self.network, self.d_max)

    @property
    def _spared(self) -> bool:
        return self.planner is not None and not self.planner.scores

    @property
    def scored(self) -> int:
        # none of its depths has its end to look for
        return self.d_max if self._spared else self._step

    def write_seed(self, slots: Tensor, logits: Tensor) -> None:
        if self.planner is not None and not self.planner.scores_next:
            self._host_seeds[:, slots.numpy()] = np.nan
        else:
            self._host_seeds[:, slots.numpy()] = self._statistics(logits)[1:]

    def begin(self, slots: Tensor) -> None:
        if not self._spared:
            super().begin(slots)

    def step(self, logits: Tensor) -> None:
        if not self._spared:
            self._add(self._statistics(logits[: self._batch]))

    def sure(self, rows: int) -> Tensor:
        return torch.full_like(super().sure(rows), torch.nan) if self._spared else super().sure(rows)

    def lengths(self, rows: int, **how: Any) -> Tensor:
        if self._spared:
            return torch.full((rows,), min(self._step, int(self.max_depth)), dtype=torch.int32)
        if self.own_here or how.keys() - {"unknown", "links"}:
            return super().lengths(rows, **how)
        sure = self._confidence[:rows, : self._step]
        kept = np.logical_and.accumulate(~(sure < float(self.beta)), axis=1)
        found = np.minimum(kept.sum(axis=1), int(self.max_depth))
        unknown, links = how.get("unknown"), how.get("links")
        if unknown is not None:
            unknown += int(np.count_nonzero(np.isnan(sure)))
        if links is not None:
            links.numpy()[np.arange(rows), found] = -1
        return torch.from_numpy(found.astype(np.int32))

    def newest(self) -> tuple[list[float], list[float]]:
        """Of each request of the draft at hand its newest token's confidence, and the logarithm of the draft's own
        probability of it, NaN where that is not kept."""
        n, column = self._batch, self._step - 1
        own = self._host_log_prob
        return (
            self._confidence[:n, column].tolist(),
            [float("nan")] * n if own is None else own[:n, column].tolist(),
        )

    def _score(self, log_prob: Tensor, entropy: Tensor, margin: Tensor) -> None:
        # a chain's token is the most probable one, whatever its id
        self._add(HostStats(None, log_prob.numpy(), entropy.numpy(), margin.numpy()))

    def _add(self, stats: HostStats) -> None:
        """One more token of every chain, as it is kept."""
        n, column = self._batch, self._step
        self._step += 1
        joint, path = self._joint[:n], self._path[:n]
        if column == 0:
            joint[:] = path[:] = 0.0
        self._confidence[:n, column] = extend(self._host_network, joint, path, stats, column)
        if self._host_log_prob is not None:
            self._host_log_prob[:n, column] = stats.log_prob
        if self._host_stats is not None:
            self._host_stats[:n, column] = np.stack((joint, *stats[1:]), axis=-1)
