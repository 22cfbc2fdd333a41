"""What is learnt from results on the host: which rows count, and when a recorded request is handed over."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from c2t_plugin.engines.sglang import recording, results
from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.step import Drafted, Step, attach, record_of
from c2t_plugin.request_options import RequestOptions
from c2t_plugin.traces.file import load_traces
from c2t_plugin.traces.recorder import TraceRecorder

KEPT = torch.tensor([2], dtype=torch.int32)


class Recorder:
    """Notes what it is given."""

    guarding = contextlib.nullcontext

    def __init__(self) -> None:
        self.added: list[tuple[int, int, list[int]]] = []
        self.finished: list[tuple[int, list[int]]] = []

    def add(self, number: int, step: int, stats: torch.Tensor, tokens: list[int]) -> None:
        self.added.append((number, step, tokens))

    def finish(self, number: int, prompt: list[int], output: list[int]) -> None:
        self.finished.append((number, list(output)))


class Request:
    """As far as results look at it. trace: its number with the recorder."""

    def __init__(self, rid: str, output: list[int], *, trace: int | None = 7, ended: bool = False) -> None:
        self.rid, self.output_ids, self.origin_input_ids = rid, output, [1, 2]
        self.ended, self.is_retracted, self.grammar = ended, False, None
        # of its text, where it ends before what was accepted does
        self.finished_len: int | None = None
        record_of(self).trace = trace

    def finished(self) -> bool:
        return self.ended


@pytest.fixture
def worker() -> SimpleNamespace:
    return SimpleNamespace(c2t=Parts(None, Counts(2), Recorder(), None, {"request_tiers": "off"}))  # type: ignore[arg-type]


def process(
    worker: SimpleNamespace,
    reqs: list[Request],
    ends: set[str],
    step: Step | None = None,
    own: int = 9,
    **result: Any,
) -> None:
    """As SGLang does: it reads the step's tokens, then requests get theirs and may end. own: the target's own token."""
    batch, outcome = SimpleNamespace(reqs=reqs), SimpleNamespace(**result)
    texts = [[*range(count - 1), own] for count in result.get("accept_lens", torch.tensor([])).tolist()]
    if step is not None:
        attach(outcome, step)

    def tokens(processor: Any, result: Any, batch: Any) -> list[list[int]]:
        # SGLang counts each request's root too, which the device left out
        assert step is None or torch.equal(result.cap_lens, lens + 1)
        return texts

    resolve, lens = results.counting(tokens), result.get("cap_lens")

    def original(scheduler: Any, batch: Any, outcome: Any) -> str:
        assert resolve(scheduler, outcome, batch) is texts
        # a prefill gives each one token
        for req, text in zip(batch.reqs, texts or [[own]] * len(batch.reqs), strict=True):
            req.output_ids += text
            req.ended = req.ended or req.rid in ends
        return "settled"

    assert results.finishing(original)(SimpleNamespace(draft_worker=worker), batch, outcome) == "settled"


def drafted(rows: int) -> Drafted:
    tokens = torch.arange(2 * rows).view(rows, 2)
    # behind each one's root
    return Drafted(torch.cat([torch.full((rows, 1), 77), tokens], dim=1), torch.zeros(rows, 2, 4))


def acceptance(verified: int, accepted: int) -> dict[str, int]:
    """Of one step, by vLLM's names."""
    return {"num_spec_steps": 1, "num_draft_tokens": verified, "num_accepted_draft_tokens": accepted}


def test_rows_of_ended_and_retracted_requests_mean_nothing(worker: SimpleNamespace):
    reqs = [
        Request("a", [5]),
        Request("b", [5, 6], ended=True),
        Request("c", [5, 6, 7]),
        Request("d", [5], trace=0),
    ]
    reqs[2].is_retracted = True
    lens = {"cap_lens": torch.tensor([2, 2, 1, 0]), "accept_lens": torch.tensor([2, 1, 1, 1])}
    wanted = torch.tensor([2, 2, 2, 1], dtype=torch.int32)
    step = Step(lens["cap_lens"], wanted, drafted(4), rows=9, depth=2, seconds=0.5)
    process(worker, reqs, set(), step, **lens)
    assert worker.c2t.counts.verified == [1, 0, 1]
    assert worker.c2t.counts.accepted == [1, 1, 0]
    assert (worker.c2t.counts.rows_computed, worker.c2t.counts.depths, worker.c2t.counts.clipped) == (9, {2: 1}, 2)
    assert worker.c2t.counts.over_budget == 1
    # nobody is told how many rows the others had
    shared = {"classifier_s": 0.5, "depths": {"2": 1}}
    assert [record.counts and record.counts.state() for record in map(record_of, reqs)] == [
        {**acceptance(2, 1), "clipped": 0, "over_budget": 0, **shared},
        None,
        None,
        {**acceptance(0, 0), "clipped": 2, "over_budget": 1, **shared},
    ]
    # the root is the newest token before the step
    assert worker.c2t.recorder.added == [(7, 0, [0, 1])]


