"""Simulated serving: counts by hand on one prompt, and the planner against every static arm where it knows all."""

from __future__ import annotations

import pytest
import torch

from benchmarks.simulation.steps import (
    Policy,
    ending,
    fixed_beta,
    plain,
    planned,
    planned_tree,
    serve,
    static,
    whole_tree,
)
from c2t_plugin.planner import CostCurve, switched_depths
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest

DEPTH = 8
# a target that is free up to 96 tokens a pass and then costs by the token, as on a GPU
CURVE = CostCurve(
    verify=((1, 10e-3), (96, 10e-3), (960, 100e-3)),
    draft=((1, 0.6e-3), (96, 0.6e-3), (960, 6e-3)),
    fixed=0.3e-3,
    draft_extend=0.6e-3,
)


def traces_of(accepted: torch.Tensor, prompt: torch.Tensor) -> Traces:
    """Chains with this acceptance, (states, DEPTH) bool; the trees and all other tables are blank."""
    states = len(accepted)

    def forest(columns: int) -> Forest:
        shape = (states, columns)
        blank = torch.zeros(shape)
        own = accepted if columns == accepted.shape[1] else torch.zeros(shape, dtype=torch.bool)
        parents = torch.full(shape, -1, dtype=torch.int16)
        return Forest(1, columns, blank, blank, blank, blank, parents, torch.zeros(shape, dtype=torch.int32), own)

    steps = torch.arange(states, dtype=torch.int16)
    return Traces(forest(1), forest(accepted.shape[1]), prompt, steps, torch.zeros(states, dtype=torch.bool), {})


def random_traces(prompts: int, each: int, sharpness: float, seed: int) -> tuple[Traces, torch.Tensor]:
    """Chains whose tokens are accepted with known probabilities, and these: (states, DEPTH) from the root."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.rand(prompts * each, DEPTH, generator=generator) ** (1 / sharpness)
    accepted = (torch.rand(own.shape, generator=generator) < own).int().cumprod(1).bool()
    return traces_of(accepted, torch.arange(prompts).repeat_interleave(each).int()), own.cumprod(1)


def test_one_prompt_by_hand():
    """Six states; two drafts accepted, then none, then three: steps at 0, 3 and 4, the last one's output cut short."""
    accepted = torch.zeros(6, DEPTH, dtype=torch.bool)
    accepted[0, :2] = True
    accepted[4, :3] = True
    traces = traces_of(accepted, torch.zeros(6, dtype=torch.int32))
    curve = CostCurve(verify=((1, 1.0), (5, 1.0)), draft=((1, 0.1), (5, 0.1)), fixed=0.01, draft_extend=0.02)
    found = serve(traces, torch.ones(6, DEPTH), curve, static(4), slots=3)
    assert (found.steps, found.tokens) == (3, 6)
    # the pass that keeps up gives the first draft token
    assert found.seconds == pytest.approx(3 * (1.0 + 3 * 0.1 + 0.03))
    assert (found.tau, found.gamma) == (pytest.approx(5 / 3), 4.0)
    without = serve(traces, torch.ones(6, DEPTH), curve, plain(), slots=3)
    assert (without.steps, without.tokens, without.tau, without.gamma) == (6, 6, 0.0, 0.0)


@pytest.mark.parametrize("slots", [1, 3, 7, 50])
@pytest.mark.parametrize("policy", [plain(), static(3), fixed_beta(0.5, 6)], ids=lambda policy: policy.name)
def test_every_prompt_is_served_whole(policy: Policy, slots: int):
    traces, acceptance = random_traces(prompts=9, each=13, sharpness=2.0, seed=1)
    found = serve(traces, acceptance, CURVE, policy, slots)
    assert found.tokens == len(traces)
    assert found.gamma >= found.tau


