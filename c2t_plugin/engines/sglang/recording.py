"""Recording of served requests on SGLang, as far as it differs from other engines'. Imported by servers that record."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.served_traces import start_recorder
from c2t_plugin.engines.sglang.args import draft_revision
from c2t_plugin.engines.sglang.step import Drafted, record_of

if TYPE_CHECKING:
    from c2t_plugin.scorer import ChainScorer
    from c2t_plugin.traces.recorder import TraceRecorder


def start(config: C2TConfig, server_args: Any, kind: str, *, top_m: int, d_max: int) -> TraceRecorder:
    """A recorder for this process. config: which has a directory for it. kind: see start_recorder."""
    assert config.trace_dir is not None
    draft, target = server_args.speculative_draft_model_path, server_args.model_path
    return start_recorder(
        config.trace_dir,
        config.trace_share,
        config.trace_limit,
        config.trace_precision,
        command="sglang.launch_server",
        base=kind,
        target=target,
        draft=draft or target,
        # a draft that the target carries comes with it
        revision=draft_revision(server_args) if draft else getattr(server_args, "revision", None),
        top_m=top_m,
        d_max=d_max,
    )


def any_chosen(reqs: Sequence[Any], recorder: TraceRecorder) -> bool:
    """Whether a request of the batch belongs to the recorded share; each is decided on once."""
    records = [record_of(req) for req in reqs]
    with recorder.guarding():
        for req, record in zip(reqs, records, strict=True):
            if record.trace is None:
                record.trace = recorder.admit(req.rid)
                # one that is aborted while it waits never comes to `finish`
                weakref.finalize(record, recorder.forget, record.trace).atexit = False
    return any(record.trace for record in records)


def stats(recorder: TraceRecorder, scorer: ChainScorer, reqs: Sequence[Any]) -> Tensor | None:
    """See Drafted, of a batch's drafts."""
    return scorer.stats(len(reqs)) if any_chosen(reqs, recorder) else None


def add(recorder: TraceRecorder, reqs: Mapping[int, Any], drafted: Drafted) -> None:
    """Hand over the drafts of the recorded requests. reqs: those that run, by their rows."""
    if drafted.stats is None:
        return
    with recorder.guarding():
        for row, req in reqs.items():
            if number := record_of(req).trace:
                stats, tokens = drafted.stats[row], drafted.tokens[row, 1:].tolist()
                recorder.add(number, len(req.output_ids) - 1, stats, tokens)


def finish(recorder: TraceRecorder, reqs: Sequence[Any]) -> None:
    """Hand over the texts of the recorded requests that have ended: in a decode step, or in a prefill that others'
    chunks or a retraction brought them into."""
    with recorder.guarding():
        for req in reqs:
            if (number := record_of(req).trace) and req.finished():
                recorder.finish(number, req.origin_input_ids, req.output_ids)
