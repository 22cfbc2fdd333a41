"""Traces of live requests: labels, the share, bounds on memory, and what a broken recording costs."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from c2t_plugin.errors import C2TError
from c2t_plugin.traces import recorder as recording
from c2t_plugin.traces.file import load_traces, novel_tokens
from c2t_plugin.traces.recorder import TraceRecorder
from tests.support.core.coarse import levels_apart

D_MAX = 3
# for the recorder's thread, which takes a moment unless the machine is busy
PATIENCE_S = 60
HEADER = {"pair": {"target": "t", "draft": "d", "draft_vocab_size": 9}, "top_m": 5, "prompts": "served"}


def stats(seed: int) -> torch.Tensor:
    """As a draft has them: joint log P, log P, entropy, margin."""
    drawn = torch.rand(D_MAX, 4, generator=torch.Generator().manual_seed(seed))
    drawn[:, 1] *= -1
    drawn[:, 0] = drawn[:, 1].cumsum(0)
    return drawn


@pytest.fixture
def recorder(tmp_path: Path):
    made = TraceRecorder(tmp_path, 1.0, D_MAX, HEADER, 1000.0)
    yield made
    made.close()


def saved(recorder: TraceRecorder):
    recorder.close()
    return load_traces(recorder.directory)


def until(holds: Callable[[], bool]) -> None:
    """The recorder's thread gets there by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("step", "drafted", "accepted"),
    [
        (0, [11, 12, 13], [True, True, True]),
        (0, [11, 12, 9], [True, True, False]),
        (0, [9, 12, 13], [False, False, False]),  # nothing behind a refused token is accepted
        (2, [13, 14, 9], [True, True, False]),
        (2, [13, 14, 15], [True, True, True]),
        (3, [14, 15, 16], None),  # the text ends before the last token's label is known
        (3, [14, 9, 16], [True, False, False]),
        (5, [16, 17, 18], None),
    ],
)
def test_labels_follow_the_text(recorder: TraceRecorder, step: int, drafted: list[int], accepted: list[bool] | None):
    recorder.add(1, 0, stats(1), [0, 0, 0])
    recorder.add(2, step, stats(2), drafted)
    recorder.finish(1, [7], [10, 11, 12, 13])
    recorder.finish(2, [7, 8], [10, 11, 12, 13, 14, 15])
    found = saved(recorder)
    mine = found[found.prompt == 1]
    if accepted is None:
        assert (len(mine), len(found)) == (0, 1)
        return
    assert mine.chain.accepted.tolist() == mine.tree.accepted.tolist() == [accepted]
    assert mine.step.tolist() == [step]
    assert levels_apart(mine.chain, stats(2)[None]) == 0


def test_nothing_of_the_text_is_written(recorder: TraceRecorder):
    recorder.add(2, 0, stats(1), [11, 12, 13])
    recorder.finish(2, [7, 8], [10, 11, 12, 13])
    found = saved(recorder)
    assert found.chain.token_ids.unique().tolist() == found.tree.token_ids.unique().tolist() == [-1]
    assert found.header == HEADER


def test_loops_are_not_novel(recorder: TraceRecorder):
    for step in (0, 12):
        recorder.add(2, step, stats(step), [3, 3, 9])
    recorder.finish(2, [5, 6, 7], [3] * 20)
    assert saved(recorder).novel.tolist() == [True, False]


def test_statistics_that_are_not_known_are_left_out(recorder: TraceRecorder):
    broken = stats(1)
    broken[1, 2] = math.nan
    recorder.add(2, 0, broken, [11, 12, 13])
    recorder.add(2, 1, stats(2), [12, 13, 14])
    recorder.add(2, 40_000, stats(3), [12, 13, 14])
    recorder.finish(2, [7], [10, 11, 12, 13, 14])
    assert saved(recorder).step.tolist() == [1]


