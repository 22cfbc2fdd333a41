"""How the simulation replays the arms of `benchmarks.serving.arms`: the drafts, what an arm knows of them and pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.report.tables import AUTO, TREE_AUTO
from benchmarks.simulation.recorded import Replay
from benchmarks.simulation.setting import Entrant, Setting
from benchmarks.simulation.sglang_adaptive import SglangAdaptive
from benchmarks.simulation.shaped import Drafts, ShapedTrees
from benchmarks.simulation.steps import (
    Policy,
    ending,
    fixed_beta,
    plain,
    planned,
    planned_tree,
    static,
    whole_tree,
)
from c2t_plugin.lab.rivals import joint_prob, tempered
from c2t_plugin.lab.sweeps import kept_nodes, path_minimum, truncate
from c2t_plugin.lab.trees import Forest
from c2t_plugin.planner.shapes import Shape

STATIC = (1, 2, 3, 4, 6, 8)
THRESHOLDS = (0.1, 0.3, 0.5)
BETAS = (0.3, 0.5, 0.7)
TREE_NODES = (16, 32, 60)
TREE_BETAS = (0.1, 0.3)

Replays = Callable[[str, Replay, Setting], Iterator[Entrant]]


def _accepted(replay: Replay) -> Tensor:
    """(states, depth) bool of whole chains."""
    return replay.traces.chain.accepted.int().cumprod(1).bool()


def _certain(replay: Replay) -> Tensor:
    """(states, depth) of an arm that is told nothing."""
    return torch.ones_like(replay.traces.chain.joint_log_prob)


def _plain(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    alone = setting.machine.curve(setting.target, None, setting.requests)
    yield Entrant(arm, arm, plain(), alone, _certain(replay), _accepted(replay), setting.tokens(0), width=0)


def _static(arm: str, replay: Replay, setting: Setting, *, length: int) -> Iterator[Entrant]:
    told = _certain(replay), _accepted(replay)
    yield Entrant(arm, arm, static(length), setting.curve(), *told, setting.tokens(length))


def _sglang_adaptive(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    accepted = _accepted(replay)
    adaptive = SglangAdaptive(initial=3)
    policy = Policy("adaptive", adaptive.depth, adaptive.keep)
    yield Entrant(arm, arm, policy, setting.curve(), accepted.float(), accepted, adaptive.tokens(setting.requests))


def _scored(arm: str, name: str, policy: Policy, seen: Tensor, replay: Replay, setting: Setting) -> Entrant:
    """An arm that scores each draft token and may verify all. seen: (states, depth) what it goes by."""
    longest = setting.tokens(setting.d_max)
    return Entrant(arm, name, policy, setting.curve(scored=True), seen, _accepted(replay), longest)


def _threshold(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    """P at a threshold; and as D-Cut (arXiv 2607.14647) uses it, taken for the chance of acceptance, by which a table
    of costs takes the best of the whole batch."""
    joint = joint_prob(replay.traces.chain).exp()
    for least in THRESHOLDS:
        yield _scored(arm, f"P >= {least:g}", fixed_beta(least, setting.d_max), joint, replay, setting)
    yield _scored(arm, "planned, P (D-Cut)", planned(setting.curve(scored=True), setting.d_max), joint, replay, setting)


def _closed_form(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    """log P and a share of the path's entropy, at a threshold; and planned, if its meaning was learnt."""
    score = tempered(replay.traces.chain).exp()
    for least in THRESHOLDS:
        policy = fixed_beta(least, setting.d_max)
        yield _scored(arm, f"closed form >= {least:g}", policy, score, replay, setting)
    if replay.closed_form is not None:
        chance = replay.closed_form.confidence(replay.traces.chain.stats())
        policy = planned(setting.curve(scored=True), setting.d_max)
        yield _scored(arm, "planned, closed form", policy, chance, replay, setting)


