"""A server's traces beside the lab's recomputation: what is the same is found to be, in whatever order, and a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.pairs.toy import pair_dir
from benchmarks.report.recomputed import Comparison, compare, recompute
from c2t_plugin.lab.collect import collect
from c2t_plugin.lab.corpora import SOURCES
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.lab.plans import CollectPlan, TreeShape
from c2t_plugin.lab.texts import greedy_text
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest

DEPTH, NEW = 3, 12


@pytest.fixture(scope="module")
def both() -> tuple[Traces, list[Forest]]:
    """Collected, in the order of prompts' lengths; recomputed, in that of the prompts."""
    plan = CollectPlan(draft="eagle3", shape=TreeShape(2, DEPTH), trees=3 * NEW, prompts="held-out", new_tokens=NEW)
    traces = collect(pair_dir(), plan)
    pool = SOURCES["held-out"](pair_dir(), 3, plan.seed)
    target, _ = load_pair(pair_dir(), "eagle3")
    prompts = [each.token_ids for each in pool[:3]]
    whole = [greedy_text(target, {0: prompt}, NEW, DEPTH).token_ids[0].tolist() for prompt in prompts]
    texts = [(prompt, text[len(prompt) :]) for prompt, text in zip(prompts, whole, strict=True)]
    return traces, recompute("eagle3", texts, DEPTH, plan.shape.top_m)


def test_the_same_chains_are_found(both: tuple[Traces, list[Forest]]):
    traces, chains = both
    assert compare(traces, chains[::-1]) == Comparison(3 * NEW, 0, pytest.approx(0.0, abs=1e-4))


def test_a_state_that_is_another_ones_is_seen(both: tuple[Traces, list[Forest]]):
    """As with a stale seed: one statistic of one state, then labels, then every request one step late."""
    traces, chains = both
    shifted = traces.chain.entropy.clone()
    shifted[5, 1] += 0.25
    assert compare(replace(traces, chain=replace(traces.chain, entropy=shifted)), chains).off == 1
    none = replace(traces.chain, accepted=torch.zeros_like(traces.chain.accepted))
    assert compare(replace(traces, chain=none), chains).off == int(traces.chain.accepted.any(1).sum()) > 0
    late = replace(traces, chain=traces.chain[torch.arange(len(traces)).roll(1)])
    assert compare(late, chains).off > len(traces) / 2


def test_a_small_difference_is_told(both: tuple[Traces, list[Forest]]):
    traces, chains = both
    near = replace(traces, chain=replace(traces.chain, margin=traces.chain.margin + 0.005))
    assert compare(near, chains) == Comparison(3 * NEW, 0, pytest.approx(0.005, abs=1e-3))
