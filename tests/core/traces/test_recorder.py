"""Traces of live requests: labels, the share, bounds on memory, files whole or not at all."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from c2t_plugin.errors import C2TError
from c2t_plugin.traces import recorder as recording
from c2t_plugin.traces.file import load_traces
from c2t_plugin.traces.recorder import TraceRecorder, is_chosen

D_MAX = 3
HEADER = {"pair": {"target": "t", "draft": "d", "draft_vocab_size": 9}, "top_m": 5, "prompts": "served"}


def stats(seed: int) -> torch.Tensor:
    return torch.randn(D_MAX, 4, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def recorder(tmp_path: Path):
    made = TraceRecorder(tmp_path, "server", 1.0, D_MAX, HEADER)
    yield made
    made.close()


def saved(recorder: TraceRecorder):
    recorder.close()
    return load_traces(recorder.directory)


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
    recorder.add("other", 0, stats(1), [0, 0, 0])
    recorder.add("one", step, stats(2), drafted)
    recorder.finish("other", [7], [10, 11, 12, 13])
    recorder.finish("one", [7, 8], [10, 11, 12, 13, 14, 15])
    found = saved(recorder)
    mine = found[found.prompt == 1]
    if accepted is None:
        assert (len(mine), len(found)) == (0, 1)
        return
    assert mine.chain.accepted.tolist() == mine.tree.accepted.tolist() == [accepted]
    assert mine.step.tolist() == [step]
    written = torch.stack([mine.chain.joint_log_prob, mine.chain.log_prob, mine.chain.entropy, mine.chain.margin], -1)
    assert torch.equal(written, stats(2)[None])


def test_nothing_of_the_text_is_written(recorder: TraceRecorder):
    recorder.add("one", 0, stats(1), [11, 12, 13])
    recorder.finish("one", [7, 8], [10, 11, 12, 13])
    found = saved(recorder)
    assert found.chain.token_ids.unique().tolist() == found.tree.token_ids.unique().tolist() == [-1]
    assert found.header == HEADER


def test_loops_are_not_novel(recorder: TraceRecorder):
    for step in (0, 12):
        recorder.add("one", step, stats(step), [3, 3, 9])
    recorder.finish("one", [5, 6, 7], [3] * 20)
    assert saved(recorder).novel.tolist() == [True, False]


def test_statistics_that_are_not_known_are_left_out(recorder: TraceRecorder):
    broken = stats(1)
    broken[1, 2] = math.nan
    recorder.add("one", 0, broken, [11, 12, 13])
    recorder.add("one", 1, stats(2), [12, 13, 14])
    recorder.add("one", 40_000, stats(3), [12, 13, 14])
    recorder.finish("one", [7], [10, 11, 12, 13, 14])
    assert saved(recorder).step.tolist() == [1]


def test_the_share_is_met_and_a_requests_choice_is_fixed():
    ids = [f"{random.Random(i).getrandbits(128):032x}" for i in range(20_000)]
    chosen = [is_chosen(each, 0.05) for each in ids]
    # 6 standard deviations of a binomial of 20,000 and .05
    assert abs(sum(chosen) - 1000) < 6 * math.sqrt(20_000 * 0.05 * 0.95)
    assert chosen == [is_chosen(each, 0.05) for each in ids]
    assert all(is_chosen(each, 1.0) for each in ids)
    assert not any(is_chosen(each, 0.0) for each in ids)
    assert all(is_chosen(each, 0.5) for each, already in zip(ids, chosen, strict=True) if already)


def test_requests_that_never_end_do_not_pile_up(recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "OPEN_REQUESTS", 3)
    monkeypatch.setattr(recording, "STATES_PER_REQUEST", 2)
    for number in range(10):
        for step in range(5):
            recorder.add(str(number), step, stats(step), [0, 0, 0])
    assert list(recorder._open) == ["7", "8", "9"]
    assert recorder.dropped == 7 * 2
    recorder.finish("3", [], [1, 2, 3, 4])
    recorder.finish("9", [], [1, 2, 3, 4])
    assert saved(recorder).step.tolist() == [0, 1]


def test_what_comes_faster_than_it_is_written_is_dropped(recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "STATES_PER_FILE", 4)
    for number in range(9):
        recorder.add(str(number), 0, stats(number), [0, 0, 0])
        recorder.finish(str(number), [], [1, 2])
    assert (recorder.recorded, recorder.dropped) == (4, 5)
    assert len(saved(recorder)) == 4


def write_now(recorder: TraceRecorder) -> None:
    """One turn of the thread, in this one."""
    recorder._closing.set()
    recorder._write_on()


def test_a_file_grows_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "STATES_PER_FILE", 3)
    recorder = TraceRecorder(tmp_path, "server", 1.0, D_MAX, HEADER)
    recorder.close()
    sizes = []
    for number in range(5):
        recorder.add(str(number), 0, stats(number), [0, 0, 0])
        recorder.finish(str(number), [], [1, 2])
        write_now(recorder)
        sizes.append([len(load_traces(path)) for path in sorted(tmp_path.iterdir())])
    assert sizes == [[1], [2], [3], [3, 1], [3, 2]]
    assert load_traces(tmp_path).prompt.tolist() == [0, 1, 2, 3, 4]


def test_a_full_disk_costs_the_states_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    recorder = TraceRecorder(tmp_path, "server", 1.0, D_MAX, HEADER)
    recorder.close()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    for number, broken in enumerate((False, True, False)):
        recorder.add(str(number), 0, stats(number), [0, 0, 0])
        recorder.finish(str(number), [], [1, 2])
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(recording, "save_traces", full)
            write_now(recorder)
    assert "1 recorded states are lost" in caplog.text and "no space left" in caplog.text
    found = load_traces(tmp_path)
    assert torch.equal(found.chain.entropy, torch.stack([stats(0)[:, 2], stats(2)[:, 2]]))


def test_files_of_different_drafts_are_not_joined(tmp_path: Path):
    for name, top_m in (("a", 5), ("b", 6)):
        recorder = TraceRecorder(tmp_path, name, 1.0, D_MAX, {**HEADER, "top_m": top_m})
        recorder.add("one", 0, stats(1), [0, 0, 0])
        recorder.finish("one", [], [1, 2])
        recorder.close()
    with pytest.raises(C2TError, match="cannot be joined"):
        load_traces(tmp_path)
    with pytest.raises(C2TError, match="holds no trace file"):
        load_traces(tmp_path.parent / tmp_path.name / "..")
