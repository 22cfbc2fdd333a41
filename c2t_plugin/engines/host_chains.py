"""ChainScorer on a CPU: the same buffers, seeds and limits, with numpy's arithmetic of `host_scorer` in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.engines.host_scorer import Array, HostNetwork, PathNode, host_stats
from c2t_plugin.scorer import ChainScorer

# Of float32 statistics that are not finite.
_QUIET: Any = {"invalid": "ignore", "divide": "ignore", "over": "ignore"}


class HostChainScorer(ChainScorer):
    """A ChainScorer whose device is the CPU: a step takes a tenth of the operations, the numbers are the same within
    float32 rounding."""

    def __init__(self, classifier: NodeClassifier, **how: Any) -> None:
        """how: as ChainScorer takes it; the device is the CPU."""
        super().__init__(classifier, **how)
        self._top_m = classifier.spec.top_m
        self._host = HostNetwork(classifier, how["max_depth"])
        self._room = np.empty((2, how["rows"], 0), dtype=np.float32)
        # views: what is written here is read there
        self._joint, self._path, self._confidence = (each.numpy() for each in self._state)

    def _statistics_of(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        known: Array = logits.detach().float().numpy()
        if known.shape[1] != self._room.shape[2] or len(known) > self._room.shape[1]:
            rows = max(len(known), self._room.shape[1])
            self._room = np.empty((2, rows, known.shape[1]), dtype=np.float32)
        with np.errstate(**_QUIET):
            stats = host_stats(known, self._top_m, self._room)
        log_prob, entropy, margin = (
            torch.from_numpy(np.ascontiguousarray(each, dtype=np.float32))
            for each in (stats.log_prob, stats.entropy, stats.margin)
        )
        return log_prob, entropy, margin

    def _score_chain(self, log_prob: Tensor, entropy: Tensor, margin: Tensor) -> None:
        n, column = len(log_prob), self._step - 1
        joint, path = self._joint[:n], self._path[:n]
        own, shared, apart = log_prob.numpy(), entropy.numpy(), margin.numpy()
        known = np.isfinite(own) & np.isfinite(shared)
        if column == 0:
            joint[:] = path[:] = 0.0
        joint += np.where(known, own, 0.0)
        path += np.where(known, shared, 0.0)
        with np.errstate(**_QUIET):
            found = self._host.confidence(PathNode(joint, path, own, shared, apart), column)
        self._confidence[:n, column] = np.where(known, found, np.nan)
