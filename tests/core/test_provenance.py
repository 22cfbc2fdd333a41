"""Provenance names everything that matters and nothing of the machine's directories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from c2t_plugin import provenance
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord, portable_command

FIELDS = {
    "command": "c2t fit",
    "git_sha": "0" * 40,
    "dirty": False,
    "versions": {"python": "3.11.7"},
    "machine": "a CPU, 2 cores, no GPU",
    "seed": 0,
    "utc": "2026-01-02T03:04:05+00:00",
}


def test_capture_describes_this_process() -> None:
    record = RunRecord.capture(seed=7, argv=["c2t", "fit"])
    assert record.command == "c2t fit"
    assert record.seed == 7
    assert record.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "numpy"} <= set(record.versions)
    assert "cores" in record.machine


def test_a_record_survives_json() -> None:
    record = RunRecord(**FIELDS)
    assert RunRecord(**json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--seed=3", "--seed=3"),
        ("{tmp}/sub/file.py", "sub/file.py"),
        ("/opt/models/llama", "llama"),
        ("--out=/opt/results/run1", "--out=run1"),
        ("--out={tmp}/run1", "--out=run1"),
        ("relative/path", "relative/path"),
    ],
)
def test_commands_lose_their_directories(
    argument: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable_command([argument.format(tmp=tmp_path)]) == expected


@pytest.mark.parametrize(
    "change",
    [{"command": "python /opt/x.py"}, {"command": "c2t --out=/opt/x"}, {"dirty": None}, {"utc": "2026-01-02T03:04:05"}],
    ids=["absolute path", "absolute path in an option", "sha without dirty flag", "no time zone"],
)
def test_a_bad_record_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(C2TError):
        RunRecord(**{**FIELDS, **change})


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout with one commit, from which provenance seems to run."""
    package = tmp_path / "c2t_plugin"
    package.mkdir()
    (package / "provenance.py").write_text("")
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    return tmp_path


def test_a_clean_checkout_has_a_commit(checkout: Path) -> None:
    record = RunRecord.capture()
    assert record.git_sha is not None and len(record.git_sha) == 40
    assert record.dirty is False


def test_an_uncommitted_file_makes_it_dirty(checkout: Path) -> None:
    (checkout / "new.py").write_text("x = 1\n")
    assert RunRecord.capture().dirty is True


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "c2t_plugin/provenance.py"))
    record = RunRecord.capture()
    assert (record.git_sha, record.dirty) == (None, None)
