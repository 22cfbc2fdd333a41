"""The counters of /metrics and the repair of vLLM's CPU sampling, each on its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch

from c2t_plugin.engines.figures import GAUGES
from c2t_plugin.engines.vllm import cpu_guard
from c2t_plugin.engines.vllm.metrics import VerifyCounters, classified, packed, plain
from tests.support.dashboards import check_panels, dashboard_of, expressions


@pytest.fixture
def counters() -> Iterator[VerifyCounters]:
    spec = SimpleNamespace(num_speculative_tokens=3)
    logger = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=spec), per_engine_labelvalues={0: ["model", "0"]}
    )
    # An engine that ran in this process before has left its own.
    forget()
    yield VerifyCounters(logger)
    forget()


def forget() -> None:
    found = prometheus_client.REGISTRY._names_to_collectors
    for collector in {collector for name, collector in found.items() if name.startswith("vllm:c2t")}:
        prometheus_client.REGISTRY.unregister(collector)


def value(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, {"model_name": "model", "engine": "0", **labels})


def steps() -> list[float | None]:
    return [value("vllm:c2t_verify_steps_total", length=str(length)) for length in range(4)]


def drafts(lengths: list[int], accepted: int) -> Any:
    reaching = [sum(length > place for length in lengths) for place in range(3)]
    return SimpleNamespace(num_drafts=len(lengths), num_draft_tokens_per_pos=reaching, num_accepted_tokens=accepted)


def test_each_length_is_counted(counters: VerifyCounters):
    counters.record(0, drafts([3, 1, 1], accepted=2))
    assert steps() == [0, 2, 0, 1]
    assert value("vllm:c2t_accepted_tokens_total") == 2
    counters.record(0, drafts([2], accepted=2))
    assert steps() == [0, 2, 1, 1]
    # drafts of which adaptive verification has left nothing
    counters.record(0, drafts([0, 1, 0], accepted=1))
    assert steps() == [2, 3, 1, 1]


def test_steps_without_drafts_are_those_that_the_scheduler_counted(counters: VerifyCounters):
    counters.record(0, None)
    counters.tell(0, plain(0))
    counters.tell(0, {**plain(2), "of LoRA": 3})
    assert steps() == [2, 0, 0, 0]


def test_the_help_says_what_is_counted(counters: VerifyCounters):
    text = prometheus_client.generate_latest().decode()
    assert "# HELP vllm:c2t_verify_steps_total Verify steps by number of draft tokens verified." in text
    assert "# HELP vllm:c2t_accepted_tokens_total Draft tokens accepted, bonus tokens excluded." in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_fills_the_tensor_that_it_is_given(dtype: torch.dtype):
    out = torch.full((7,), -9, dtype=dtype)
    values = torch.tensor([0.0, 2.5, 4.0]).to(dtype)
    cpu_guard.expand(out, values, torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1)
    assert out.tolist() == [1, 1, *[values[2].item()] * 3, -9, -9]


def test_top_k_of_nothing_is_nothing():
    def stock(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        return logits + k.max()

    guarded = cpu_guard.unless_empty(stock)
    assert guarded(torch.zeros(0, 5), torch.zeros(0), None).shape == (0, 5)
    assert guarded(torch.zeros(2, 1), torch.ones(2), None).tolist() == [[1], [1]]


LEARNT: dict[str, Any] = {
    "learnt": {
        **{"seen": 9, "discarded": 1, "turns": 1, "slope": 1.5, "own": -0.25, "offsets": [0.25]},
        **{"nll": [0.6, 0.5], "auc": None},
        "depths": [{"tokens": 4, "accepted": 0.5, "classifier": 0.9, "learnt": 0.6}],
        "network": {"swaps": 2, "discarded": 1},
    },
    "came": {"tokens": 1.5, "seconds": None},
}


def test_what_a_planner_learns_travels_as_whole_numbers(counters: VerifyCounters):
    sent = packed(LEARNT)
    assert all(isinstance(each, int) for each in sent.values())
    counters.tell(0, {**sent, "of LoRA": 3})
    assert value("vllm:c2t_learnt_own") == -0.25
    assert value("vllm:c2t_expected_nll", by="learnt") == 0.5
    assert value("vllm:c2t_expected_acceptance", by="classifier", depth="1") == 0.9
    assert value("vllm:c2t_tokens_per_expected") == 1.5
    assert value("vllm:c2t_seconds_per_expected") is None


def test_the_dashboard_asks_for_metrics_that_there_are_and_has_a_place_for_each_panel(root: Path):
    loggers = pytest.importorskip("vllm.v1.metrics.loggers", reason="vLLM is not installed in this environment")
    spec_decode = pytest.importorskip("vllm.v1.spec_decode.metrics")
    dashboard = dashboard_of(root, "grafana-vllm.json")
    stock = "".join(inspect.getsource(each) for each in (loggers, spec_decode))
    ours = {"verify_steps", "accepted_tokens", "classifier_seconds", *(name for name, *_ in GAUGES)}
    ours = {f"vllm:c2t_{name}" for name in ours}
    asked = {name for text in expressions(dashboard) for name in re.findall(r"\bvllm:\w+", text)}
    names = {name.removesuffix("_total") for name in asked}
    assert names - ours - set(re.findall(r'"(vllm:\w+)"', stock)) == set()
    assert ours - names == set(), "a metric that no panel shows"
    check_panels(dashboard)


def test_the_classifiers_time_is_added_up(counters: VerifyCounters):
    assert value("vllm:c2t_classifier_seconds_total") == 0
    for seconds in (0.25, 0.0, 0.5):
        counters.tell(0, classified(seconds))
    assert value("vllm:c2t_classifier_seconds_total") == 0.75
