"""Scores of nodes and yield of chains, against plain loops."""

from __future__ import annotations

import math
import random

import pytest
import torch

from c2t_plugin.lab.scores import BETAS, ChainReplay, auc, node_scores, suggest_beta


@pytest.mark.parametrize("levels", [3, 1000])
def test_auc_counts_pairs(levels) -> None:
    # 3 levels: mostly ties
    rng = random.Random(levels)
    scores = [rng.randrange(levels) for _ in range(200)]
    labels = [rng.random() < 0.3 for _ in scores]
    pairs = [
        (p > n) + (p == n) / 2
        for p, a in zip(scores, labels, strict=True)
        if a
        for n, b in zip(scores, labels, strict=True)
        if not b
    ]
    # float64 sums of at most 12,000 pairs
    assert auc(torch.tensor(scores).float(), torch.tensor(labels)) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_auc_of_one_class_is_not_a_number() -> None:
    assert math.isnan(auc(torch.ones(3), torch.ones(3, dtype=torch.bool)))


def test_node_scores_by_hand() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, -2.0, -3.0])
    accepted = torch.tensor([True, False, True, False, False])
    joint = torch.tensor([-3.5, -1.0, -0.5, -3.0, -4.0])
    scores = node_scores(logits, joint, accepted)
    # a confidence of exactly 0.5 is predicted positive
    assert (scores.recall, scores.theta) == (0.5, pytest.approx(0.4))
    # the two highest P are the second and third node
    assert scores.recall_joint_prob == 0.5
    assert scores.auc == pytest.approx(5 / 6)
    assert scores.auc_joint_prob == pytest.approx(4 / 6)
    bce = [
        math.log1p(math.exp(-2)),
        math.log(2),
        math.log1p(math.exp(1)),
        math.log1p(math.exp(-2)),
        math.log1p(math.exp(-3)),
    ]
    assert scores.bce == pytest.approx(sum(bce) / 5, abs=1e-6)  # float32


def served(traces, lengths, d_max) -> tuple[float, float, float]:
    """tau, gamma and gamma per token, prompt by prompt and step by step."""
    steps = kept = hits = 0
    by_prompt: dict[int, list[int]] = {}
    for row, prompt in enumerate(traces.prompt.tolist()):
        by_prompt.setdefault(prompt, []).append(row)
    for rows in by_prompt.values():
        at = 0
        while at < len(rows):
            row = rows[at]
            accepted = 0
            while accepted < lengths[row] and traces.chain.accepted[row, accepted]:
                accepted += 1
            steps, kept, hits = steps + 1, kept + lengths[row], hits + accepted
            at += accepted + 1
    return hits / steps, kept / steps, kept / (hits + steps)


def test_replay_visits_what_a_server_would(make_traces) -> None:
    traces = make_traces(prompts=7, steps=9, layers=4)
    lengths = torch.randint(0, 4, (len(traces),), generator=torch.Generator().manual_seed(0))
    found = ChainReplay(traces, d_max=3).run(lengths)
    assert (found.tau, found.gamma, found.gamma_per_token) == pytest.approx(served(traces, lengths.tolist(), 3))


def test_replay_of_a_prompt_with_one_state(make_traces) -> None:
    traces = make_traces(prompts=3, steps=1)
    assert ChainReplay(traces, 2).static(2).gamma == 2.0


@pytest.mark.parametrize("length", [1, 2, 4])
def test_static_chains(make_traces, length) -> None:
    traces = make_traces(prompts=5, steps=8)
    found = ChainReplay(traces, 4).static(length)
    assert (found.tau, found.gamma) == pytest.approx(served(traces, [length] * len(traces), 4)[:2])


def test_a_cut_chain_ends_before_its_first_low_score(make_traces) -> None:
    traces = make_traces(prompts=5, steps=8)
    scores = torch.rand(len(traces), 4, generator=torch.Generator().manual_seed(1))
    # a score equal to the threshold stays
    scores[0, 0] = 0.5
    lengths = [next((i for i in range(3) if row[i] < 0.5), 3) for row in scores.tolist()]
    found = ChainReplay(traces, 3).cut(scores, 0.5)
    assert lengths[0] > 0
    assert (found.tau, found.gamma) == pytest.approx(served(traces, lengths, 3)[:2])


def test_gamma_at_lies_between_the_thresholds_around_it(make_traces) -> None:
    traces = make_traces(prompts=20, steps=10)
    replay, scores = ChainReplay(traces, 4), traces.chain.joint_log_prob
    low, high = replay.cut(scores, -1.0), replay.cut(scores, -3.0)
    assert low.tau < high.tau
    assert low.gamma < replay.gamma_at(scores, (low.tau + high.tau) / 2) < high.gamma
    assert math.isnan(replay.gamma_at(scores, 4.5))


def test_the_suggested_beta_is_the_largest_that_keeps_the_accept_length(make_traces) -> None:
    traces = make_traces(prompts=20, steps=10)
    replay, confidence = ChainReplay(traces, 4), traces.chain.joint_log_prob.exp()
    wanted = replay.static(2).tau
    beta = suggest_beta(replay, confidence, static_length=2)
    assert BETAS[0] < beta < BETAS[-1]
    assert replay.cut(confidence, beta).tau >= wanted
    above = [replay.cut(confidence, other).tau for other in BETAS if other > beta]
    assert above and max(above) < wanted


def test_without_a_fitting_beta_the_smallest_is_suggested(make_traces) -> None:
    traces = make_traces()
    assert suggest_beta(ChainReplay(traces, 4), torch.zeros(len(traces), 4), static_length=4) == BETAS[0]
