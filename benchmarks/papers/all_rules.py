"""The rules of all four papers side by side: candidates at equal accept length, on the same states of a greedy target.

Chains, EAGLE-2, the threshold on P and C2T are read from the record at every setting; the others ask for what no record
holds and draft live at the very states that were recorded, at a few settings each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.experiment import Bench, Cell, Experiment, Findings, Row
from benchmarks.papers.sequoia import Sequoia
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.collect import run_live
from c2t_plugin.lab.curves import REPLICATES, PromptSums, bootstrap_unit, bootstrap_weights, compare, gamma_at, serve
from c2t_plugin.lab.grow import TreePolicy
from c2t_plugin.lab.plans import CollectPlan, TreeShape
from c2t_plugin.lab.policies.dyspec import DySpecGreedy, DySpecThreshold
from c2t_plugin.lab.policies.entropy import DynamicWidth
from c2t_plugin.lab.policies.presets import preset
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import FixedBranching, IndependentSequences
from c2t_plugin.lab.replay import Outcomes, acceptance_by_rank
from c2t_plugin.lab.rivals import CHAIN_RIVALS
from c2t_plugin.lab.sweeps import Sweep, eagle2_sweep, static_sweep, threshold_sweep, thresholds, truncate
from c2t_plugin.traces.file import Traces

DRAFTS = {"draft": "stand-alone", "eagle3": "EAGLE-3 head"}
D_MAX = 10
# Of the record; one prompt gives 40.
STATES, QUICK_STATES = 400, 40
QUICK_SETTINGS, QUICK_REPLICATES = 2, 50
TAUS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
AT = (*(f"tau {tau:g}" for tau in TAUS), "EAGLE-1's tau")
AGAINST = ("gamma / EAGLE-2", "from", "to")
COLUMNS = ("draft", "shape", "rule", "paper", "varied", *AT, *AGAINST)
CHAIN, TREE = "chain", "tree"
EAGLE1, EAGLE2 = "EAGLE-1's tree", "EAGLE-2"
THREE, EXTENDED = "C2T tree, paper's features", "C2T tree, extended features"
# DySpec's draft draws at .6 (its 5.1).
HEAT = 0.6
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
# DySpec's 1/n for those sizes, about; a threshold tree has a size limit too.
LIMITS, LIMIT_NODES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.01), 128
# sequences and their length
SEQUENCES = ((1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (4, 8), (8, 8))
SHAPES = ((1, 1), (2, 1), (2, 2), (1, 1, 3, 1, 1, 1, 1, 1), (2, 2, 2), (3, 2, 2, 1, 1), (2, 2, 2, 2))
ENTROPIES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True)
class Rule:
    """What is known of a rule. shape: chain or tree. paper: whose it is. varied: what its settings are."""

    shape: str
    paper: str
    varied: str
    curve: PromptSums

    def reaches(self, tau: float) -> bool:
        """Whether some setting accepts at least tau and some at most: no cheaper setting is made up."""
        taus = self.curve.curve()[0]
        return bool(taus.min() - 1e-9 <= tau <= taus.max() + 1e-9)


Settings = Mapping[float, TreePolicy]


def live_rules(acceptance: Tensor) -> dict[str, tuple[str, str, Settings]]:
    """Name -> paper, what is varied, policy by setting. acceptance: (ranks,) by which Sequoia plans its trees."""
    most_probable: dict[str, Any] = {"temperature": HEAT, "reading": "joint", "d_max": D_MAX}
    drawn: dict[str, Any] = {"temperature": HEAT, "sampled": True, "d_max": D_MAX}
    naive, both = preset("naive-width"), preset("dynamic-width-depth")
    rates = acceptance.tolist()
    return {
        EAGLE1: ("C2T v1", "nothing", {25.0: preset("eagle1").policy()}),
        "DySpec greedy, drawn": ("DySpec", "nodes", {n: DySpecGreedy(max_nodes=n, **drawn) for n in SIZES}),
        "DySpec greedy, most probable words": (
            "DySpec",
            "nodes",
            {n: DySpecGreedy(max_nodes=n, **most_probable) for n in SIZES},
        ),
        "DySpec threshold, drawn": (
            "DySpec",
            "threshold",
            {limit: DySpecThreshold(threshold=limit, max_nodes=LIMIT_NODES, **drawn) for limit in LIMITS},
        ),
        "DySpec threshold, most probable words": (
            "DySpec",
            "threshold",
            {limit: DySpecThreshold(threshold=limit, max_nodes=LIMIT_NODES, **most_probable) for limit in LIMITS},
        ),
        "Sequoia": ("DySpec's rival", "nodes", {n: Sequoia.plan(rates, n, D_MAX) for n in SIZES}),
        "SpecInfer": (
            "DySpec's rival",
            "branches per layer",
            {float(place): SpecInfer(branches=shape) for place, shape in enumerate(SHAPES)},
        ),
        "k sequences": (
            "DySpec's rival",
            "k and length",
            {
                float(place): IndependentSequences(sequences=k, length=length)
                for place, (k, length) in enumerate(SEQUENCES)
            },
        ),
        "static, 2 wide": ("Entropy trees", "depth", {n: FixedBranching(width=2, depth=n) for n in (1, 2, 3, 4, 5)}),
        "naive width": (
            "Entropy trees",
            "entropy limit",
            {limit: naive.policy(max_entropy=limit) for limit in ENTROPIES},
        ),
        "dynamic width": ("Entropy trees", "depth", {n: DynamicWidth(d_max=n) for n in (1, 2, 3)}),
        "dynamic width and depth": (
            "Entropy trees",
            "entropy limit",
            {limit: both.policy(max_entropy=limit) for limit in ENTROPIES[:6]},
        ),
    }


def same_states(traces: Traces, prompt: Tensor) -> tuple[Traces, Tensor]:
    """The recorded states of these prompts, and the rows of `prompt`, (states,) as of run_live, in their order.

    C2TError if the two are not the same states.
    """
    held = traces[torch.isin(traces.prompt, prompt.unique())]
    place = held.prompt.unique_consecutive()
    order = (prompt[:, None] == place).int().argmax(1).argsort(stable=True)
    if len(order) != len(held) or (prompt[order] != held.prompt).any():
        raise C2TError(f"{len(held)} states are recorded of the {len(order)} drafted at; collect the traces again")
    return held, order


def swept(outcomes: Mapping[float, Outcomes]) -> Sweep:
    """The settings of one rule as a sweep."""
    gamma, tau = (
        torch.stack([getattr(each, name) for each in outcomes.values()]).short() for name in ("gamma", "accepted")
    )
    return Sweep(torch.tensor(list(outcomes), dtype=torch.float32), gamma, tau)


def recorded_rules(bench: Bench, draft: str, held: Traces) -> dict[str, Rule]:
    """Chains, EAGLE-2, the threshold on P and C2T, at all settings of the record."""
    depth = min(D_MAX, held.tree.layers)
    chain, tree = truncate(held.chain, depth), truncate(held.tree, depth)
    classifiers = {THREE: common.paper_features(bench, draft), EXTENDED: bench.classifier(draft)}

    def rule(shape: str, paper: str, varied: str, sweep: Sweep) -> Rule:
        return Rule(shape, paper, varied, serve(held, sweep, starts=common.STARTS))

    found = {"static chain": rule(CHAIN, "C2T v1", "length", static_sweep(chain))}
    for rival in CHAIN_RIVALS:
        name, _, kept = rival.name.partition(", ")
        title = {"P": "DyJoint", "entropy": "entropy stop"}.get(name, name) + (f", {kept}" if kept else "")
        paper = "Entropy trees" if name == "entropy" else "C2T v1"
        sweep = threshold_sweep(chain, rival.score(chain), keeps_failing=rival.keeps_failing)
        found[title] = rule(CHAIN, paper, "threshold", sweep)
    for name, classifier in classifiers.items():
        sweep = threshold_sweep(chain, common.confidence(classifier, chain))
        found[name.replace("tree", "chain")] = rule(CHAIN, "C2T v1", "beta", sweep)
    found[EAGLE2] = rule(TREE, "C2T v1", "nodes", eagle2_sweep(tree))
    scores = {"threshold on P": tree.joint_log_prob.exp()}
    scores |= {name: common.confidence(classifier, tree) for name, classifier in classifiers.items()}
    for name, score in scores.items():
        levels = thresholds(score, common.POINTS)
        found[name] = rule(TREE, "C2T v1", "beta", threshold_sweep(tree, score, levels))
    return found


def measure(bench: Bench, draft: str) -> tuple[Traces, dict[str, Rule]]:
    """Every rule of every paper on the same states of one draft."""
    known = live_rules(acceptance_by_rank(bench.traces(draft, "train").tree))
    if bench.quick:
        known = {
            name: (paper, varied, dict(islice(own.items(), QUICK_SETTINGS)))
            for name, (paper, varied, own) in known.items()
        }
    states = QUICK_STATES if bench.quick else STATES
    held = bench.traces(draft)
    plan = CollectPlan(
        draft=draft,
        shape=TreeShape(layers=D_MAX),
        trees=states,
        prompts="held-out",
        new_tokens=int(held.header["new_tokens"]),
        seed=bench.seed,
    )
    policies = {f"{name} {setting}": each for name, (_, _, own) in known.items() for setting, each in own.items()}
    prompt, outcomes = run_live(bench.live(draft), plan, policies)
    held, order = same_states(held, prompt)
    found = recorded_rules(bench, draft, held)
    for name, (paper, varied, own) in known.items():
        sweep = swept({setting: outcomes[f"{name} {setting}"][order] for setting in own})
        found[name] = Rule(TREE, paper, varied, serve(held, sweep, starts=common.STARTS))
    return held, found


def all_rules(bench: Bench) -> Findings:
    rows: list[Row] = []
    said = []
    unit = ""
    for draft, title in DRAFTS.items():
        held, rules = measure(bench, draft)
        unit = bootstrap_unit(held)
        weights = bootstrap_weights(held.groups, QUICK_REPLICATES if bench.quick else REPLICATES, bench.seed)
        own = float(rules[EAGLE1].curve.curve()[0][0])
        mine = [_row(title, name, rule, rules[EAGLE2], own, weights) for name, rule in rules.items()]
        trees = fewest([row for row in mine if row["shape"] == TREE])
        said.append(f"{title} (EAGLE-1's tau is {own:.2f}): {fewest(mine)}; of trees alone: {trees}")
        rows += mine
    return Findings(
        rows,
        f"Candidates per verification, linear between two settings, nothing where a rule has no setting as small or as "
        f"large; gamma / EAGLE-2 is the mean over the taus of the row. Fewest: {'. '.join(said)}. The target is "
        f"greedy; {QUICK_STATES if bench.quick else STATES} held-out states; 95% intervals over {unit}. Trees reach "
        f"{D_MAX} layers, the entropy trees' 4. C2T's and P's lose a little at large tau, where the record ends. "
        "Candidates are all that is counted: DySpec's greedy construction takes a draft pass per node.",
    )


def _row(draft: str, name: str, rule: Rule, eagle2: Rule, own: float, weights: np.ndarray) -> dict[str, Cell]:
    """own: EAGLE-1's tau. weights: (replicates, prompts)."""
    names = {"draft": draft, "shape": rule.shape, "rule": name, "paper": rule.paper, "varied": rule.varied}
    return {**names, **at_equal_tau(rule, eagle2, dict(zip(AT, (*TAUS, own), strict=True)), weights)}


