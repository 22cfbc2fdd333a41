"""Which pair is in use, and the prompts that come with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pairs.toy import held_out_prompts, pair_dir
from c2t_plugin.errors import C2TError


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").touch()
    prompts = [{"file": "a.py", "text": "", "ids": list(range(n))} for n in (64, 80, 100, 128)]
    (tmp_path / "held_out_prompts.json").write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    monkeypatch.setenv("C2T_PAIR", str(tmp_path))
    return tmp_path


def test_c2t_pair_names_the_pair_in_use(pair: Path) -> None:
    assert pair_dir() == pair


def test_prompts_are_drawn_once_each_and_by_length(pair: Path) -> None:
    drawn = held_out_prompts(3, 70, 128)
    assert sorted(len(ids) for ids in drawn) == [80, 100, 128]
    assert drawn == held_out_prompts(3, 70, 128)


def test_more_prompts_than_there_are_is_an_error(pair: Path) -> None:
    with pytest.raises(C2TError, match="asked for 3 prompts of 64-80 tokens, the pair has 2"):
        held_out_prompts(3, 64, 80)


def test_an_empty_pair_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("C2T_PAIR", str(tmp_path))
    with pytest.raises(C2TError, match="no pair in"):
        pair_dir()
