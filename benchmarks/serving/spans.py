"""A torch profiler trace with call stacks, added up by the phases of a speculative decoding step.

A function's time counts for the innermost phase that it runs in; what runs in a step but in no phase is `other`. A
step that reads prompts is none.

A replayed CUDA graph shows its kernels and no function: what runs in the draft's counts as draft but for C2T's own
kernels, so that EAGLE-2's second top-K and rerank are draft there, and C2T's scoring of a tree's nodes is rerank.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from c2t_plugin.errors import C2TError

Event = Mapping[str, Any]
STEP = "step"
PREFILL = "prefill"
PHASES = ("draft", "statistics", "classifier", "rerank", "verify", "other")
# Functions of SGLang 0.5.23 and of C2T, as the profiler names them: file(line): function.
FUNCTIONS = (
    (STEP, re.compile(r"eagle_worker_v2\.py\(\d+\): forward_batch_generation$")),
    (PREFILL, re.compile(r"eagle_worker_v2\.py\(\d+\): _forward_prefill_batch$")),
    ("draft", re.compile(r"eagle_worker_v2\.py\(\d+\): (?:draft|_draft_extend_for_decode)$")),
    ("draft", re.compile(r"sglang/worker\.py\(\d+\): (?:draft|_draft_extend_for_decode)$")),
    ("verify", re.compile(r"eagle_worker_v2\.py\(\d+\): verify$")),
    ("rerank", re.compile(r"\.py\(\d+\): (?:select_top_k_tokens|organize_draft_results)$")),
    ("rerank", re.compile(r"c2t_kernels\S*\.py\(\d+\): (?:grow_layer|fill_spare_rows|build_tree|full_mask)$")),
    ("rerank", re.compile(r"c2t_plugin/trees/nodes\.py\(\d+\): best$")),
    ("statistics", re.compile(r"c2t_kernels\S*\.py\(\d+\): draft_stats$")),
    ("statistics", re.compile(r"c2t_plugin/engines/host_scorer\.py\(\d+\): host_stats$")),
    ("classifier", re.compile(r"c2t_plugin/engines/host_chains\.py\(\d+\): _add$")),
    ("classifier", re.compile(r"c2t_plugin/classifier/network\.py\(\d+\): confidence$")),
    ("classifier", re.compile(r"c2t_kernels\S*\.py\(\d+\): (?:score_chain|confidence_of|early_stop)$")),
)
# C2T's own kernels: inside a captured graph a launch says only which graph it was.
KERNELS = (
    ("statistics", re.compile(r"^(?:scan_kernel|select_kernel)")),
    ("classifier", re.compile(r"^(?:score_chain_kernel|early_stop_kernel)")),
    # It scores children and chooses among them in one launch.
    ("rerank", re.compile(r"^grow_layer_kernel")),
)


class Span(NamedTuple):
    """A phase's function on a thread, in microseconds."""

    start: float
    end: float
    phase: str


def load_trace(path: Path) -> list[Event]:
    """The events of a trace file, gzipped or not. C2TError if it is none."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events: list[Event] = json.loads(raw)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise C2TError(f"{path.name} is no readable trace: {error}") from error
    return events


def phases(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds per decoding step of each of PHASES, as `draft_ms` and so on, and how many `steps` there were.

    Device time where the trace has kernels, else host time. C2TError if it holds no decoding step.
    """
    threads = _threads(events)
    steps = sum(span.phase == STEP for spans in threads.values() for span in spans)
    if not steps:
        raise C2TError("the trace holds no decoding step with call stacks: profile with stacks, under speculation")
    kernels = _launched(events)
    total = _device(kernels, threads) if kernels else _host(threads)
    found = {f"{phase}_ms": total.get(phase, 0.0) / 1e3 / steps for phase in PHASES}
    return {**found, "steps": float(steps)}


