"""Figures that pages written by hand quote are those of the published rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report.command import RESULTS, ROOT, read_published
from benchmarks.report.first_screen import Speeds, real_rows, speeds
from benchmarks.report.training_tables import DRAFTS, number

LOADS = (1, 4, 16)
README = ROOT / "README.md"


def compared(scenario: str) -> Speeds:
    """C2T and the best other arm by requests at once, in the newest greedy rows of a scenario on SGLang."""
    _, rows = read_published(RESULTS)
    wanted = [row for row in rows if row.scenario == scenario and row.setting.get("engine") == "sglang"]
    return speeds(real_rows(wanted))


def readme() -> str:
    return " ".join(README.read_text(encoding="utf-8").split())


def test_the_readme_quotes_the_demo() -> None:
    found = compared("demo")
    (one, four, sixteen), others = (
        [number(each[load], 2) for load in LOADS]
        for each in (found.ours, {load: ratio for load, (ratio, _) in found.best.items()})
    )
    said = f"C2T without other options at {one}, {four} and {sixteen} of plain decoding for 1, 4 and 16 requests"
    assert f"{said}, the best other way of each load at {others[0]}, {others[1]} and {others[2]}" in readme()


def test_the_readme_quotes_the_matrix() -> None:
    found = compared("matrix")
    of_the_best = [ratio / found.best[load][0] for load, ratio in found.ours.items()]
    least, most = (number(each, 2) for each in (min(of_the_best), max(of_the_best)))
    loads = f"{min(found.ours)} to {max(found.ours)} requests"
    assert f"{loads} it had {least} to {most} of the speed of the best other way" in readme()


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
