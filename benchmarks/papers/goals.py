"""The project's own goals as rows: candidates at equal accept length, with intervals, and the speed of the replay."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.experiment import Bench, Cell, Experiment, Findings, Row
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.curves import bootstrap_unit, serve
from c2t_plugin.lab.evaluate import plan_for
from c2t_plugin.lab.judging import Evaluation, evaluate_chains, evaluate_trees
from c2t_plugin.lab.plans import EvaluatePlan
from c2t_plugin.lab.sweeps import threshold_sweep, truncate
from c2t_plugin.traces.file import Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAND_ALONE = "draft"
TITLES = {**common.TITLES, "mtp": "MTP head"}
THREE, EXTENDED = "three", "extended"
ESTIMATOR = "vLLM's estimator, whole"
# Replicates of the bootstrap where figures mean little anyway.
QUICK_REPLICATES = 50
MILLION = 1e6
MEAN_OF, AUC_GAINED = "mean; ", "AUC gain x 100"

# At most so many candidates for EAGLE-2's: at every tau, and on average.
OF_EAGLE2 = {"head": (0.80, 0.75), STAND_ALONE: (0.90, None)}
OF_P = 0.85
OF_STATIC = 0.85
OF_RIVALS = 1.0
AUC_GAIN = 0.01
NODES_PER_SECOND = 1e6

COLUMNS = ("draft", "features", "against", "at", "gamma", "measured", "from", "to", "goal", "reached")
SOURCE = "This project's goals, in no paper; tau without bonus"
READING = (
    "measured is gamma over the other's at the same tau; from and to are its 95% interval, a paired bootstrap over "
    "{unit}. reached: yes if the whole interval keeps the goal, estimate only if the estimate does, else no."
)


class Measured(NamedTuple):
    """A figure and its 95% interval; NaN where it is out of reach."""

    value: float
    low: float
    high: float


def plan(bench: Bench, traces: Traces) -> EvaluatePlan:
    """As `c2t evaluate` judges by default."""
    return plan_for(traces, QUICK_REPLICATES if bench.quick else EvaluatePlan.replicates, bench.seed)


def classifiers(bench: Bench, draft: str) -> dict[str, NodeClassifier]:
    """Both that ship: the paper's three features, and the extended ones."""
    return {THREE: common.paper_features(bench, draft), EXTENDED: bench.classifier(draft)}


def at_most(measured: Measured, goal: float | None) -> dict[str, Cell]:
    """Cells of a figure that is to be small; goal None where there is none."""
    value, low, high = (None if math.isnan(each) else each for each in measured)
    reached = None
    if goal is not None and value is not None:
        reached = "no" if value > goal else "yes" if high is not None and high <= goal else "estimate only"
    words = None if goal is None else f"at most {goal}"
    return {"measured": value, "from": low, "to": high, "goal": words, "reached": reached}


def at_every_tau(
    names: Row, found: Mapping[str, Any], taus: Sequence[float], goals: Sequence[float | None], mean_goal: float | None
) -> list[Row]:
    """A row per tau and one for the mean. names: draft, features, against. found: curves.Compared as a dictionary."""
    rows = [
        {**names, "at": f"tau {tau:.2f}", "gamma": gamma, **at_most(Measured(ratio, *around), goal)}
        for tau, gamma, ratio, around, goal in zip(
            taus, found["gamma"], found["ratio"], found["ratio_interval"], goals, strict=True
        )
    ]
    mean = at_most(Measured(found["mean"], *found["mean_interval"]), mean_goal)
    return [*rows, {**names, "at": "mean", "gamma": None, **mean}]


def tree_goals(draft: str, taus: int) -> dict[str, tuple[list[float | None], float | None]]:
    """Against whom -> goal at every tau, and of the mean; against P from the middle of the taus on."""
    each, mean = OF_EAGLE2.get(draft, OF_EAGLE2["head"])
    middle = taus // 2
    return {"EAGLE-2": ([each] * taus, mean), "P": ([None] * middle + [OF_P] * (taus - middle), None)}


def trees(bench: Bench) -> Findings:
    rows: list[Row] = []
    evaluations: dict[str, Evaluation] = {}
    unit = ""
    for draft, title in TITLES.items():
        held = bench.traces(draft)
        unit = bootstrap_unit(held)
        evaluations[draft] = found = evaluate_trees(classifiers(bench, draft), held, plan(bench, held))
        goals = tree_goals(draft, len(found.taus))
        for rule in found.rules:
            for against, compared in rule.compared.items():
                # rules without training have none, nor has anything against them but P
                mine = goals.get(against) if rule.name in (THREE, EXTENDED) else None
                each, mean = mine or ([None] * len(found.taus), None)
                names = {"draft": title, "features": rule.name, "against": against}
                rows += at_every_tau(names, compared, found.taus, each, mean)
    return Findings(
        rows,
        f"All held-out prompts, trees of at most {EvaluatePlan.tree_depth} layers. {READING.format(unit=unit)} "
        f"P is the threshold on P. Goals kept by the estimate: {summary(rows)}.",
        picture(evaluations),
    )


def summary(rows: Sequence[Row]) -> str:
    """Of every draft and set of features, how many goals the estimate keeps, by what they are held against."""
    said = []
    for names in dict.fromkeys((row["draft"], row["features"]) for row in rows):
        parts = []
        own = [row for row in rows if (row["draft"], row["features"]) == names and row["reached"] is not None]
        for part in dict.fromkeys(_part(row) for row in own):
            kept = [row["reached"] != "no" for row in own if _part(row) == part]
            parts.append(f"{part} {sum(kept)} of {len(kept)}")
        if parts:
            said.append(f"{names[0]}, {names[1]}: {', '.join(parts)}")
    return "; ".join(said)