def gap_ms(events: Sequence[Event]) -> float | None:
    """Milliseconds from the end of a step's draft to the start of its verification, on average; None if
    there are no such steps.

    On the device where the trace has kernels: what it idles there, since both are long queues of kernels.
    """
    kernels = _launched(events)
    found = []
    for thread, spans in _threads(events).items():
        for draft, verify in _pairs(spans):
            ends, starts = [draft.end], [verify.start]
            if kernels:
                mine = kernels.get(thread, ())
                ends = [kernel["ts"] + kernel["dur"] for at, kernel in mine if draft.start <= at < draft.end]
                starts = [kernel["ts"] for at, kernel in mine if verify.start <= at < verify.end]
            if ends and starts:
                found.append((min(starts) - max(ends)) / 1e3)
    return sum(found) / len(found) if found else None


def _pairs(spans: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """Each verification of a thread with the last outermost draft before it."""
    draft: Span | None = None
    verified = 0.0
    for span in spans:
        if span.phase == "draft" and (draft is None or span.start >= draft.end):
            draft = span
        elif span.phase == "verify" and draft is not None and span.start >= max(draft.end, verified):
            verified = span.end
            yield draft, span


def _threads(events: Iterable[Event]) -> dict[Any, list[Span]]:
    """The phases' functions of each thread, by start, an outer one before an inner one; without steps that prefill."""
    threads: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or event.get("cat") != "python_function":
            continue
        phase = phase_of(FUNCTIONS, event["name"])
        if phase is not None:
            span = Span(event["ts"], event["ts"] + event["dur"], phase)
            threads[event["tid"]].append(span)
    return {
        thread: _without_prefill(sorted(spans, key=lambda span: (span.start, -span.end)))
        for thread, spans in threads.items()
    }


def phase_of(table: Iterable[tuple[str, re.Pattern[str]]], name: str) -> str | None:
    """What a function or kernel of this name counts for; None if for nothing of its own."""
    return next((phase for phase, pattern in table if pattern.search(name)), None)


def _without_prefill(spans: Sequence[Span]) -> list[Span]:
    """Spans by start: those of steps that read prompts are left out whole."""
    read = [span.start for span in spans if span.phase == PREFILL]
    dropped = [span for span in spans if span.phase == STEP and any(span.start <= start < span.end for start in read)]
    return [
        span
        for span in spans
        if span.phase != PREFILL and not any(step.start <= span.start < step.end for step in dropped)
    ]


def _host(threads: Mapping[Any, Sequence[Span]]) -> dict[str, float]:
    """Microseconds of each phase itself, without the phases inside it."""
    total: dict[str, float] = defaultdict(float)
    for spans in threads.values():
        open_: list[Span] = []
        for span in spans:
            while open_ and open_[-1].end <= span.start:
                open_.pop()
            inside = open_[-1].phase if open_ else None
            if inside is None and span.phase != STEP:
                # outside a step: another thread's work, or the step began before the trace did
                continue
            total[_named(span.phase)] += span.end - span.start
            if inside is not None:
                total[_named(inside)] -= span.end - span.start
            open_.append(span)
    return dict(total)


def _device(
    kernels: Mapping[Any, Sequence[tuple[float, Event]]], threads: Mapping[Any, Sequence[Span]]
) -> dict[str, float]:
    """Microseconds of the kernels that each phase launched."""
    total: dict[str, float] = defaultdict(float)
    for thread, spans in threads.items():
        for at, kernel in kernels.get(thread, ()):
            phase = _innermost(spans, at)
            if phase is None:
                continue
            total[phase_of(KERNELS, kernel["name"]) or _named(phase)] += kernel["dur"]
    return dict(total)


def _launched(events: Sequence[Event]) -> dict[Any, list[tuple[float, Event]]]:
    """The device's kernels and copies by the thread that launched them, with the time of the launch."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found: dict[Any, list[tuple[float, Event]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy"):
            launch = launches.get(event.get("args", {}).get("correlation"))
            # one that was launched before the trace began counts for no thread
            found[launch["tid"] if launch else None].append((launch["ts"] if launch else event["ts"], event))
    return dict(found)


def _innermost(spans: Sequence[Span], at: float) -> str | None:
    """The phase that runs at this moment; the spans of a thread are nested, so the last one that began is it."""
    for span in reversed(spans[: bisect_right(spans, at, key=lambda span: span.start)]):
        if span.end > at:
            return span.phase
    return None


def _named(phase: str) -> str:
    return "other" if phase == STEP else phase
