"""What a draft of the shipped pair says along its target's texts, by the lab's forward passes: a second opinion on what
a server recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.pairs.toy import pair_dir
from c2t_plugin.lab.plans import TreeShape
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest

# Float32 sums in another order; statistics of another state are off by more.
TOLERANCE = 0.01
STATISTICS = ("joint_log_prob", "log_prob", "entropy", "margin")


@dataclass(frozen=True)
class Comparison:
    """states: compared. off: those of which a statistic differs by TOLERANCE or more, or another token counts as
    accepted. largest_difference: of a statistic of the others, nats."""

    states: int
    off: int
    largest_difference: float


def recompute(kind: str, texts: Sequence[tuple[Sequence[int], Sequence[int]]], depth: int, top_m: int) -> list[Forest]:
    """The greedy chains of a draft at every token of each text but the last `depth`. texts: prompt and continuation."""
    # they import transformers, which a script that only names rungs can do without
    from c2t_plugin.lab.pairs import load_pair
    from c2t_plugin.lab.texts import Texts
    from c2t_plugin.lab.trees import grow

    _, model = load_pair(pair_dir(), kind)
    shape, found = TreeShape(1, depth, top_m), []
    with torch.inference_mode():
        for prompt, continuation in texts:
            token_ids = torch.tensor([[*prompt, *continuation]])
            roots = range(len(prompt), token_ids.shape[1] - depth)
            after = Texts(torch.zeros(1, dtype=torch.int64), token_ids, roots).continuation(depth)
            found.append(grow(model.at(token_ids, roots).start(depth), after, shape))
    return found


def compare(traces: Traces, chains: Sequence[Forest]) -> Comparison:
    """Each recorded request beside that text which is nearest to it: traces do not say whose they are."""
    states, off, largest = 0, 0, 0.0
    for number in traces.prompt.unique():
        recorded = traces[traces.prompt == number]
        recorded = recorded[recorded.step < min(map(len, chains))]
        if not len(recorded):
            continue
        steps = recorded.step.long()
        differences = torch.stack([(_rows(recorded.chain) - _rows(each[steps])).abs().amax((0, 2)) for each in chains])
        nearest = int(differences.median(dim=1).values.argmin())
        labels = (recorded.chain.accepted == chains[nearest][steps].accepted).all(1)
        same = labels & (differences[nearest] < TOLERANCE)
        states += len(recorded)
        off += int((~same).sum())
        largest = max(largest, float(differences[nearest][same].max()) if same.any() else 0.0)
    return Comparison(states, off, largest)


def _rows(chains: Forest) -> Tensor:
    return torch.stack([getattr(chains, name) for name in STATISTICS])
