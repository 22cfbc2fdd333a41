"""How soon what was learnt follows the traffic: the replay of `learning` after states that said the contrary.

    python -m benchmarks.simulation.drifting --learn TRAINING.traces --judge HELD_OUT.traces --offline CLASSIFIER \\
        --from draft=CLASSIFIER --name "toy, EAGLE-3"

The first BEFORE states accept what these drafts have rejected, and the other way round: no traffic drifts further. Then
they are served as they are, and states are counted from there. Who has forgotten the first part foretells as well as
who never saw it, whose figures are those of `learning`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.report.rows import BenchRow
from benchmarks.simulation import learning
from benchmarks.simulation.learning import OFFLINE, RIVAL, Served, Told, learnt, retrained, rival, table
from benchmarks.simulation.streams import replay
from c2t_plugin.config import AUTO, NETWORK
from c2t_plugin.traces.forest import Forest

SCENARIO = "drifting"
BEFORE = 10_000


def turned(told: Told, chain: Forest) -> tuple[Forest, Told]:
    """The stream after BEFORE states of its contrary. Every state is there twice: as it says the contrary, and as it
    is."""
    states = len(told.accepted)
    twice = chain[torch.arange(states).repeat(2)]
    accepted = torch.cat([learning.D_MAX - told.accepted, told.accepted])
    order = [*told.order[:BEFORE], *(state + states for state in told.order)]
    return twice, Told(accepted, told.prompt.repeat(2), order, told.at_once, BEFORE)


def rows_of(options: argparse.Namespace, record: Mapping[str, Any]) -> Iterator[BenchRow]:
    """Every contestant at every mark after the turn."""
    served = Served.of(options)
    twice, told = turned(served.told, served.chains[0])
    chains = twice, served.chains[1]
    sure = {name: (stream.repeat(2, 1), judged) for name, (stream, judged) in served.sure().items()}
    found = {f"from {name}": learnt(each, chains, told, served.judge) for name, each in sure.items()}
    found[f"from {OFFLINE}, {AUTO}"] = learnt(sure[OFFLINE], chains, told, served.judge, trusted=True)
    found[f"from {OFFLINE}, {NETWORK}"] = retrained(served.classifiers[OFFLINE], chains, told, served.judge)
    found[RIVAL] = rival(chains, told, served.judge)
    for arm, figures in found.items():
        for mark, metrics in zip(learning.MARKS, figures, strict=True):
            label = {"stream": options.name, "states": mark, "before": BEFORE, "poisoned": 0}
            yield BenchRow(SCENARIO, "simulated", arm, label, metrics, "", {**record, "files": served.files})


def main(argv: list[str]) -> int:
    """Print the tables of one stream and append its rows."""
    return replay("drifting", argv, __doc__, rows_of, table, ("nll", "gamma_ratio"))


if __name__ == "__main__":
    sys.exit(run(main))