def _part(row: Row) -> str:
    if row["at"] == AUC_GAINED:
        return "AUC"
    return "means against rivals" if str(row["at"]).startswith(MEAN_OF) else f"against {row['against']}"


def picture(evaluations: Mapping[str, Evaluation]) -> Figure:
    """Candidates over EAGLE-2's, one panel per draft, bands of 95%; dashed: the goal."""
    from c2t_plugin.lab.pictures import TAU, panels

    figure, axes = panels(len(evaluations), 5.0)
    for axis, (draft, found) in zip(axes, evaluations.items(), strict=True):
        for rule in found.rules:
            compared = rule.compared["EAGLE-2"]
            (line,) = axis.plot(found.taus, compared["ratio"], marker=".", label=rule.name)
            low, high = zip(*compared["ratio_interval"], strict=True)
            axis.fill_between(found.taus, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axis.axhline(OF_EAGLE2.get(draft, OF_EAGLE2["head"])[0], color="black", linestyle="--", linewidth=0.8)
        axis.set(title=TITLES[draft], xlabel=TAU, ylabel="gamma / EAGLE-2")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    return figure


def chains(bench: Bench) -> Findings:
    rows: list[Row] = []
    unit = ""
    for draft, title in TITLES.items():
        held = bench.traces(draft)
        # few states are less than vLLM's estimator learns from at a time
        known = None if bench.quick else bench.traces(draft, "train")
        unit = bootstrap_unit(held)
        found = evaluate_chains(classifiers(bench, draft), held, known, plan(bench, held))
        for rule in found.rules:
            if rule.name not in (THREE, EXTENDED):
                continue
            names = {"draft": title, "features": rule.name}
            goals = [OF_STATIC] * len(found.taus)
            static = rule.compared["static"]
            rows += at_every_tau(names | {"against": "static"}, static, found.taus, goals, OF_STATIC)
            for rival, compared in rule.compared.items():
                if rival != "static":
                    mean = at_most(Measured(compared["mean"], *compared["mean_interval"]), OF_RIVALS)
                    rows.append({**names, "against": rival, "at": _below(compared), "gamma": None, **mean})
            if rule.auc_gain is not None and rule.auc_gain_interval is not None:
                gain = Measured(rule.auc_gain, *rule.auc_gain_interval)
                rows.append({**names, "against": ESTIMATOR, "at": AUC_GAINED, "gamma": None, **gained(gain)})
    return Findings(
        rows,
        f"All held-out prompts, chains of at most {EvaluatePlan.d_max}, at the tau of static chains of 1 to "
        f"{EvaluatePlan.d_max - 1}. {READING.format(unit=unit)} vLLM's estimator reads the training chains, as the "
        "engine does (online) and to its optimum (whole); an AUC gain also needs an interval above 0. Goals kept by "
        f"the estimate: {summary(rows)}.",
    )


def _below(compared: Mapping[str, Any]) -> str:
    ratios = [ratio for ratio in compared["ratio"] if not math.isnan(ratio)]
    return f"{MEAN_OF}at or below at {sum(ratio <= OF_RIVALS for ratio in ratios)} of {len(ratios)} taus"


def gained(gain: Measured) -> dict[str, Cell]:
    """Cells of an AUC gain, in hundredths: .01 or more, with an interval above 0."""
    reached = "yes" if gain.value >= AUC_GAIN and gain.low > 0.0 else "no"
    value, low, high = (100 * each for each in gain)
    return {"measured": value, "from": low, "to": high, "goal": f"at least {100 * AUC_GAIN}", "reached": reached}


def replay_speed(bench: Bench) -> Findings:
    rows: list[Row] = []
    for draft, title in TITLES.items():
        traces = bench.traces(draft)
        forest = truncate(traces.tree, plan(bench, traces).tree_depth)
        nodes = forest.accepted.numel()
        for name, classifier in classifiers(bench, draft).items():
            started = time.process_time()
            scores = common.confidence(classifier, forest)
            scored = time.process_time()
            sweep = threshold_sweep(forest, scores)
            serve(traces, sweep, starts=common.STARTS)
            done = time.process_time()
            speed = nodes / (done - scored)
            rows.append(
                {
                    "draft": title,
                    "features": name,
                    "nodes": nodes,
                    "thresholds": len(sweep.settings),
                    "M nodes/s": speed / MILLION,
                    "M nodes/s, scoring too": nodes / (done - started) / MILLION,
                    "goal": f"at least {NODES_PER_SECOND / MILLION}",
                    "reached": "yes" if speed >= NODES_PER_SECOND else "no",
                }
            )
    return Findings(
        rows,
        f"Recorded nodes replayed at all thresholds and served from {common.STARTS} starts per prompt, per second of "
        "processor time on one core. Scoring is the classifier's forward pass over all nodes.",
    )


EXPERIMENTS = (
    Experiment("goals-trees", "Goal: candidates of trees at equal tau", SOURCE, COLUMNS, trees),
    Experiment("goals-chains", "Goal: candidates and AUC of chains", SOURCE, COLUMNS, chains),
    Experiment(
        "goals-replay",
        "Goal: nodes replayed per second",
        "This project's goals, in no paper",
        (
            "draft",
            "features",
            "nodes",
            "thresholds",
            "M nodes/s",
            "M nodes/s, scoring too",
            "goal",
            "reached",
        ),
        replay_speed,
    ),
)
