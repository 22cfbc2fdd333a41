"""Pictures: what is drawn is what was measured, and what cannot be drawn is refused in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from c2t_plugin.errors import C2TError
from c2t_plugin.lab import evaluate, fit, plot
from c2t_plugin.lab.pictures import evaluation_figure, rows_figure, save_png
from c2t_plugin.provenance import RunRecord, describe_machine
from c2t_plugin.traces.file import save_traces

PNG = b"\x89PNG\r\n\x1a\n"
ROWS = [
    {"rule": "one", "tau": 1.0, "gamma": 2.0, "gamma / EAGLE-2": 0.5},
    {"rule": "two", "tau": 1.5, "gamma": 3.0, "gamma / EAGLE-2": None},
    {"rule": "out of reach", "tau": None, "gamma": None, "gamma / EAGLE-2": None},
]


@pytest.fixture(scope="module")
def folder(make_traces, tmp_path_factory):
    """Traces, a classifier, the JSON of their evaluation, and rows of experiments."""
    folder = tmp_path_factory.mktemp("plot")
    save_traces(make_traces(prompts=12, steps=6), folder / "toy.traces")
    assert fit.main([str(folder / "toy.traces"), "--d-max", "4", "--out", str(folder / "ours.safetensors")]) == 0
    command = [f"ours={folder / 'ours.safetensors'}", "--traces", str(folder / "toy.traces"), "--d-max", "4"]
    command += ["--tree-depth", "4", "--replicates", "20", "--json", str(folder / "found.json")]
    assert evaluate.main(command) == 0
    records = [{"experiment": name, "rows": ROWS, "quick": False} for name in ("a", "b")]
    records.append({"experiment": "no-tau", "rows": [{"gamma": 1.0}], "quick": False})
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return folder


def test_curves_are_those_of_the_evaluation(folder) -> None:
    record = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    chains, trees, *reliability = evaluation_figure(record).axes
    for axis, part, baseline in ((chains, "chains", "static"), (trees, "trees", "EAGLE-2")):
        lines = {line.get_label(): line for line in axis.lines}
        assert list(lines) == [baseline, *(rule["name"] for rule in record[part]["rules"])]
        for rule in record[part]["rules"]:
            expected = [np.nan if gamma is None else gamma for gamma in rule["compared"][baseline]["gamma"]]
            np.testing.assert_array_equal(lines[rule["name"]].get_xdata(), record[part]["taus"])
            np.testing.assert_array_equal(lines[rule["name"]].get_ydata(), expected)
    ours = next(rule for rule in record["chains"]["rules"] if rule["name"] == "ours")
    (line,) = (line for line in reliability[0].lines if str(line.get_label()).startswith("ours"))
    assert [list(point) for point in line.get_xydata()] == [each[1:] for each in ours["calibration"]["bins"]]
    # DyMax gives no probability
    assert not any("DyMax" in str(line.get_label()) for line in reliability[0].lines)


@pytest.mark.parametrize(
    ("sha", "dirty", "commit"),
    [("0123abc", False, "0123abc"), ("0123abc", True, "0123abc with uncommitted changes"), (None, None, "unknown")],
)
def test_a_picture_says_what_it_came_from(tmp_path, sha, dirty, commit) -> None:
    run = RunRecord("c2t plot x", sha, dirty, {}, "a machine", None, "2026-01-02T03:04:05+00:00")
    save_png(rows_figure("title", ROWS[:2], "gamma"), tmp_path / "new" / "x.png", run)
    with Image.open(tmp_path / "new" / "x.png") as picture:
        found = {name: picture.info[name] for name in ("Command", "Commit", "Machine", "Date")}
    assert found == {"Command": "c2t plot x", "Commit": commit, "Machine": "a machine", "Date": run.utc}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.png"]


def test_rows_become_points(folder) -> None:
    (axis, *_) = rows_figure("title", ROWS[:2], "gamma").axes
    assert [list(line.get_xydata()[0]) for line in axis.lines] == [[1.0, 2.0], [1.5, 3.0]]
    assert [line.get_label() for line in axis.lines] == ["one", "two"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["toy.traces"], ["toy.png"]),
        (["toy.traces", "--classifier", "ours=ours.safetensors", "--out", "x.png"], ["x.png"]),
        (["found.json"], ["found.png"]),
        (["rows.jsonl"], ["a-rows.png", "b-rows.png"]),
        (["rows.jsonl", "--experiment", "b", "--out", "y.png"], ["y.png"]),
        (["rows.jsonl", "--out", "pictures"], ["pictures/a-rows.png", "pictures/b-rows.png"]),
    ],
)
def test_pictures_are_written(folder, tmp_path, monkeypatch, capsys, arguments, written) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    before = {file for file in tmp_path.rglob("*") if file.is_file()}
    assert plot.main(arguments) == 0
    new = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file() and file not in before}
    assert new == set(written)
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in written)
    for name in written:
        with Image.open(tmp_path / name) as picture:
            assert {"Command", "Commit", "Machine", "Date"} <= set(picture.info)
            assert picture.info["Machine"] == describe_machine()
    assert capsys.readouterr().out.splitlines()[-len(written) :] == written


EMPTY = json.dumps({"experiment": "no-tau", "rows": [{"gamma": 1.0}], "quick": False})


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "not found; c2t plot draws trace files"),
        ("nothing of the kind\n", [], "is none of trace files"),
        ("", [], "has no rows to plot"),
        (EMPTY, [], "has no rows to plot: they need a column tau"),
        (EMPTY, ["--experiment", "no-tau"], "no-tau has no rows to plot"),
        (EMPTY, ["--experiment", "other"], "has no rows of other; it has no-tau"),
        (EMPTY, ["--classifier", "x"], "leave --classifier out"),
        ('{"format": "c2t-evaluation", "version": 1}', [], "version 1, 2 is drawn"),
        (b"\xff\xfe\x00", [], "not a readable safetensors file"),
        ('{"format": "c2t-evaluation", "version": 2}', [], r"does not hold what is drawn \(KeyError: 'chains'\)"),
        ('{"format": "c2t-evaluation", "version": 2, "chains": 3}', [], r"does not hold what is drawn \(TypeError"),
        ("[1]", [], "is none of trace files"),
        ("[" * 100_000, [], "is none of trace files"),
        ("1" * 5_000, [], "is none of trace files"),
        (json.dumps({"experiment": ["a"], "rows": [], "quick": False}), [], "is none of trace files"),
        (json.dumps({"experiment": "a", "rows": [3], "quick": False}), [], r"does not hold what is drawn \(Attribute"),
        (json.dumps({"experiment": "a", "rows": [{"tau": 1, "gamma": 2}, {"tau": 1}], "quick": False}), [], "KeyError"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, content, arguments, message) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(C2TError, match=message) as error:
        plot.main([str(file), *arguments])
    assert "\n" not in str(error.value)
    assert [entry for entry in tmp_path.iterdir() if entry != file] == []
