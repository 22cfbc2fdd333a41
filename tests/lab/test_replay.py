"""Replay of policies on records: the same trees as live growth, or a report of what the record lacks.

Longer than 300 lines because one toy draft is grown live and replayed by all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from benchmarks.pairs.toy import load_prompts
from benchmarks.papers.sequoia import Sequoia
from c2t_plugin.errors import C2TError
from c2t_plugin.lab import replay as replay_module
from c2t_plugin.lab.collect import collect, run_live
from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.lab.plans import CollectPlan, TreeShape
from c2t_plugin.lab.policies.base import Certainty, JointProb, LayerPolicy, alive_where, top_children
from c2t_plugin.lab.policies.c2t import C2TTree, ThresholdTree
from c2t_plugin.lab.policies.chains import C2TChain, DyJoint, DyMax, EntropyStop, StaticChain
from c2t_plugin.lab.policies.dyspec import READINGS, DySpecGreedy, DySpecThreshold
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.policies.entropy import DynamicWidth, DynamicWidthDepth, NaiveWidth
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import FixedBranching, IndependentSequences, StaticTree
from c2t_plugin.lab.replay import (
    Outcomes,
    RecordedDraft,
    acceptance_by_rank,
    grow_live,
    replay,
    replay_trees,
    serve,
    visited,
)
from c2t_plugin.lab.scores import ChainReplay
from c2t_plugin.lab.texts import greedy_text, held_out_prompts, of_equal_length
from c2t_plugin.lab.trees import grow
from c2t_plugin.traces.forest import Forest
from tests.support.core.policy_toys import classifier_of

VOCAB, STATES, LAYERS = 6, 30, 4
CLASSIFIER = classifier_of("joint_prob", "entropy", "depth", weights=(6.0, 0.3, -0.2), bias=-2.5, top_m=VOCAB)


def tokens_of(tree, row: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids[row].tolist(), tree.parent_ids[row].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return [path for path, alive in zip(found, tree.alive[row].tolist(), strict=True) if alive]


@pytest.fixture(scope="module")
def toy(toy_draft, toy_logits):
    """A toy draft's logits, the target's continuations, mostly the draft's own, and the record of three children."""
    logits = toy_logits(VOCAB, 3)
    generator = torch.Generator().manual_seed(0)
    chain = grow(toy_draft(STATES, logits), torch.zeros(STATES, LAYERS + 1, dtype=torch.int64),
                 TreeShape(1, LAYERS + 1, VOCAB)).token_ids.long()  # fmt: skip
    noise = torch.randint(VOCAB, chain.shape, generator=generator)
    follows = torch.rand(chain.shape, generator=generator) < 0.7
    continuation = torch.where(follows, chain, noise)
    forest = grow(toy_draft(STATES, logits), continuation[:, :LAYERS], TreeShape(3, LAYERS, VOCAB))
    return logits, continuation, forest