def test_the_share_is_met_and_a_requests_choice_is_fixed(recorder: TraceRecorder):
    ids = [f"{random.Random(i).getrandbits(128):032x}" for i in range(20_000)]
    recorder._share = 0.05
    chosen = [bool(recorder.admit(each)) for each in ids]
    # 6 standard deviations of a binomial of 20,000 and .05
    assert abs(sum(chosen) - 1000) < 6 * math.sqrt(20_000 * 0.05 * 0.95)
    assert chosen == [bool(recorder.admit(each)) for each in ids]
    recorder._share = 0.5
    assert all(recorder.admit(each) for each, already in zip(ids, chosen, strict=True) if already)
    recorder._share = 1.0
    assert all(recorder.admit(each) for each in ids)


def test_who_chooses_ids_does_not_choose_what_is_recorded(tmp_path: Path):
    """Ids that one process records are, to another, ids like all others."""
    ids = [str(number) for number in range(2_000)]
    chosen = []
    for _ in range(2):
        recorder = TraceRecorder(tmp_path, 0.5, D_MAX, HEADER, 1000.0)
        chosen.append([bool(recorder.admit(each)) for each in ids])
        recorder.close()
    same = sum(one == other for one, other in zip(*chosen, strict=True))
    # 6 standard deviations of a binomial of 2,000 and .5
    assert abs(same - 1_000) < 6 * math.sqrt(2_000 * 0.25)


@pytest.mark.parametrize("request_id", ["", "\ud800", "x" * 100_000, 7, None, ["a"]])
def test_any_id_is_taken(recorder: TraceRecorder, request_id: Any):
    assert recorder.admit(request_id) > 0


def test_an_id_that_comes_again_is_a_new_request(recorder: TraceRecorder):
    """The first was aborted after it had drafted, and never ended."""
    first, second = recorder.admit("same"), recorder.admit("same")
    for step in range(0, 9, 3):
        recorder.add(first, step, stats(step), [1, 1, 1])
    recorder.add(second, 0, stats(7), [11, 12, 13])
    recorder.finish(second, [7], [10, 11, 12, 13, 14])
    recorder.forget(first)
    found = saved(recorder)
    assert found.step.tolist() == [0] and found.chain.accepted.tolist() == [[True, True, True]]
    assert (recorder.recorded, recorder.dropped, recorder.failed) == (1, 0, 0)


def test_nothing_raises_and_the_first_failure_is_logged(recorder: TraceRecorder, caplog: pytest.LogCaptureFixture):
    for _ in range(3):
        with recorder.guarding():
            raise IndexError("out of range")
    assert recorder.failed == 3
    assert caplog.text.count("recording a request has failed") == 1 and "out of range" in caplog.text


def test_a_text_that_its_drafts_are_not_of_costs_that_request_only(recorder: TraceRecorder):
    for number, steps in ((1, (0, 40)), (2, (0, 1))):
        for step in steps:
            recorder.add(number, step, stats(step), [11, 12, 13])
        recorder.finish(number, [7], [10, 11, 12, 13, 14, 15, 16])
    assert saved(recorder).step.tolist() == [0, 1]
    assert (recorder.recorded, recorder.dropped, recorder.failed) == (2, 2, 1)


def test_requests_that_never_end_do_not_pile_up(recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "OPEN_REQUESTS", 3)
    monkeypatch.setattr(recording, "STATES_PER_REQUEST", 2)
    for number in range(1, 11):
        for step in range(5):
            recorder.add(number, step, stats(step), [0, 0, 0])
    assert list(recorder._open) == [8, 9, 10]
    assert recorder.dropped == 7 * 2
    recorder.finish(3, [], [1, 2, 3, 4])
    recorder.finish(10, [], [1, 2, 3, 4])
    assert saved(recorder).step.tolist() == [0, 1]


def test_a_state_does_not_keep_its_batch(recorder: TraceRecorder):
    batch = torch.zeros(64, D_MAX, 4)
    recorder.add(1, 0, batch[3], [0, 0, 0])
    assert recorder._open[1].stats[0].untyped_storage().nbytes() == D_MAX * 4 * 4


