"""The toy pair's frozen prompts: of files that no model read, the same on every machine, refused where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pairs.toy import frozen, pair_dir
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.corpora import file_prompts
from c2t_plugin.lab.texts import PROMPT_TOKENS


def test_they_are_those_of_published_rows(tmp_path: Path) -> None:
    assert frozen.main(["--out", str(tmp_path / "new" / "frozen.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "new" / "frozen.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["source"] for line in lines}) == frozen.FILES
    assert {line["source"].partition("/")[0] for line in lines} <= set(frozen.PACKAGES)
    prompts = file_prompts(pair_dir(), tmp_path / "new" / "frozen.jsonl")
    low, high = PROMPT_TOKENS
    assert len(prompts) == frozen.FILES and all(low <= len(prompt.token_ids) <= high for prompt in prompts)


def test_other_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = frozen.sources()
    monkeypatch.setattr(frozen, "sources", lambda: [(f"other/{name}", path) for name, path in known])
    assert frozen.main(["--out", str(tmp_path / "frozen.jsonl")]) == 2
    error = capsys.readouterr().err
    assert "the packages are others" in error and error.count("\n") == 1
    assert not (tmp_path / "frozen.jsonl").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "PACKAGES", ("nobody_has_this",))
    with pytest.raises(C2TError, match="nobody_has_this is missing"):
        frozen.sources()