POLICIES = {
    "eagle2": Eagle2(d_max=LAYERS, k=3, max_nodes=12, top_m=VOCAB),
    "eagle2 shallow": Eagle2(d_max=2, k=3, max_nodes=12, top_m=VOCAB),
    "eagle2 narrow": Eagle2(d_max=LAYERS, k=2, max_nodes=8, top_m=VOCAB),
    "threshold": ThresholdTree(d_max=LAYERS, score=JointProb(), beta=0.1, first_k=3, top_m=VOCAB),
    "threshold low": ThresholdTree(d_max=LAYERS, score=JointProb(), beta=0.01, first_k=3, top_m=VOCAB),
    "threshold second": ThresholdTree(d_max=LAYERS, score=JointProb(), beta=0.0, first_k=3, second_k=3, top_m=VOCAB),
    "static": StaticTree(paths=((0,), (1,), (2,), (2, 0), (0, 0), (1, 2), (0, 0, 1), (1, 2, 0)), top_m=VOCAB),
    "width": FixedBranching(width=2, depth=3, top_m=VOCAB),
    "dynamic width": DynamicWidth(d_max=3, widest=3, top_m=VOCAB),
    "dynamic width shallow": DynamicWidth(d_max=2, widest=3, top_m=VOCAB),
    "naive width": NaiveWidth(d_max=4, k=2, max_entropy=1.2, top_m=VOCAB),
    "chain": StaticChain(d_max=4, top_m=VOCAB),
    "too deep": StaticChain(d_max=5, top_m=VOCAB),
    "c2t": C2TTree(classifier=CLASSIFIER, beta=0.3, first_k=3, second_k=3, d_max=LAYERS),
    "c2t one top-K": C2TTree(classifier=CLASSIFIER, beta=0.5, first_k=3, d_max=LAYERS),
    "c2t chain": C2TChain(classifier=CLASSIFIER, beta=0.3, d_max=LAYERS),
    "c2t chain kept": C2TChain(classifier=CLASSIFIER, beta=0.5, d_max=LAYERS, keep_failing=True),
    "dymax": DyMax(threshold=0.5, d_max=LAYERS, top_m=VOCAB),
    "dymax kept": DyMax(threshold=0.5, d_max=LAYERS, top_m=VOCAB, keep_failing=True),
    "dyjoint": DyJoint(threshold=0.2, d_max=LAYERS, top_m=VOCAB),
    "dyjoint kept": DyJoint(threshold=0.2, d_max=LAYERS, top_m=VOCAB, keep_failing=True),
    "entropy stop": EntropyStop(max_entropy=1.0, d_max=LAYERS, top_m=VOCAB),
    "width and depth": DynamicWidthDepth(widest=3, max_entropy=1.0, d_max=3, top_m=VOCAB),
    "width and depth kept": DynamicWidthDepth(widest=3, max_entropy=1.0, d_max=3, top_m=VOCAB, keep_failing=True),
    "specinfer": SpecInfer(branches=(1, 1, 3, 1), top_m=VOCAB),
    "sequoia": replace(Sequoia.plan([0.5, 0.2, 0.1], max_nodes=8, d_max=LAYERS), top_m=VOCAB),
    "sequences": IndependentSequences(sequences=3, length=3, top_m=VOCAB),
    **{
        f"dyspec {reading}": DySpecGreedy(
            max_nodes=8, temperature=1.0, max_children=3, d_max=LAYERS, reading=reading, top_m=VOCAB
        )
        for reading in READINGS
    },
    "dyspec threshold": DySpecThreshold(threshold=0.1, temperature=1.0, max_children=3, d_max=LAYERS, top_m=VOCAB),
}


@pytest.mark.parametrize("name", POLICIES)
def test_replay_is_live_growth_or_says_what_is_missing(toy, toy_draft, name) -> None:
    logits, continuation, forest = toy
    policy = POLICIES[name]
    recorded = replay_trees(forest, policy, VOCAB)
    live = grow_live(toy_draft(STATES, logits), policy, continuation, None)
    outcomes, expected = recorded.outcomes(), live.outcomes()
    recorded.tree.validate()
    for row in range(STATES):
        found, truth = tokens_of(recorded.tree, row), tokens_of(live.tree, row)
        if outcomes.missing[row]:
            assert outcomes.accepted[row] <= expected.accepted[row]
            continue
        assert found == truth
        for item in ("joint_log_probs", "entropy", "margin", "scores"):
            a, b = (getattr(grown.tree, item)[row][grown.tree.alive[row]] for grown in (recorded, live))
            assert torch.equal(a, b), item
        for item in fields(Outcomes):
            assert getattr(outcomes, item.name)[row] == getattr(expected, item.name)[row], item.name
    if name in {"eagle2", "eagle2 shallow", "eagle2 narrow", "threshold second", "dynamic width shallow"}:
        assert not outcomes.missing.any(), "the record holds these whole"
    elif name in {"threshold low", "static", "width", "dynamic width", "too deep"}:
        assert outcomes.missing.any()
    else:
        assert not outcomes.missing.all()
    assert expected.accepted.any()


