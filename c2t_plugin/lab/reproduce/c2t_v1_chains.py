"""C2T v1, section 5.5: chains (table 3, which v2 prints again as table 7)."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from c2t_plugin.lab.reproduce.experiment import Bench, Experiment, Findings, Row
from c2t_plugin.lab.scores import ChainReplay, ChainYield
from c2t_plugin.lab.traces import Traces

D_MAX = 10
# method -> paper's average length, tau, gamma: candidates of all 80 MT-bench prompts
PAPER = {
    "static 5": (5.0, 1.98, 112_231),
    "static 6": (6.0, 2.06, 125_992),
    "static 7": (7.0, 2.10, 140_238),
    "static 8": (8.0, 2.09, 155_420),
    "static 9": (9.0, 2.13, 184_140),
    "DyMax .3": (6.10, 2.06, 127_018),
    "DyJoint .08": (6.33, 2.12, 129_876),
    "C2T": (5.46, 2.12, 116_694),
}
DYMAX, DYJOINT = 0.3, 0.08
DRAFTS = {"eagle1": "EAGLE-1 head", "eagle3": "EAGLE-3 head", "draft": "stand-alone"}


def yields(traces: Traces, confidence: Tensor) -> dict[str, ChainYield]:
    """Of every method of PAPER, and of C2T at the tau of static 5. confidence: (states, chain positions)."""
    replay = ChainReplay(traces, D_MAX)
    found = {f"static {length}": replay.static(length) for length in range(5, 10)}
    found["DyMax .3"] = replay.cut(traces.chain.log_prob, math.log(DYMAX))
    found["DyJoint .08"] = replay.cut(traces.chain.joint_log_prob, math.log(DYJOINT))
    found["C2T"] = replay.cut(confidence, beta_at(replay, confidence, found["DyJoint .08"].tau))
    return found


def beta_at(replay: ChainReplay, confidence: Tensor, tau: float) -> float:
    """The largest of 400 betas whose chains accept at least tau, 0 if none does.

    The paper's .85 holds for its own classifier; ours is cut where it accepts what DyJoint does, to compare the cost.
    """
    levels = np.quantile(confidence[:, :D_MAX].numpy(), np.linspace(0, 1, 400))
    betas = np.unique(levels).tolist()
    low, high = 0, len(betas)
    while low < high:
        middle = (low + high) // 2
        if replay.cut(confidence, betas[middle]).tau >= tau:
            low = middle + 1
        else:
            high = middle
    return betas[low - 1] if low else 0.0


def table_3(bench: Bench) -> Findings:
    rows: list[Row] = []
    for draft, title in DRAFTS.items():
        traces = bench.traces(draft)
        confidence = bench.classifier(draft).confidence(traces.chain.stats())
        found = yields(traces, confidence)
        base = found["static 5"].gamma_per_token
        for method, (length, tau, gamma) in PAPER.items():
            ours = found[method]
            rows.append(
                {
                    "draft": title,
                    "method": method,
                    "paper tau": tau,
                    "paper length": length,
                    "paper gamma / static 5": gamma / PAPER["static 5"][2],
                    "tau": ours.tau,
                    "length": ours.gamma,
                    "gamma / static 5": ours.gamma_per_token / base,
                }
            )
    return Findings(
        rows,
        "C2T is cut at the beta that accepts what DyJoint does. gamma counts the candidates of the same output: per "
        "output token, bonus tokens being output.",
    )


EXPERIMENTS = (
    Experiment(
        name="c2t-v1-table-3",
        title="Chains of at most 10: static length, DyMax, DyJoint, C2T",
        source="C2T v1 table 3, C2T v2 table 7; tau without bonus",
        columns=(
            "draft",
            "method",
            "paper tau",
            "paper length",
            "paper gamma / static 5",
            "tau",
            "length",
            "gamma / static 5",
        ),
        run=table_3,
    ),
)
