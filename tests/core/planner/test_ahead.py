"""Whether a draft goes on, against every depth that it could end at."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2t_plugin.planner import CostCurve, OwnLimits, Planner, draft_passes, spend
from c2t_plugin.planner.ahead import Chances, DraftEnd, Meaning, Prices
from c2t_plugin.planner.budget import falling
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.learnt import Learnt
from c2t_plugin.planner.planner import WHOLE_FIRST
from c2t_plugin.planner.step_planner import StepPlanner

D_MAX = 4
CURVE = CostCurve(verify=((1, 1.0), (8, 1.4), (64, 6.0)), draft=((1, 0.1), (64, 0.4)), fixed=0.05, draft_extend=0.05)
# a usual draft: each depth half as likely as the one before it
USUAL = torch.tensor([[0.6, 0.3, 0.15, 0.075]])

drafts = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=D_MAX - 1), min_size=1, max_size=5).filter(
    lambda rows: len({len(row) for row in rows}) == 1
)


def knowing(**how: bool) -> Planner:
    """A planner that has seen enough drafts to let one end."""
    planner = Planner(CURVE, D_MAX, prior=0, **how)
    for _ in range(WHOLE_FIRST):
        planner.observe(USUAL)
    return planner


def goes_on(planner: Planner, *rows: list[float]) -> bool:
    return pays(DraftEnd(), planner, torch.tensor(rows, dtype=torch.float64))


def pays(end: DraftEnd, planner: Planner, so_far: torch.Tensor, own: Sequence[OwnLimits | None] = ()) -> bool:
    return end.pays(Prices.of(planner, len(so_far)), chances(so_far, own))


def chances(so_far: torch.Tensor, own: Sequence[OwnLimits | None] = ()) -> Chances:
    """Of these confidences."""
    found = Chances(len(so_far), None, own)
    for column in so_far.T.tolist():
        found.add(column, [math.nan] * len(column))
    return found


@given(rows=drafts)
def test_a_draft_goes_on_where_a_deeper_one_would_be_faster(rows: list[list[float]]):
    so_far = torch.tensor(rows, dtype=torch.float64).cummin(1).values
    drafted, ratios = so_far.shape[1], [0.6, 0.5, 0.5, 0.5]
    rates = []
    for depth in range(drafted, D_MAX + 1):
        if depth > drafted:
            so_far = torch.cat([so_far, so_far[:, -1:] * ratios[depth - 1]], dim=1)
        rates.append(spend(so_far, CURVE, draft_passes(depth)).rate)
    best = max(rates[1:])
    if abs(best / rates[0] - 1) > 1e-9:
        assert goes_on(knowing(), *so_far[:, :drafted].tolist()) == (best > rates[0])


LIMITS = st.none() | st.builds(
    OwnLimits, st.none() | st.floats(0, 1), st.none() | st.integers(0, D_MAX + 1), st.booleans()
)


@given(rows=drafts, own=st.lists(LIMITS, min_size=5, max_size=5), packed=st.booleans())
def test_beside_requests_with_limits_of_their_own_it_ends_as_those_leave_it(
    rows: list[list[float]], own: list[OwnLimits | None], packed: bool
):
    so_far = torch.tensor(rows, dtype=torch.float64).cummin(1).values
    requests, drafted = so_far.shape
    own = own[:requests]
    rates = []
    for depth in range(drafted, D_MAX + 1):
        if depth > drafted:
            so_far = torch.cat([so_far, so_far[:, -1:] * (0.6 if depth == 1 else 0.5)], dim=1)
        rates.append(rate(so_far, own, packed))
    if abs(max(rates[1:]) / rates[0] - 1) > 1e-9:
        found = pays(DraftEnd(), knowing(packed=packed), so_far[:, :drafted], own)
        assert found == (max(rates[1:]) > rates[0])


def rate(chain: torch.Tensor, own: Sequence[OwnLimits | None], packed: bool) -> float:
    """Output tokens per second of drafts of which requests have verified what they asked for."""
    (requests, depth), longest, at_least = chain.shape, [], []
    for row, limits in zip(chain.tolist(), own, strict=True):
        leaves = depth if limits is None or limits.longest is None else min(limits.longest, depth)
        if limits is not None and limits.threshold is not None:
            leaves = min(leaves, sum(chance >= limits.threshold for chance in row))
        longest.append(leaves)
        at_least.append(leaves if limits is not None and limits.exact else 0)
    if packed:
        return spend(chain, CURVE, draft_passes(depth), torch.tensor(longest), torch.tensor(at_least)).rate
    expected = requests + sum(sum(row[:most]) for row, most in zip(chain.tolist(), longest, strict=True))
    seconds = CURVE.verify_s(torch.tensor(requests * (depth + 1))) + draft_passes(depth) * CURVE.draft_s(requests)
    return expected / float(seconds + CURVE.fixed + CURVE.draft_extend)


def test_who_has_all_verified_makes_neighbours_drafts_end_and_who_wants_none_does_not_matter():
    everything, nothing = OwnLimits(0.0, None, exact=True), OwnLimits(None, 0, exact=False)
    planner = knowing()
    # what is verified in any case has its price
    assert goes_on(planner, [0.99], [0.01])
    assert not pays(DraftEnd(), planner, torch.tensor([[0.99], [0.01]]), [None, everything])
    # nor is a pass for a draft of which nothing is verified
    assert goes_on(planner, [0.05], [0.99])
    assert not pays(DraftEnd(), planner, torch.tensor([[0.05], [0.99]]), [None, nothing])


def test_a_sure_draft_goes_on_and_an_unlikely_one_ends():
    planner = knowing()
    assert goes_on(planner, [0.99])
    assert not goes_on(planner, [0.05])
    # beside a neighbour that is sure the pass is shared
    assert goes_on(planner, [0.05], [0.99])


def test_the_first_drafts_are_whole_and_none_is_longer():
    planner, unlikely = Planner(CURVE, D_MAX), [0.01] * D_MAX
    for _ in range(WHOLE_FIRST):
        assert all(goes_on(planner, unlikely[:depth]) for depth in range(1, D_MAX))
        assert not goes_on(planner, unlikely)
        planner.keep(torch.tensor([unlikely]))
    assert not goes_on(planner, unlikely[:1])


def test_where_the_whole_window_is_computed_an_unlikely_neighbour_counts():
    mixed = [[0.99], [0.99], [0.01], [0.01]]
    assert goes_on(knowing(packed=True), *mixed)
    assert not goes_on(knowing(packed=False), *mixed)


def test_means_are_weighed_by_how_likely_the_token_before_was():
    """Of two steps with one request each: a token after an unlikely one says little about those after a likely one."""
    planner = Planner(CURVE, 2, forget=0.5, prior=0)
    planner.observe(torch.tensor([[0.9, 0.9]]))
    planner.observe(torch.tensor([[0.1, 0.0]]))
    assert planner.accepted.tolist() == pytest.approx([0.5, 0.9])


@pytest.fixture
def stepping() -> StepPlanner:
    planner = StepPlanner(CURVE, None, steps=D_MAX, most=D_MAX, device=torch.device("cpu"), depths=(0, 1, 2, 4))
    planner.packed, planner.draft_end = True, DraftEnd()
    return planner


def draft(planner: StepPlanner, chances: torch.Tensor, **how: object) -> int:
    """How deep a step of these whole confidences drafts."""
    depth = planner.begin(len(chances), **how)
    for scored in range(1, depth):
        if not planner.goes_on(scored, chances[:, scored - 1].tolist(), [math.nan] * len(chances)):
            depth = scored
            planner.ended(depth)
            break
    zeros = torch.full((len(chances),), depth, dtype=torch.int32)
    planner.keep(zeros, torch.zeros(len(chances), dtype=torch.bool), chances[:, :depth])
    assert planner.depth == depth
    return depth


def test_each_step_ends_its_own_draft(stepping: StepPlanner):
    sure, unlikely = torch.full((1, D_MAX), 0.99), torch.tensor([[0.6, 0.04, 0.03, 0.02]])
    for _ in range(WHOLE_FIRST):
        assert draft(stepping, USUAL) == D_MAX
    assert draft(stepping, sure) == D_MAX
    assert draft(stepping, unlikely) == 2
    assert draft(stepping, sure) == D_MAX
    # all drafts of a request that is recorded are whole
    assert draft(stepping, unlikely, whole=True) == D_MAX


def test_a_neighbour_with_limits_of_its_own_takes_no_ones_end(stepping: StepPlanner):
    for _ in range(WHOLE_FIRST):
        draft(stepping, torch.full((2, D_MAX), 0.99))
    sure, unlikely = [0.99] * D_MAX, [0.6, 0.04, 0.03, 0.02]
    nothing = OwnLimits(None, 0, exact=False)
    assert draft(stepping, torch.tensor([unlikely, sure])) == D_MAX
    assert draft(stepping, torch.tensor([unlikely, sure]), own=[None, nothing]) == 2
    assert draft(stepping, torch.tensor([unlikely, sure]), own=[nothing, None]) == D_MAX


def test_where_a_draft_cannot_end_it_is_as_deep_as_it_was_begun(stepping: StepPlanner):
    stepping.draft_end = None
    for _ in range(2 * WHOLE_FIRST):
        depth = draft(stepping, USUAL)
    assert depth in (1, 2)


def test_drafts_that_were_measured_are_known_to_the_planner():
    planner = StepPlanner(None, None, steps=D_MAX, most=D_MAX, device=torch.device("cpu"), depths=(0, 1, 2, 4))
    planner.packed = True
    for _ in range(60):
        depth = planner.begin(1)
        for part, count, seconds in (
            ("draft", 1, 0.1),
            ("verify", 1 + depth, 1.0 + 0.1 * depth),
            ("draft_extend", 1, 0.05),
        ):
            planner.took(part, count, seconds)
        kept = torch.full((1,), D_MAX, dtype=torch.int32)
        planner.keep(kept, torch.zeros(1, dtype=torch.bool), USUAL[:, :depth])
        if planner.curve is not None:
            break
    assert planner.curve is not None
    assert planner._planner is not None
    assert not goes_on(planner._planner, [1e-9])


@given(rows=drafts, packed=st.booleans())
def test_who_is_sent_the_prices_decides_as_the_planner(rows: list[list[float]], packed: bool):
    planner, so_far = knowing(packed=packed), torch.tensor(rows, dtype=torch.float64)
    sent = pickle.dumps(Prices.of(planner, len(rows)))
    assert len(sent) < 1500
    there = DraftEnd().pays(pickle.loads(sent), chances(so_far))
    assert there == pays(DraftEnd(), planner, so_far)


confidences = st.one_of(st.floats(0, 1, width=32), st.just(float("nan")))
log_probs = st.one_of(st.floats(-30, 0, width=32), st.sampled_from([float("nan"), float("-inf")]))


@given(
    tokens=st.lists(
        st.lists(st.tuples(confidences, log_probs), min_size=D_MAX, max_size=D_MAX), min_size=1, max_size=4
    ),
    meaning=st.one_of(
        st.none(),
        st.builds(
            Meaning,
            st.floats(0.1, 3),
            st.floats(-1, 1),
            st.lists(st.floats(-3, 3), min_size=D_MAX, max_size=D_MAX).map(tuple),
        ),
    ),
)
def test_chances_of_a_draft_are_the_planners(tokens: list[list[tuple[float, float]]], meaning: Meaning | None):
    offsets = torch.tensor([] if meaning is None else meaning.offsets, dtype=torch.float64)
    start = None if meaning is None else Learnt(meaning.slope, meaning.own, offsets)
    confidence, log_prob = torch.tensor(tokens, dtype=torch.float32).unbind(-1)
    expected = falling(Calibration(D_MAX, start=start)(confidence, log_prob))
    found = Chances(len(tokens), meaning)
    for depth in range(D_MAX):
        found.add(confidence[:, depth].tolist(), log_prob[:, depth].tolist())
    # the same doubles in another order
    assert torch.tensor(found.rows, dtype=torch.float64).allclose(expected, rtol=1e-9, atol=1e-12)


def test_what_was_learnt_is_sent():
    planner, start = knowing(), Learnt(0.5, 0.25, torch.full((D_MAX,), -1.0, dtype=torch.float64))
    assert Prices.of(planner, 1, Calibration(D_MAX).in_force).meaning is None
    assert Prices.of(planner, 1, Calibration(D_MAX, trusted=True).in_force).meaning is None
    assert Prices.of(planner, 1, Calibration(D_MAX, start=start).in_force).meaning == Meaning(
        0.5, 0.25, (-1.0,) * D_MAX
    )