def test_missing_counts_the_nodes_that_were_asked_for(toy) -> None:
    _, _, forest = toy
    outcomes = replay(forest, FixedBranching(width=3, depth=3, top_m=VOCAB), VOCAB)
    # all three of layer 1 are recorded; of the nine of layer 2 three are
    assert outcomes.missing.tolist() == [6] * STATES
    assert outcomes.gamma.tolist() == [3 + 9 + 9] * STATES
    deep = replay(forest, StaticChain(d_max=LAYERS + 2, top_m=VOCAB), VOCAB)
    assert deep.missing[forest.accepted.sum(1) == LAYERS].ge(1).all()


def test_chunks_change_nothing(toy, monkeypatch) -> None:
    _, _, forest = toy
    policy = POLICIES["threshold"]
    whole = replay_trees(forest, policy, VOCAB).outcomes()
    monkeypatch.setattr(replay_module, "NODES_PER_CHUNK", 7 * forest.accepted.shape[1])
    parts = replay(forest, policy, VOCAB)
    assert all(torch.equal(getattr(parts, item.name), getattr(whole, item.name)) for item in fields(Outcomes))


def test_eagle2_accepts_what_its_best_nodes_hold(toy) -> None:
    _, _, forest = toy
    for size in (1, 5, 30):
        outcomes = replay(forest, Eagle2(d_max=LAYERS, k=3, max_nodes=size, top_m=VOCAB), VOCAB)
        order = forest.joint_log_prob.argsort(dim=1, descending=True, stable=True)[:, :size]
        assert outcomes.accepted.tolist() == forest.accepted.gather(1, order).sum(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "eagle3", "eagle1", "mtp"])
def test_replay_is_live_growth_on_a_pair(tiny_pair, kind) -> None:
    target, model = load_pair(tiny_pair, kind)
    shape = TreeShape(k=4, layers=3, top_m=20)
    prompts = dict(enumerate(prompt["ids"] for prompt in load_prompts(tiny_pair)))
    pair = next(of_equal_length(prompts, 2))
    texts = greedy_text(target, {number: prompts[number] for number in pair}, 3, shape.layers)
    with torch.inference_mode():
        batch = model.at(texts.token_ids, texts.roots)
        continuation = texts.continuation(shape.layers)
        forest = grow(batch.start(shape.layers), continuation, shape)
        for policy in (
            Eagle2(d_max=3, k=4, max_nodes=9, top_m=20),
            ThresholdTree(d_max=3, score=JointProb(), beta=0.05, first_k=4, second_k=3, top_m=20),
        ):
            live = grow_live(batch.start(shape.layers), policy, continuation, None)
            recorded = replay_trees(forest, policy, 20)
            rows = (recorded.missing == 0).nonzero().flatten().tolist()
            assert rows
            for row in rows:
                assert tokens_of(recorded.tree, row) == tokens_of(live.tree, row)
                assert recorded.accepted[row].sum() == live.accepted[row].sum()
                a, b = (grown.tree.joint_log_probs[row][grown.tree.alive[row]] for grown in (recorded, live))
                # float32 products of another shape
                torch.testing.assert_close(a, b, atol=5e-4, rtol=0)


def test_running_live_visits_the_states_that_are_recorded(tiny_pair, monkeypatch) -> None:
    plan = CollectPlan("eagle3", TreeShape(k=3, layers=3, top_m=20), trees=9, prompts="held-out", new_tokens=3)
    first = held_out_prompts(tiny_pair, 3, plan.seed)[0]
    texts = greedy_text(load_pair(tiny_pair, "eagle3")[0], {0: first.token_ids}, 3, 3)
    # one text ends at its first new token, so that its states are left out
    monkeypatch.setattr("c2t_plugin.lab.texts.end_of_text", lambda target: [int(texts.token_ids[0, texts.roots[0]])])
    traces = collect(tiny_pair, plan)
    assert 0 not in traces.prompt
    policies = {
        "eagle2": Eagle2(d_max=3, k=3, max_nodes=7, top_m=20),
        "chain": StaticChain(d_max=3, top_m=20),
        "wide": FixedBranching(width=3, depth=3),
        "drawn": StaticChain(d_max=2, temperature=1.0),
    }
    prompt, outcomes = run_live(tiny_pair, plan, policies)
    assert torch.equal(prompt, traces.prompt)
    for name, forest in (("eagle2", traces.tree), ("chain", traces.chain)):
        recorded = replay(forest, policies[name], 20)
        assert all(torch.equal(getattr(outcomes[name], item.name), getattr(recorded, item.name))
                   for item in fields(Outcomes))  # fmt: skip
    assert outcomes["wide"].gamma.tolist() == [3 + 9 + 27] * len(traces)
    assert outcomes["wide"].accepted.ge(outcomes["chain"].accepted).all()
    alone = run_live(tiny_pair, plan, {"drawn": policies["drawn"]})[1]["drawn"]
    assert torch.equal(alone.accepted, outcomes["drawn"].accepted)
    with pytest.raises(C2TError, match="deeper than the layers"):
        run_live(tiny_pair, plan, {"deep": StaticChain(d_max=5)})


