"""The planner against brute force, and the cost curve against bad files."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import PROBE_EVERY, CostCurve, OwnLimits, Planner, draft_passes, spend
from c2t_plugin.planner.curve_file import read_curve, write_curve
from c2t_plugin.planner.gains import MEMORY, RecentGains
from c2t_plugin.planner.pace import Pace
from c2t_plugin.planner.planner import FORGET, FORGET_ONE, PAYS_FROM, PRIOR, PROBES_COST, TAUGHT
from c2t_plugin.planner.step_costs import StepCosts

FREE = CostCurve(verify=((1, 1.0), (1000, 1.0)), draft=((1, 1e-6), (1000, 1e-6)))
# every token costs the same, nothing else costs anything to speak of
DEAR = CostCurve(verify=((1, 1.0), (1000, 1000.0)), draft=((1, 0.1), (1000, 0.1)))
# Every verified token has its price, the first one of a draft too, which no draft pass is spent on.
PRICED = CostCurve(verify=((1, 1.0), (1001, 21.0)), draft=((1, 0.02), (1000, 0.02)))
USUAL = CostCurve(
    verify=((1, 1.0), (32, 1.0), (512, 8.0)), draft=((1, 0.05), (512, 0.2)), fixed=0.02, draft_extend=0.03
)

# who takes what came once for what is
KNOWN = {"prior": 0, "taught": 0}

probabilities = st.lists(
    st.lists(st.floats(0, 1) | st.just(math.nan), min_size=3, max_size=3), min_size=1, max_size=3
).map(torch.tensor)


def chain(acceptance: torch.Tensor) -> list[list[float]]:
    return [list(itertools.accumulate((1.0 if math.isnan(p) else p for p in row), min)) for row in acceptance.tolist()]


def rate(chains: list[list[float]], kept: tuple[int, ...], curve: CostCurve, drafted: int) -> float:
    expected = len(chains) + sum(sum(row[:count]) for row, count in zip(chains, kept, strict=True))
    seconds = float(curve.verify_s(torch.tensor(len(chains) + sum(kept)))) + drafted * curve.draft_s(len(chains))
    return expected / (seconds + curve.fixed + curve.draft_extend)


@given(acceptance=probabilities, curve=st.sampled_from([FREE, DEAR, USUAL]))
def test_no_other_choice_of_kept_tokens_is_faster(acceptance: torch.Tensor, curve: CostCurve):
    chains, drafted = chain(acceptance), acceptance.shape[1]
    found = spend(acceptance, curve, drafted)
    every = itertools.product(range(drafted + 1), repeat=len(chains))
    best = max(rate(chains, kept, curve, drafted) for kept in every)
    assert found.rate == pytest.approx(best, rel=1e-9)
    assert rate(chains, tuple(found.kept.tolist()), curve, drafted) == pytest.approx(best, rel=1e-9)


def test_free_tokens_are_all_verified_and_dear_ones_never():
    acceptance = torch.tensor([[0.7, 0.6, 0.1], [0.5, 0.4, 0.3]])
    assert spend(acceptance, FREE, 3).kept.tolist() == [3, 3]
    assert spend(acceptance, DEAR, 3).kept.tolist() == [0, 0]


def test_a_confidence_that_rises_along_the_chain_does_not_count():
    """The tail is worth no more than what stands before it: the target must accept both."""
    curve = CostCurve(verify=((1, 1.0), (2, 1.0), (3, 1.4), (10, 9.0)), draft=((1, 1e-9), (9, 1e-9)))
    assert spend(torch.tensor([[0.3, 0.99]]), curve, 2).kept.tolist() == [1]
    assert spend(torch.tensor([[0.99, 0.97]]), curve, 2).kept.tolist() == [2]


def test_a_single_requests_limit_holds():
    acceptance = torch.full((3, 4), 0.9)
    kept = spend(acceptance, FREE, 4, torch.tensor([0, 2, 9])).kept
    assert kept.tolist() == [0, 2, 4]


@given(
    acceptance=probabilities,
    curve=st.sampled_from([FREE, DEAR, USUAL]),
    at_least=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    sizes=st.sampled_from([(), (4, 8), (2, 3, 6, 12)]),
)
def test_no_other_choice_is_faster_where_some_tokens_have_to_be_taken_and_passes_are_padded(
    acceptance: torch.Tensor, curve: CostCurve, at_least: list[int], sizes: tuple[int, ...]
):
    chains, drafted = chain(acceptance), acceptance.shape[1]
    least = at_least[: len(chains)]

    def padded_rate(kept: tuple[int, ...]) -> float:
        tokens = len(chains) + sum(kept)
        tokens = next((size for size in sizes if size >= tokens), tokens)
        expected = len(chains) + sum(sum(row[:count]) for row, count in zip(chains, kept, strict=True))
        seconds = float(curve.verify_s(torch.tensor(tokens))) + drafted * curve.draft_s(len(chains))
        return expected / (seconds + curve.fixed + curve.draft_extend)

    found = spend(acceptance, curve, drafted, at_least=torch.tensor(least), sizes=sizes)
    every = itertools.product(*(range(few, drafted + 1) for few in least))
    best = max(padded_rate(kept) for kept in every)
    assert all(count >= few for count, few in zip(found.kept.tolist(), least, strict=True))
    assert found.rate == pytest.approx(best, rel=1e-9)
    assert padded_rate(tuple(found.kept.tolist())) == pytest.approx(best, rel=1e-9)


def test_of_equal_tokens_the_shallow_ones_go_first():
    # two tokens are free, the third is not worth its price
    curve = CostCurve(verify=((1, 1.0), (5, 1.0), (6, 9.0), (9, 99.0)), draft=((1, 1e-9), (9, 1e-9)))
    kept = spend(torch.full((3, 4), 0.8), curve, 4).kept
    assert kept.tolist() == [1, 1, 0]


def wanted(rates: Sequence[float]) -> float:
    """The largest, plain decoding's first, unless that is nearly it."""
    return max(rates) if max(rates) >= PAYS_FROM * rates[0] else rates[0]


