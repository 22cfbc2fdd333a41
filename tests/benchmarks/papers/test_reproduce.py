"""Experiments of the papers have their columns, rows carry their provenance, the page shows what was run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.command import USAGE_ERROR, run
from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers import page
from benchmarks.papers.catalogue import REGISTRY
from benchmarks.papers.command import main
from benchmarks.papers.experiment import Bench, Experiment, Findings, Registry
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.pictures import rows_figure

ROOT = Path(__file__).parents[3]


def experiment(name: str = "toy", columns: tuple[str, ...] = ("method", "paper tau", "tau")) -> Experiment:
    rows = [{"method": "static", "paper tau": 1.98, "tau": 2.5}, {"method": "C2T", "paper tau": None, "tau": 2.75}]
    return Experiment(name, "A toy", "No paper, table 0", columns, lambda bench: Findings(rows, "It is a toy."))


def registry(*experiments: Experiment) -> Registry:
    found = Registry(())
    found.__dict__["experiments"] = {each.name: each for each in experiments}
    return found


def record(name: str, rows: list[dict], quick: bool = False, dirty: bool = False) -> str:
    run = {"git_sha": "0123456789abcdef", "dirty": dirty, "machine": "a machine", "utc": "2026-01-02T03:04:05+00:00"}
    return json.dumps({"experiment": name, "rows": rows, "remark": "", "quick": quick, "run": run}) + "\n"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "pair", tmp_path / "traces")


def test_rows_must_have_the_columns(bench: Bench) -> None:
    assert len(experiment().findings(bench).rows) == 2
    with pytest.raises(C2TError, match="'gamma'"):
        experiment(columns=("method", "gamma")).findings(bench)


def test_names_are_known_and_all_means_all() -> None:
    names = list(REGISTRY.experiments)
    assert [each.name for each in REGISTRY.chosen(["all"])] == names
    assert [each.name for each in REGISTRY.chosen(names[:1])] == names[:1]
    with pytest.raises(C2TError, match=r"no experiment nonsense; .*--list"):
        REGISTRY.chosen([names[0], "nonsense"])


def test_two_experiments_of_one_name_are_refused() -> None:
    module = REGISTRY.modules[0]
    with pytest.raises(C2TError, match="one name"):
        _ = Registry((module, module)).experiments


def test_every_experiment_says_where_it_is_from() -> None:
    for each in REGISTRY.experiments.values():
        assert each.title and each.columns, each.name
        assert each.source.startswith(("C2T v1", "C2T v2", "DySpec", "Entropy trees", "This project's goals")), (
            each.name
        )


def test_the_page_shows_the_last_rows_and_names_what_is_missing(tmp_path: Path) -> None:
    known = registry(experiment(), experiment("other"))
    row = {"method": "static", "paper tau": 1.98, "tau": 2.0}
    rows = record("toy", [row]) + record("toy", [row | {"tau": 2.5}], dirty=True) + record("toy", [row], quick=True)
    (tmp_path / page.ROWS).write_text(rows)
    fields = PngInfo()
    fields.add_text("Command", "python -m benchmarks.papers toy")
    Image.new("RGB", (30, 20), "red").save(tmp_path / "toy.png", pnginfo=fields)
    page.write(tmp_path / "page.md", tmp_path, known)
    # rows that were run elsewhere have no picture; the page keeps the one it has
    (tmp_path / "toy.png").unlink()
    page.write(tmp_path / "page.md", tmp_path, known)
    with Image.open(tmp_path / "page" / "toy.png") as picture:
        assert picture.info["Command"] == "python -m benchmarks.papers toy"
        assert picture.size == (30, 20) and picture.convert("RGB").getpixel((3, 3)) == (255, 0, 0)
    text = (tmp_path / "page.md").read_text()
    assert "| static | 1.980 | 2.500 |" in text and "2.000" not in text
    assert (
        "`python -m benchmarks.papers toy`, a machine, 2026-01-02, commit 0123456789ab with uncommitted changes."
        in text
    )
    assert "Not run for this page: other." in text
    (tmp_path / page.REAL_ROWS).write_text(record("toy", [row | {"tau": 3.5}]))
    page.write(tmp_path / "page.md", tmp_path, known)
    real = (tmp_path / "page.md").read_text().partition(page.ON_REAL)[2]
    assert "| static | 1.980 | 3.500 |" in real and text.splitlines()[0] in (tmp_path / "page.md").read_text()
    assert "![A toy](page/toy.png)" in text


def test_a_picture_carries_what_its_rows_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Findings(experiment().run(None).rows, "", rows_figure("title", [{"tau": 1.0, "gamma": 2.0}], "gamma"))
    pictured = replace(experiment(), run=lambda bench: drawn)
    monkeypatch.setattr("benchmarks.papers.catalogue.REGISTRY", registry(pictured))
    monkeypatch.chdir(tmp_path)
    assert run(main, ["toy", "--out", "out"]) == 0
    recorded = page.latest(tmp_path / "out" / page.ROWS)["toy"]["run"]
    with Image.open(tmp_path / "out" / "toy.png") as picture:
        assert [picture.info[name] for name in ("Command", "Machine", "Date")] == [
            recorded[name] for name in ("command", "machine", "utc")
        ]
        assert picture.info["Commit"].startswith(recorded["git_sha"] or "unknown")


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "reproduction").glob("*.png")), ids=lambda path: path.stem)
def test_a_published_picture_is_of_published_rows(picture: Path) -> None:
    records = [json.loads(line) for line in (ROOT / "benchmarks/results/reproduce.jsonl").read_text().splitlines()]
    commits = {record["run"]["git_sha"] for record in records if record["experiment"] == picture.stem}
    with Image.open(picture) as image:
        assert image.info["Commit"] in commits


def test_the_published_page_is_that_of_the_published_rows(tmp_path: Path) -> None:
    """Only the rows are copied: a picture is shown if the page has it."""
    shutil.copytree(ROOT / "docs" / "reproduction", tmp_path / "reproduction")
    for name, copy in (("reproduce", page.ROWS), ("reproduce-real", page.REAL_ROWS)):
        rows = ROOT / f"benchmarks/results/{name}.jsonl"
        if rows.is_file():
            (tmp_path / copy).write_bytes(rows.read_bytes())
    page.write(tmp_path / "reproduction.md", tmp_path, REGISTRY)
    assert (tmp_path / "reproduction.md").read_bytes() == (ROOT / "docs/reproduction.md").read_bytes()


def test_a_long_remark_is_laid_out_word_by_word() -> None:
    assert page.laid_out("Short. As it is; so.") == ["Short. As it is; so."]
    words = " ".join(["word"] * page.PARAGRAPH)
    assert page.laid_out(f"A tau of 0.5 first. Means: one {words}; two.") == [
        "- A tau of 0.5 first.",
        "- Means:",
        f"  - one {words};",
        "  - two.",
    ]


def test_the_list_says_where_each_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, ["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, (name, each) in zip(lines, REGISTRY.experiments.items(), strict=True):
        assert line.split()[0] == name and each.title in line and line.endswith(f"({each.source})")


def test_rows_of_an_older_experiment_are_refused(tmp_path: Path) -> None:
    (tmp_path / page.ROWS).write_text(record("toy", [{"method": "static"}]))
    with pytest.raises(C2TError, match="run it again"):
        page.write(tmp_path / "page.md", tmp_path, registry(experiment()))
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an experiment"),
        (["nonsense"], "no experiment nonsense"),
        (["--page", "page.md"], "run the experiments into that folder first"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(main, arguments) == USAGE_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_broken_rows_file_is_named(tmp_path: Path) -> None:
    (tmp_path / page.ROWS).write_text('{"experiment": "toy"\n')
    with pytest.raises(C2TError, match=f"{page.ROWS}, line 1"):
        page.latest(tmp_path / page.ROWS)


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.papers.catalogue.REGISTRY", registry(experiment(), experiment("other")))
    monkeypatch.chdir(tmp_path)
    command = ["all", "--out", "out", "--missing"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / page.ROWS).write_text(record("toy", [{"method": "static", "paper tau": 1.98, "tau": 2.0}]))
    for _ in range(2):
        assert run(main, command) == 0
        found = [json.loads(line)["experiment"] for line in (tmp_path / "out" / page.ROWS).read_text().splitlines()]
        assert found == ["toy", "other"]
    assert run(main, command[:-1]) == 0
    assert len((tmp_path / "out" / page.ROWS).read_text().splitlines()) == 4


@pytest.mark.slow
def test_the_command_collects_runs_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on the shipped pair with few trees, then the page refuses rows of a quick run."""
    monkeypatch.chdir(tmp_path)
    assert run(main, ["c2t-v1-table-3", "--quick", "--out", "out", "--traces", "traces"]) == 0
    found = [json.loads(line) for line in (tmp_path / "out" / page.ROWS).read_text().splitlines()]
    assert [each["experiment"] for each in found] == ["c2t-v1-table-3"]
    assert set(found[0]["files"]) >= {"target", "draft", f"draft/{common.PAPER_FEATURES_FILE}"}
    assert found[0]["quick"] and {"command", "git_sha", "machine", "seed"} <= set(found[0]["run"])
    assert {row["draft"] for row in found[0]["rows"]} == {"EAGLE-1 head", "EAGLE-3 head", "stand-alone"}
    assert all(0 < row["tau"] < row["length"] for row in found[0]["rows"])
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted(
        f"{draft}-held-out-quick.traces" for draft in ("draft", "eagle1", "eagle3")
    )
    page.write(tmp_path / "page.md", tmp_path / "out", REGISTRY)
    assert "Not run for this page: " in (tmp_path / "page.md").read_text()
