"""Model runner V2: vLLM's own speculators, with the classifier in the place of their acceptance estimator.

With synchronous scheduling the scheduler takes as many tokens of each draft as the list that it is handed is long, so
the lists are cut. The stock draft loop always runs to its end.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from c2t_plugin.classifier import load_classifier
from c2t_plugin.engines.vllm.adaptive import StepScorer
from c2t_plugin.engines.vllm.checkpoints import without_classifier_files
from c2t_plugin.engines.vllm.config import Settings

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator as _StockSpeculator
else:
    _StockSpeculator = object

logger = logging.getLogger("vllm.c2t")


class _ScoringMixin(_StockSpeculator):
    """Over a stock speculator."""

    scorer: StepScorer

    def load_model(self, *positional: Any, **keyword: Any) -> None:
        with without_classifier_files():
            super().load_model(*positional, **keyword)
        settings = Settings.of(self.vllm_config)
        assert settings is not None
        self.scorer = StepScorer(
            load_classifier(settings.classifier),
            rows=self.max_num_reqs,
            max_depth=self.num_speculative_steps,
            beta=settings.beta,
            device=self.device,
        )
        self.acceptance_estimator = SimpleNamespace(predict=self.scorer.predict, step=self.scorer.observe)
        settings.log(logger, self.method, self.num_speculative_steps, "model runner V2")


class C2TEagleSpeculator(_ScoringMixin, EagleSpeculator):
    """EAGLE and EAGLE-3 heads."""


class C2TMTPSpeculator(_ScoringMixin, MTPSpeculator):
    """MTP heads."""


class C2TStandaloneSpeculator(_ScoringMixin, StandaloneARSpeculator):
    """Stand-alone draft models."""


class CuttingHandler(DraftTokensHandler):
    """Hands the scheduler draft lists of unequal length."""

    scorer: StepScorer | None = None
    _kept: Tensor | None = None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Tensor) -> None:
        super().set_draft_tokens(input_batch, draft_tokens)
        self._kept = None if self.scorer is None else self.scorer.kept(*draft_tokens.shape)

    def get_draft_tokens(self) -> DraftTokenIds | None:
        drafts = super().get_draft_tokens()
        if drafts is None or self._kept is None:
            return drafts
        rows = zip(drafts.draft_token_ids, self._kept.tolist(), strict=True)
        return DraftTokenIds(drafts.req_ids, [row[:length] for row, length in rows])


def substitutes() -> list[tuple[str, str, type]]:
    """Module, name there, and the class that stands for that name while vLLM builds its model runner."""
    ours = (C2TEagleSpeculator, C2TMTPSpeculator, C2TStandaloneSpeculator)
    stock = [(cls.__bases__[-1].__module__, cls.__bases__[-1].__name__, cls) for cls in ours]
    return [*stock, ("vllm.v1.worker.gpu.model_runner", "DraftTokensHandler", CuttingHandler)]
