"""Figures that pages written by hand quote are those of the published rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report.command import RESULTS, ROOT, read_published
from benchmarks.report.rows import MEASURED_CPU, BenchRow
from benchmarks.report.tables import RATIO, latest_blocks, load_of
from benchmarks.report.training_tables import DRAFTS, number

LOADS = (1, 4, 16)
README = ROOT / "README.md"


def best(rows: list[BenchRow], scenario: str, name: str, ours: bool) -> dict[int, float]:
    """By requests at once, to plain decoding, from the newest greedy rows of a scenario on SGLang: of the arm of this
    name, or of the best of all others."""
    newest = {
        (row.arm, load_of(row)): row.metrics[RATIO] or 0.0
        for block in latest_blocks(row for row in rows if row.kind == MEASURED_CPU).values()
        for row in block
        if row.setting["engine"] == "sglang" and row.scenario == scenario and not row.setting.get("temperature")
    }
    found: dict[int, float] = {}
    for (arm, load), ratio in newest.items():
        if (arm == name) == ours:
            found[load] = max(found.get(load, 0.0), ratio)
    return found


def ratios(rows: list[BenchRow], ours: bool) -> str:
    """Of the demo, as the README writes them."""
    found = best(rows, "demo", "C2T", ours)
    one, four, sixteen = (number(found[load], 2) for load in LOADS)
    return f"{one}, {four} and {sixteen}"


def test_the_readme_quotes_the_demo() -> None:
    _, rows = read_published(RESULTS)
    text = " ".join(README.read_text(encoding="utf-8").split())
    mine, others = (ratios(rows, ours) for ours in (True, False))
    assert f"C2T without other options at {mine} of plain decoding for 1, 4 and 16 requests" in text
    assert f"the best other way of each load at {others}" in text


def test_the_readme_quotes_the_matrix() -> None:
    _, rows = read_published(RESULTS)
    mine, others = (best(rows, "matrix", "C2T auto", ours) for ours in (True, False))
    of_the_best = [ratio / others[load] for load, ratio in mine.items()]
    least, most = (number(each, 2) for each in (min(of_the_best), max(of_the_best)))
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"{min(mine)} to {max(mine)} requests it had {least} to {most} of the speed of the best other way" in text


@pytest.mark.parametrize("page", ["docs/classifiers.md"])
def test_the_page_quotes_the_evaluation(page: str) -> None:
    """Mean confidence and accepted share of P on the real pair's chains."""
    found = json.loads((RESULTS / "evaluations/real-eagle3.json").read_text(encoding="utf-8"))
    calibration = next(rule for rule in found["chains"]["rules"] if rule["name"] == "P")["calibration"]
    text = (Path(ROOT) / page).read_text(encoding="utf-8")
    means = [number(calibration[name], 2) for name in ("confidence", "accepted")]
    assert f"P is too low here as well, {means[0]} on average where {means[1]}" in text


def percent(values: list[float]) -> str:
    """How much less than 1 these ratios are, from the least to the most."""
    less = sorted(round(100 * (1 - value)) for value in values)
    return f"{less[0]} to {less[-1]}%"


def test_the_page_quotes_what_chains_save() -> None:
    """Over the three drafts."""
    compared = []
    for draft in DRAFTS:
        found = json.loads((RESULTS / f"evaluations/rules-{draft}.json").read_text(encoding="utf-8"))
        rule = next(rule for rule in found["chains"]["rules"] if rule["name"] == "extended")
        compared.append({name: each["mean"] for name, each in rule["compared"].items()})
    on_p = [each["P"] for each in compared]
    estimator = [each[f"vLLM's estimator, {how}"] for each in compared for how in ("online", "whole")]
    text = " ".join((ROOT / "docs/classifiers.md").read_text(encoding="utf-8").split())
    assert (
        f"`extended` verifies {percent(on_p)} less than P and {percent(estimator)} less than vLLM's estimator" in text
    )
