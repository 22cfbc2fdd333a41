"""The files of one serving process: how they grow, end and make room, and what a full disk costs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from c2t_plugin.traces import served_files
from c2t_plugin.traces.file import Traces, load_traces
from c2t_plugin.traces.served_files import ServedFiles


@pytest.fixture
def state(make_traces):
    """Row `number` of some traces of chains."""
    traces = make_traces(prompts=30, steps=1, k=1)

    def one(number: int) -> Traces:
        return traces[traces.prompt == number]

    return one


def test_a_file_grows_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state) -> None:
    monkeypatch.setattr(served_files, "STATES_PER_FILE", 3)
    files, sizes = ServedFiles(tmp_path, 1000.0), []
    for number in range(5):
        files.take(state(number))
        files.write()
        sizes.append([len(load_traces(path)) for path in sorted(tmp_path.iterdir())])
    assert sizes == [[1], [2], [3], [3, 1], [3, 2]]
    assert load_traces(tmp_path).prompt.tolist() == [0, 1, 2, 3, 4] and files.recorded == 5


def test_a_full_file_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state) -> None:
    monkeypatch.setattr(served_files, "STATES_PER_FILE", 3)
    files = ServedFiles(tmp_path, 1000.0)
    for number in range(4):
        files.take(state(number))
    assert [len(load_traces(path)) for path in tmp_path.iterdir()] == [3]


def test_states_that_leave_nothing_are_no_file(tmp_path: Path, state) -> None:
    files = ServedFiles(tmp_path, 1000.0)
    files.take(state(0)[torch.zeros(1, dtype=torch.bool)])
    files.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError("no space left on device"), RuntimeError("no space left on device")])
def test_a_full_disk_costs_the_states_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, state, error: Exception
) -> None:
    files = ServedFiles(tmp_path, 1000.0)

    def full(*_: object, **__: object) -> None:
        raise error

    for number, broken in enumerate((False, True, False)):
        files.take(state(number))
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(served_files, "save_traces", full)
            files.write()
    assert "1 recorded states are lost" in caplog.text and "no space left" in caplog.text
    assert len(load_traces(tmp_path)) == 2 and (files.recorded, files.dropped) == (2, 1)


def test_a_folder_that_vanishes_comes_back(tmp_path: Path, state) -> None:
    files = ServedFiles(tmp_path / "served", 1000.0)
    for number in range(2):
        files.take(state(number))
        files.write()
        found = len(load_traces(tmp_path / "served"))
        for path in (tmp_path / "served").iterdir():
            path.unlink()
        (tmp_path / "served").rmdir()
    assert found == 2


def test_the_oldest_make_room(tmp_path: Path, state) -> None:
    """Those of another process too; what a user has put there stays."""
    limit = 4 * size_of(state(0), tmp_path / "probe")
    for number, name in enumerate((f"{served_files.PREFIX}of-another.traces", "mine.traces")):
        (tmp_path / name).write_bytes(b"x" * int(limit))
        os.utime(tmp_path / name, (number + 1, number + 1))
    files, seen = ServedFiles(tmp_path, limit / 1e6), set()
    for number in range(20):
        files.take(state(number))
        files.write()
        own = [path for path in tmp_path.iterdir() if path.name.startswith(served_files.PREFIX)]
        assert sum(path.stat().st_size for path in own) <= limit
        seen |= set(own)
    assert files.recorded == 20 and len(seen) > 4 >= len(own)
    assert (tmp_path / "mine.traces").exists() and not (tmp_path / f"{served_files.PREFIX}of-another.traces").exists()


def size_of(traces: Traces, folder: Path) -> int:
    files = ServedFiles(folder, 1000.0)
    files.take(traces)
    files.write()
    return sum(path.stat().st_size for path in folder.iterdir())


def test_no_two_recorders_write_to_one_file(tmp_path: Path, state, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two containers may have the same number, and start in the same second."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    for _ in range(2):
        files = ServedFiles(tmp_path, 1000.0)
        files.take(state(0))
        files.write()
    assert len(load_traces(tmp_path)) == 2
