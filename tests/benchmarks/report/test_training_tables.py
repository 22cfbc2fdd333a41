"""The tables of docs/classifiers.md are what committed evaluations say, and only evaluations of clean commits count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pairs.toy import pair_dir
from benchmarks.report import training_tables
from benchmarks.report.training_tables import DRAFTS, FOLDER, PAGE, TABLES, load, main, number, render, with_interval
from c2t_plugin.classifier import FILE_NAME, load_classifier
from c2t_plugin.errors import C2TError

GOOD = FOLDER / "rules-eagle3.json"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page and the evaluations, to be changed."""
    folder = tmp_path / "evaluations"
    folder.mkdir()
    for path in FOLDER.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    (tmp_path / "classifiers.md").write_bytes(PAGE.read_bytes())
    monkeypatch.setattr(training_tables, "FOLDER", folder)
    monkeypatch.setattr(training_tables, "PAGE", tmp_path / "classifiers.md")
    return tmp_path


def changed(path: Path, **run: Any) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return {**found, "run": {**found["run"], **run}}


def test_the_page_is_generated():
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page


def test_another_figure_in_an_evaluation_is_another_one_on_the_page(files: Path):
    found = json.loads(GOOD.read_text(encoding="utf-8"))
    extended = next(rule for rule in found["chains"]["rules"] if rule["name"] == "extended")
    assert number(extended["auc"], 4) in PAGE.read_text(encoding="utf-8")
    extended["auc"] = 0.12345
    (files / "new.json").write_text(json.dumps(found))
    assert main(["--add", f"rules-eagle3={files / 'new.json'}"]) == 0
    page = (files / "classifiers.md").read_text(encoding="utf-8")
    assert "| .1235 |" in page and page != PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("draft", DRAFTS)
def test_they_are_of_the_models_that_ship(draft: str):
    """Of another pair's figures the page would say what nobody can repeat."""
    pair = json.loads((FOLDER / f"rules-{draft}.json").read_text(encoding="utf-8"))["traces"]["header"]["pair"]
    assert load_classifier(pair_dir() / draft / FILE_NAME).spec.pair == pair


@pytest.mark.parametrize("run", [{"dirty": True}, {"dirty": None}, {"git_sha": None}, {"command": ""}], ids=str)
def test_an_evaluation_that_nobody_can_repeat_is_refused(
    run: dict[str, Any], files: Path, capsys: pytest.CaptureFixture[str]
):
    (files / "new.json").write_text(json.dumps(changed(GOOD, **run)))
    before = (files / "evaluations" / GOOD.name).read_bytes()
    assert main(["--add", f"rules-eagle3={files / 'new.json'}"]) == 2
    assert "no evaluation of a clean commit" in capsys.readouterr().err
    assert (files / "evaluations" / GOOD.name).read_bytes() == before


@pytest.mark.parametrize("content", ["", "{}", "[]", json.dumps({"format": "other", "run": {}})])
def test_what_is_no_evaluation_is_named(content: str, tmp_path: Path):
    (tmp_path / "some.json").write_text(content)
    with pytest.raises(C2TError, match=r"some.json is no evaluation"):
        load(tmp_path / "some.json")


@pytest.mark.parametrize("added", ["rules-nobody=x.json", "x.json"])
def test_an_unknown_name_is_refused_with_those_known(added: str, files: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--add", added]) == 2
    assert f"got {added!r}" in (said := capsys.readouterr().err) and "rules-eagle3" in said


def test_a_page_without_a_tables_place_is_refused():
    with pytest.raises(C2TError, match="table:tried"):
        render(PAGE.read_text(encoding="utf-8").replace("<!-- table:tried -->", ""))
    assert len(TABLES) == 11


def test_numbers_are_written_as_shares():
    assert (number(0.5), number(1.0), number(-0.25, 2), number(None)) == (".500", "1.000", "-0.25", "")
    assert with_interval(0.5, [0.25, 0.75]) == ".500 (.250 to .750)"
    assert with_interval(0.5, [None, 0.75]) == with_interval(0.5, None) == ".500"