def at_equal_tau(rule: Rule, eagle2: Rule, wanted: Mapping[str, float], weights: np.ndarray) -> dict[str, Cell]:
    """Candidates by column -> tau, None where a rule has no setting as small or as large; then AGAINST."""
    gammas = gamma_at(*rule.curve.curve(), np.array(list(wanted.values())))
    cells: dict[str, Cell] = {
        column: float(gamma) if rule.reaches(tau) else None
        for (column, tau), gamma in zip(wanted.items(), gammas, strict=True)
    }
    both = [tau for tau in wanted.values() if rule.reaches(tau) and eagle2.reaches(tau)]
    against: list[Cell] = [None, None, None]
    if both:
        compared = compare(rule.curve, eagle2.curve, both, weights)
        against = [None if np.isnan(each) else each for each in (compared.mean, *compared.mean_interval)]
    return {**cells, **dict(zip(AGAINST, against, strict=True))}


def fewest(rows: Sequence[Row]) -> str:
    """For a remark: which rule has the fewest candidates at each tau."""
    parts = []
    for column in AT[:-1]:
        reached = {str(row["rule"]): float(row[column] or 0.0) for row in rows if row[column] is not None}
        if reached:
            parts.append(f"{column} {min(reached, key=lambda name: reached[name])}")
    return ", ".join(parts)


EXPERIMENTS = (
    Experiment(
        name="all-rules",
        title="All rules of the four papers: candidates at equal accept length",
        source="C2T v1 tables 1, 3 and 4, DySpec tables 1 to 4, Entropy trees figure 2; tau without bonus",
        columns=COLUMNS,
        run=all_rules,
    ),
)
