"""The table of docs/smollm2.md on the head's acceptance is that of what was evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import head_table
from benchmarks.report.evaluations import HEAD_FORMAT, load
from benchmarks.report.head_table import FILE, PAGE, main, render

RUN = {
    "utc": "2026-01-01T00:00:00+00:00",
    "command": "evaluate --json head.json",
    "machine": "a CPU",
    "git_sha": "abcdef0123456789",
    "dirty": False,
    "seed": 0,
    "versions": {},
}
EACH = {
    "mean": 1.25,
    "interval": [1.0, 1.5],
    "novel_states": 0.75,
    "depths": [0.6, 0.3],
    "verify_steps": 90,
    "texts": 1240,
}
RECORD: dict[str, Any] = {
    "format": HEAD_FORMAT,
    "part": "development",
    "prompts": "0123456789abcdef",
    "chain": 2,
    "new_tokens": 128,
    "run": RUN,
    "temperatures": {"0.0": {"all": EACH}, "0.7": {"all": EACH, "code": EACH}},
}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    made = tmp_path / "smollm2.md"
    made.write_text(f"<!-- table:{head_table.NAME} -->\nold\n<!-- /table:{head_table.NAME} -->\n")
    monkeypatch.setattr(head_table, "PAGE", made)
    monkeypatch.setattr(head_table, "FILE", tmp_path / "head.json")
    return made


def test_the_page_shows_what_was_evaluated() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render(text) == text
    assert load(FILE, HEAD_FORMAT)["chain"] == 4


def test_an_evaluation_is_taken_in_and_shown(page: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    new.write_text(json.dumps(RECORD))
    assert main(["--add", str(new)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "| 0.7 | code | 1.250 (1.000 to 1.500) | .750 | .600 | .300 | 1,240 |" in text
    assert "Chains of 2, development prompts (0123456789ab), 128 new tokens." in text and "abcdef012345" in text
    assert json.loads((tmp_path / "head.json").read_text()) == RECORD


@pytest.mark.parametrize("change", [{"format": "c2t-evaluation"}, {"run": {**RUN, "dirty": True}}], ids=str)
def test_what_nobody_could_repeat_is_refused(change: dict[str, Any], page: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    new.write_text(json.dumps({**RECORD, **change}))
    assert main(["--add", str(new)]) == 2
    assert "old" in page.read_text(encoding="utf-8") and not (tmp_path / "head.json").exists()
