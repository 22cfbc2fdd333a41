"""Figures that pages written by hand quote are those of the published rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report.command import RESULTS, ROOT, read_published
from benchmarks.report.first_screen import Speeds, real_rows, speeds
from benchmarks.report.rows import BenchRow
from benchmarks.report.tables import AUTO, TREE_AUTO
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


def vllm_page() -> str:
    return " ".join((ROOT / "docs/vllm.md").read_text(encoding="utf-8").split())


def step(row: BenchRow, drafts: int) -> tuple[float, float, float]:
    """Of a row of static chains: tokens that a step of the batch yields, its milliseconds, and tokens of its pass."""
    running, tau, rate = (row.metrics[name] or 0.0 for name in ("mean_at_once", "tau", "output_tokens_per_s"))
    yields = running * (1 + tau)
    return yields, 1000 * yields / rate, running * (1 + drafts)


def dearer(load: int) -> tuple[tuple[float, float, float], tuple[float, float, float], float]:
    """Steps of static 2 and static 4 on vLLM, in the newest rows of the demo, and what one more token adds."""
    _, rows = read_published(RESULTS)
    demo = [row for row in rows if row.scenario == "demo" and row.setting.get("engine") == "vllm"]
    newest = {(row.arm, row.setting["concurrency"]): row for row in sorted(demo, key=lambda row: row.run["utc"])}
    two, four = (step(newest[f"static {drafts}", load], drafts) for drafts in (2, 4))
    return two, four, (four[1] - two[1]) / (four[2] - two[2])


@pytest.mark.parametrize("load", LOADS)
def test_the_page_quotes_what_a_node_has_to_bring(load: int) -> None:
    two, four, adds = dearer(load)
    tokens = f"{two[2]:.1f} and {four[2]:.1f}"
    line = f"| {load} | {two[0]:.1f} | {two[1]:.0f} | {four[1]:.0f} | {tokens} | {adds:.1f} |"
    assert f"{line} {number(two[0] * adds / two[1], 2)} |" in vllm_page()


def test_the_page_quotes_what_nodes_bring() -> None:
    found = json.loads((RESULTS / "evaluations/real-eagle3.json").read_text(encoding="utf-8"))
    chain, taus = found["chains"]["taus"], found["trees"]["taus"]
    tree = found["trees"]["baselines"]["EAGLE-2"]
    brings = [number(more - less, 2) for less, more in zip([0.0, *chain], chain, strict=False)]
    assert f"The tokens of a static chain bring {brings[0]}, {brings[1]}, {brings[2]} and {brings[3]}." in vllm_page()
    points = [f"{number(taus[i], 2)} accepted of {tree[i]:.2f}" for i in (1, 2, 3, 4)]
    slopes = [number((taus[i + 1] - taus[i]) / (tree[i + 1] - tree[i]), 2) for i in (1, 2, 3)]
    assert f"EAGLE-2's trees have {', '.join(points)} nodes: one more brings {', then '.join(slopes)}." in vllm_page()
    of_two = taus[1] + (taus[2] - taus[1]) * (2 - tree[1]) / (tree[2] - tree[1])
    assert f"a tree has {number(of_two, 2)} accepted and a chain {number(chain[1], 2)}." in vllm_page()


def test_the_page_quotes_what_a_tree_would_gain_at_one_request() -> None:
    found = json.loads((RESULTS / "evaluations/real-eagle3.json").read_text(encoding="utf-8"))
    nodes, tau = (each[3] for each in (found["trees"]["baselines"]["EAGLE-2"], found["trees"]["taus"]))
    two, _, adds = dearer(1)
    chain, tree = 1 + found["chains"]["taus"][2], 1 + tau
    chain_ms, tree_ms = (two[1] + adds * (verified - 2) for verified in (3, nodes))
    gain = tree / tree_ms / (chain / chain_ms) - 1
    said = f"a chain of 3 yields {chain:.2f} tokens in {chain_ms:.0f} ms and a tree of {nodes:.2f} nodes {tree:.2f}"
    assert f"{said} in {tree_ms:.0f}: {100 * gain:.0f}% more" in vllm_page()


def test_the_page_quotes_what_trees_and_chains_are_worth() -> None:
    _, rows = read_published(RESULTS)
    on = {"gpu": "L40", "target": "llama-3.1-8b", "draft": "eagle3", "context": 512}
    found: dict[str, dict[int, float]] = {"tree": {}, "chain": {}, "other": {}}
    newest = max((row for row in rows if row.arm == TREE_AUTO), key=lambda row: row.run["utc"]).run
    for row in rows:
        ratio = row.metrics.get("ratio_to_plain")
        if row.run != newest or ratio is None or on.items() - row.setting.items():
            continue
        way = {TREE_AUTO: "tree", AUTO: "chain"}.get(row.arm, "other")
        load = row.setting["requests_in_flight"]
        found[way][load] = max(ratio, found[way].get(load, 0.0))
    text = (ROOT / "docs/trees.md").read_text(encoding="utf-8")
    names = {"tree": "`--speculative-c2t-mode tree`", "chain": "chains, as it comes", "other": "the best other way"}
    for way, name in names.items():
        assert f"| {name} | {' | '.join(f'{ratio:.2f}' for _, ratio in sorted(found[way].items()))} |" in text