@pytest.mark.parametrize(("tell", "told"), [("on", {"9": 1}), ("off", None)])
def test_the_rows_of_the_batch_are_told_where_the_operator_says_so(worker: SimpleNamespace, tell: str, told: Any):
    worker.c2t.configuration["request_tiers"] = tell
    lens = {"cap_lens": torch.tensor([2]), "accept_lens": torch.tensor([2])}
    process(worker, [req := Request("a", [5])], set(), Step(KEPT, rows=9, depth=2), **lens)
    assert record_of(req).counts.state().get("tiers") == told


def test_a_request_that_ends_is_handed_over_with_all_its_text(worker: SimpleNamespace):
    lens = {"cap_lens": torch.tensor([2]), "accept_lens": torch.tensor([2])}
    process(worker, [Request("a", [5])], {"a"}, Step(KEPT, drafted=drafted(1), rows=3, depth=2), **lens)
    assert worker.c2t.recorder.finished == [(7, [5, 0, 9])]


def test_it_may_end_in_a_step_that_verifies_nothing(worker: SimpleNamespace):
    """With mixed chunks, or after a retraction, a request's last token comes from a prefill."""
    process(worker, [Request("a", [5]), Request("b", [5], trace=0), Request("c", [5])], {"a", "b"})
    assert worker.c2t.recorder.finished == [(7, [5, 9])]
    assert worker.c2t.counts.steps == 0


def test_without_a_recorder_nothing_is_kept(worker: SimpleNamespace):
    worker.c2t.recorder = None
    process(worker, [Request("a", [5])], {"a"})
    lens = {"cap_lens": torch.tensor([2]), "accept_lens": torch.tensor([2])}
    process(worker, [Request("b", [5])], {"b"}, Step(KEPT, rows=3, depth=2), **lens)
    assert worker.c2t.counts.steps == 1


class Planner:
    """Notes what it is to learn, and of what drafts."""

    learns = True

    def __init__(self) -> None:
        self.learnt: list[tuple[str, int, int]] = []
        self.sure: list[float] = []

    def learn(self, *outcomes: Any) -> None:
        for sure, verified, accepted, owners in outcomes:
            assert len(sure) == len(owners)
            self.learnt += zip(owners, verified.tolist(), accepted.tolist(), strict=True)
            self.sure += sure[:, 0].tolist()


def learnt(
    worker: SimpleNamespace,
    *reqs: Request,
    ends: str = "",
    drafted: int = 2,
    accepted: int = 1,
    own: int = 9,
    confidence: float = 0.5,
) -> list[tuple[str, int, int]]:
    """Of one step that verifies 2 draft tokens of each request, which are 0, 1 and so on behind a root of -1."""
    worker.c2t.recorder, worker.c2t.planner = None, Planner()
    rows = len(reqs)
    lens = {"cap_lens": torch.full((rows,), 2), "accept_lens": torch.full((rows,), 1 + accepted)}
    tokens, sure = torch.arange(-1, drafted).repeat(rows, 1), torch.full((rows, drafted), confidence)
    step = Step(lens["cap_lens"], drafted=Drafted(tokens), rows=9, depth=drafted, sure=sure)
    process(worker, list(reqs), set(ends.split()), step, own, **lens)
    assert not worker.c2t.untaught
    return worker.c2t.planner.learnt


def test_what_runs_teaches(worker: SimpleNamespace):
    found = learnt(worker, Request("a", [5]), Request("b", [5], ended=True), Request("c", [5]), ends="c")
    assert found == [("a", 2, 1), ("c", 2, 1)]