@given(
    accepted=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    requests=st.integers(1, 5),
    curve=st.sampled_from([FREE, DEAR, USUAL]),
)
def test_the_depth_is_the_one_whose_best_budget_is_fastest(accepted: list[float], requests: int, curve: CostCurve):
    chain = torch.tensor(accepted, dtype=torch.float64).cumprod(0)
    planner = Planner(curve, 4, **KNOWN)
    planner.keep(chain[None])
    rates = [spend(chain[:n].expand(requests, n), curve, draft_passes(n)).rate for n in range(5)]
    assert rates[planner.depth(requests)] == pytest.approx(wanted(rates), rel=1e-9)


@given(
    accepted=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    requests=st.integers(1, 5),
    curve=st.sampled_from([FREE, DEAR, USUAL]),
    depths=st.sampled_from([(0, 1, 2, 4), (0, 4), (0, 1, 2, 3, 4)]),
    packed=st.booleans(),
)
def test_of_the_depths_that_there_are_the_fastest_is_taken(
    accepted: list[float], requests: int, curve: CostCurve, depths: tuple[int, ...], packed: bool
):
    chain = torch.tensor(accepted, dtype=torch.float64).cumprod(0)
    planner = Planner(curve, 4, depths=depths, packed=packed, **KNOWN)
    planner.keep(chain[None])

    def rate(depth: int, count: int) -> float:
        expected = requests + sum(chain[i // requests].item() for i in range(count))
        seconds = float(curve.verify_s(torch.tensor(requests + count))) + curve.fixed + curve.draft_extend
        return expected / (seconds + max(0, depth - 1) * curve.draft_s(requests))

    def best(depth: int) -> float:
        return max(rate(depth, count) for count in (range(depth * requests + 1) if packed else [depth * requests]))

    chosen = planner.depth(requests)
    assert chosen in depths
    assert best(chosen) == pytest.approx(wanted([best(depth) for depth in depths]), rel=1e-9)


OWN = st.lists(st.tuples(st.none() | st.floats(0, 1), st.none() | st.integers(0, 2**31 - 1), st.booleans()), max_size=4)


@given(
    accepted=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    others=st.integers(0, 3),
    own=OWN.filter(bool),
    curve=st.sampled_from([FREE, DEAR, USUAL, PRICED]),
    packed=st.booleans(),
)
def test_requests_with_settings_of_their_own_are_priced_as_what_they_will_be(
    accepted: list[float], others: int, own: list[tuple[float | None, int | None, bool]], curve: CostCurve, packed: bool
):
    chain = torch.tensor(accepted, dtype=torch.float64).cumprod(0)
    planner = Planner(curve, 4, packed=packed, **KNOWN)
    planner.keep(chain[None])
    requests = others + len(own)

    def best(depth: int) -> float:
        likely, at_least, longest = [chain[:depth].tolist()] * others, [0] * others, [depth] * others
        for threshold, most, exact in own:
            left = sum(p >= (threshold or 0.0) for p in chain[: min(depth, 4 if most is None else most)].tolist())
            likely.append(chain[:depth].tolist())
            longest.append(left)
            at_least.append(left if exact else 0)
        bounds = torch.tensor(longest), torch.tensor(at_least)
        if packed:
            return spend(torch.tensor(likely, dtype=torch.float64), curve, draft_passes(depth), *bounds).rate
        expected = requests + sum(sum(row[:most]) for row, most in zip(likely, longest, strict=True))
        seconds = float(curve.verify_s(torch.tensor(requests * (depth + 1)))) + draft_passes(depth) * curve.draft_s(
            requests
        )
        return expected / (seconds + curve.fixed + curve.draft_extend)

    chosen = planner.depth(requests, [OwnLimits(*each) for each in own])
    assert best(chosen) == pytest.approx(wanted([best(depth) for depth in range(5)]), rel=1e-9)


def test_what_one_request_has_verified_makes_a_deep_draft_dear():
    """Nine rows cost what one does, a tenth a lot: of seven requests two tokens are verified, of eight one."""
    curve = CostCurve(verify=((1, 1.0), (9, 1.0), (10, 9.0), (99, 99.0)), draft=((1, 1e-6), (99, 1e-6)))
    planner = Planner(curve, 4, **KNOWN)
    planner.keep(torch.full((1, 4), 0.9))
    nothing, everything = OwnLimits(None, 0, exact=False), OwnLimits(0.0, None, exact=True)
    assert planner.depth(7, [nothing] * 6) == 2
    assert planner.depth(8, [nothing] * 7) == 1
    # whoever has all verified has it of every depth
    assert planner.depth(7, [everything] + [nothing] * 6) == 2
    assert planner.depth(8, [everything] * 2 + [nothing] * 6) == 0


def test_where_the_window_is_computed_anyway_all_of_it_is_kept():
    planner = Planner(DEAR, 4, packed=False)
    assert planner.keep(torch.full((3, 2), 0.5)).tolist() == [2, 2, 2]
    assert planner.keep(torch.full((3, 2), 0.5), torch.tensor([0, 1, 9])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("depths", [(), (1, 4), (0, 1), (0, 4, 1), (0, 1, 1, 4), (-1, 0, 4)])
def test_depths_that_cannot_be_are_refused(depths: tuple[int, ...]):
    with pytest.raises(ConfigError, match="rise from 0 to 4"):
        Planner(USUAL, 4, depths=depths)


def test_drafting_is_deep_where_it_pays_and_stops_where_it_loses():
    likely, hopeless = torch.full((4, 6), 0.95), torch.full((4, 6), 0.02)
    for curve, acceptance, expected in ((PRICED, likely, 6), (PRICED, hopeless, 0), (DEAR, likely, 0)):
        planner = Planner(curve, 6)
        for _ in range(40):
            planner.keep(acceptance)
        assert planner.depth(4) == expected


def test_the_first_step_looks_at_every_depth():
    """From one step on, drafting that pays is not missed for want of a probe."""
    planner = Planner(USUAL, 6)
    assert planner.depth(200) == 6
    planner.keep(torch.full((4, 6), 0.95).cumprod(1))
    assert planner.depth(4) == 6


@pytest.mark.parametrize("tuning", [{"probe_every": 0}, {"forget": 0.0}, {"forget": 1.5}])
def test_constants_that_cannot_be_are_refused(tuning: dict):
    with pytest.raises(ConfigError, match="probe_every"):
        Planner(USUAL, 3, **tuning)


def test_plain_decoding_looks_now_and_then_whether_drafting_would_pay():
    planner = Planner(PRICED, 6)
    for _ in range(40):
        planner.keep(torch.full((4, 6), 0.02))
    depths = [planner.depth(4) for _ in range(500)]
    assert {depth for depth in depths if depth} == {1, 2, 3, 4, 5, 6}
    assert min(np.diff([step for step, depth in enumerate(depths) if depth])) >= PROBE_EVERY


@pytest.mark.parametrize("best", [0, 2, 4])
def test_every_other_depth_is_probed_and_verified_whole(best: int):
    """Shallower ones too: their price may have fallen. What is dearer is probed less often."""
    planner, unlikely = Planner(DEAR, 6, probe_every=5, depths=(0, 1, 2, 4, 6)), torch.full((2, 6), 0.01)
    planner.keep(unlikely)
    planner._priced = lambda *_: (best, np.array([0.1, 0.1, 0.2, 0.4, 0.4]))
    found = [(planner.depth(2), planner.probing, planner.keep(unlikely).tolist()) for _ in range(1000)]
    probes = Counter(depth for depth, probing, kept in found if probing)
    assert set(probes) == {0, 1, 2, 4, 6} - {planner.depths[best]}
    lost = {0: 0.1, 1: 0.1, 2: 0.2, 4: 0.4, 6: 0.4}
    shares = {depth: lost[depth] * count / len(found) for depth, count in probes.items()}
    assert all(share == pytest.approx(PROBES_COST / 4, rel=0.25) for share in shares.values())
    assert all(kept == ([6, 6] if probing else [0, 0]) for _, probing, kept in found)


def test_a_probe_lasts_until_one_of_its_steps_counts():
    """Where the host runs ahead only a step behind one of its kind has a time of its own."""
    planner = Planner(DEAR, 6, probe_every=5, pace=Pace(settled=1))
    planner.keep(torch.full((2, 6), 0.01))
    planner._priced = lambda *_: (0, np.full(7, 0.01))
    found = [(planner.depth(2), planner.probing) for _ in range(300)]
    runs = [(depth, len(list(run))) for (depth, probing), run in itertools.groupby(found) if probing]
    assert len(runs) > 5 and {length for _, length in runs[:-1]} == {2}


def test_what_a_probe_loses_is_what_the_step_brings_less_than_the_best():
    planner = Planner(USUAL, 6)
    planner.keep(torch.tensor([[0.8, 0.5, 0.3, 0.1, 0.05, 0.01]]))
    best, lost = planner._priced(1, ())
    likely = planner.accepted.cumprod()
    tokens = [1 + likely[:depth].sum() for depth in range(7)]
    took = [1.0 + 0.05 * max(0, depth - 1) + 0.05 for depth in range(7)]
    rates = [a / b for a, b in zip(tokens, took, strict=True)]
    assert best == rates.index(max(rates)) and lost[best] == pytest.approx(0)
    expected = [(b - a / max(rates)) / took[best] for a, b in zip(tokens, took, strict=True)]
    assert lost.tolist() == pytest.approx(expected, abs=1e-3)


def test_a_probe_leaves_single_requests_their_limits():
    planner = Planner(USUAL, 6, probe_every=1)
    planner.keep(torch.full((2, 6), 0.5))
    planner._saved += 100.0
    planner.depth(2)
    assert planner.probing
    assert planner.keep(torch.full((2, 6), 0.01), torch.tensor([2, 6])).tolist() == [2, 6]


def test_a_few_drafts_are_averaged_and_one_of_many_weighs_little():
    planner, likely, not_at_all = Planner(USUAL, 1), torch.tensor([[0.9]]), torch.tensor([[0.0]])
    planner.observe(likely)
    planner.observe(not_at_all)
    assert planner.accepted.tolist() == pytest.approx([0.45])
    for _ in range(98):
        planner.observe(likely)
    # of a step with one draft, and of one with more than a step may say
    for drafts, weight in ((1, FORGET_ONE), (9, FORGET)):
        before = float(planner.accepted[0])
        planner.observe(not_at_all.repeat(drafts, 1))
        assert planner.accepted[0] == pytest.approx((1 - weight) * before)


def test_a_depth_that_few_drafts_have_reached_goes_on_as_the_one_above_it():
    """One hard answer at the beginning, of which nothing deep is accepted, says little of deep tokens."""
    planner, hard = Planner(USUAL, 4), torch.tensor([[0.6, 0.3, 0.0, 0.0]])
    for _ in range(10):
        planner.observe(hard)
    first, second, third, fourth = planner.accepted.tolist()
    assert first == pytest.approx(0.6)
    # six drafts have come to the second token and three of them further, three to the third and none
    assert second == pytest.approx((3 + PRIOR * first) / (6 + PRIOR))
    assert third == pytest.approx((0 + PRIOR * second) / (3 + PRIOR))
    assert fourth == pytest.approx((0 + PRIOR * third) / (0 + PRIOR))
    for _ in range(10_000):
        planner.observe(hard)
    assert planner.accepted[:3].tolist() == pytest.approx([0.6, 0.5, 0.0], abs=0.01)


@pytest.mark.parametrize("depth", [0, 2, 6])
def test_a_hard_answer_at_the_beginning_does_not_keep_drafts_short(depth: int):
    """Drafts are easy behind it. depth: that ends before it."""
    planner, easy = Planner(PRICED, 6), torch.full((1, 6), 0.9).cumprod(1)
    hard = easy.clone()
    hard[:, depth:] = 0.01
    for _ in range(9):
        planner.observe(hard)
    found = []
    for _ in range(200):
        found.append(planner.depth(1))
        if found[-1]:
            planner.observe(easy[:, : found[-1]])
    assert sum(found[-100:]) > 500


@pytest.mark.parametrize("requests", [1, 32])
def test_plain_decoding_which_teaches_nothing_waits_for_a_number_of_drafts(requests: int):
    planner, unlikely = Planner(DEAR, 4), torch.full((requests, 4), 0.01)
    chosen, drafts = [], 0
    while drafts < TAUGHT or len(chosen) < 10:
        depth = planner.depth(requests)
        # a probe sees what it costs
        if drafts >= TAUGHT:
            chosen.append(depth)
        else:
            assert depth > 0 or planner.probing
        planner.keep(unlikely[:, :depth])
        drafts += requests * (depth > 0)
    assert chosen.count(0) >= 9


def test_where_nobody_takes_a_draft_plain_decoding_waits_for_nothing():
    planner = Planner(USUAL, 4)
    planner.keep(torch.full((2, 4), 0.9))
    nothing = OwnLimits(None, 0, exact=False)
    assert planner.depth(2, [nothing] * 2) == 0 < planner.depth(2, [nothing])


def test_it_comes_back_from_plain_decoding():
    planner = Planner(PRICED, 6)
    for _ in range(40):
        planner.keep(torch.full((4, 6), 0.02))
    assert planner.depth(4) == 0
    for _ in range(600):
        depth = planner.depth(4)
        planner.keep(torch.full((4, 6), 0.95)[:, :depth])
    assert planner.depth(4) >= 4


def test_draft_extend_is_no_price_of_plain_steps_that_do_without():
    curve = CostCurve(verify=((1, 1.0), (2, 1.4)), draft=((1, 0.1), (2, 0.1)), draft_extend=0.3)
    for skips, expected in ((False, 1), (True, 0)):
        planner = Planner(curve, 1, **KNOWN)
        planner.skips = skips
        # 1.5 tokens in 1.7 seconds, or one in 1.3 or 1.0
        planner.keep(torch.tensor([[0.5]]))
        assert planner.depth(1) == expected


def test_what_a_draft_has_to_read_first_is_shared_by_some_steps():
    """A gain of 2.6% a step is not worth going back and forth; one of 4% is."""
    curve = CostCurve(verify=((1, 1.0), (2, 1.4)), draft=((1, 0.1), (2, 0.1)), draft_extend=0.3)
    for skips, acceptance, expected in ((True, 0.745, 0), (True, 0.77, 1), (False, 0.705, 1)):
        planner = Planner(curve, 1, **KNOWN)
        planner.skips = skips
        planner.keep(torch.tensor([[acceptance]]))
        assert planner.depth(1) == 1
        # plain decoding is best for so many
        assert planner.depth(100) == 0
        assert planner.depth(1) == expected


def test_depths_that_were_never_drafted_are_forecast_from_the_last_ratio():
    """At .8 and then .9 of what is left, drafting four pays; at .8 and then .1, one does."""
    curve = CostCurve(verify=((1, 1.0), (64, 1.0)), draft=((1, 0.2), (64, 0.2)))
    for second, expected in ((0.72, 4), (0.08, 1)):
        planner = Planner(curve, 4, **KNOWN)
        planner.keep(torch.tensor([[0.8, second]]))
        assert planner.depth(1) == expected


def test_no_requests_and_no_drafts():
    assert spend(torch.zeros(2, 0), USUAL, 0).kept.tolist() == [0, 0]
    assert Planner(USUAL, 3).keep(torch.zeros(2, 0)).tolist() == [0, 0]


def test_a_curve_may_fall_and_goes_on_after_its_points():
    curve = CostCurve(verify=((2, 1.0), (4, 3.0), (8, 2.0), (16, 5.0)), draft=((1, 1.0), (2, 1.0)))
    counts = torch.tensor([1, 2, 3, 4, 6, 8, 16, 24])
    expected = [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 5.0, 8.0]
    assert curve.verify_s(counts).tolist() == pytest.approx(expected)
    assert [curve.verify_one(count) for count in counts.tolist()] == pytest.approx(expected)


def test_a_curve_that_falls_at_its_end_does_not_go_on_falling():
    curve = CostCurve(verify=((1, 3.0), (2, 1.0)), draft=((1, 1.0), (2, 1.0)))
    assert curve.verify_s(torch.tensor([2, 3, 1000])).tolist() == [1.0, 1.0, 1.0]


def test_a_pass_that_the_machine_computes_badly_is_not_run():
    """Two rows take longer than four, as on a processor that was measured: a draft is whole or not made."""
    curve = CostCurve(((1, 1.0), (2, 2.0), (3, 1.6), (4, 1.2)), ((1, 1e-3), (2, 1e-3)))
    assert spend(torch.tensor([[0.5, 0.2, 0.1]]), curve, 2).kept.tolist() == [3]
    assert spend(torch.tensor([[0.1, 0.05, 0.01]]), curve, 2).kept.tolist() == [0]


def test_what_was_measured_beside_the_passes_counts_in_the_place_of_the_curves():
    acceptance, curve = torch.tensor([[0.3, 0.1]]), CostCurve(((1, 1.0), (2, 1.4), (3, 1.8)), ((1, 0.1), (2, 0.1)))
    assert spend(acceptance, curve, 0).kept.tolist() == [0]
    dearer = StepCosts(0.6)
    assert spend(acceptance, curve, 0, costs=dearer).kept.tolist() == [1]


def test_a_cut_that_costs_more_than_it_saves_is_not_made():
    acceptance, curve = torch.tensor([[0.9, 0.1]]), CostCurve(((1, 1.0), (2, 1.1), (3, 1.3)), ((1, 0.1), (2, 0.1)))
    free = StepCosts(0.0)
    assert spend(acceptance, curve, 0, costs=free).kept.tolist() == [1]
    dear = spend(acceptance, curve, 0, costs=free._replace(a_cut=0.3))
    assert dear.kept.tolist() == [2] and dear.seconds == pytest.approx(1.3)


def test_a_curve_survives_its_file(tmp_path: Path):
    write_curve(USUAL, tmp_path / "curve.json")
    assert read_curve(tmp_path / "curve.json") == USUAL
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify": [[1, 1.0]]}, "two or more points"),
        ({"verify": [[4, 1.0], [2, 1.0]]}, "rising"),
        ({"verify": [[0, 1.0], [2, 1.0]]}, "from 1 on"),
        ({"draft": [[1, 0.0], [2, 1.0]]}, "positive"),
        ({"draft": [[1, "fast"], [2, 1.0]]}, "no cost curve"),
        ({"fixed": -1}, "0 or more"),
        ({"draft_extend": float("nan")}, "0 or more"),
        ({"draft_extend": "0"}, "expected a number, got a str"),
        ({"fixed": 1e300}, "0 or more"),
        ({"fixed": 10**400}, "too large"),
        ({"fixed": True}, "expected a number, got a bool"),
        ({"verify": [[1, 1e300], [2, 1e308]]}, "positive"),
        ({"verify": [[1, 5e-324], [2, 1.0]]}, "positive"),
        ({"verify": [[1, 1.0], [10**400, 1.0]]}, "rising"),
        ({"verify": [[1.5, 1.0], [2, 1.0]]}, "expected a number, got a float"),
        ({"verify": 3}, "no cost curve"),
        ({"verify": [[1, 1.0, 2.0]]}, "no cost curve"),
        ({"format": "something"}, "needs exactly"),
        ({"more": 1}, "needs exactly"),
    ],
)
def test_a_bad_curve_is_refused(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "curve.json"
    write_curve(USUAL, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_curve(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "maximum recursion"),
        ('{"fixed": ' + "1" * 5000 + "}", "Exceeds the limit"),
        ('{"fixed": 0, "fixed": 0}', "the name 'fixed' comes twice"),
        (" " * 1_000_001, "no regular file of at most"),
    ],
    ids=["deep", "many digits", "twice", "large"],
)
def test_hostile_json_is_one_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "curve.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_curve(tmp_path / "curve.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_curve_is_read_from_a_file_alone(tmp_path: Path, make):
    make(tmp_path / "curve.json")
    with pytest.raises(ConfigError, match=r"curve\.json is no regular file"):
        read_curve(tmp_path / "curve.json")


def test_a_curve_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (sync(number), seen.append(os.listdir(tmp_path))))
    for _ in range(2):
        (tmp_path / "curve.json").unlink(missing_ok=True)
        write_curve(USUAL, tmp_path / "curve.json")
    # and no other process that writes the same curve has that name
    assert [len(names) for names in seen] == [1, 1] and "curve.json" not in seen[0] + seen[1]
    assert seen[0] != seen[1]


