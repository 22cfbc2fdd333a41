"""ChainScorer on a CPU: the same buffers, seeds and limits, with numpy's arithmetic of `host_scorer` in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from c2t_kernels import DraftStats
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.engines.host_scorer import HostNetwork, HostStatistics, HostStats, extend
from c2t_plugin.scorer import ChainScorer


class HostChainScorer(ChainScorer):
    """A ChainScorer whose device is the CPU: a step takes a tenth of the operations, the numbers are the same within
    float32 rounding."""

    def __init__(self, classifier: NodeClassifier, **how: Any) -> None:
        """how: as ChainScorer takes it; the device is the CPU."""
        super().__init__(classifier, **how)
        self._host_stats = HostStatistics(how["rows"], classifier.spec.top_m)
        self._draft_stats = self._on_host
        self._host_network = HostNetwork(self.network, how["max_depth"])
        # views: what is written here is read there
        self._joint, self._path, self._confidence = (each.numpy() for each in self._state)

    def take(self, parameters: Sequence[Tensor]) -> None:
        super().take(parameters)
        self._host_network = HostNetwork(self.network, self.d_max)

    def _on_host(self, logits: Tensor, *, out: DraftStats | None = None, at: Tensor | None = None) -> DraftStats:
        """c2t_kernels.draft_stats of the most probable token."""
        token_ids, log_prob, entropy, margin = map(torch.from_numpy, self._host_stats(logits))
        return DraftStats(token_ids[:, None], log_prob[:, None], entropy, margin).into(out, at)

    def _score_chain(self, log_prob: Tensor, entropy: Tensor, margin: Tensor) -> None:
        n, column = len(log_prob), self._step - 1
        joint, path = self._joint[:n], self._path[:n]
        if column == 0:
            joint[:] = path[:] = 0.0
        # a chain's token is the most probable one, whatever its id
        stats = HostStats(None, log_prob.numpy(), entropy.numpy(), margin.numpy())
        self._confidence[:n, column] = extend(self._host_network, joint, path, stats, column)
