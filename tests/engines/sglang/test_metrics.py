"""Counts of what C2T did, what Prometheus gets of them, and the dashboard that reads it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang]

import sglang  # noqa: E402
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from c2t_plugin.engines import figures  # noqa: E402
from c2t_plugin.engines.sglang import metrics  # noqa: E402
from c2t_plugin.engines.sglang.metrics import Counts, Exporter, RequestCounts  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from tests.support.dashboards import check_panels, dashboard_of, expressions  # noqa: E402

# as Prometheus lists them
GAUGES = metrics.GAUGES + figures.GAUGES
NAMES = [*(f"c2t:{name}_total" for name, *_ in metrics.COUNTERS), *(f"c2t:{name}" for name, *_ in GAUGES)]
SECONDS = 'c2t:classifier_seconds_total{model_name="m"}'
LEARNT = {
    "learnt": {
        **{"seen": 9, "discarded": 1, "turns": 1, "slope": 1.5, "own": 0.5, "offsets": [0.25]},
        **{"nll": [0.6, 0.5], "auc": [0.7, 0.8]},
        "depths": [{"tokens": 4, "accepted": 0.5, "classifier": 0.9, "learnt": 0.6}],
        "network": {"swaps": 2, "discarded": 1},
    },
    "came": {"tokens": 1.5, "seconds": 0.5},
}
STEPS = [
    ([2, 0, 3], [1, 0, 3], 8, 3, [2, 3, 3]),
    ([2], [2], 4, 2, [2]),
    ([], [], 4, 2, []),
    # of another rank's draft, which may differ
    ([1], [0], 2, 1, [0]),
]


def exported(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if "_created" not in name}


def test_counts_are_means_over_running_requests():
    counts = Counts(3)
    for step in STEPS:
        counts.add(*step)
    assert counts.state() == {
        "verified_tokens": 8 / 5,
        "accept_len": 11 / 5,
        "steps": 4,
        "rows_computed": 18,
        "clipped": 4,
        "over_budget": 3,
        "settings_ignored": 0,
        "classifier_s": None,
        "verified": [1, 1, 2, 1],
        "accepted": [2, 1, 1, 1],
        "depths": {"1": 1, "2": 2, "3": 1},
        "tiers": {"2": 1, "4": 2, "8": 1},
    }


def test_a_request_counts_its_own_steps():
    counts = RequestCounts(tiers=Counter())
    # the last one of a tree, which has more nodes than it is deep, on a rank that drafted fewer
    for step in ((2, 8, 3, 3, 0.5, 1), (0, 12, 0, 0, 0.25, 0), (3, 8, 3, 3, 0.0, 3), (5, 16, 3, 4, 0.25, 2)):
        counts.add(*step)
    assert counts.state() == {
        "num_spec_steps": 4,
        "num_draft_tokens": 10,
        "num_accepted_draft_tokens": 6,
        "clipped": 1,
        "over_budget": 1,
        "classifier_s": 1.0,
        "depths": {"0": 1, "3": 3},
        "tiers": {"8": 2, "12": 1, "16": 1},
    }


def test_a_requests_time_is_unknown_where_the_servers_is():
    counts = RequestCounts()
    counts.add(2, 8, 3, 3, Counts(3).lap(), 0)
    assert counts.state()["classifier_s"] is None


def test_time_is_counted_where_the_hosts_clock_knows_it(monkeypatch: pytest.MonkeyPatch):
    registry = CollectorRegistry()
    clock = iter([1.0, 1.5, 7.0, 7.25])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    counts = Counts(3, Exporter({"model_name": "m"}, registry), classifier_s=0.0)
    laps = [counts.lap()]
    for _ in range(2):
        with counts.classifying():
            pass
        laps.append(counts.lap())
    assert laps == [0.0, 0.5, 0.25]
    assert counts.state()["classifier_s"] == exported(registry)[SECONDS] == 0.75
    elsewhere = Counts(3)
    with elsewhere.classifying():
        pass
    assert elsewhere.state()["classifier_s"] is None


def test_nothing_counted_is_no_division_by_zero():
    state = Counts(2).state()
    assert (state["verified_tokens"], state["accept_len"], state["verified"]) == (0.0, 0.0, [0, 0, 0])


def test_prometheus_gets_the_same():
    registry = CollectorRegistry()
    counts = Counts(3, Exporter({"model_name": "m"}, registry))
    for step in STEPS:
        counts.add(*step)
    counts.exporter.add("classifier_seconds", 0.5)
    counts.ignore(ConfigError("bad"))
    counts.exporter.set("beta", 0.5)
    counts.exporter.set("max_depth", 3)
    found = exported(registry)
    metrics.publish_learnt(counts.exporter, LEARNT)
    told = {name: value for name, value in exported(registry).items() if name not in found}
    assert told['c2t:expected_nll{by="learnt",model_name="m"}'] == 0.5
    assert told['c2t:expected_acceptance{by="classifier",depth="1",model_name="m"}'] == 0.9
    assert told['c2t:tokens_per_expected{model_name="m"}'] == 1.5
    assert found == {
        'c2t:chains_total{model_name="m",verified="0"}': 1.0,
        'c2t:chains_total{model_name="m",verified="1"}': 1.0,
        'c2t:chains_total{model_name="m",verified="2"}': 2.0,
        'c2t:chains_total{model_name="m",verified="3"}': 1.0,
        'c2t:steps_total{depth="1",model_name="m"}': 1.0,
        'c2t:steps_total{depth="2",model_name="m"}': 2.0,
        'c2t:steps_total{depth="3",model_name="m"}': 1.0,
        'c2t:tiers_total{model_name="m",rows="2"}': 1.0,
        'c2t:tiers_total{model_name="m",rows="4"}': 2.0,
        'c2t:tiers_total{model_name="m",rows="8"}': 1.0,
        'c2t:draft_tokens_clipped_total{model_name="m"}': 4.0,
        'c2t:draft_tokens_over_budget_total{model_name="m"}': 3.0,
        'c2t:settings_ignored_total{model_name="m"}': 1.0,
        'c2t:classifier_seconds_total{model_name="m"}': 0.5,
        'c2t:draft_tokens_verified_total{model_name="m"}': 8.0,
        'c2t:draft_tokens_accepted_total{model_name="m"}': 6.0,
        'c2t:rows_computed_total{model_name="m"}': 18.0,
        'c2t:beta{model_name="m"}': 0.5,
        'c2t:max_depth{model_name="m"}': 3.0,
    }
    assert {name.partition("{")[0] for name in exported(registry)} == set(NAMES)


@pytest.fixture(scope="module")
def dashboard(root: Path) -> dict[str, Any]:
    return dashboard_of(root, "grafana.json")


def test_the_dashboard_asks_for_metrics_that_there_are(dashboard: dict[str, Any]):
    stock = (Path(sglang.__file__).parent / "srt/observability/metrics_collector.py").read_text(encoding="utf-8")
    known = {*NAMES, *re.findall(r'"(sglang:\w+)"', stock)}
    asked = {name for text in expressions(dashboard) for name in re.findall(r"\b(?:c2t|sglang):\w+", text)}
    assert asked - known == set()
    assert set(NAMES) - asked == set(), "a metric that no panel shows"


def test_the_dashboard_has_its_own_place_for_every_panel(dashboard: dict[str, Any]):
    check_panels(dashboard)