class Held:
    """The recorder's thread, held up in its first label until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, original = threading.Event(), recording.labelled

        def held(*arguments: Any) -> Any:
            self.go.wait(PATIENCE_S)
            return original(*arguments)

        monkeypatch.setattr(recording, "labelled", held)


@pytest.mark.parametrize(("limit", "most"), [("STATES_WAITING", 4), ("TOKENS_WAITING", 20)])
def test_what_comes_faster_than_it_is_written_is_dropped(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
):
    monkeypatch.setattr(recording, limit, most)
    held = Held(monkeypatch)
    for number in range(1, 10):
        recorder.add(number, 0, stats(number), [0, 0, 0])
        recorder.finish(number, [3, 3, 3], [1, 2])
    assert (recorder.recorded, recorder.dropped) == (0, 5)
    held.go.set()
    assert len(saved(recorder)) == 4 == recorder.recorded


class Prompt(Sequence[int]):
    """Notes which threads look at its tokens."""

    def __init__(self, tokens: list[int], threads: set[str]) -> None:
        self.tokens, self.threads = tokens, threads

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Prompt(self.tokens[place], self.threads)
        self.threads.add(threading.current_thread().name)
        return self.tokens[place]


def test_the_engines_thread_looks_at_no_token(recorder: TraceRecorder):
    seen: set[str] = set()
    recorder.add(1, 0, stats(1), [11, 12, 13])
    recorder.finish(1, Prompt([7] * 50, seen), Prompt([10, 11, 12, 13, 14], seen))
    assert len(saved(recorder)) == 1
    assert seen == {"c2t-traces"}


def test_a_text_that_grows_on_is_the_one_that_had_ended(recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch):
    held, output = Held(monkeypatch), [10, 11, 12]
    recorder.add(1, 0, stats(1), [11, 12, 13])
    recorder.finish(1, [], output)
    output += [13, 14]
    held.go.set()
    recorder.close()
    # the end of the text leaves its label open
    assert recorder.recorded == 0 and recorder.dropped == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_is_seen(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def die(*_: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(recording, "labelled", die)
    for number in range(1, 4):
        recorder.add(number, 0, stats(number), [0, 0, 0])
        recorder.finish(number, [], [1, 2])
        until(lambda: not recorder._thread.is_alive())
    assert (recorder.recorded, recorder.dropped) == (0, 3)
    assert caplog.text.count("the thread that writes traces has ended") == 1


def test_closing_does_not_wait_for_ever(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    held = Held(monkeypatch)
    recorder.add(1, 0, stats(1), [0, 0, 0])
    recorder.finish(1, [], [1, 2])
    recorder.close(timeout=0.01)
    assert "what is left of them is lost" in caplog.text
    held.go.set()


def test_it_writes_without_being_asked(recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(recording, "WRITE_EVERY_S", 0.01)
    eager = TraceRecorder(tmp_path / "eager", 1.0, D_MAX, HEADER, 1000.0)
    eager.add(1, 0, stats(1), [0, 0, 0])
    eager.finish(1, [], [1, 2])
    until(lambda: eager.recorded == 1)
    eager.close()


def test_files_of_different_drafts_are_not_joined(tmp_path: Path):
    for top_m in (5, 6):
        recorder = TraceRecorder(tmp_path, 1.0, D_MAX, {**HEADER, "top_m": top_m}, 1000.0)
        recorder.add(1, 0, stats(1), [0, 0, 0])
        recorder.finish(1, [], [1, 2])
        recorder.close()
    with pytest.raises(C2TError, match="cannot be joined"):
        load_traces(tmp_path)
    with pytest.raises(C2TError, match="holds no trace file"):
        load_traces(tmp_path.parent / tmp_path.name / "..")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("words", [1, 2, 9])
def test_novel_tokens_are_those_of_a_plain_search(size: int, words: int):
    rng = random.Random(f"{size} {words}")
    for length in (0, 1, size - 1, size, 60):
        text = [rng.randrange(words) for _ in range(length)]
        grams = [tuple(text[max(0, end - size) : end]) for end in range(1, length + 1)]
        expected = [end < size or grams.index(grams[end - 1]) == end - 1 for end in range(1, length + 1)]
        assert novel_tokens(text, size) == expected
