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


def ratios(rows: list[BenchRow], ours: bool) -> str:
    """To plain decoding, as the README writes them, from the newest rows of the demo on SGLang: C2T's, or the best of
    the other arms at each load."""
    newest = {
        (row.arm, load_of(row)): row.metrics[RATIO] or 0.0
        for block in latest_blocks(row for row in rows if row.kind == MEASURED_CPU).values()
        for row in block
        if row.setting["engine"] == "sglang" and row.scenario == "demo"
    }
    best = (
        max(ratio for (arm, load), ratio in newest.items() if load == at and (arm == "C2T") == ours) for at in LOADS
    )
    one, four, sixteen = (number(each, 2) for each in best)
    return f"{one}, {four} and {sixteen}"


def test_the_readme_quotes_the_demo() -> None:
    _, rows = read_published(RESULTS)
    text = " ".join(README.read_text(encoding="utf-8").split())
    mine, best = (ratios(rows, ours) for ours in (True, False))
    assert f"C2T without other options at {mine} of plain decoding for 1, 4 and 16 requests" in text
    assert f"the best other way of each load at {best}" in text


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
