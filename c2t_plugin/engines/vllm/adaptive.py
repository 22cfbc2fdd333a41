"""The scorer of model runner V2, in the place of vLLM's acceptance estimator.

V2 shows every draft step's logits to an estimator, when there is one, and cuts by what that says: with asynchronous
scheduling its adaptive verification spends a budget of tokens on the drafts most likely to survive. So one object
serves both ways of scheduling: synchronous, where `kept` cuts the lists that the scheduler gets, and asynchronous,
where `predict` hands out the chance that a token is accepted if all before it are.

V2 replays one captured CUDA graph for every draft step, and the step's number is a tensor; nothing here depends on
a number of Python, allocates by it, or synchronises with the host before `kept`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from c2t_kernels import early_stop, score_step
from c2t_kernels.step import Meaning, StepState
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.engines.row_limits import RowLimits
from c2t_plugin.engines.vllm.early_exit import Ended
from c2t_plugin.scorer import DraftScorer

# Of vLLM's estimator: what it has counted since its last fit.
ROUND = ("info", "grad", "counts")


class StepScorer(RowLimits, DraftScorer):
    """Confidences of a batch's chains; rows are places in the batch, columns draft steps.

    `predict` and `observe` have the arguments of `predict` and `step` of vLLM's OnlineAcceptanceEstimator. Without
    `learn_by` the classifier's confidences are taken for what they say.
    """

    def __init__(
        self,
        classifier: NodeClassifier,
        *,
        rows: int,
        max_depth: int,
        beta: float,
        device: torch.device | str,
        keep_stats: bool = False,
    ) -> None:
        super().__init__(
            classifier, slots=rows, rows=rows, max_depth=max_depth, beta=beta, device=device, keep_stats=keep_stats
        )
        self._state = StepState.create(rows, max_depth, device, self.non_finite)
        # How often a request got so many tokens, accepted drafts and its own, and had so many drafts rejected.
        self._outcomes = torch.zeros((max_depth + 2, max_depth + 1), dtype=torch.int64, device=device)
        self._ones = torch.ones(rows, dtype=torch.int64, device=device)
        # vLLM's own estimator, where what chances mean is learnt
        self._estimator: Any = None
        self._meaning: Meaning | None = None
        self._ended = Ended(rows, torch.device(device)) if torch.device(device).type == "cuda" else None

    def learn_by(self, estimator: Any) -> None:
        """Have vLLM's OnlineAcceptanceEstimator fit a slope and offsets to the classifier's chances, in the place of
        the draft's own probabilities; it begins with what they say."""
        self._estimator = estimator
        self._meaning = Meaning(estimator.slope, estimator.intercepts, estimator.features, estimator.predictions)
        self._untaught()

    def _untaught(self) -> None:
        if self._estimator is not None:
            self._estimator.slope.fill_(1.0)
            for each in (self._estimator.intercepts, *(getattr(self._estimator, name) for name in ROUND)):
                each.zero_()

    def predict(
        self, logits: Tensor, idx_mapping: Tensor, draft_step: Tensor, confidence_probs: Tensor, temperature: Tensor
    ) -> None:
        """Score one draft step.

        logits: (rows, draft_vocab) before the temperature. draft_step: int64 number in a tensor, 0 for a draft's first
        token. confidence_probs: (max rows, steps) float32, column draft_step gets the `chances` of
        c2t_kernels.score_step. idx_mapping: (rows,) request slots, -1 for rows that only pad a captured batch.
        temperature: not used; the classifier's statistics are those of temperature 1.
        """
        log_prob, entropy, margin = self._statistics_of(logits)
        given = (draft_step, idx_mapping, self.beta, self.max_depth, confidence_probs, self._stats, self._meaning)
        score_step(self._state, self.network, log_prob, entropy, margin, *given)

    def kept(self, rows: int, steps: int) -> Tensor:
        """(rows,) int32: how many of the last draft's first `steps` tokens to verify; vLLM may draft none."""
        if not steps:
            return torch.zeros(rows, dtype=torch.int32, device=self.beta.device)
        beta, depth = self.limits_of(self._rows[:rows]) if self.own_here else (self.beta, self.max_depth)
        return early_stop(self._state.confidence[:rows, :steps], beta, depth)

    def said(self, rows: int, steps: int) -> Tensor:
        """(rows, steps, 4): of each request's first `steps` tokens of the last draft, confidence, the logarithm of the
        draft's own probability, entropy and margin. Of a scorer that keeps statistics."""
        assert self._stats is not None
        confidence, stats = self._state.confidence[:rows, :steps, None], self._stats[:rows, :steps, 1:]
        return torch.cat((confidence, stats), dim=-1)

    def any_alive_after(self, rows: int, steps: int) -> bool:
        """Whether a chain may grow behind its first `steps` tokens; on a GPU as far as that is known. Not for a
        captured graph."""
        if self._ended is not None:
            return not self._ended.after(steps, partial(self.kept, rows, steps))
        return bool(((self.kept(rows, steps) == steps) & (self.max_depth > steps)).any())

    def forget(self) -> None:
        """Count from here."""
        super().forget()
        self._outcomes.zero_()
        self._untaught()

    def observe(self, idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
        """Count what became of the last drafts. num_sampled: (requests,) accepted drafts and the bonus token, 0 for
        a request that is still in its prompt; num_rejected: (requests,) verified drafts that were not accepted."""
        found = torch.add(num_rejected, num_sampled, alpha=self._outcomes.shape[1])
        self._outcomes.view(-1).index_add_(0, found, self._ones[: len(found)])
        if self._estimator is not None:
            self._estimator.step(idx_mapping, num_sampled, num_rejected)

    def learnt(self) -> dict[str, Any] | None:
        """Slope and offsets by depth that chances are taken with; None: nothing is learnt. Asks the device."""
        if self._meaning is None:
            return None
        return {"slope": float(self._meaning.slope), "offsets": self._meaning.offsets[: self.d_max].tolist()}

    def outcomes(self) -> tuple[list[int], int]:
        """How many requests had so many drafts verified, those without any not counted, and how many drafts were
        accepted. Asks the device."""
        verified, accepted = [0] * self._outcomes.shape[1], 0
        for tokens, row in enumerate(self._outcomes.tolist()):
            hits = max(tokens - 1, 0)
            for rejected, times in enumerate(row):
                if times and hits + rejected:
                    verified[hits + rejected] += times
                    accepted += hits * times
        return verified, accepted
