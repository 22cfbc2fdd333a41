"""Classifiers and their rivals judged on recorded traces, for `c2t evaluate`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.progress import track
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.calibration import calibration
from c2t_plugin.lab.curves import PromptSums, bootstrap_weights, compare, gamma_at, interval, serve
from c2t_plugin.lab.plans import EvaluatePlan
from c2t_plugin.lab.rivals import CHAIN_FORMS, CHAIN_RIVALS, TREE_FORMS, OnlineLogistic
from c2t_plugin.lab.scores import auc, weighted_auc
from c2t_plugin.lab.sweeps import (
    censored,
    eagle2_sweep,
    kept_nodes,
    static_sweep,
    threshold_sweep,
    thresholds,
    top_k_sweep,
    truncate,
)
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest

# Drafts verified at once when vLLM's estimator reads the training traces; it refits every 100 steps.
ESTIMATOR_BATCH = 16
# The second top-K needs a pass of its own per threshold.
TOP_K_POINTS = 100


@dataclass(frozen=True)
class RuleResult:
    """One rule on chains or on trees. Intervals are (low, high), of 95%.

    auc: over all nodes. calibration: fields of Calibration, None of rules that give no probability.
    compared: curves.Compared per baseline name; of a classifier in chains, every rival is one.
    censored: of trees, where the record ends first, at the middle tau.
    nodes_per_second: of trees, recorded nodes replayed at all thresholds, per second of processor time on one core.
    """

    name: str
    auc: float
    auc_interval: tuple[float, float]
    auc_gain: float | None = None
    auc_gain_interval: tuple[float, float] | None = None
    calibration: dict[str, Any] | None = None
    compared: dict[str, dict[str, Any]] = field(default_factory=dict)
    censored: dict[str, float] | None = None
    nodes_per_second: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """taus: accept lengths, bonus excluded. baselines: name -> gamma at each tau. rules: in order of the tables.
    reference: rule that AUC gains are over, None if it is not there."""

    taus: list[float]
    baselines: dict[str, list[float]]
    rules: list[RuleResult]
    reference: str | None = None


def evaluate_chains(
    classifiers: Mapping[str, NodeClassifier], traces: Traces, training: Traces | None, plan: EvaluatePlan
) -> Evaluation:
    """At the accept lengths of static chains below d_max; there is nothing to save at d_max itself."""
    chain = truncate(traces.chain, plan.d_max)
    weights = bootstrap_weights(traces.groups, plan.replicates, plan.seed)
    scores = {rule.name: (rule.score(chain), rule.keeps_failing) for rule in (*CHAIN_RIVALS, *CHAIN_FORMS)}
    forms = ("P", *(form.name for form in CHAIN_FORMS))
    # a closed form may exceed 1
    probabilities = {name: scores[name][0].exp().clamp_max(1.0) for name in forms}
    reference = None
    if training is not None:
        reference = "vLLM's estimator, whole"
        online = OnlineLogistic(plan.d_max).fit(training.chain, plan.d_max, ESTIMATOR_BATCH)
        whole = OnlineLogistic(plan.d_max).fit_whole(training.chain, plan.d_max)
        for name, model in (("vLLM's estimator, online", online), (reference, whole)):
            scores[name] = (model.survival(chain), False)
            probabilities[name] = scores[name][0].exp()
    for name, classifier in classifiers.items():
        probabilities[name] = classifier.confidence(chain.stats())
        scores[name] = (probabilities[name], False)
    static = serve(traces, static_sweep(chain), plan.every_state, plan.starts)
    taus = static.curve()[0][:-1].tolist()
    curves = {
        name: serve(traces, threshold_sweep(chain, score, keeps_failing=keeps), plan.every_state, plan.starts)
        for name, (score, keeps) in track(scores.items(), "chains, served")
    }
    aucs = {
        name: _auc(score, chain.accepted, traces, weights) for name, (score, _) in track(scores.items(), "chains, AUC")
    }
    rules = []
    for name, curve in track(curves.items(), "chains, compared"):
        others = [rival for rival in curves if rival not in classifiers] if name in classifiers else ["P"]
        against = {"static": static, **{other: curves[other] for other in others if other != name}}
        compared = {other: asdict(compare(curve, baseline, taus, weights)) for other, baseline in against.items()}
        rules.append(
            RuleResult(
                name,
                **_auc_fields(aucs[name], aucs.get(reference or "")),
                calibration=_calibration(probabilities.get(name), chain.accepted),
                compared=compared,
            )
        )
    return Evaluation(taus, {"static": gamma_at(*static.curve(), np.asarray(taus)).tolist()}, rules, reference)


def evaluate_trees(classifiers: Mapping[str, NodeClassifier], traces: Traces, plan: EvaluatePlan) -> Evaluation:
    """Threshold on P, closed forms and classifiers against EAGLE-2's top N by P, on trees that EAGLE-2 expanded."""
    forest = truncate(traces.tree, plan.tree_depth)
    weights = bootstrap_weights(traces.groups, plan.replicates, plan.seed)
    scores = {"P": forest.joint_log_prob.exp()}
    scores |= {form.name: form.score(forest).exp() for form in TREE_FORMS}
    scores |= {name: classifier.confidence(forest.stats()) for name, classifier in classifiers.items()}
    baseline = serve(traces, eagle2_sweep(forest), plan.every_state, plan.starts)
    curves, speed = {}, {}
    for name, score in track(scores.items(), "trees, served"):
        started = time.process_time()
        curves[name] = serve(traces, threshold_sweep(forest, score), plan.every_state, plan.starts)
        speed[name] = forest.accepted.numel() / (time.process_time() - started)
    judged = dict(scores)
    if plan.second_top_k is not None:
        for name in track(list(classifiers), "trees, second top-K"):
            title = f"{name}, second top-{plan.second_top_k}"
            betas = thresholds(scores[name], TOP_K_POINTS).tolist()
            sweep = top_k_sweep(forest, scores[name], betas, plan.second_top_k)
            curves[title] = serve(traces, sweep, plan.every_state, plan.starts)
            judged[title] = scores[name]
    taus = list(plan.taus) if plan.taus else _spread([baseline, *curves.values()])
    rivals = ("P", *(form.name for form in TREE_FORMS))
    rules = []
    for name, curve in track(curves.items(), "trees, compared"):
        compared = {"EAGLE-2": asdict(compare(curve, baseline, taus, weights))}
        others = ("P",) if name in rivals else rivals
        compared |= {other: asdict(compare(curve, curves[other], taus, weights)) for other in others if other != name}
        rules.append(
            RuleResult(
                name,
                **_auc_fields(_auc(judged[name], forest.accepted, traces, weights[:0]), None),
                # a closed form may exceed 1
                calibration=_calibration(judged[name].clamp_max(1.0), forest.accepted),
                compared=compared,
                censored=_censored(forest, judged[name], curve, taus[len(taus) // 2]),
                nodes_per_second=speed.get(name),
            )
        )
    return Evaluation(taus, {"EAGLE-2": gamma_at(*baseline.curve(), np.asarray(taus)).tolist()}, rules)


def _spread(curves: list[PromptSums]) -> list[float]:
    reached = min(float(curve.curve()[0].max()) for curve in curves)
    return sorted({round(float(tau), 2) for tau in np.linspace(0.2, 0.9, 8) * reached})


def _auc(scores: Tensor, accepted: Tensor, traces: Traces, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """Over all nodes, and of bootstrap replicates."""
    flat, label = scores.flatten(), accepted.flatten()
    owner = traces.owner.repeat_interleave(scores.shape[1])
    return auc(flat, label), weighted_auc(flat, label, owner, weights)


def _auc_fields(own: tuple[float, np.ndarray], reference: tuple[float, np.ndarray] | None) -> dict[str, Any]:
    """auc and auc_interval; with another rule as reference, auc_gain and auc_gain_interval too."""
    around = interval(own[1]) if len(own[1]) else (float("nan"),) * 2
    found = {"auc": own[0], "auc_interval": around}
    if reference is not None and reference is not own:
        gain = interval(np.subtract(own[1], reference[1]))
        found |= {"auc_gain": own[0] - reference[0], "auc_gain_interval": gain}
    return found


def _calibration(confidence: Tensor | None, accepted: Tensor) -> dict[str, Any] | None:
    if confidence is None:
        return None
    return asdict(calibration(confidence.flatten(), accepted.flatten()))


def _censored(forest: Forest, confidence: Tensor, curve: PromptSums, tau: float) -> dict[str, float]:
    """At the largest threshold that reaches tau."""
    fitting = curve.settings[curve.curve()[0] >= tau]
    beta = float(fitting.max()) if len(fitting) else float(curve.settings.min())
    return {"beta": beta, **asdict(censored(forest, kept_nodes(forest, confidence, beta)))}
