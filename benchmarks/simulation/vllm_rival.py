"""C2T's confidence against vLLM's acceptance estimator, each used as vLLM's adaptive verification uses them.

    python -m benchmarks.simulation.vllm_rival CLASSIFIER --traces HELD_OUT.traces --rivals-from TRAINING.traces

A rule gives every draft token of a chain the chance that the chain is accepted up to it; of all tokens the most likely
ones are verified, as many as the budget has. Prints, over the recorded chains, AUC and negative log-likelihood (nats
per token) of that chance; at budgets of 20, 40 and 60% of the draft tokens, which share of the acceptable ones is
verified (recall) and how many are accepted per verified one; and what C2T has more, with 95% intervals of a paired
bootstrap.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier, load_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.curves import bootstrap_unit, bootstrap_weights, interval
from c2t_plugin.lab.judging import ESTIMATOR_BATCH
from c2t_plugin.lab.rivals import OnlineLogistic
from c2t_plugin.lab.scores import weighted_auc
from c2t_plugin.lab.sweeps import truncate
from c2t_plugin.traces.file import Traces, load_traces

BUDGETS = (0.2, 0.4, 0.6)
C2T = "C2T"
ESTIMATORS = ("vLLM's estimator, online", "vLLM's estimator, whole")
# A chance of 0 or 1 would cost infinitely much if it were wrong.
LEAST = 1e-6


@dataclass(frozen=True)
class Figures:
    """Of one rule, (replicates,) each, the first of the sample itself: auc, nll (nats per token), and per budget the
    recall and the accepted tokens per verified one."""

    auc: np.ndarray
    nll: np.ndarray
    recall: tuple[np.ndarray, ...]
    accepted: tuple[np.ndarray, ...]

    def columns(self) -> list[np.ndarray]:
        """In the order of the table."""
        return [self.auc, self.nll, *self.recall, *self.accepted]


def survivals(
    classifier: NodeClassifier, traces: Traces, training: Traces, d_max: int
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Per rule the chance that a chain is accepted up to each token, and whether it is: (chains, d_max) each."""
    chain, learnt = truncate(traces.chain, d_max), truncate(training.chain, d_max)
    online = OnlineLogistic(d_max).fit(learnt, d_max, ESTIMATOR_BATCH)
    whole = OnlineLogistic(d_max).fit_whole(learnt, d_max)
    found = {name: model.survival(chain).exp() for name, model in zip(ESTIMATORS, (online, whole), strict=True)}
    found[C2T] = classifier.confidence(chain.stats()).cummin(dim=1).values
    return found, chain.accepted


def figures(survival: Tensor, accepted: Tensor, owner: Tensor, weights: np.ndarray) -> Figures:
    """survival, accepted: (chains, d_max). owner: (chains,) column of weights. weights: (replicates, prompts)."""
    column = owner.repeat_interleave(accepted.shape[1])
    hits = accepted.flatten().numpy()
    chance = survival.flatten().double().clamp(LEAST, 1 - LEAST).numpy()
    losses = -np.log(np.where(hits, chance, 1 - chance))
    order = np.argsort(-survival.flatten().numpy(), kind="stable")
    nll, recall, rate = (np.empty((count, len(weights))) for count in (1, len(BUDGETS), len(BUDGETS)))
    for index, drawn in enumerate(weights):
        row = drawn[column.numpy()]
        nll[:, index] = (row * losses).sum() / row.sum()
        verified, taken = row[order].cumsum(), (row * hits)[order].cumsum()
        budgets = np.array(BUDGETS) * verified[-1]
        within = np.interp(budgets, verified, taken)
        recall[:, index], rate[:, index] = within / taken[-1], within / budgets
    auc = weighted_auc(survival.flatten(), accepted.flatten(), column, weights)
    return Figures(auc, nll[0], tuple(recall), tuple(rate))


def table(found: Mapping[str, Figures]) -> list[str]:
    """Lines of Markdown: a row per figure; a column per rule, then C2T's less each estimator's."""
    budgets = [f"{share:.0%}" for share in BUDGETS]
    rows = ["AUC", "NLL", *(f"recall, {b}" for b in budgets), *(f"accepted per verified, {b}" for b in budgets)]
    heads = ["", *found, *(f"C2T less {name.rpartition(' ')[2]}" for name in ESTIMATORS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for place, row in enumerate(rows):
        values = {name: each.columns()[place] for name, each in found.items()}
        cells = [f"{each[0]:.4f}" for each in values.values()]
        for name in ESTIMATORS:
            gain = values[C2T] - values[name]
            low, high = interval(gain[1:])
            cells.append(f"{gain[0]:+.4f} ({low:+.4f} to {high:+.4f})")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def main(argv: list[str]) -> int:
    """Print the table of one draft."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.vllm_rival",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("classifier", type=Path)
    parser.add_argument("--traces", type=Path, required=True, help="of held-out prompts, from `c2t collect`")
    parser.add_argument("--rivals-from", type=Path, required=True, help="traces that the estimator learns from")
    parser.add_argument("--d-max", type=int, default=6, help="longest chain")
    parser.add_argument("--replicates", type=int, default=1000, help="of the bootstrap")
    options = parser.parse_args(argv)
    try:
        traces, training = load_traces(options.traces), load_traces(options.rivals_from)
        if training.header["pair"] != traces.header["pair"]:
            raise C2TError(f"{options.rivals_from} and {options.traces} are of different drafts; collect again")
        found, accepted = survivals(load_classifier(options.classifier), traces, training, options.d_max)
    except C2TError as error:
        print(f"vllm_rival: {error}", file=sys.stderr)
        return 2
    drawn = bootstrap_weights(traces.groups, options.replicates)
    weights = np.concatenate([np.ones_like(drawn[:1]), drawn])
    rules = {name: figures(survival, accepted, traces.owner, weights) for name, survival in found.items()}
    print(f"{len(traces)} chains of {options.d_max} of {len(traces.first)} prompts, drawn by {bootstrap_unit(traces)}")
    print("\n".join(table(rules)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
