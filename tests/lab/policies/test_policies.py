"""What every policy promises, and settings that are refused."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch

from benchmarks.papers.sequoia import Sequoia
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.policies.base import JointProb
from c2t_plugin.lab.policies.c2t import ThresholdTree
from c2t_plugin.lab.policies.chains import DyJoint, DyMax, EntropyStop, StaticChain
from c2t_plugin.lab.policies.dyspec import DySpec, DySpecGreedy, DySpecThreshold
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.policies.entropy import DynamicWidth, NaiveWidth
from c2t_plugin.lab.policies.presets import PRESETS, preset
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import FixedBranching, IndependentSequences, StaticTree
from c2t_plugin.lab.verify import Drafting, Draw, Pruning, Verification, exact_verifications
from tests.support.core.policy_toys import classifier_of


def every_policy():
    classifier = classifier_of("joint_prob", "entropy", "depth", weights=(6.0, 0.3, -0.2), bias=-2.5, top_m=5)
    for name, item in PRESETS.items():
        changes = {} if item.needs_classifier else {"top_m": 5}
        if issubclass(item.kind, DySpec):
            # without limits their trees over few words are deep and slow
            changes |= {"max_nodes": 40, "d_max": 6}
        # the others of table 2, and DySpec's sizes, differ in one number
        if not name.endswith(("70b", "13b", "33b", "768")):
            yield pytest.param(item.policy(classifier, **changes), id=name)
    yield pytest.param(IndependentSequences(sequences=3, length=2), id="sequences")
    yield pytest.param(StaticChain(d_max=3, temperature=0.7), id="sampled-chain")


@pytest.mark.parametrize("policy", list(every_policy()))
@pytest.mark.parametrize("vocab", [1, 3, 9])
def test_every_policy_keeps_the_trees_promises(policy, vocab, path_draft, at_random, paths) -> None:
    logits = at_random(vocab, 7, 1.5)

    def run():
        return grow_tree(path_draft(3, logits), policy, torch.Generator().manual_seed(0))

    grown = run()
    tree = grown.tree.validate()
    d_max = getattr(policy, "d_max", None)
    assert int((tree.depths * tree.alive).max()) <= d_max
    # one by one, or layer by layer
    assert int(grown.passes.max()) <= (policy.max_nodes if isinstance(policy, DySpecGreedy) else d_max)
    assert int(tree.sizes().max()) <= getattr(policy, "max_nodes", math.inf)
    assert torch.isfinite(tree.joint_log_probs[tree.alive]).all()
    siblings = Counter(zip(*(value[tree.alive].tolist() for value in (tree.parent_ids, tree.rank)), strict=True))
    assert max(siblings.values(), default=0) <= tree.batch
    again = run().tree
    assert all(torch.equal(getattr(tree, item.name), getattr(again, item.name)) for item in dataclasses.fields(tree))
    if not getattr(policy, "temperature", 0.0):
        alone = grow_tree(path_draft(1, lambda state, path: logits(2, path)), policy).tree
        assert paths(alone) == paths(tree, 2), "the rest of the batch changes nothing"


TOP = Drafting(Draw.TOP_K, Pruning.BEFORE_SIBLINGS)
BY_SCORE = Drafting(Draw.TOP_K, Pruning.OWN_DRAW)


@pytest.mark.parametrize(
    ("policy", "drafting"),
    [
        (StaticChain(d_max=2), TOP),
        (StaticChain(d_max=2, temperature=0.5), Drafting(Draw.INDEPENDENT)),
        (DyJoint(d_max=2, threshold=0.5), BY_SCORE),
        (EntropyStop(d_max=2, max_entropy=0.5), BY_SCORE),
        (ThresholdTree(d_max=2, score=JointProb(), beta=0.5), BY_SCORE),
        (Eagle2(d_max=2, max_nodes=3), BY_SCORE),
        (NaiveWidth(d_max=2, k=2, max_entropy=1.0), BY_SCORE),
        (DynamicWidth(d_max=2), BY_SCORE),
        (StaticTree(paths=((0,),)), TOP),
        (StaticTree(paths=((0,),), temperature=0.5), Drafting(Draw.WITHOUT_REPLACEMENT)),
        (Sequoia(paths=((0,),), temperature=0.5), Drafting(Draw.WITHOUT_REPLACEMENT)),
        (FixedBranching(width=2, depth=2), TOP),
        (SpecInfer(branches=(2,), temperature=0.5), Drafting(Draw.INDEPENDENT)),
        (IndependentSequences(sequences=2, length=2, temperature=0.5), Drafting(Draw.INDEPENDENT)),
        (DySpecGreedy(max_nodes=3), Drafting(Draw.TOP_K, Pruning.BEFORE_DRAW)),
        (DySpecGreedy(max_nodes=3, sampled=True), Drafting(Draw.WITHOUT_REPLACEMENT, Pruning.BEFORE_DRAW)),
    ],
)
def test_policies_say_how_they_draft(policy, drafting, path_draft, at_random) -> None:
    assert policy.drafting == drafting
    grown = grow_tree(path_draft(1, at_random(4, 1, 1.0)), policy, torch.Generator().manual_seed(0))
    assert grown.drafting == drafting


@pytest.mark.parametrize("policy", list(every_policy()))
def test_only_what_is_drawn_may_be_rejected(policy) -> None:
    """No verification divides by the probability of a token that was not drawn."""
    drawn = getattr(policy, "sampled", getattr(policy, "temperature", 0.0) > 0)
    rejections = exact_verifications(policy.drafting) - {Verification.GREEDY, Verification.TARGET_ONLY}
    assert bool(rejections) == bool(drawn)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaticChain(d_max=0), "d_max must be an integer of at least 1"),
        (lambda: StaticChain(d_max=2, temperature=-1.0), "temperature must be a number of at least 0"),
        (lambda: StaticChain(d_max=2, top_m=0), "top_m must be an integer"),
        (lambda: DyMax(d_max=2, threshold=1.5), r"threshold must be a number in \[0.0, 1.0\], got 1.5"),
        (lambda: DyJoint(d_max=2, threshold=math.nan), "threshold must be a number"),
        (lambda: EntropyStop(d_max=2, max_entropy=-0.1), "max_entropy must be a number of at least 0"),
        (lambda: Eagle2(d_max=2, max_nodes=0), "max_nodes must be an integer of at least 1"),
        (lambda: Eagle2(d_max=2, k=True, max_nodes=3), "k must be an integer"),
        (lambda: ThresholdTree(d_max=2, score=JointProb(), beta=2.0), "beta must be a number"),
        (lambda: ThresholdTree(d_max=2, score=JointProb(), beta=0.5, first_k=0), "first_k must be an integer"),
        (lambda: ThresholdTree(d_max=2, score=JointProb(), beta=0.5, second_k=0), "second_k must be an integer"),
        (lambda: StaticTree(paths=()), "at least one is needed"),
        (lambda: StaticTree(paths=((0,), (0,))), "none twice"),
        (lambda: StaticTree(paths=((0,), (1, 0))), r"path \(1, 0\) must be ranks"),
        (lambda: StaticTree(paths=((-1,),)), r"path \(-1,\) must be ranks"),
        (lambda: SpecInfer(branches=(1, 0)), "branches must be integers of at least 1"),
        (lambda: FixedBranching(width=2, depth=0), "depth must be an integer of at least 1"),
        (lambda: IndependentSequences(sequences=0, length=2), "sequences must be an integer of at least 1"),
        (lambda: DynamicWidth(d_max=2, sure=2.0), r"sure \(2.0\) must not exceed unsure"),
        (lambda: NaiveWidth(d_max=2, k=0, max_entropy=1.0), "k must be an integer"),
        (lambda: preset("c2t").policy(), "needs a classifier"),
        (lambda: preset("c3t"), "no preset 'c3t'; there are c2t"),
    ],
)
def test_bad_settings_are_refused(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_dyspecs_presets_hold_its_constants() -> None:
    found = {name: item.policy() for name, item in PRESETS.items() if issubclass(item.kind, DySpec)}
    assert found == {
        "dyspec-64": DySpecGreedy(max_nodes=64, temperature=0.6, sampled=True),
        "dyspec-768": DySpecGreedy(max_nodes=768, temperature=0.6, sampled=True),
        "dyspec-threshold": DySpecThreshold(threshold=0.001, max_nodes=768, temperature=0.6, sampled=True),
    }
    assert preset("dyspec-64").policy(sampled=False).sampled is False
