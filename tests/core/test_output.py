"""Where a command cannot write: one line and status 2 before any work, nothing left behind; else files come whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.command import run
from benchmarks.papers.command import main as papers
from c2t_plugin import cli
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.evaluate import FORMAT, VERSION
from c2t_plugin.output import check_file, check_folder, write_text, write_whole

# What they would read is missing or no good: the output is looked at first. `OUT` is the bad path.
COMMANDS = (
    ("collect", "--draft eagle3 --out OUT"),
    ("fit", "none.traces --out OUT"),
    ("calibrate", "none.safetensors none.traces --out OUT"),
    ("tune", "none.safetensors none.traces --out OUT"),
    ("evaluate", "--traces none.traces --json OUT"),
    ("show", "none.traces --html OUT"),
    ("plot", "binary --out OUT"),
    ("plot", "evaluation.json --out OUT"),
    ("plot", "rows.jsonl --experiment toy --out OUT"),
    ("plot", "rows.jsonl --out OUT/of/rows"),
    ("papers", "c2t-v2-equations --out OUT"),
    ("papers", "--page OUT"),
)
BAD = {
    "fifo": "is no regular file",
    "link": "is no regular file",
    "dangling": "is no regular file",
    "folder": "is a directory",
    "file/x.md": "file is no directory",
    "locked/x.md": "is read-only",
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, a folder in which every name that a command may write is a folder, and one that cannot be written."""
    for name in ("rows.jsonl", "of/rows/toy-rows.png"):
        (tmp_path / "folder" / name).mkdir(parents=True)
    (tmp_path / "locked").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "evaluation.json").write_text(json.dumps({"format": FORMAT, "version": VERSION}))
    rows = {"experiment": "toy", "quick": False, "rows": [{"tau": 1.0, "gamma": 2.0}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows) + "\n")
    allowed = os.access
    # a test may run as a user whom no mode keeps out
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and allowed(path, mode))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status(command: str, arguments: list[str]) -> int:
    """Of one of C2T's commands, or of the papers' experiments."""
    return run(papers, arguments) if command == "papers" else cli.main([command, *arguments])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("command", "arguments"), COMMANDS, ids=lambda value: value)
def test_what_cannot_be_written_is_refused_first(
    workplace: Path, command: str, arguments: str, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(workplace.rglob("*"))
    assert status(command, arguments.replace("OUT", bad).split()) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert error.partition(": ")[2].startswith("cannot write ") and error.count("\n") == 1
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((f"fit none.traces --out {bad}", message) for bad, message in BAD.items()),
        ("papers c2t-v2-equations --traces file/x", "file is no directory"),
        ("papers --page page", "name a file with .md"),
    ],
)
def test_the_line_says_what_is_wrong(
    workplace: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = arguments.split()
    assert status(command, rest) == cli.USAGE_ERROR
    assert message in capsys.readouterr().err


def test_a_folder_may_be_missing(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "newer")
    write_text(tmp_path / "new" / "newer" / "a", "words")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "newer", "a"]
    with pytest.raises(C2TError, match="is no directory"):
        check_folder(tmp_path / "new" / "newer" / "a" / "b")


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling"])
def test_nothing_but_a_file_is_replaced(workplace: Path, kind: str) -> None:
    with pytest.raises(C2TError, match="is no regular file"):
        write_text(Path(kind), "words")
    assert not Path(kind).is_file() or Path(kind).is_symlink()
    assert sorted(path.name for path in workplace.glob("*.part")) == []


def test_a_device_stays_one() -> None:
    with pytest.raises(C2TError, match="is no regular file"):
        check_file(Path(os.devnull))


def test_what_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")

    def break_off(part: Path) -> None:
        part.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", break_off)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
