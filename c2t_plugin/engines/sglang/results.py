"""What is learnt from a step's result once it is on the host, beside what SGLang itself does with it.

Nothing here waits for the device: tensors travel with the copy that SGLang makes of every result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from c2t_plugin.engines.sglang.metrics import Counts, RequestCounts
from c2t_plugin.engines.sglang.requests import KEY
from c2t_plugin.traces.recorder import TraceRecorder, is_chosen


class Drafted(NamedTuple):
    """One draft of a batch. stats: (rows, d_max, 4), see ChainScorer.stats. tokens: (rows, d_max) int64."""

    stats: Tensor
    tokens: Tensor

    def to_host(self) -> Drafted:
        """Start the copy; the caller knows when it has ended."""
        return Drafted(*map(to_host, self))


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy; the caller knows when it has ended."""
    if tensor.is_cuda:
        # SGLang copies on a stream of its own, of which the owner of this memory does not know.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor.to("cpu", non_blocking=True)


def install() -> None:
    """Wrap SGLang's copy of a result to the host and what the scheduler does with it, once per process."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
    from sglang.srt.managers.utils import GenerationBatchResult

    if not hasattr(Scheduler.process_batch_result, "c2t"):
        GenerationBatchResult.copy_to_cpu = _with_drafts(GenerationBatchResult.copy_to_cpu)
        SchedulerBatchResultProcessor._resolve_spec_v2_tokens = _counting(
            SchedulerBatchResultProcessor._resolve_spec_v2_tokens
        )
        _GenerationStreamAccumulator.accept = _telling(_GenerationStreamAccumulator.accept)
        Scheduler.process_batch_result = _finishing(Scheduler.process_batch_result)


def _with_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy_to_cpu(self: Any, *positional: Any, **keyword: Any) -> Any:
        # before the original, whose event then covers these copies too
        if getattr(self, "c2t_drafted", None) is not None:
            self.c2t_drafted = self.c2t_drafted.to_host()
        if getattr(self, "c2t_wanted", None) is not None:
            self.c2t_wanted = to_host(self.c2t_wanted)
        return original(self, *positional, **keyword)

    return copy_to_cpu


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Over what SGLang takes a step's tokens out of its result with: the result has arrived, and no request has ended
    of it or been answered yet."""

    def resolve(self: Any, result: Any, batch: Any) -> Any:
        tokens = original(self, result, batch)
        if getattr(result, "c2t_rows", None) is not None:
            count(self.draft_worker.counts, self.draft_worker.recorder, batch.reqs, result)
        return tokens

    return resolve


def count(counts: Counts, recorder: TraceRecorder | None, reqs: Sequence[Any], result: Any) -> None:
    """Note one step with the server, its requests and, of recorded ones, the recorder."""
    # With the overlap scheduler a request that has ended is in one more batch; that row means nothing.
    running = [row for row, req in enumerate(reqs) if not (req.finished() or req.is_retracted)]
    rows, depth = result.c2t_rows, result.c2t_depth
    accepted, verified = ((lens[running] - 1).tolist() for lens in (result.accept_lens, result.cap_lens))
    wanted = verified if result.c2t_wanted is None else result.c2t_wanted[running].tolist()
    counts.add(verified, accepted, rows, depth, wanted)
    for row, length, asked in zip(running, verified, wanted, strict=True):
        req = reqs[row]
        if not hasattr(req, "c2t_counts"):
            req.c2t_counts = RequestCounts()
        req.c2t_counts.add(length, rows, depth, asked, result.c2t_classifier_s)
        drafted = result.c2t_drafted
        if recorder is not None and drafted is not None and req.c2t_chosen:
            recorder.add(req.rid, len(req.output_ids) - 1, drafted.stats[row], drafted.tokens[row].tolist())


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def accept(self: Any, *, req: Any) -> None:
        before = len(self.rids)
        original(self, req=req)
        if len(self.rids) == before or self.rust_server_mode:
            return
        counted = getattr(req, "c2t_counts", None) if req.finished() else None
        column = self.customized_info.get(KEY)
        if column is None and counted is None:
            return
        # SGLang puts here what has a value per token, and fills up with as many None; this has one per request.
        mine = [] if counted is None else [counted.state()]
        self.customized_info[KEY] = [*(column or [[]] * before)[:before], mine]

    return accept


def _finishing(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_batch_result(self: Any, batch: Any, result: Any) -> Any:
        settled = original(self, batch, result)
        finish(self.draft_worker.recorder, batch.reqs)
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
