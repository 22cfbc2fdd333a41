"""What a cut by what was learnt makes of what is learnt next: the replay of `learning`, with and without it.

    python -m benchmarks.simulation.censoring --learn TRAINING.traces --judge HELD_OUT.traces --offline CLASSIFIER \\
        --from draft=CLASSIFIER --name "toy, EAGLE-3"

Nothing is learnt of a draft token that was not verified, and what is verified follows from what was learnt. So each
start is replayed seven times: verified whole; as a planner cuts that takes the chances of that moment for true, with
so many requests (--requests) on a GPU's data sheet; as it cuts with its probes, steps that are verified whole; both
once more where the text tells of the first token that was cut, and once more where it tells of all that was drafted, as
it does in servers. One start more is a pessimist, the offline fit's network with a bias so low that the planner cuts
nearly everything. States are the same, in the same order, whatever is verified. They are judged as `learning` judges,
uncut.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from benchmarks.command import run
from benchmarks.report.rows import BenchRow
from benchmarks.simulation import learning
from benchmarks.simulation.learning import LOADS, OFFLINE, Served, curve_of, learnt, retrained, whole
from benchmarks.simulation.streams import replay
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import AUTO, NETWORK
from c2t_plugin.planner import CostCurve, Planner
from c2t_plugin.planner.planner import PROBE_EVERY

SCENARIO = "censoring"
WHOLE, AS_CUT, PROBED = "whole", "as cut", "as cut, with probes"
# where the text tells of the first token that was cut
TOLD, TOLD_PROBED = (f"{way}, the text tells" for way in (AS_CUT, PROBED))
# where it tells of all that was drafted
ALL, ALL_PROBED = (f"{way}, the text tells all" for way in (AS_CUT, PROBED))
VERIFIED = WHOLE, AS_CUT, PROBED, TOLD, TOLD_PROBED, ALL, ALL_PROBED
PESSIMIST, LOGITS = "a pessimist", -4.0
# Steps between two probes of a planner that has none.
NEVER = 10**9


class Cut:
    """How many tokens of each draft are verified, a step after the other, and how many are told of. drafts, tokens:
    verified so far."""

    def __init__(self, curve: CostCurve, d_max: int, verified: str) -> None:
        """verified: one of VERIFIED."""
        self.drafts = self.tokens = 0
        self._planner: Planner | None = None
        # tokens that were cut and are told of
        self._told = d_max if verified in (ALL, ALL_PROBED) else int(verified in (TOLD, TOLD_PROBED))
        if verified != WHOLE:
            probes = verified in (PROBED, TOLD_PROBED, ALL_PROBED)
            self._planner = Planner(curve, d_max, PROBE_EVERY if probes else NEVER)

    def __call__(self, chance: Tensor) -> Tensor:
        """(drafts,) int64 tokens that are told of. chance: (drafts, d_max) that a draft is accepted up to each token,
        as is known now."""
        drafted = chance[:, : self._planner.depth(len(chance))] if self._planner else chance
        found = self._planner.keep(drafted) if self._planner and drafted.numel() else whole(drafted)
        self.drafts += len(found)
        self.tokens += int(found.sum())
        return (found + self._told).clamp(max=drafted.shape[1])


def pessimist(classifier: NodeClassifier) -> NodeClassifier:
    """One that ranks as this one does, and expects LOGITS of each token."""
    found = copy.deepcopy(classifier).requires_grad_(False)
    found.out.bias.add_(LOGITS)
    return found


def rows_of(options: argparse.Namespace, record: Mapping[str, Any]) -> Iterator[BenchRow]:
    """Every start, verified in each of the ways, at every mark."""
    served = Served.of(options)
    served.classifiers[PESSIMIST] = pessimist(served.classifiers[OFFLINE])
    curve = curve_of(served.kind, options.requests)
    given = served.chains, served.told, served.judge
    starts: dict[str, Any] = {f"from {name}": (learnt, each) for name, each in served.sure().items()}
    starts[f"from {OFFLINE}, {AUTO}"] = functools.partial(learnt, trusted=True), starts[f"from {OFFLINE}"][1]
    starts |= {f"from {name}, {NETWORK}": (retrained, each) for name, each in served.classifiers.items()}
    for verified in VERIFIED:
        for arm, (learns, start) in starts.items():
            cut = Cut(curve, learning.D_MAX, verified)
            for mark, metrics in zip(learning.MARKS, learns(start, *given, cut), strict=True):
                label = {"stream": options.name, "states": mark, "verified": verified}
                if cut.drafts:
                    metrics["verified_per_draft"] = cut.tokens / cut.drafts
                    cut.drafts = cut.tokens = 0
                yield BenchRow(SCENARIO, "simulated", arm, label, metrics, "", {**record, "files": served.files})


def table(rows: list[BenchRow], metric: str) -> list[str]:
    """Lines of Markdown: a start and way each, a column per number of states."""
    marks = learning.MARKS
    lines = [
        f"| {metric} after states | verified | {' | '.join(f'{mark:,}' for mark in marks)} |",
        "|---" * (len(marks) + 2) + "|",
    ]
    found = {(row.arm, row.setting["verified"], row.setting["states"]): row.metrics.get(metric) for row in rows}
    for arm, verified in dict.fromkeys((row.arm, row.setting["verified"]) for row in rows):
        cells = (found[arm, verified, mark] for mark in marks)
        lines.append(f"| {arm} | {verified} | {' | '.join('' if x is None else f'{x:.4g}' for x in cells)} |")
    return lines


def main(argv: list[str]) -> int:
    """Print the tables of one stream and append its rows."""
    metrics = "nll", "verified_per_draft", *(f"tokens_per_s_{load}" for load in LOADS)
    return replay("censoring", argv, __doc__, rows_of, table, metrics)


if __name__ == "__main__":
    sys.exit(run(main))
