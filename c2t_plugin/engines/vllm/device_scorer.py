"""Model runner V1 on a GPU: the scorer of chains, by rows of the batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.engines.row_limits import RowLimits
from c2t_plugin.engines.vllm.early_exit import Ended
from c2t_plugin.scorer import ChainScorer


class DeviceScorer(RowLimits, ChainScorer):
    """On a GPU: as HostScorer, but that it chooses no token."""

    def __init__(self, classifier: NodeClassifier, *, rows: int, device: torch.device, **keyword: Any) -> None:
        super().__init__(classifier, slots=rows, rows=rows, device=device, **keyword)
        self._ended = Ended(rows, device)

    def score(self, logits: Tensor, *, first: bool) -> None:
        """Score the next token of every chain from (rows, draft_vocab) logits. first: of a new draft."""
        if first:
            rows = self._rows[: logits.shape[0]]
            self.write_seed(rows, logits)
            self.begin(rows)
        else:
            self.step(logits)

    def any_alive(self) -> bool:
        """As far as is known: see Ended."""
        return not self._ended.after(self.scored, functools.partial(self.lengths, self.batch))