@pytest.mark.parametrize(
    ("accepted", "own", "taught"),
    [
        # the target's own token is the draft's third, and there is no fourth; or it is another
        (2, 2, (3, 3)),
        (2, 9, (3, 2)),
        # one before it was refused: it is no part of the text, whatever came
        (1, 9, (3, 1)),
        (0, 2, (3, 0)),
    ],
)
def test_the_text_tells_of_the_token_that_was_cut(
    worker: SimpleNamespace, accepted: int, own: int, taught: tuple[int, int]
):
    found = learnt(worker, Request("a", [5]), Request("b", [5]), drafted=3, accepted=accepted, own=own)
    assert found == [("a", *taught), ("b", *taught)]


@pytest.mark.parametrize(
    ("goes_on", "taught"),
    [
        # the draft's fourth and fifth, all that it has; its fourth and another; another
        ([3, 4], (5, 5)),
        ([3, 9], (5, 4)),
        ([9, 4], (5, 3)),
    ],
)
def test_later_text_tells_of_what_was_cut_behind_that(
    worker: SimpleNamespace, goes_on: list[int], taught: tuple[int, int]
):
    """Of a draft of 5 tokens 2 were verified, and the target's own was the third."""
    req, other = Request("a", [5]), Request("b", [5])
    # as long as the text agrees, nothing is learnt of it
    assert learnt(worker, req, other, drafted=5, accepted=2, own=2, confidence=0.75) == []
    for token in goes_on:
        found = learnt(worker, req, drafted=2, accepted=0, own=token)
        # of later steps at once
        assert found[0] == ("a", 2, 0)
        if found[1:]:
            break
    assert found[1:] == [("a", *taught)] and worker.c2t.planner.sure == [0.5, 0.75]
    assert record_of(req).untold == [] and len(record_of(other).untold) == 1


def test_a_text_that_goes_on_elsewhere_meanwhile_tells_too(worker: SimpleNamespace):
    """A request that was retracted has its next token of a prefill, and a step may have no scores."""
    req = Request("a", [5])
    learnt(worker, req, drafted=5, accepted=2, own=2)
    process(worker, [req], set(), own=3)
    assert learnt(worker, req, accepted=0, own=9) == [("a", 2, 0), ("a", 5, 4)]


def test_a_text_that_ends_tells_no_more(worker: SimpleNamespace):
    """Neither of what it could have gone on with, nor of what came behind its end."""
    for end, taught in ((None, (4, 4)), (4, (3, 3))):
        req = Request("a", [5])
        learnt(worker, req, drafted=5, accepted=2, own=2)
        req.finished_len = end
        found = learnt(worker, req, ends="a", accepted=0, own=3)
        assert found[-1] == ("a", *taught) and record_of(req).untold == []


def test_behind_the_end_of_a_text_nothing_tells_of_what_was_cut(worker: SimpleNamespace):
    """The target's own token was dropped with it."""
    req = Request("a", [5])
    req.finished_len = 2
    # nor does it where it was not
    assert learnt(worker, Request("b", [5]), ends="b", drafted=4, accepted=2, own=2) == [("b", 3, 3)]
    assert learnt(worker, req, ends="a", drafted=4, accepted=2, own=2) == [("a", 1, 1)]


def test_a_grammar_and_a_request_that_wants_it_so_teach_nothing(worker: SimpleNamespace):
    forced, asked = Request("forced", [5]), Request("asked", [5])
    forced.grammar = object()
    record_of(asked).options = RequestOptions(learn=False)
    assert learnt(worker, forced, Request("a", [5]), asked) == [("a", 2, 1)]
    assert learnt(worker, forced) == []


@pytest.mark.parametrize(
    ("end", "taught"),
    [
        # by a token that ends the text, a stop string, or its greatest length, all alike: 2 tokens came in this step
        (3, (2, 1)),
        # the second, which is the target's own, is not part of the text: so much was accepted, and no more is known
        (2, (1, 1)),
        (1, (0, 0)),
    ],
)
def test_what_lies_behind_the_end_of_a_text_teaches_nothing(worker: SimpleNamespace, end: int, taught: tuple[int, int]):
    req = Request("a", [5])
    req.finished_len = end
    assert learnt(worker, req, ends="a") == [("a", *taught)]


def test_a_prefill_teaches_nothing(worker: SimpleNamespace):
    learnt(worker, Request("a", [5]))
    process(worker, [Request("b", [5])], {"b"})
    assert worker.c2t.planner.learnt == [("a", 2, 1)]


