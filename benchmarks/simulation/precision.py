"""What a fit loses by statistics that are stored in a byte each: the same fits on the same chains, as float32 and not.

    python -m benchmarks.simulation.precision

Chains are recorded as a server drafts them, one a state, of prompts that the pair was trained on and of held-out ones.
Each fit is judged on the held-out ones as they are, since a server reads what it drafts in float32. A fit with another
seed, on float32 too, shows how far fits differ anyway.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import run
from benchmarks.pairs.toy import pair_dir
from benchmarks.report.rows import BenchRow, append_rows
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.collect import collect
from c2t_plugin.lab.curves import PromptSums, bootstrap_weights, compare, serve
from c2t_plugin.lab.fit import fit
from c2t_plugin.lab.plans import CollectPlan, EvaluatePlan, FitPlan, TreeShape
from c2t_plugin.lab.scores import auc
from c2t_plugin.lab.sweeps import static_sweep, threshold_sweep
from c2t_plugin.lab.training import FIT_RECIPES
from c2t_plugin.provenance import RunRecord
from c2t_plugin.traces import coarse
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import TABLES, Forest

SCENARIO = "traces-precision"
DRAFT, RECIPE = "eagle3", "extended"
D_MAX, TOP_M = 6, 1000
OTHER_SEED = "float32, another seed"
# by arm
LEVELS = {f"{levels} levels": levels for levels in (coarse.LEVELS, 16)}


@dataclass(frozen=True)
class Plan:
    """states, judged: of the chains that are fitted on and judged on. seeds: fits of each arm."""

    states: int
    judged: int
    seeds: int


@dataclass(frozen=True)
class Judged:
    """One classifier on the held-out chains."""

    served: PromptSums
    auc: float


def chains(states: int, prompts: str) -> Traces:
    """Recorded as a server's: chains alone."""
    plan = CollectPlan(draft=DRAFT, shape=TreeShape(1, D_MAX, TOP_M), trees=states, prompts=prompts)
    found = collect(pair_dir(), plan)
    return replace(found, tree=found.chain)


def stored(traces: Traces, levels: int) -> Traces:
    """As they are read again after so many levels."""
    tables = {name: getattr(traces.chain, name) for name in TABLES}
    chain = Forest(1, traces.chain.layers, **coarse.unpacked(coarse.packed(tables, levels), levels))
    return replace(traces, tree=chain, chain=chain)


def judge(classifier: NodeClassifier, traces: Traces, plan: EvaluatePlan) -> Judged:
    confidence = classifier.confidence(traces.chain.stats())
    served = serve(traces, threshold_sweep(traces.chain, confidence), plan.every_state, plan.starts)
    return Judged(served, auc(confidence.flatten(), traces.chain.accepted.flatten()))


def differences(plan: Plan, training: Traces, judged: Traces) -> dict[str, dict[str, float | None]]:
    """Metrics by arm, each over the float32 fit of the same seed.

    ratio: of the verified tokens at the same accept lengths, those of static chains below D_MAX: its mean, and the
    least and largest bound of any interval of any seed. auc_difference: the largest of any seed, without its sign.
    """
    how = EvaluatePlan(d_max=D_MAX)
    weights = bootstrap_weights(judged.groups, how.replicates, how.seed)
    taus = serve(judged, static_sweep(judged.chain), how.every_state, how.starts).curve()[0][:-1].tolist()

    def fitted(traces: Traces, seed: int) -> Judged:
        classifier, _, _ = fit(traces, FIT_RECIPES[RECIPE], FitPlan(d_max=D_MAX, seed=seed))
        return judge(classifier, judged, how)

    seeds = range(plan.seeds)
    exact = [fitted(training, seed) for seed in seeds]
    arms = {name: [fitted(stored(training, levels), seed) for seed in seeds] for name, levels in LEVELS.items()}
    arms[OTHER_SEED] = [*exact[1:], exact[0]]
    return {name: _metrics(list(zip(found, exact, strict=True)), taus, weights) for name, found in arms.items()}


def _metrics(
    pairs: Sequence[tuple[Judged, Judged]], taus: Sequence[float], weights: np.ndarray
) -> dict[str, float | None]:
    """pairs: of a seed each, the second is on float32."""
    compared = [compare(mine.served, its.served, taus, weights) for mine, its in pairs]
    bounds = np.array([each.ratio_interval for each in compared])
    return {
        "ratio": float(np.nanmean([each.ratio for each in compared])),
        "ratio_low": float(np.nanmin(bounds)),
        "ratio_high": float(np.nanmax(bounds)),
        "auc_difference": max(abs(mine.auc - its.auc) for mine, its in pairs),
    }


def rows_of(plan: Plan, found: Mapping[str, Mapping[str, float | None]], record: Mapping[str, Any]) -> list[BenchRow]:
    setting: dict[str, str | int | float | None] = {
        "draft": DRAFT,
        "recipe": RECIPE,
        "d_max": D_MAX,
        "states": plan.states,
        "judged": plan.judged,
        "seeds": plan.seeds,
    }
    return [BenchRow(SCENARIO, "simulated", arm, setting, metrics, "", record) for arm, metrics in found.items()]


def main(argv: list[str]) -> int:
    """Record, fit, judge, print, append rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.precision",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--states", type=int, default=4000, help="chains to fit on, at least (default: 4000)")
    parser.add_argument("--judged", type=int, default=2000, help="held-out chains to judge on (default: 2000)")
    parser.add_argument("--seeds", type=int, default=3, help="fits of each arm (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("build/precision/rows.jsonl"), help="rows are appended here")
    options = parser.parse_args(argv)
    plan = Plan(options.states, options.judged, options.seeds)
    record = RunRecord.capture(seed=0).to_json()
    found = differences(plan, chains(plan.states, "train"), chains(plan.judged, "held-out"))
    rows = rows_of(plan, found, record)
    append_rows(options.out, rows)
    for row in rows:
        print(f"{row.arm}: {dict(row.metrics)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