def test_a_file_that_is_none_is_refused(tmp_path: Path):
    for content in (None, b"", b"[]", b"\xff\xfe"):
        path = tmp_path / "curve.json"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"curve\.json is no"):
            read_curve(path)


# --- by steps before


def gains_of(acceptance: torch.Tensor, requests: int) -> list[float]:
    """Accepted tokens of the best 0, 1, 2, ... draft tokens, as if the step had had so many requests."""
    best = sorted((p for row in chain(acceptance) for p in row), reverse=True)
    sums = [math.fsum(best[:n]) for n in range(len(best) + 1)]
    scale, depth = requests / len(acceptance), acceptance.shape[1]
    places = [min(n / scale, len(best)) for n in range(requests * depth + 1)]
    return [scale * (sums[int(at)] + (at % 1) * (sums[math.ceil(at)] - sums[int(at)])) for at in places]


@given(steps=st.lists(probabilities, min_size=1, max_size=10), requests=st.integers(1, 5))
def test_expected_gains_are_the_mean_of_the_last_steps(steps: list[torch.Tensor], requests: int):
    recent = RecentGains()
    for acceptance in steps:
        recent.note(np.array(chain(acceptance), dtype=np.float64).reshape(acceptance.shape))
    found = recent.expected(requests, 3)
    assert found is not None and len(found) == requests * 3 + 1
    known = [gains_of(acceptance, requests) for acceptance in steps[-MEMORY:]]
    assert found.tolist() == pytest.approx([sum(each) / len(known) for each in zip(*known, strict=True)], abs=1e-9)
    assert recent.expected(requests, 2) is None


