"""Options: types, ranges, unknown keys, and which source wins."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2t_plugin.config import C2TConfig
from c2t_plugin.errors import ConfigError


@pytest.fixture(autouse=True)
def no_c2t_variables(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "CONFIG",
        "BETA",
        "BASE",
        "MODE",
        "CLASSIFIER",
        "TOP_M",
        "TRACE_DIR",
        "TRACE_SHARE",
        "TRACE_LIMIT",
        "TRACE_PRECISION",
        "COST_CURVE",
        "PACKING",
        "ROWS",
        "RAGGED",
        "PLAN",
        "ATTENTION",
    ):
        monkeypatch.delenv(f"C2T_{name}", raising=False)


@pytest.mark.parametrize("beta", ["-0.1", "1.01", "nan", "inf", 2])
def test_beta_outside_the_unit_interval(beta: object):
    with pytest.raises(ConfigError, match=r"beta must be a number in \[0, 1\]"):
        C2TConfig.from_mapping({"beta": beta})


def test_beta_may_be_decided_by_what_it_costs():
    assert C2TConfig.from_mapping({"planner": "curve.json"}).curve == Path("curve.json")
    assert C2TConfig.from_mapping({"planner": "on"}).planned and C2TConfig.from_mapping({"planner": "on"}).curve is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"beta": "auto"}, "on"),
        ({"beta": "auto", "cost_curve": "curve.json"}, "curve.json"),
        ({"planner": "on", "cost_curve": "curve.json"}, "curve.json"),
    ],
)
def test_old_names_of_the_planner_are_taken_with_a_line(
    old: dict[str, str], new: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert C2TConfig.from_mapping(old) == C2TConfig(planner=new)
    assert f"planner {new}" in caplog.text


@pytest.mark.parametrize("beta", [0, 1, "0.85"])
def test_beta_inside_it(beta: object):
    assert C2TConfig.from_mapping({"beta": beta}).beta == float(beta)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": "high"}, "beta must be a number, got 'high'"),
        ({"cost_curve": "curve.json"}, "cost_curve is what a planner decides by; expected planner curve.json"),
        ({"planner": "on", "beta": 0.5}, "planner on decides what beta 0.5 would; leave one out"),
        ({"beta": True}, "wrong type"),
        ({"top_m": "many"}, "top_m must be an integer"),
        ({"top_m": math.inf}, "top_m must be an integer, got inf"),
        ({"top_m": 1.5}, r"top_m must be an integer, got 1\.5"),
        ({"beta": 10**400}, "beta must be a number, got 1000"),
        ({"trace_share": [0.5]}, r"trace_share must be a number, got \[0\.5\]"),
        ({"classifier": "a\0b"}, r"classifier has characters that no name and no path has: 'a\\\\x00b'"),
        ({"learned": "\ud800"}, "learned has characters that no name"),
        ({"a\nb": 1, "c": 2}, r"unknown option a\\\\nb, c; known"),
        ({"top_m": 0}, "top_m must be at least 1"),
        ({"trace_limit": "0.5"}, "trace_limit must be a number of MB, 1 or more, got 0.5"),
        ({"trace_limit": "inf"}, "trace_limit must be a number of MB"),
        ({"trace_limit": "nan"}, "trace_limit must be a number of MB"),
        ({"trace_precision": "half"}, "trace_precision must be one of coarse, exact, got 'half'"),
        ({"base": "medusa"}, "base must be one of auto, eagle, eagle3, standalone"),
        ({"trace_share": 0}, "trace_share must be a number above 0"),
        ({"trace_share": "1.01"}, "trace_share must be a number above 0 and at most 1, got 1.01"),
        ({"trace_share": "some"}, "trace_share must be a number, got 'some'"),
        ({"mode": "forest"}, "mode must be one of chain, tree"),
        ({"packing": "fast"}, "packing must be one of auto, triton, flashinfer, fa3, cpu, trtllm_mha, trtllm_mla"),
        ({"rows": "late"}, "rows must be one of auto, sync, lagged, got 'late'"),
        (
            {"rows": "lagged", "mode": "tree"},
            "rows lagged clips chains, and trees that a planner cuts: set one",
        ),
        ({"request_settings": "some"}, "request_settings must be one of all, lower, none, got 'some'"),
        ({"learn": "on"}, "learn must be one of auto, calibrate, network, off, got 'on'"),
        ({"request_tiers": "yes"}, "request_tiers must be one of on, off, got 'yes'"),
        ({"attention": "flash"}, "attention must be one of auto, stock, tree, got 'flash'"),
        ({"attention": "tree", "packing": "fa3"}, "attention tree is a kernel of packing triton, packing is fa3"),
        ({"attention": "tree", "packing": "off"}, "packing is off; leave one out"),
        ({"mode": "tree", "policy": "sequoia"}, "policy must be one of c2t, prob"),
        ({"policy": "eagle2"}, "policy eagle2 grows trees: set the mode to tree"),
        ({"mode": "tree", "policy": "prob"}, "policy prob has no suggested beta"),
        ({"mode": "tree", "policy": "static", "beta": 0.5}, "policy static has no beta"),
        ({"classifier": 3}, "wrong type"),
        (
            {"ragged": "off", "packing": "auto"},
            "ragged off is the old name of packing, which is auto; leave ragged out",
        ),
        ({"betta": 0.5}, "unknown option betta; known: attention, base, beta"),
    ],
)
def test_what_is_refused(values: dict, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        C2TConfig.from_mapping(values)
    assert "\n" not in str(error.value)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(),
    st.sampled_from(["nan", "1e999", "\ud800", "a\nb", "\0", "x" * 10_000]),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.integers()),
)
NAMES = st.sampled_from([field.name for field in fields(C2TConfig)]) | st.text()


@pytest.mark.slow
@settings(deadline=None, max_examples=500, derandomize=True)
@given(values=st.dictionaries(NAMES, ODD, min_size=1, max_size=3))
def test_any_options_are_taken_or_refused_in_one_line(values: dict[str, Any]):
    try:
        C2TConfig.from_mapping(values)
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("old", "new"),
    [({"ragged": "off"}, C2TConfig(packing="off")), ({"plan": "sync"}, C2TConfig(rows="sync"))],
)
def test_old_names_are_taken_with_a_line(
    old: dict[str, str], new: C2TConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert C2TConfig.from_mapping(old) == C2TConfig.resolve(old) == new
    ((name, value),) = old.items()
    assert f"C2T: {name} is called" in caplog.text
    monkeypatch.setenv(f"C2T_{name.upper()}", value)
    assert C2TConfig.resolve({}) == new


def test_a_flag_by_its_old_name_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("C2T_PACKING", "full")
    assert C2TConfig.resolve({"ragged": "off"}).packing == "off"


def test_flags_win_over_variables_over_json_over_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "c2t.json"
    file.write_text(json.dumps({"beta": 0.1, "base": "eagle", "top_m": 10}))
    monkeypatch.setenv("C2T_CONFIG", str(file))
    monkeypatch.setenv("C2T_BETA", "0.2")
    monkeypatch.setenv("C2T_TOP_M", "20")
    config = C2TConfig.resolve({"beta": "0.3", "base": None})
    assert config == C2TConfig(beta=0.3, base="eagle", top_m=20)


def test_inline_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("C2T_CONFIG", '{"beta": 0.25}')
    assert C2TConfig.resolve({}).beta == 0.25


@pytest.mark.parametrize("text", ["{beta: 1", "[1]", "no-such-file.json", "x" * 300, '{"bete": 1}'])
def test_a_bad_json_source_is_named(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("C2T_CONFIG", text)
    with pytest.raises(ConfigError, match=r"C2T_CONFIG|unknown option"):
        C2TConfig.resolve({})


@pytest.mark.parametrize(
    ("values", "planned"),
    [
        ({}, True),
        ({"beta": 0.4}, False),
        ({"planner": "off"}, False),
        ({"mode": "tree"}, False),
        ({"mode": "tree", "planner": "on"}, True),
        ({"trace_dir": "traces"}, False),
        ({"trace_dir": "traces", "planner": "on"}, True),
    ],
)
def test_chains_are_planned_unless_somebody_says_otherwise(values: dict[str, Any], planned: bool):
    assert C2TConfig.from_mapping(values).planned == planned
