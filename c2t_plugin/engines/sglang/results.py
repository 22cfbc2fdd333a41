"""What is learnt from a step's result once it is on the host, beside what SGLang itself does with it.

Nothing here waits for the device: tensors travel with the copy that SGLang makes of every result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from c2t_plugin.recording import TraceRecorder, is_chosen


class Drafted(NamedTuple):
    """One draft of a batch. stats: (rows, d_max, 4), see ChainScorer.stats. tokens: (rows, d_max) int64."""

    stats: Tensor
    tokens: Tensor

    def to_host(self) -> Drafted:
        """Start the copy; the caller knows when it has ended."""
        return Drafted(*(tensor.to("cpu", non_blocking=True) for tensor in self))


def install() -> None:
    """Wrap SGLang's copy of a result to the host and what the scheduler does with it, once per process."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.utils import GenerationBatchResult

    if not hasattr(Scheduler.process_batch_result, "c2t"):
        GenerationBatchResult.copy_to_cpu = _with_drafts(GenerationBatchResult.copy_to_cpu)
        Scheduler.process_batch_result = _settling(Scheduler.process_batch_result)


def _with_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy_to_cpu(self: Any, *positional: Any, **keyword: Any) -> Any:
        drafted = getattr(self, "c2t_drafted", None)
        if drafted is not None:
            # before the original, whose event then covers these copies too
            self.c2t_drafted = drafted.to_host()
        return original(self, *positional, **keyword)

    return copy_to_cpu


def _settling(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_batch_result(self: Any, batch: Any, result: Any) -> Any:
        recorder = self.draft_worker.recorder
        if getattr(result, "c2t_rows", None) is None:
            settled = original(self, batch, result)
            finish(recorder, batch.reqs)
            return settled
        # With the overlap scheduler a request that has ended is in one more batch; that row means nothing.
        running = [row for row, req in enumerate(batch.reqs) if not (req.finished() or req.is_retracted)]
        roots = [len(req.output_ids) - 1 for req in batch.reqs]
        settled = original(self, batch, result)
        verified, accepted = result.cap_lens.tolist(), result.accept_lens.tolist()
        self.draft_worker.counts.add(
            [verified[row] - 1 for row in running],
            [accepted[row] - 1 for row in running],
            result.c2t_rows,
            result.c2t_depth,
        )
        if result.c2t_drafted is not None:
            chosen = [row for row in running if batch.reqs[row].c2t_chosen]
            for row in chosen:
                drafted = result.c2t_drafted
                recorder.add(batch.reqs[row].rid, roots[row], drafted.stats[row], drafted.tokens[row].tolist())
        finish(recorder, batch.reqs)
        return settled

    process_batch_result.c2t = True  # type: ignore[attr-defined]
    return process_batch_result


def any_chosen(reqs: Sequence[Any], recorder: TraceRecorder) -> bool:
    """Whether a request of the batch belongs to the recorded share; each is decided on once."""
    for req in reqs:
        if not hasattr(req, "c2t_chosen"):
            req.c2t_chosen = is_chosen(req.rid, recorder.share)
    return any(req.c2t_chosen for req in reqs)


def finish(recorder: TraceRecorder | None, reqs: Sequence[Any]) -> None:
    """Hand over the texts of the recorded requests that have ended: in a decode step, or in a prefill that others'
    chunks or a retraction brought them into."""
    if recorder is None:
        return
    for req in reqs:
        if getattr(req, "c2t_chosen", False) and req.finished():
            recorder.finish(req.rid, req.origin_input_ids, req.output_ids)
