"""The scorer of model runner V2, in the place of vLLM's acceptance estimator.

V2 shows every draft step's logits to an estimator, when there is one, and cuts by what that says: with asynchronous
scheduling its adaptive verification spends a budget of tokens on the drafts most likely to survive. So one object
serves both ways of scheduling: synchronous, where `kept` cuts the lists that the scheduler gets, and asynchronous,
where `predict` hands out the chance that a token is accepted if all before it are.

V2 replays one captured CUDA graph for every draft step, and the step's number is a tensor; nothing here depends on
a number of Python, allocates by it, or synchronises with the host before `kept`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_kernels import early_stop
from c2t_kernels.network import PathSums, children, finite
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.scorer import DraftScorer


class StepScorer(DraftScorer):
    """Confidences of a batch's chains; rows are places in the batch, columns draft steps.

    `predict` and `observe` have the arguments of `predict` and `step` of vLLM's OnlineAcceptanceEstimator. Nothing is
    learnt while serving: the classifier file was fitted before, and is best calibrated on chains then.
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
            classifier, slots=1, rows=rows, max_depth=max_depth, beta=beta, device=device, keep_stats=keep_stats
        )
        # not the kernel that `score_chain` is, which takes the depth as a number of Python
        self.classifier = classifier.to(device)
        self._joint, self._path_entropy = torch.zeros((2, rows), dtype=torch.float32, device=device)
        self._lowest = torch.ones(rows, dtype=torch.float32, device=device)
        self._confidence = torch.full((rows, max_depth), torch.nan, dtype=torch.float32, device=device)
        # How many requests had so many drafts verified (those without any are not counted), and how many were accepted.
        self.verified = torch.zeros(max_depth + 1, dtype=torch.int64, device=device)
        self.accepted = torch.zeros(1, dtype=torch.int64, device=device)

    def predict(
        self, logits: Tensor, idx_mapping: Tensor, draft_step: Tensor, confidence_probs: Tensor, temperature: Tensor
    ) -> None:
        """Score one draft step.

        logits: (rows, draft_vocab) before the temperature. draft_step: int64 number in a tensor, 0 for a draft's first
        token. confidence_probs: (max rows, steps) float32, column draft_step gets c_d = C_d / C_{d-1} with C the
        running minimum of the confidences, so that c_d <= 1 and the product down the chain is C_d; 0 for a token below
        beta. idx_mapping: (rows,) request slots, -1 for rows that only pad a captured batch. temperature: not used; the
        classifier's statistics are those of temperature 1.
        """
        rows = logits.shape[0]
        stats = self._draft_stats(logits)
        known, first, column = finite(stats), draft_step == 0, draft_step.reshape(1)
        above = PathSums(*(torch.where(first, 0.0, part[:rows]) for part in (self._joint, self._path_entropy)))
        # (rows, 1) each: a chain's token is the only child of the one before it
        node = children(above, stats, draft_step + 1, known=known)
        self._joint[:rows], self._path_entropy[:rows] = node.joint_log_prob[:, 0], node.path_entropy[:, 0]
        if self._stats is not None:
            stacked = torch.stack((node.joint_log_prob, node.log_prob, node.entropy, node.margin), dim=-1)
            self._stats[:rows].index_copy_(1, column, stacked)
        confidence = torch.where(known, self.classifier.confidence(node), torch.nan)[:, 0]
        self._confidence[:rows].index_copy_(1, column, confidence[:, None])
        self.non_finite += (~known[:, 0] & (idx_mapping >= 0)).sum()
        lowest = torch.where(first, 1.0, self._lowest[:rows])
        # fmin leaves the minimum as it is where the confidence is not known
        self._lowest[:rows] = torch.fmin(lowest, confidence)
        conditional = self._lowest[:rows] / lowest.clamp_min(torch.finfo(torch.float32).tiny)
        dropped = (confidence < self.beta) | (draft_step >= self.max_depth)
        confidence_probs[:rows].index_copy_(1, column, torch.where(dropped, 0.0, conditional)[:, None])

    def kept(self, rows: int, steps: int) -> Tensor:
        """(rows,) int32: how many of the last draft's first `steps` tokens to verify; vLLM may draft none."""
        if not steps:
            return torch.zeros(rows, dtype=torch.int32, device=self._confidence.device)
        return early_stop(self._confidence[:rows, :steps], self.beta, self.max_depth)

    def any_alive_after(self, rows: int, steps: int) -> bool:
        """Whether a chain may grow behind its first `steps` tokens. Asks the device, so not for a captured graph."""
        return bool(((self.kept(rows, steps) == steps) & (self.max_depth > steps)).any())

    def forget(self) -> None:
        """Count from here."""
        super().forget()
        self.verified.zero_()
        self.accepted.zero_()

    def observe(self, idx_mapping: Tensor, num_sampled: Tensor, num_rejected: Tensor) -> None:
        """Count what became of the last drafts. num_sampled: (requests,) accepted drafts and the bonus token, 0 for
        a request that is still in its prompt; num_rejected: (requests,) verified drafts that were not accepted."""
        accepted = (num_sampled - 1).clamp_min(0)
        verified = (accepted + num_rejected).long()
        self.verified.index_add_(0, verified, (verified > 0).long())
        self.accepted += accepted.sum()
