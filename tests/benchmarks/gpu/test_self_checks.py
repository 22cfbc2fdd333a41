"""Rows of what servers' checks at start found, from states as servers tell them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks.gpu.self_checks import rows_of
from c2t_plugin.provenance import RunRecord

RUN = {**RunRecord.capture(seed=0).to_json(), "machine": "an H100"}


def state(packing: str = "fa3", **changes: Any) -> dict[str, Any]:
    """As it comes back from a server, through JSON."""
    found = {
        "failures": [],
        "proved": 3,
        "tiers": 4,
        "worst": 0.02,
        "allowed": 0.1,
        "poison": "nan",
        "microseconds": {8: 5000.0, 16: 6000.0},
        "window_microseconds": {8: 8000.0, 16: 6000.0},
        "seconds": 4.5,
        "skipped": "",
        "kernels": [],
        "checked": {"draft_stats": {"name": "draft_stats", "error": 1e-5, "allowed": 2e-4, "microseconds": 30.0}},
        "draft": {"compared": 8},
        "device": "NVIDIA H100",
    }
    for each in (found | changes)["checked"].values():
        each.setdefault("failure", "")
    configuration = {"attention": "stock", "packing": packing, "self_check": {**found, **changes}}
    loaded: dict[str, Any] = json.loads(json.dumps({"beta": 0.5, "configuration": configuration}))
    return loaded


def rows(told: dict[str, Any], kind: str = "measured") -> list[tuple[Any, dict[str, float | None], str]]:
    made = rows_of(told, "kept", kind, {"dtype": "bfloat16"}, RUN)
    assert all((row.scenario, row.arm, row.kind, row.run) == ("gpu-self-check", "kept", kind, RUN) for row in made)
    assert all(row.setting.items() >= {"dtype": "bfloat16"}.items() for row in made)
    return [(row.setting.get("rows") or row.setting.get("kernel"), dict(row.metrics), row.error) for row in made]


def test_figures_are_beside_their_bounds_and_times_beside_the_windows():
    figures = {"logits_off": 0.02, "logits_allowed": 0.1, "sizes_proved": 3, "sizes": 4}
    assert rows(state()) == [
        (None, {**figures, "drafts_compared": 8, "seconds": 4.5}, ""),
        ("draft_stats", {"off": 1e-5, "allowed": 2e-4, "us": 30.0}, ""),
        (8, {"packed_us": 5000.0, "window_us": 8000.0, "packed_share": 0.625}, ""),
        (16, {"packed_us": 6000.0, "window_us": 6000.0, "packed_share": 1.0}, ""),
    ]
    assert rows_of(state(), "kept", "measured", {}, RUN)[0].setting == {"attention": "stock", "packing": "fa3"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failures": ["8 rows: off by 3"], "worst": math.inf}, "8 rows: off by 3"),
        ({"kernels": ["draft_stats off by 0.5"]}, "draft_stats off by 0.5"),
        ({"draft": {"compared": 8, "off": "confidence is off"}}, "confidence is off"),
        ({"draft": {"compared": 0, "untried": "TypeError: no"}}, "TypeError: no"),
        ({"skipped": "MemoryError: no room"}, "MemoryError: no room"),
        ({"failures": ["a"], "kernels": ["b"]}, "a; b"),
    ],
)
def test_what_is_wrong_or_was_not_tried_is_the_rows_error(changes: dict[str, Any], said: str):
    found = rows(state(**changes))
    assert found[0] == (None, {}, said) and [row[0] for row in found[1:]] == ["draft_stats", 8, 16]


def test_a_kernel_that_did_not_run_says_why_and_one_that_is_infinitely_off_has_no_number():
    kernel = {"error": math.inf, "allowed": 0.0, "microseconds": 0.0}
    found = rows(state(checked={"early_stop": {**kernel, "failure": "no image"}, "pack_ragged": {**kernel}}))
    assert found[1] == ("early_stop", {}, "no image")
    assert found[2] == ("pack_ragged", {"off": None, "allowed": 0.0, "us": 0.0}, "")


def test_over_the_uniform_window_nothing_was_to_be_proved():
    found = rows(state("off", proved=0, tiers=0, worst=0.0, allowed=0.0, microseconds={}, skipped="DP attention"))
    assert [error for _, _, error in found] == ["", ""]
    assert found[0][1]["logits_off"] is None and found[0][1]["sizes"] == 0


def test_a_server_on_a_gpu_without_one_is_said_and_one_on_a_cpu_is_not():
    assert rows({"beta": 0.5}) == [(None, {}, "the server's state has no check at start")]
    assert rows({"configuration": {"packing": "off"}}, "functional") == []
    # which says there what was asked for
    assert rows({"configuration": {"self_check": "auto"}}, "functional") == []
