"""The planner of the adapter: when it decides, what it leaves alone, and that a choice never knows what was drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.engines.sglang.control import apply
from c2t_plugin.engines.sglang.planning import StepPlanner
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import CostCurve, spend
from c2t_plugin.policies.chain import ChainScorer
from c2t_plugin.profiling import REPEATS, WARM_UP

D_MAX = 3
ROWS = 4
CURVE = CostCurve(verify=((1, 1.0), (9, 1.0), (64, 30.0)), draft=((1, 0.05), (64, 0.1)))


@pytest.fixture
def scorer() -> ChainScorer:
    """After one draft of random logits."""
    torch.manual_seed(5)
    classifier = NodeClassifier(ClassifierSpec(top_m=10)).eval().requires_grad_(False)
    made = ChainScorer(classifier, slots=8, rows=ROWS, max_depth=D_MAX, beta=0.0, device="cpu")
    made.write_seed(torch.arange(ROWS), 3 * torch.randn(ROWS, 20))
    made.begin(torch.arange(ROWS))
    for _ in range(D_MAX - 1):
        made.step(3 * torch.randn(ROWS, 20))
    return made


def planner_of(scorer: ChainScorer, curve: CostCurve | None = CURVE, path: Path | None = None) -> StepPlanner:
    planner = StepPlanner(curve, path, steps=D_MAX, most=D_MAX, device=scorer.beta.device)
    planner.compact = True
    return planner


def decide(planner: StepPlanner, scorer: ChainScorer) -> list[int]:
    return planner.keep(scorer.end(ROWS), scorer.own_beta(ROWS), scorer.confidence(ROWS)).tolist()


def test_it_spends_what_the_curve_says(scorer: ChainScorer):
    expected = spend(scorer.confidence(ROWS), CURVE, D_MAX - 1).kept.tolist()
    assert 0 < sum(expected) < ROWS * D_MAX
    assert decide(planner_of(scorer), scorer) == expected


def test_sizes_of_captured_passes_count(scorer: ChainScorer):
    planner = planner_of(scorer)
    planner.sizes = lambda: (ROWS * (D_MAX + 1),)
    # every pass is as large as the largest
    assert decide(planner, scorer) == [D_MAX] * ROWS


@pytest.mark.parametrize("why", ["inactive", "the window is computed anyway"])
def test_otherwise_the_threshold_decides(scorer: ChainScorer, why: str):
    planner = planner_of(scorer)
    if why == "inactive":
        planner.active = False
    else:
        planner.compact = False
    assert decide(planner, scorer) == [D_MAX] * ROWS
    assert planner.state()["active"] is False


def test_a_requests_own_beta_and_depth_hold(scorer: ChainScorer):
    scorer.set_requests(torch.arange(ROWS), [0.0, None, 1.0, None], [None, 0, None, 1])
    found = decide(planner_of(scorer), scorer)
    assert found[:3] == [D_MAX, 0, 0]
    assert found[3] <= 1


def test_every_length_is_tried_while_it_measures_and_own_rules_hold(scorer: ChainScorer, tmp_path: Path):
    path = tmp_path / "curve.json"
    planner = planner_of(scorer, None, path)
    scorer.set_requests(torch.arange(ROWS), [0.0, None, None, None], [None] * ROWS)
    seen = []
    steps = WARM_UP + REPEATS * (D_MAX + 1)
    for _ in range(steps):
        planner.begin(ROWS)
        for part in ("draft", "verify", "up"):
            with planner.timed(part, lambda: 5 + len(seen) % 4):
                pass
        seen.append(decide(planner, scorer))
    assert {tuple(kept) for kept in seen} == {(D_MAX, length, length, length) for length in range(D_MAX + 1)}
    assert not path.exists()
    planner.begin(ROWS)
    assert CostCurve.load(path) == planner.curve
    assert planner.state() == {"active": True, "curve": True}


def test_a_curve_that_cannot_be_kept_stops_nothing(
    scorer: ChainScorer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    planner = planner_of(scorer, None, tmp_path / "gone" / "curve.json")
    planner._learn(CURVE)
    assert planner.curve == CURVE
    assert "cost curve cannot be written" in caplog.text


def test_a_number_ends_it_and_auto_returns(scorer: ChainScorer):
    planner = planner_of(scorer)
    apply(scorer, planner, {"speculative_c2t_beta": 0.5})
    assert (planner.active, float(scorer.beta)) == (False, 0.5)
    apply(scorer, planner, {"speculative_c2t_auto": 1, "speculative_c2t_max_depth": 2})
    assert (planner.active, float(scorer.beta), int(scorer.max_depth)) == (True, 0.0, 2)


@pytest.mark.parametrize(
    ("values", "has_planner"),
    [
        ({"speculative_c2t_auto": 1}, False),
        ({"speculative_c2t_auto": 0}, True),
        ({"speculative_c2t_auto": 2}, True),
        ({"speculative_c2t_auto": 1, "speculative_c2t_beta": 0.5}, True),
        ({"speculative_c2t_auto": 1, "speculative_c2t_max_depth": 99}, True),
    ],
)
def test_what_cannot_be_set_changes_nothing(scorer: ChainScorer, values: dict[str, float], has_planner: bool):
    planner = planner_of(scorer)
    scorer.set_beta(0.25)
    planner.active = False
    with pytest.raises(ConfigError):
        apply(scorer, planner if has_planner else None, values)
    assert (planner.active, float(scorer.beta), int(scorer.max_depth)) == (False, 0.25, D_MAX)