def test_trees_by_hand():
    """Six states, trees of 5 nodes in the order of their chances: the first and the third are accepted, then the second
    alone."""
    traces = traces_of(torch.zeros(6, DEPTH, dtype=torch.bool), torch.zeros(6, dtype=torch.int32))
    accepted = torch.zeros(6, 5, dtype=torch.bool)
    accepted[0, [0, 2]] = True
    accepted[3, 1] = True
    curve = CostCurve(verify=((1, 1.0), (4, 1.0), (6, 2.0)), draft=((1, 0.1), (5, 0.1)), fixed=0.01, draft_extend=0.02)
    sizes = torch.tensor([5.0, 5, 5, 2, 5, 5])[:, None]
    whole = serve(traces, sizes, curve, whole_tree(3), slots=1, accepted=accepted)
    # from 0 to 3, from 3 to 5, and the last
    assert (whole.steps, whole.tokens) == (3, 6)
    assert whole.seconds == pytest.approx(2.0 + 1.0 + 2.0 + 3 * (2 * 0.1 + 0.03))
    assert (whole.tau, whole.gamma) == (1.0, 4.0)
    chances = torch.tensor([0.9, 0.5, 0.4, 0.3, 0.2]).expand(6, -1)
    cut = serve(traces, chances, curve, planned_tree(curve, 3), slots=1, accepted=accepted)
    # of a pass that gets dearer beyond 4 rows a tree of 3 nodes is worth most
    assert (cut.steps, cut.tokens, cut.gamma) == (3, 6, 3.0)
    assert cut.seconds == pytest.approx(3 * (1.0 + 2 * 0.1 + 0.03))


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [0.3, 4.0, 30.0])
@pytest.mark.parametrize("slots", [1, 16, 160])
def test_the_planner_is_never_far_behind_the_best_of_all(slots: int, sharpness: float):
    """Plain decoding wins in some of these settings, chains of 8 in others; the planner is told neither. It may draft
    to few depths only: a static chain of 6 is 4% faster in one of these settings."""
    traces, acceptance = random_traces(prompts=max(60, 3 * slots), each=40, sharpness=sharpness, seed=2)
    arms = [plain(), *(static(length) for length in switched_depths(DEPTH)[1:])]
    speeds = {arm.name: serve(traces, acceptance, CURVE, arm, slots).tokens_per_s for arm in arms}
    found = serve(traces, acceptance, CURVE, planned(CURVE, DEPTH), slots).tokens_per_s
    assert found >= 0.97 * max(speeds.values()), speeds


def test_where_requests_differ_the_planner_beats_every_static_chain():
    """Half of the prompts are easy, half hopeless: no common length serves both."""
    easy, sure = random_traces(prompts=200, each=40, sharpness=30.0, seed=3)
    hard, unsure = random_traces(prompts=200, each=40, sharpness=0.2, seed=4)
    accepted = torch.cat([easy.chain.accepted, hard.chain.accepted])
    mixed = torch.arange(400).view(2, 200).T.flatten()
    rows = (mixed[:, None] * 40 + torch.arange(40)).flatten()
    traces = traces_of(accepted[rows], torch.arange(400).repeat_interleave(40).int())
    acceptance = torch.cat([sure, unsure])[rows]
    speeds = [
        serve(traces, acceptance, CURVE, arm, 64).tokens_per_s
        for arm in (plain(), *(static(length) for length in range(1, DEPTH + 1)))
    ]
    found = serve(traces, acceptance, CURVE, planned(CURVE, DEPTH), 64).tokens_per_s
    assert found >= 1.05 * max(speeds), (found, speeds)


@pytest.mark.parametrize("slots", [1, 2])
def test_of_few_requests_a_draft_that_ends_where_it_should_beats_a_depth_that_is_chosen_before(slots: int):
    """Easy and hopeless prompts by turns: what the next step is worth, the steps before it do not say."""
    easy, sure = random_traces(prompts=60, each=1, sharpness=30.0, seed=3)
    hard, unsure = random_traces(prompts=60, each=1, sharpness=0.2, seed=4)
    rows = torch.arange(120).view(2, 60).T.flatten()
    accepted = torch.cat([easy.chain.accepted, hard.chain.accepted])[rows]
    # each request takes from both in turn
    traces = traces_of(accepted, torch.arange(120).div(20, rounding_mode="floor").int())
    acceptance = torch.cat([sure, unsure])[rows]
    before, on_its_way = (
        serve(traces, acceptance, CURVE, policy, slots).tokens_per_s
        for policy in (planned(CURVE, DEPTH), ending(CURVE, DEPTH))
    )
    assert on_its_way > 1.02 * before
