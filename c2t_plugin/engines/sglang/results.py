"""What is learnt from a step's result once it is on the host, beside what SGLang itself does with it.

Nothing here waits for the device: tensors travel with the copy that SGLang makes of every result.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from c2t_plugin.config import ON
from c2t_plugin.engines.sglang.metrics import RequestCounts
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.requests import KEY
from c2t_plugin.engines.sglang.step import Step, attach, record_of, step_of


def with_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Over SGLang's copy of a result to the host: the step's record goes with it."""

    @functools.wraps(original)
    def copy_to_cpu(self: Any, *positional: Any, **keyword: Any) -> Any:
        step = step_of(self)
        if step is not None:
            # before the original, whose event then covers these copies too
            attach(self, step.to_host())
        return original(self, *positional, **keyword)

    return copy_to_cpu


def counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Over what SGLang takes a step's tokens out of its result with: the result has arrived, and no request has ended
    of it or been answered yet."""

    @functools.wraps(original)
    def resolve(self: Any, result: Any, batch: Any) -> Any:
        step = step_of(result)
        if step is not None:
            # each request's root
            result.cap_lens = result.cap_lens + 1
        tokens = original(self, result, batch)
        if step is not None:
            count(self.draft_worker.c2t, batch.reqs, result, step)
        return tokens

    return resolve


def count(parts: Parts, reqs: Sequence[Any], result: Any, step: Step) -> None:
    """Note one verified step with the server, its requests and, of recorded ones, the recorder."""
    assert step.rows is not None and step.depth is not None
    # With the overlap scheduler a request that has ended is in one more batch; that row means nothing.
    running = [row for row, req in enumerate(reqs) if not (req.finished() or req.is_retracted)]
    # as lists: of few requests a tensor's every operation takes longer than all of this
    lens = result.accept_lens.tolist(), result.cap_lens.tolist()
    accepted, verified = ([each[row] - 1 for row in running] for each in lens)
    wanted = verified if step.wanted is None else list(map(step.wanted.tolist().__getitem__, running))
    parts.counts.add(verified, accepted, step.rows, step.depth, wanted)
    if parts.planner is not None and parts.planner.learns and step.sure is not None:
        from c2t_plugin.planner.following import Untold

        assert step.drafted is not None
        # a later step writes where these are
        sure, drafts = step.sure.clone(), step.drafted.tokens[:, 1:].tolist()
        rows = [row for row in running if _teaches(reqs[row])]
        # when their text has been looked at
        parts.untaught = [(reqs[row], Untold(sure, row, drafts[row], at=len(reqs[row].output_ids))) for row in rows]
    for row, length, hits, asked in zip(running, verified, accepted, wanted, strict=True):
        record = record_of(reqs[row])
        if record.counts is None:
            record.counts = RequestCounts(tiers=Counter() if parts.configuration["request_tiers"] == ON else None)
        record.counts.add(length, step.rows, step.depth, asked, step.seconds, hits)
    if parts.recorder is not None and step.drafted is not None:
        from c2t_plugin.engines.sglang import recording

        recording.add(parts.recorder, {row: reqs[row] for row in running}, step.drafted)


def _teaches(req: Any) -> bool:
    """What a grammar forbids says nothing about drafts without one."""
    options = record_of(req).options
    return req.grammar is None and (options is None or options.learn)


def _teach(parts: Parts) -> None:
    """Let the planner learn from the step that was counted last, and from earlier ones, as far as the requests' texts
    go: what was accepted behind the end of one was never part of it."""
    untaught, parts.untaught = parts.untaught, ()
    if not untaught or parts.planner is None:
        return
    from c2t_plugin.planner.following import Told, outcome

    now, since = list[Told](), list[Told]()
    for req, draft in untaught:
        record, end = record_of(req), len(req.output_ids) - _left_over(req)
        asked, record.untold = [*record.untold, draft], []
        for each in asked:
            if (ends := each.told(req.output_ids[each.at : end], req.finished())) is None:
                record.untold.append(each)
            else:
                (now if each is draft else since).append((each, ends, req.rid))
    parts.planner.learn(outcome(untaught[0][1].sure, now), *(outcome(one[0].sure, [one]) for one in since))


def _left_over(req: Any) -> int:
    """Tokens behind the end of its text; 0 as long as that has none."""
    end = getattr(req, "finished_len", None)
    return 0 if end is None else max(0, len(req.output_ids) - end)


def telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Over what SGLang gathers a request's answer with: one that has ended is told its own counts."""

    @functools.wraps(original)
    def accept(self: Any, *, req: Any) -> None:
        before = len(self.rids)
        original(self, req=req)
        if len(self.rids) == before or self.rust_server_mode:
            return
        counted = record_of(req).counts if req.finished() else None
        column = self.customized_info.get(KEY)
        if column is None and counted is None:
            return
        # SGLang puts here what has a value per token, and fills up with as many None; this has one per request.
        mine = [] if counted is None else [counted.state()]
        self.customized_info[KEY] = [*(column or [[]] * before)[:before], mine]

    return accept


def finishing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Over what SGLang does with a result, of a prefill too."""

    @functools.wraps(original)
    def process_batch_result(self: Any, batch: Any, result: Any) -> Any:
        settled = original(self, batch, result)
        _teach(self.draft_worker.c2t)
        if (recorder := self.draft_worker.c2t.recorder) is not None:
            from c2t_plugin.engines.sglang import recording

            recording.finish(recorder, batch.reqs)
        return settled

    return process_batch_result


def read_by_the_draft(original: Callable[..., Any]) -> Callable[..., Any]:
    """Over how much of a request's keys SGLang keeps when it ends: what the draft has not read is freed."""

    @functools.wraps(original)
    def owned_kv_len(self: Any) -> int:
        owned: int = original(self)
        missed = record_of(self).missed
        # the prompt's may be the cache's already
        return owned if missed is None else max(owned - len(missed.rows), min(owned, self.kv.cache_protected_len))

    return owned_kv_len