def test_chains_agree_with_the_replay_of_cut_chains(make_traces) -> None:
    traces = make_traces(prompts=12, steps=10, k=2, layers=5)
    judge = ChainReplay(traces, 5)
    joint, own = traces.chain.joint_log_prob.exp(), traces.chain.log_prob.exp()
    entropy = traces.chain.stats().entropy
    for policy, expected in (
        (StaticChain(d_max=3, top_m=4), judge.static(3)),
        (DyJoint(d_max=5, threshold=0.1, top_m=4), judge.cut(joint, 0.1)),
        (DyJoint(d_max=5, threshold=0.1, top_m=4, keep_failing=True), judge.cut(joint, 0.1, keeps_failing=True)),
        (DyMax(d_max=5, threshold=0.5, top_m=4), judge.cut(own, 0.5)),
        (DyMax(d_max=5, threshold=0.5, top_m=4, keep_failing=True), judge.cut(own, 0.5, keeps_failing=True)),
        (EntropyStop(d_max=5, max_entropy=1.0, top_m=4), judge.cut(-entropy, -1.0)),
    ):
        served = serve(replay(traces.chain, policy, 4), traces.prompt)
        assert served.missing == 0
        found = (served.tau, served.gamma, served.gamma_per_token)
        assert found == pytest.approx((expected.tau, expected.gamma, expected.gamma_per_token))


def test_a_server_skips_the_states_inside_an_accepted_run() -> None:
    prompt = torch.tensor([7, 7, 7, 7, 7, 2, 2, 2])
    accepted = torch.tensor([1, 9, 0, 2, 9, 0, 4, 0])
    mask = visited(prompt, accepted)
    assert mask.nonzero().flatten().tolist() == [0, 2, 3, 5, 6]
    outcomes = Outcomes(
        gamma=torch.full((8,), 4), accepted=accepted, passes=torch.full((8,), 3),
        wasted=(3 - accepted - 1).clamp_min(0), missing=torch.tensor([0, 9, 0, 1, 0, 0, 0, 0]),
    )  # fmt: skip
    served = serve(outcomes, prompt)
    assert (served.steps, served.tau, served.gamma, served.passes) == (5, 7 / 5, 4.0, 3.0)
    assert served.gamma_per_token == 20 / (7 + 5)
    assert served.wasted == (1 + 2 + 0 + 2 + 0) / 5
    assert served.missing == pytest.approx(1 / 5)


def test_acceptance_by_rank_counts_where_the_parent_is_accepted(toy) -> None:
    _, _, forest = toy
    hits, reached = Counter(), 0
    for row in range(STATES):
        for distribution, parent in enumerate(forest.parent_ids[row].tolist()):
            if parent < 0 or forest.accepted[row, parent]:
                reached += 1
                for rank in range(3):
                    hits[rank] += int(forest.accepted[row, 3 * distribution + rank])
    assert acceptance_by_rank(forest).tolist() == pytest.approx([hits[rank] / reached for rank in range(3)])