@given(acceptance=probabilities, curve=st.sampled_from([FREE, DEAR, USUAL]))
def test_the_rows_of_a_step_like_the_one_before_are_those_that_it_had_spent(acceptance: torch.Tensor, curve: CostCurve):
    planner, requests = Planner(curve, 3), len(acceptance)
    assert planner.rows(requests, 3) == requests * 4, "nothing is known: all of them"
    planner.observe(acceptance)
    rows = planner.rows(requests, 3)
    spent = spend(acceptance, curve, draft_passes(3))
    kept = torch.tensor(gains_of(acceptance, requests))[rows - requests]
    seconds = float(curve.verify_s(torch.tensor(rows))) + draft_passes(3) * curve.draft_s(requests)
    assert float(requests + kept) / (seconds + curve.fixed + curve.draft_extend) == pytest.approx(spent.rate, rel=1e-6)


def test_a_captured_pass_is_paid_for_and_filled():
    """Of 4 to 8 tokens a pass costs the same, so the best draft tokens fill the 8."""
    planner = Planner(CostCurve(verify=((1, 1.0), (4, 1.0), (8, 1.1), (16, 5.0)), draft=((1, 1e-6), (9, 1e-6))), 3)
    planner.observe(torch.full((3, 3), 0.5))
    assert planner.rows(3, 3, sizes=(4, 8, 16)) == 8
    assert planner.rows(3, 3, sizes=(4, 16)) == 4
