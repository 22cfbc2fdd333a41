"""The page of results begins with three pictures, and what its sentences say is what the rows say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import first_screen as screen
from benchmarks.report.command import EVALUATION, PAGE, RESULTS, read_published
from benchmarks.report.evaluations import load
from benchmarks.report.first_pictures import draw_first
from benchmarks.report.rows import CURVE, BenchRow

RUN = {
    **{"command": "make demo", "git_sha": "abcdef0123456789", "dirty": False, "versions": {}, "seed": 0},
    **{"machine": "a CPU, no GPU", "utc": "2026-01-02T03:04:05+00:00"},
}
SETTING = {"processor": "a CPU", "cores": 2, "threads": 2, "engine": "sglang", "target": "T", "temperature": 0.0}
COST = {"memory_gb_per_s": 11.5, **{f"target_ms_{tokens}": 40.0 + tokens for tokens in CURVE}}


def row(arm: str, load: int, ratio: float, utc: str = RUN["utc"], **setting: Any) -> BenchRow:
    metrics = {**COST, "ratio_to_plain": ratio, "output_tokens_per_s": 20 * ratio}
    label = {**SETTING, "concurrency": load, **setting}
    return BenchRow("demo", "measured-cpu", arm, label, metrics, "", {**RUN, "utc": utc})


def contest(**change: Any) -> list[BenchRow]:
    speeds: Mapping[str, tuple[float, float]] = {
        "plain": (1.0, 1.0),
        "static 2": (1.5, 1.2),
        "static 4": (1.25, 0.9),
        "C2T": (1.375, 1.25),
    }
    return [
        row(arm, load, ratio, **change)
        for arm, both in speeds.items()
        for load, ratio in zip((1, 16), both, strict=True)
    ]


def test_the_sentence_on_speed_is_what_the_rows_say() -> None:
    text = screen.speed_sentence(contest())
    assert "C2T makes 1.38 and 1.25 of plain decoding's tokens/s at 1 and 16 requests at once" in text
    assert "the best other arm 1.50 (static 2) and 1.20 (static 2)" in text
    assert "ahead of plain decoding at 2 of 2 loads and of every other arm at 1 (T on SGLang, 2 cores" in text


def test_every_arm_that_ran_is_a_rival() -> None:
    text = screen.speed_sentence([*contest(), row("SGLang adaptive", 16, 1.3), row("C2T beta .3", 1, 1.1)])
    assert "the best other arm 1.50 (static 2) and 1.30 (SGLang adaptive)" in text
    assert "of every other arm at 0" in text
    slow = [each for each in contest() if each.arm in ("plain", "C2T")] + [row("static 2", 1, 0.9)]
    assert "the best other arm 1.00 (plain): it is ahead" in screen.speed_sentence(slow)


def test_a_load_without_other_arms_says_nothing_of_them() -> None:
    rows = [*contest(), row("C2T", 4, 9.0), row("plain", 4, 1.0)]
    assert "at 1 and 16 requests at once" in screen.speed_sentence(rows)


def test_the_planned_arm_goes_before_a_fixed_threshold() -> None:
    rows = [*contest(), row("C2T auto", 1, 0.5), row("C2T auto", 16, 0.75)]
    assert screen.speed_sentence(rows).startswith("C2T makes .50 and .75 of")


def test_a_gpus_comparison_is_told_apart() -> None:
    setting = {"engine": "sglang", "target": "T", "temperature": 0.0}
    measured = [
        BenchRow("gpu-matrix", "measured", arm, {**setting, "concurrency": 16}, {"ratio_to_plain": ratio}, "", gpu)
        for arm, ratio in (("plain", 1.0), ("static 2", 1.25), ("C2T as it comes", 1.5), ("C2T tree auto", 0.75))
        for gpu in [{**RUN, "machine": "a CPU, 16 cores, 1 x NVIDIA H200"}]
    ]
    said = screen.first_screen([*contest(), *measured], load(EVALUATION))
    assert (
        "- **Tokens/s on a GPU.** C2T makes 1.50 of plain decoding's tokens/s at 16 requests at once, the best" in said
    )
    assert "best other arm 1.25 (static 2): it is ahead" in said and "(T on SGLang, NVIDIA H200; [intervals]" in said
    assert "Tokens/s on a GPU" not in screen.first_screen(contest(), load(EVALUATION))


@pytest.mark.parametrize(
    "change", [{"temperature": 0.7}, {"utc": "2025-01-02T03:04:05+00:00", "engine": "vllm"}], ids=["sampled", "older"]
)
def test_the_newest_greedy_comparison_is_shown(change: dict[str, Any]) -> None:
    assert screen.real_rows([*contest(), *contest(**change)]) == contest()


def test_a_comparison_of_more_loads_goes_before_a_newer_one() -> None:
    older = {"engine": "vllm", "utc": "2025-01-02T03:04:05+00:00"}
    matrix = [*contest(**older), row("C2T", 4, 0.9, **older), row("static 2", 4, 1.1, **older)]
    assert screen.real_rows([*contest(), *matrix]) == matrix


def test_a_step_is_priced_by_its_tokens() -> None:
    assert "41 ms for one token, 1.4 times that for 16 and 4.1 times for 128" in screen.step_sentence(contest())


def test_what_is_verified_is_the_evaluations() -> None:
    text = screen.lengths_sentence(load(EVALUATION))
    rules = {each["name"]: each["compared"]["static"] for each in load(EVALUATION)["chains"]["rules"]}
    for name in ("extended", "P"):
        low, high = (f"{bound:.3f}".lstrip("0") for bound in rules[name]["mean_interval"])
        assert f"{rules[name]['mean']:.3f} ({low} to {high})".lstrip("0") in text


def test_without_a_real_model_there_is_no_screen(tmp_path: Path) -> None:
    assert screen.first_screen([], load(EVALUATION)) == ""
    draw_first([], load(EVALUATION), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_page_begins_with_three_pictures_and_a_sentence_of_each() -> None:
    _, bench = read_published(RESULTS)
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition("\n## ")
    assert screen.first_screen(bench, load(EVALUATION)) in head
    assert rest.startswith("What the papers claim")
    shown = re.findall(r"!\[([^]]+)\]\((results/[^)]+)\)", head)
    assert len(shown) == 3 and all((PAGE.parent / path).is_file() for _, path in shown)
    # tokens/s on a GPU, and of each engine
    told = re.findall(r"^- \*\*(.+?)\.\*\*", head, re.MULTILINE)
    speeds = ["Tokens/s on SGLang", "Tokens/s on a GPU", "Tokens/s on vLLM"]
    assert sorted(told[:-2]) == speeds and told[-2:] == ["Accept length", "A step"]


def test_the_same_rows_give_the_same_pictures_and_others_other_ones(tmp_path: Path) -> None:
    draw_first(contest(), load(EVALUATION), tmp_path)
    before = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(before) == set(screen.ALTERNATIVES)
    draw_first(contest(), load(EVALUATION), tmp_path)
    assert before == {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert ">C2T</text>" in before[screen.SPEEDS] and ">static chains</text>" in before[screen.LENGTHS]
    draw_first([*contest(), row("C2T", 4, 2.0)], load(EVALUATION), tmp_path)
    assert (tmp_path / screen.SPEEDS).read_text(encoding="utf-8") != before[screen.SPEEDS]