HEADER = {"pair": {}, "top_m": 5}
LENS = {"cap_lens": torch.tensor([2]), "accept_lens": torch.tensor([2])}


@pytest.fixture
def recorder(worker: SimpleNamespace, tmp_path: Path) -> TraceRecorder:
    worker.c2t.recorder = TraceRecorder(tmp_path, 1.0, 2, HEADER, 1000.0)
    return worker.c2t.recorder


def step_of_one() -> Step:
    return Step(KEPT, drafted=drafted(1), rows=3, depth=2)


@pytest.mark.parametrize("text", [[5], [5] * 90], ids=["shorter", "longer"])
def test_an_aborted_request_leaves_nothing_to_another_under_its_id(
    worker: SimpleNamespace, recorder: TraceRecorder, text: list[int]
):
    """It drafted, was retracted, and aborted while it waited: no result ever names it again."""
    newest = len(text) - 1
    first, second = Request("same", [5] * 40, trace=None), Request("same", text, trace=None)
    for req, ends in ((first, set()), (second, {"same"})):
        assert recording.any_chosen([req], recorder)
        process(worker, [req], ends, step_of_one(), **LENS)
    recorder.close()
    found = load_traces(recorder.directory)
    assert found.step.tolist() == [newest]
    assert (recorder.recorded, recorder.failed) == (1, 0)


def test_an_aborted_requests_states_go_with_it(worker: SimpleNamespace, recorder: TraceRecorder):
    req = Request("a", [5, 6], trace=None)
    assert recording.any_chosen([req], recorder)
    process(worker, [req], set(), step_of_one(), **LENS)
    assert len(recorder._open) == 1
    del req
    gc.collect()
    assert len(recorder._open) == 0 and recorder.dropped == 0
    recorder.close()


BROKEN = {
    "admit": lambda worker, req: recording.any_chosen([req], worker.c2t.recorder),
    "add": lambda worker, req: process(worker, [req], set(), step_of_one(), **LENS),
    "finish": lambda worker, req: process(worker, [req], {"a"}, step_of_one(), **LENS),
}


@pytest.mark.parametrize("method", BROKEN)
def test_recording_never_raises_into_serving(
    worker: SimpleNamespace, recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, method: str
):
    def fail(*_: Any) -> None:
        raise IndexError("of a text that is another's")

    monkeypatch.setattr(recorder, method, fail)
    req = Request("a", [5], trace=None if method == "admit" else 7)
    BROKEN[method](worker, req)
    assert recorder.failed == 1
    assert worker.c2t.counts.steps == (method != "admit")
    recorder.close()


class Answers:
    """SGLang's accumulator as far as this looks at it: it fills up every column with one None per token."""

    def __init__(self, rust: bool = False) -> None:
        self.rids: list[str] = []
        self.rust_server_mode = rust
        self.customized_info: dict[str, list[Any]] = {"theirs": []}

    def accept(self, *, req: Any) -> None:
        if req.rid == "silent":
            return
        self.rids.append(req.rid)
        for column in self.customized_info.values():
            if len(column) < len(self.rids):
                column.append([None] * len(req.output_ids))


def told(rids: str, ended: str, *, rust: bool = False) -> dict[str, Any]:
    answers, accept = Answers(rust), results.telling(Answers.accept)
    for rid in rids.split():
        req = Request(rid, [5, 6], ended=rid in ended.split())
        if rid != "uncounted":
            record_of(req).counts = SimpleNamespace(state=lambda rid=rid: rid)  # type: ignore[assignment]
        accept(answers, req=req)
    assert answers.customized_info.pop("theirs") == [[None, None]] * len(answers.rids)
    return answers.customized_info


@pytest.mark.parametrize(
    ("rids", "ended", "expected"),
    [
        ("a b", "", {}),
        ("a", "a", {"c2t": [["a"]]}),
        ("a b silent c d", "b d silent", {"c2t": [[], ["b"], [], ["d"]]}),
        # aborted before its first step
        ("uncounted", "uncounted", {}),
        ("a uncounted", "a uncounted", {"c2t": [["a"], []]}),
    ],
)
def test_each_answered_request_that_has_ended_is_told_its_own(rids: str, ended: str, expected: dict[str, Any]):
    assert told(rids, ended) == expected


def test_where_nobody_would_read_it_nothing_is_told():
    assert told("a", "a", rust=True) == {}