def test_equal_siblings_accept_one_line(toy, toy_draft) -> None:
    logits, continuation, _ = toy
    policy = IndependentSequences(sequences=20, length=3, temperature=1.0, top_m=VOCAB)
    live = grow_live(toy_draft(STATES, logits), policy, continuation, torch.Generator().manual_seed(0))
    for row in range(STATES):
        want = continuation[row].tolist()
        longest = max((len(path) for path in tokens_of(live.tree, row) if list(path) == want[: len(path)]), default=0)
        assert int(live.accepted[row].sum()) == longest
    assert live.accepted.any()


def test_a_rule_may_keep_no_node_in_any_state(toy, toy_draft) -> None:
    logits, continuation, forest = toy
    policy = DySpecThreshold(
        threshold=1.0, max_nodes=8, d_max=LAYERS, temperature=1.0, reading="joint", max_children=3, top_m=VOCAB
    )
    live = grow_live(toy_draft(STATES, logits), policy, continuation, None)
    for found in (live, replay_trees(forest, policy, VOCAB)):
        outcomes = found.outcomes()
        assert found.tree.nodes == int(outcomes.gamma.sum()) == int(outcomes.accepted.sum()) == 0
        assert outcomes.passes.tolist() == [1] * STATES


class Swapped(LayerPolicy):
    """Children in another order than the record's."""

    def branch(self, growth, distributions):
        block = top_children(growth, distributions, self.top_m, 2)
        return alive_where(block, block.rank == 1).__class__(
            **{item.name: getattr(block, item.name) if item.name != "rank" else 1 - block.rank
               for item in fields(block)}
        )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (StaticChain(d_max=2, top_m=5), "sum over 6 probabilities, the policy's over 5"),
        (Eagle2(d_max=2, k=4, max_nodes=5, top_m=VOCAB), "asks for 4 children of a node, 3 are recorded"),
        (StaticChain(d_max=2, temperature=1.0, top_m=VOCAB), "a record holds no logits"),
        (Swapped(d_max=2, top_m=VOCAB), "not the recorded ones"),
    ],
)
def test_what_no_record_can_answer_is_refused(toy, policy, message) -> None:
    with pytest.raises(C2TError, match=message):
        replay(toy[2], policy, VOCAB)


def test_a_known_vocabulary_answers_for_more_than_is_recorded(toy_draft, toy_logits) -> None:
    logits = toy_logits(3, 0)
    forest = grow(toy_draft(4, logits), torch.zeros(4, 2, dtype=torch.int64), TreeShape(3, 2, 3))
    policy = ThresholdTree(d_max=2, score=Certainty(), beta=0.0, first_k=None)
    with pytest.raises(C2TError, match="collect with --top-m 1000"):
        replay(forest, policy, 3)
    assert replay(forest, ThresholdTree(d_max=2, score=JointProb(), beta=0.0, first_k=None), 3, vocab=3).gamma.tolist()


def test_a_continuation_that_is_too_short_is_refused(toy, toy_draft) -> None:
    logits, continuation, _ = toy
    with pytest.raises(C2TError, match="deeper than the 2 tokens"):
        grow_live(toy_draft(STATES, logits), StaticChain(d_max=3), continuation[:, :2], None)


def test_nothing_to_serve_is_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(C2TError, match="0 outcomes and 0 states"):
        serve(Outcomes(none, none, none, none, none), none)


def test_words_of_probability_zero_stay_out_of_replayed_trees(toy_draft) -> None:
    def logits(state, path):
        return [0.0, 0.0, -torch.inf, -torch.inf]

    continuation = torch.zeros(2, 2, dtype=torch.int64)
    forest = grow(toy_draft(2, logits), continuation, TreeShape(3, 2, 4))
    assert isinstance(forest, Forest)
    policy = Eagle2(d_max=2, k=3, max_nodes=99, top_m=4)
    live = grow_tree(toy_draft(2, logits), policy).tree
    again = grow_tree(RecordedDraft(forest, 4), policy).tree
    assert tokens_of(again, 0) == tokens_of(live, 0)
    assert live.sizes().tolist() == again.sizes().tolist() == [2 + 4] * 2
