"""A score that no paper has: draft probabilities sharpened by a temperature and divided among the recorded children.

A greedy target takes the draft's first tokens more often than a draft that spreads its probability says. Dividing by
the siblings' sum alone (temperature 1) takes out what the draft gives to the thousands of tokens behind them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.all_rules import AGAINST, EAGLE2, TAUS, TREE, Rule, at_equal_tau
from benchmarks.papers.c2t_recent import confidences
from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from c2t_plugin.classifier import EXTENDED_FEATURES
from c2t_plugin.lab.curves import bootstrap_unit, bootstrap_weights, serve
from c2t_plugin.lab.report import forest_features
from c2t_plugin.lab.rivals import TEMPERED, sharpened
from c2t_plugin.lab.scores import auc
from c2t_plugin.lab.sweeps import Sweep, eagle2_sweep, threshold_sweep, thresholds, truncate
from c2t_plugin.lab.training import sample_negatives
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest

D_MAX = 10
HEATS = (1.0, 0.8, 0.6, 0.4)
# Of the feature that a classifier gets beside the extended ones.
FEATURE_HEAT = 0.6
TRAINING_PROMPTS, NEGATIVES = 40, 20.0
SHIPPED, FITTED, SHARPENED = "C2T, as shipped", "C2T, fitted here", "C2T, fitted here with the sharpened P"
AT = {f"tau {tau:g}": tau for tau in TAUS}


def features(forest: Forest) -> Tensor:
    """(trees, nodes, F + 1): the extended features and the sharpened P."""
    return torch.cat([forest_features(forest, EXTENDED_FEATURES, 1), sharpened(forest, FEATURE_HEAT)[..., None]], -1)


def fitted(known: Forest, held: Forest, seed: int) -> dict[str, Tensor]:
    """Confidences (trees, nodes) of two fits on the same nodes, which differ in that feature alone."""
    columns, accepted = common.by_trees(known, features).flatten(0, 1), known.accepted.flatten()
    rows = sample_negatives(accepted, NEGATIVES, torch.Generator().manual_seed(seed))
    columns, accepted = columns[rows], accepted[rows]
    wanted = common.by_trees(held, features).flatten(0, 1)
    shape = held.accepted.shape
    return {
        name: confidences((columns[:, :count], accepted), wanted[:, :count], seed).view(shape)
        for name, count in ((FITTED, len(EXTENDED_FEATURES)), (SHARPENED, len(EXTENDED_FEATURES) + 1))
    }


def rules(held: Traces, scores: Mapping[str, Tensor], tree: Forest) -> dict[str, Rule]:
    """EAGLE-2, and a threshold on each score."""

    def rule(varied: str, sweep: Sweep) -> Rule:
        return Rule(TREE, "", varied, serve(held, sweep, starts=common.STARTS))

    found = {EAGLE2: rule("nodes", eagle2_sweep(tree))}
    for name, score in scores.items():
        found[name] = rule("threshold", threshold_sweep(tree, score, thresholds(score, common.POINTS)))
    return found


def sharp(bench: Bench) -> Findings:
    rows: list[Row] = []
    said, unit = [], ""
    for draft, title in common.titles(bench).items():
        held = common.held_out(bench, draft)
        unit = bootstrap_unit(held)
        depth = min(D_MAX, held.tree.layers)
        tree = truncate(held.tree, depth)
        known = truncate(common.first_prompts(bench.traces(draft, "train"), TRAINING_PROMPTS).tree, depth)
        scores = {"threshold on P": tree.joint_log_prob.exp()}
        scores |= {f"threshold on P at temperature {heat:g}": sharpened(tree, heat).exp() for heat in HEATS}
        scores[TEMPERED.name] = TEMPERED.score(tree).exp()
        scores[SHIPPED] = common.confidence(bench.classifier(draft), tree)
        scores |= fitted(known, tree, bench.seed)
        aucs = {name: auc(score.flatten(), tree.accepted.flatten()) for name, score in scores.items()}
        said.append(f"{title} {aucs[SHARPENED] - aucs[FITTED]:+.4f}")
        weights = bootstrap_weights(held.groups)
        found = rules(held, scores, tree)
        for name, rule in found.items():
            cells = at_equal_tau(rule, found[EAGLE2], AT, weights)
            rows.append({"draft": title, "rule": name, **cells, "auc": aucs.get(name)})
    return Findings(
        rows,
        f"Candidates per verification at equal tau (bonus excluded), linear between two settings; gamma / EAGLE-2 is "
        f"the mean over the taus that both reach, 95% over {unit}. Temperature 1 divides by the siblings' sum alone. "
        f"Both fits see at most {TRAINING_PROMPTS} training prompts and {NEGATIVES:g} rejected nodes per accepted one. "
        f"The feature's gain of AUC over tree nodes: {'; '.join(said)}. {common.SAMPLED} {TEMPERED.name} is a "
        "classifier file too, which both engines serve; no adapter has the others.",
    )


EXPERIMENTS = (
    Experiment(
        name="c2t-sharpened",
        title="The draft's probabilities sharpened, as a rule and as a further feature, in trees",
        source="DySpec 5.1 drafts at temperature .6; the rest is in no paper",
        columns=("draft", "rule", *AT, *AGAINST, "auc"),
        run=sharp,
    ),
)
