"""The planner of the adapter: when it decides, what it leaves alone, and that a choice never knows what was drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.engines.sglang.control import apply
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import PROBE_EVERY, CostCurve, OwnLimits, draft_passes, spend, switched_depths
from c2t_plugin.planner.ahead import DraftEnd
from c2t_plugin.planner.curve_file import read_curve
from c2t_plugin.planner.profile import REPEATS, WARM_UP
from c2t_plugin.planner.step_planner import StepPlanner
from c2t_plugin.scorer import ChainScorer

D_MAX = 3
DEPTHS = switched_depths(D_MAX)
ROWS = 4
CURVE = CostCurve(verify=((1, 1.0), (9, 1.0), (64, 30.0)), draft=((1, 0.05), (64, 0.1)))
# A token more costs as much as a request.
NO_DRAFTS = CostCurve(verify=((1, 1.0), (64, 64.0)), draft=((1, 0.5), (64, 0.5)))


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


def planner_of(
    scorer: ChainScorer, curve: CostCurve | None = CURVE, path: Path | None = None, *, switches: bool = True
) -> StepPlanner:
    planner = StepPlanner(
        curve, path, steps=D_MAX, most=D_MAX, device=scorer.beta.device, depths=DEPTHS if switches else ()
    )
    planner.packed = True
    if planner._planner is not None:
        # drafts have taught it already
        planner._planner._taught = 0
    return planner


def observe(planner: StepPlanner, scorer: ChainScorer) -> None:
    """As after a step that drafted so deep."""
    scorer.drafted(planner.depth)
    decide(planner, scorer)


def decide(planner: StepPlanner, scorer: ChainScorer) -> list[int]:
    return planner.keep(scorer.end(ROWS), scorer.own_beta(ROWS), scorer.confidence(ROWS)).tolist()


def test_it_spends_what_the_curve_says(scorer: ChainScorer):
    expected = spend(scorer.confidence(ROWS), CURVE, draft_passes(D_MAX)).kept.tolist()
    assert 0 < sum(expected) < ROWS * D_MAX
    assert decide(planner_of(scorer), scorer) == expected


def test_sizes_of_captured_passes_count(scorer: ChainScorer):
    planner = planner_of(scorer)
    planner.sizes = lambda: (ROWS * (D_MAX + 1),)
    # every pass is as large as the largest
    assert decide(planner, scorer) == [D_MAX] * ROWS


def test_a_fixed_beta_is_the_papers(scorer: ChainScorer):
    """The whole depth is drafted, and the threshold decides."""
    planner = planner_of(scorer, NO_DRAFTS)
    observe(planner, scorer)
    assert planner.begin(ROWS) == 0
    planner.active = False
    assert planner.begin(ROWS) == D_MAX
    assert decide(planner, scorer) == [D_MAX] * ROWS


def test_where_the_window_is_computed_anyway_every_drafted_token_is_verified(scorer: ChainScorer):
    planner = planner_of(scorer, NO_DRAFTS)
    planner.packed = False
    assert decide(planner, scorer) == [D_MAX] * ROWS
    assert planner.begin(ROWS) == 0


def test_a_requests_own_beta_and_depth_hold(scorer: ChainScorer):
    scorer.set_requests(torch.arange(ROWS), [0.0, None, 1.0, None], [None, 0, None, 1])
    found = decide(planner_of(scorer), scorer)
    assert found[:3] == [D_MAX, 0, 0]
    assert found[3] <= 1


@pytest.mark.parametrize("own", [[], [OwnLimits(0.0, None, True)], [OwnLimits(None, 1, False)] * ROWS])
def test_every_depth_is_tried_while_it_measures(own: list[OwnLimits], scorer: ChainScorer, tmp_path: Path):
    """Beside requests with settings of their own too."""
    path = tmp_path / "curve.json"
    planner = planner_of(scorer, None, path)
    seen = []
    for _ in range(WARM_UP + REPEATS * len(DEPTHS)):
        # that one is not measured, and does not count
        assert planner.begin(ROWS, whole=True) == D_MAX
        depth = planner.begin(ROWS, own=own)
        for part in ("draft", "verify", "draft_extend"):
            with planner.timed(part, lambda: 5 + len(seen) % 4):
                pass
        seen.append(depth)
        scorer.drafted(depth)
        assert decide(planner, scorer) == [depth] * ROWS
    assert seen == (list(DEPTHS) * len(seen))[: len(seen)]
    assert not path.exists()
    planner.begin(ROWS)
    assert read_curve(path) == planner.curve
    assert planner.state()["curve"]


def test_a_step_that_another_planner_decides_is_measured_if_it_is_what_was_to_be(scorer: ChainScorer):
    planner, depths = planner_of(scorer, None), []
    while planner.curve is None and len(depths) < 99:
        wanted = planner.begin(ROWS)
        # every other step is as deep as can be
        depths.append(wanted if len(depths) % 2 else D_MAX)
        planner.follow(depths[-1])
        assert planner.depth == depths[-1] == planner.state()["depth"]
        for part in ("draft", "verify", "draft_extend"):
            with planner.timed(part, lambda: ROWS):
                pass
        scorer.drafted(depths[-1])
        assert decide(planner, scorer) == [depths[-1]] * ROWS
    # those that were not, are asked for again, but where it would have drafted so deep itself
    assert WARM_UP + REPEATS * len(DEPTHS) < len(depths) < 2 * (WARM_UP + REPEATS * len(DEPTHS))


def test_a_probe_that_another_planner_takes_the_place_of_is_none(scorer: ChainScorer):
    planner = planner_of(scorer, NO_DRAFTS)
    observe(planner, scorer)
    assert planner._planner is not None
    while not planner._planner.probing:
        assert planner.begin(ROWS) == 0 or planner._planner.probing
    planner.follow(D_MAX)
    scorer.drafted(D_MAX)
    # a probe verifies all
    assert decide(planner, scorer) == [0] * ROWS


def test_drafting_ends_where_it_loses_and_returns_where_it_wins(scorer: ChainScorer):
    planner = planner_of(scorer)
    observe(planner, scorer)
    assert planner.begin(ROWS) > 0
    planner.curve = NO_DRAFTS
    found = []
    for _ in range(4 * PROBE_EVERY):
        found.append(planner.begin(ROWS))
        if found[-1]:
            observe(planner, scorer)
    # but for a probe now and then
    assert found.count(0) >= 4 * PROBE_EVERY - 4
    assert planner.state()["depth"] == found[-1]
    planner.curve = CURVE
    assert planner.begin(ROWS) > 0


def test_without_depths_to_switch_between_every_draft_is_whole(scorer: ChainScorer):
    planner = planner_of(scorer, switches=False)
    assert planner.begin(ROWS) == D_MAX
    assert decide(planner, scorer) == spend(scorer.confidence(ROWS), CURVE, draft_passes(D_MAX)).kept.tolist()
    planner.curve = NO_DRAFTS
    assert planner.begin(ROWS) == D_MAX
    assert decide(planner, scorer) == [0] * ROWS
    measuring = planner_of(scorer, None, switches=False)
    scorer.set_requests(torch.arange(ROWS), [0.0, None, None, None], [None] * ROWS)
    assert [measuring.begin(ROWS) for _ in range(2)] == [D_MAX] * 2
    # the second step of the profile cuts all chains at 1
    assert decide(measuring, scorer) == [D_MAX, 1, 1, 1]
    planner.packed = False
    assert decide(planner, scorer) == [D_MAX] * ROWS
    assert planner.state()["active"] is False


def test_it_does_not_draft_for_requests_that_verify_nothing(scorer: ChainScorer):
    planner = planner_of(scorer)
    observe(planner, scorer)
    nothing = OwnLimits(None, 0, exact=False)
    assert planner.begin(ROWS, own=[nothing] * (ROWS - 1)) > 0
    assert planner.begin(ROWS, own=[nothing] * ROWS) == 0


def test_it_switches_between_few_depths():
    assert [switched_depths(d_max) for d_max in (1, 2, 3, 4, 6, 8)] == [
        (0, 1),
        (0, 1, 2),
        (0, 1, 2, 3),
        (0, 1, 2, 4),
        (0, 1, 2, 4, 6),
        (0, 1, 2, 4, 8),
    ]


def test_a_request_that_needs_all_its_drafts_gets_them(scorer: ChainScorer):
    planner = planner_of(scorer, NO_DRAFTS)
    observe(planner, scorer)
    assert [planner.begin(ROWS, whole=whole) for whole in (False, True, False)] == [0, D_MAX, 0]


@pytest.mark.parametrize("place", ["file/curve.json", "link"])
def test_a_curve_that_cannot_be_kept_stops_nothing(
    scorer: ChainScorer, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    planner = planner_of(scorer, None, tmp_path / place)
    planner._learn(CURVE)
    assert planner.curve == CURVE
    assert "cost curve cannot be written" in caplog.text


def test_a_number_ends_it_and_auto_returns(scorer: ChainScorer):
    planner = planner_of(scorer)
    apply(scorer, planner, {"speculative_c2t_beta": 0.5})
    assert (planner.active, float(scorer.beta)) == (False, 0.5)
    apply(scorer, planner, {"speculative_c2t_auto": 1, "speculative_c2t_max_depth": 2})
    assert (planner.active, float(scorer.beta), int(scorer.max_depth)) == (True, 0.0, 2)


@pytest.mark.parametrize("ends", [False, True], ids=["whole", "ending"])
def test_no_draft_is_deeper_than_the_server_verifies(scorer: ChainScorer, ends: bool):
    planner = planner_of(scorer)
    planner.draft_end = DraftEnd() if ends else None
    assert planner._planner is not None
    planner._planner.probe_every = 1

    def depths(steps: int = 300) -> set[int]:
        found = set()
        for _ in range(steps):
            depth = planner.begin(ROWS)
            found.add(depth)
            planner.keep(
                torch.full((ROWS,), depth), torch.zeros(ROWS, dtype=torch.bool), torch.full((ROWS, depth), 0.98)
            )
        return found

    assert D_MAX in depths()
    for longest in (2, 1, 0):
        apply(scorer, planner, {"speculative_c2t_max_depth": longest})
        assert max(depths()) == longest
    apply(scorer, planner, {"speculative_c2t_max_depth": D_MAX})
    assert max(depths()) == D_MAX


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