def _c2t(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    confidence = replay.classifier.confidence(replay.traces.chain.stats())
    for beta in BETAS:
        yield _scored(arm, f"C2T beta {beta:g}", fixed_beta(beta, setting.d_max), confidence, replay, setting)


def _vllm_adaptive(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    """vLLM's estimator, if it was trained, with C2T's planner in the place of vLLM's manager."""
    if replay.estimator is not None:
        survival = replay.estimator.survival(replay.traces.chain).exp()
        policy = planned(setting.curve(scored=True), setting.d_max)
        yield _scored(arm, "planned, vLLM's estimator", policy, survival, replay, setting)


def _c2t_auto(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    confidence = (replay.calibrated or replay.classifier).confidence(replay.traces.chain.stats())
    curve = setting.curve(scored=True)
    yield _scored(arm, AUTO, planned(curve, setting.d_max), confidence, replay, setting)
    yield _scored(arm, "planned, drafts end", ending(curve, setting.d_max), confidence, replay, setting)


def _forest(replay: Replay, setting: Setting) -> Forest:
    """The recorded trees, at most d_max deep. A record that ends before a tree does leaves tau a little too small."""
    return truncate(replay.traces.tree, min(setting.d_max, replay.traces.tree.layers))


def _eagle2_tree(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    forest = _forest(replay, setting)
    _, accepted = _in_order(forest, forest.joint_log_prob, max(TREE_NODES))
    for nodes in dict.fromkeys(min(size, accepted.shape[1]) for size in TREE_NODES):
        whole = torch.full((len(forest),), nodes)
        yield _whole_trees(arm, f"EAGLE-2 tree of {nodes}", whole, accepted, forest, setting, scored=False)


def _c2t_tree(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    forest = _forest(replay, setting)
    confidence = replay.classifier.confidence(forest.stats())
    yield from _cut_trees(arm, "C2T tree, beta {:g}", confidence, forest, setting)


def _closed_form_tree(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    forest = _forest(replay, setting)
    yield from _cut_trees(arm, "closed form tree >= {:g}", tempered(forest).exp(), forest, setting)


def _c2t_tree_auto(arm: str, replay: Replay, setting: Setting) -> Iterator[Entrant]:
    """Trees grown without a threshold, whose likeliest nodes the planner takes, if their meaning was learnt."""
    if replay.on_trees is None:
        return
    forest = _forest(replay, setting)
    confidence = replay.on_trees.confidence(forest.stats())
    grown = kept_nodes(forest, confidence, 0.0, forest.k)
    most = forest.k * forest.layers
    chance, accepted = _in_order(forest, path_minimum(forest, confidence).masked_fill(~grown, -torch.inf), most)
    curve = setting.curve(scored=True, width=forest.k)
    policy, tokens = planned_tree(curve, forest.layers), setting.tokens(most)
    whole = Entrant(arm, TREE_AUTO, policy, curve, chance, accepted, tokens, forest.k)
    yield whole
    curves = {1: setting.curve(scored=True), forest.k: curve}
    step = ShapedTrees(_shapes(forest, confidence, replay), curves)
    yield dataclasses.replace(whole, name="C2T tree auto, width by step", step=step)


def _shapes(forest: Forest, confidence: Tensor, replay: Replay) -> dict[Shape, Drafts]:
    """Chains and trees of every depth that these have."""
    assert replay.on_trees is not None
    found = {}
    chain, accepted = replay.on_trees.confidence(replay.traces.chain.stats()), _accepted(replay)
    for depth in range(1, forest.layers + 1):
        tree = truncate(forest, depth)
        own = confidence[:, : tree.accepted.shape[1]]
        grown = path_minimum(tree, own).masked_fill(~kept_nodes(tree, own, 0.0, tree.k), -torch.inf)
        found[Shape(tree.k, depth)] = Drafts(*_in_order(tree, grown, tree.k * depth))
        falling = chain[:, :depth].nan_to_num(nan=1.0).cummin(1).values
        found[Shape(1, depth)] = Drafts(falling, accepted[:, :depth])
    return found


def _in_order(forest: Forest, score: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` nodes of highest score of each tree, equal ones in node order: their scores, falling, and which of
    them are accepted. score: (states, nodes), no node's above its parent's."""
    order = score.argsort(dim=1, descending=True, stable=True)[:, :most]
    return score.gather(1, order), forest.accepted.gather(1, order)


def _cut_trees(arm: str, name: str, score: Tensor, forest: Forest, setting: Setting) -> Iterator[Entrant]:
    """Trees cut at TREE_BETAS. name: has a place for one of them. score: (states, nodes)."""
    for beta in TREE_BETAS:
        kept = kept_nodes(forest, score, beta, forest.k)
        sizes = kept.sum(1)
        _, accepted = _in_order(forest, kept.float(), int(sizes.max()))
        yield _whole_trees(arm, name.format(beta), sizes, accepted, forest, setting, scored=True)


def _whole_trees(
    arm: str, name: str, sizes: Tensor, accepted: Tensor, forest: Forest, setting: Setting, *, scored: bool
) -> Entrant:
    """An arm that verifies all nodes of its trees. sizes: (states,) int64. accepted: see Entrant."""
    curve, policy = setting.curve(scored, forest.k), whole_tree(forest.layers)
    tokens = setting.tokens(int(sizes.max()))
    return Entrant(arm, name, policy, curve, sizes[:, None].float(), accepted, tokens, forest.k)


# by the table's name of an arm: its entrants, of which several differ in a threshold
CHAINS: Mapping[str, Replays] = {
    "plain": _plain,
    **{f"static {length}": partial(_static, length=length) for length in STATIC},
    "SGLang adaptive": _sglang_adaptive,
    "threshold on P": _threshold,
    "closed form": _closed_form,
    "C2T": _c2t,
    "vLLM adaptive": _vllm_adaptive,
    "C2T auto": _c2t_auto,
}
TREES: Mapping[str, Replays] = {
    "EAGLE-2 tree": _eagle2_tree,
    "C2T tree": _c2t_tree,
    "C2T tree auto": _c2t_tree_auto,
    "closed form tree": _closed_form_tree,
}


def chain_arms(replay: Replay, setting: Setting) -> Iterator[Entrant]:
    """Plain decoding and everything that drafts chains."""
    for arm, replays in CHAINS.items():
        yield from replays(arm, replay, setting)


def tree_arms(replay: Replay, setting: Setting) -> Iterator[Entrant]:
    """EAGLE-2's tree, C2T's and the closed form's."""
    for arm, replays in TREES.items():
        yield from replays(arm, replay, setting)
