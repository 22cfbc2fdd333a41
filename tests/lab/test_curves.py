"""Curves against plain loops over prompts: what serving visits, and intervals over what is drawn."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.curves import PromptSums, bootstrap_unit, bootstrap_weights, compare, gamma_at, interval, serve
from c2t_plugin.lab.sweeps import static_sweep, threshold_sweep
from c2t_plugin.traces.file import Traces


def visited(traces, gamma, tau, prompt: int, start: int = 0) -> tuple[int, int, int]:
    rows = [row for row, number in enumerate(traces.prompt.tolist()) if number == prompt]
    steps = verified = hits = 0
    at = start
    while at < len(rows):
        row = rows[at]
        steps, verified, hits = steps + 1, verified + gamma[row], hits + tau[row]
        at += tau[row] + 1
    return steps, verified, hits


@pytest.mark.parametrize("every_state", [False, True])
def test_serving_visits_what_a_server_would(make_traces, every_state) -> None:
    traces = make_traces(prompts=7, steps=9, k=3)
    sweep = threshold_sweep(traces.tree, traces.tree.joint_log_prob.exp(), torch.tensor([0.0, 0.3, torch.inf]))
    found = serve(traces, sweep, every_state)
    for setting in range(3):
        gamma, tau = sweep.gamma[setting].tolist(), sweep.tau[setting].tolist()
        for prompt in range(7):
            rows = range(9 * prompt, 9 * prompt + 9)
            expected = (
                (9, sum(gamma[row] for row in rows), sum(tau[row] for row in rows))
                if every_state
                else visited(traces, gamma, tau, prompt)
            )
            assert tuple(part[setting, prompt] for part in (found.steps, found.verified, found.accepted)) == expected


def test_replays_from_several_starts_are_added(make_traces) -> None:
    traces = make_traces(prompts=4, steps=9, k=3)
    sweep = threshold_sweep(traces.tree, traces.tree.joint_log_prob.exp(), torch.tensor([0.1, 0.4]))
    found = serve(traces, sweep, starts=3)
    for setting in range(2):
        gamma, tau = sweep.gamma[setting].tolist(), sweep.tau[setting].tolist()
        for prompt in range(4):
            each = [visited(traces, gamma, tau, prompt, start) for start in range(3)]
            expected = tuple(sum(part) for part in zip(*each, strict=True))
            assert tuple(part[setting, prompt] for part in (found.steps, found.verified, found.accepted)) == expected
    one = make_traces(prompts=3, steps=2)
    assert serve(one, static_sweep(one.chain), starts=5).steps.sum(1).max() <= 3 * 3
    with pytest.raises(C2TError, match="starts"):
        serve(traces, sweep, starts=0)


def test_gamma_between_two_settings() -> None:
    tau, gamma = np.array([2.0, 1.0, 1.5]), np.array([4.0, 1.0, 5.0])
    # 1.5 for 5 is not chosen: 2.0 costs less
    assert gamma_at(tau, gamma, np.array([0.5, 1.0, 1.25, 1.5, 2.0])).tolist() == [0.5, 1.0, 2.5, 4.0, 4.0]
    assert math.isnan(gamma_at(tau, gamma, 2.01))


def test_the_same_rule_saves_nothing_in_any_replicate(make_traces) -> None:
    traces = make_traces(prompts=12, steps=6)
    served = serve(traces, static_sweep(traces.chain))
    found = compare(served, served, [0.3, 0.5], bootstrap_weights(traces.groups, 50))
    assert found.ratio == [1.0, 1.0]
    assert found.ratio_interval == [(1.0, 1.0)] * 2
    low, high = found.gamma_interval[1]
    assert low < found.gamma[1] < high


def test_replicates_draw_whole_prompts(make_traces) -> None:
    traces = make_traces(prompts=5)
    weights = bootstrap_weights(traces.groups, 2000, seed=1)
    assert bootstrap_unit(traces) == "prompts"
    assert (weights.sum(1) == 5).all()
    # the mean of 2,000 draws of variance 0.8 has a standard deviation of 0.02; five of them
    assert np.abs(weights.mean(0) - 1).max() < 0.1
    served = PromptSums(np.array([1.0]), *(np.array([[2.0, 1.0]]), np.array([[4.0, 6.0]]), np.array([[2.0, 1.0]])))
    tau, gamma = served.curve(np.array([[2.0, 0.0], [1.0, 1.0]]))
    assert tau.tolist() == [[1.0], [1.0]] and gamma.tolist() == [[2.0], [10 / 3]]


def test_prompts_of_one_source_are_drawn_together(make_traces) -> None:
    traces = replace(make_traces(prompts=5, steps=2), group=torch.tensor([7, 7, 3, 3, 7, 7, 0, 0, 3, 3]))
    weights = bootstrap_weights(traces.groups, 2000, seed=1)
    assert weights.shape == (2000, 5)
    assert (weights[:, 0] == weights[:, 2]).all() and (weights[:, 1] == weights[:, 4]).all()
    # each of the three sources is drawn once on average; a standard deviation of the mean is 0.018
    assert (weights[:, [0, 1, 3]].sum(1) == 3).all() and np.abs(weights.mean(0) - 1).max() < 0.1
    assert bootstrap_unit(traces) == "their 3 sources"


def test_intervals_over_sources_are_wider_than_over_prompts_that_repeat_each_other(make_traces) -> None:
    once = make_traces(prompts=6, steps=6)
    rows = torch.arange(len(once)).repeat(4)
    prompt = torch.arange(24, dtype=torch.int32).repeat_interleave(6)
    copies = Traces(once.tree[rows], once.chain[rows], prompt, once.step[rows], once.novel[rows], once.header)
    sources = replace(copies, group=once.prompt[rows])
    served = serve(copies, static_sweep(copies.chain))
    narrow, wide, true = (
        compare(each, each, [0.2], bootstrap_weights(traces.groups, 500)).gamma_interval[0]
        for each, traces in ((served, copies), (served, sources), (serve(once, static_sweep(once.chain)), once))
    )
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])
    # four copies of a prompt say no more than one
    assert wide == pytest.approx(true)


def test_an_interval_that_is_mostly_out_of_reach_is_none() -> None:
    values = np.arange(100.0)
    assert interval(values) == pytest.approx((2.475, 96.525))
    values[:6] = np.nan
    assert all(math.isnan(end) for end in interval(values))


def test_replicates_that_reach_no_tau_are_left_out_without_a_warning() -> None:
    """One setting of tau 1 on average, .5 and 1.5 by prompt: a replicate of the first prompt alone does not reach 1."""
    steps, verified, accepted = (np.array([part]) for part in ([2.0, 2.0], [4.0, 4.0], [1.0, 3.0]))
    served = PromptSums(np.array([4.0]), steps, verified, accepted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare(served, served, [1.0], np.array([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]]))
    assert found.mean == 1.0 and all(math.isnan(bound) for bound in found.mean_interval)
