"""What a planner learns while it serves, by the number of states that it has seen, beside vLLM's estimator.

    python -m benchmarks.simulation.learning --learn TRAINING.traces --judge HELD_OUT.traces --offline CLASSIFIER \\
        --from eagle1=CLASSIFIER --from draft=CLASSIFIER --name "toy, EAGLE-3"

The recorded states of some prompts are served in their order, 8 prompts at a time (--requests), each from state to
state as its chains are accepted; when all have been served they are again, from another state. The planner's
calibration starts from classifiers of other pairs, from the draft's own probabilities ("nothing") and from one that was
fitted offline on the very pair; from that one once more believed as a server's `auto` believes it ("auto"), and from
each classifier with its network learnt too ("network"), which takes as many states as a server's thread would. vLLM's
estimator reads the same stream. At some numbers of states both stand still and judge the recorded chains of other
prompts: nats per draft token, AUC, verified draft tokens at the accept lengths of static chains over those of the
static chains, and the output tokens per second that a planner gets with these chances on a GPU's data sheet. A poisoned
stream says the contrary in every tenth prompt.

Every draft is verified whole. What a cut by what was learnt makes of it: `benchmarks.simulation.censoring`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.command import run
from benchmarks.report.rows import BenchRow
from benchmarks.simulation.roofline import GPUS, MODELS, Machine, draft_of
from benchmarks.simulation.setting import Setting
from benchmarks.simulation.steps import planned, serve
from benchmarks.simulation.streams import CONCURRENT, repeated, replay, visits
from benchmarks.simulation.vllm_rival import LEAST
from c2t_plugin.classifier import NodeClassifier, load_classifier
from c2t_plugin.config import AUTO, NETWORK
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.pair_files import file_hash
from c2t_plugin.lab.rivals import OnlineLogistic
from c2t_plugin.lab.sweeps import truncate
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.budget import falling
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.network_learner import BATCHES, SHARE, NetworkLearner
from c2t_plugin.traces.file import Traces, load_traces
from c2t_plugin.traces.forest import Forest

SCENARIO = "learning"
D_MAX = 6
MARKS = (0, 100, 500, 2_000, 10_000, 50_000)
NOTHING, RIVAL, OFFLINE = "nothing", "vLLM's estimator", "offline fit"
# Every so many prompts say the contrary in a poisoned stream.
POISONED = 10
# States that come while a server's thread trains: a round is 64 minibatches of at most .55 ms (AMD EPYC, drafts of
# eight; learning_time has less for six), at 1% of a core 3.5 seconds, and 8 requests at 20 steps a second are 160
# states in each.
MINIBATCH_S, STATES_PER_S = 0.55e-3, 160.0
ROUND = round(BATCHES * MINIBATCH_S / SHARE * STATES_PER_S)
# Where a planner is judged: a GPU, a target, and requests at once.
GPU, TARGET, LOADS = "L40", "llama-3.1-8b", (1, 8, 64)


@dataclass(frozen=True)
class Judge:
    """Other prompts' chains, all of their recorded states. traces: the same, as a server walks through them."""

    chain: Forest
    traces: Traces

    def figures(self, survival: Tensor) -> dict[str, float]:
        """survival: (chains, D_MAX) chance that a chain is accepted up to each token."""
        hits = self.chain.accepted.flatten().numpy()
        chance = survival.flatten().double().clamp(LEAST, 1 - LEAST).numpy()
        order = np.argsort(-survival.flatten().numpy(), kind="stable")
        taken = hits[order].cumsum()
        # static chains of 1 to 5: what they accept, and what they verify for that
        lengths = np.arange(1, D_MAX)
        accepted = self.chain.accepted.sum(0).cumsum(0).numpy()[: D_MAX - 1]
        verified = np.interp(accepted, taken, np.arange(1, len(taken) + 1))
        below = np.empty(len(order))
        below[order] = np.arange(len(order))
        auc = (below[~hits].mean() - below[hits].mean()) / len(order) + 0.5
        return {
            "nll": float(-np.log(np.where(hits, chance, 1 - chance)).mean()),
            "auc": float(auc),
            "gamma_ratio": float((verified / (lengths * len(self.chain))).mean()),
            **{f"tokens_per_s_{load}": self.planned(survival, load) for load in LOADS},
        }

    def planned(self, survival: Tensor, requests: int) -> float:
        """Output tokens per second of a planner that takes these for chances, so many requests at once. All prompts are
        served as many times: once, 64 requests would be some 35 steps, and one of these more or less 3%."""
        curve = curve_of(self.traces.header["pair"].get("kind", ""), requests)
        again = repeated(self.traces, requests)
        return serve(again, survival.repeat(requests, 1), curve, planned(curve, D_MAX), requests).tokens_per_s


@functools.cache
def curve_of(kind: str, requests: int) -> CostCurve:
    """What steps of so many requests cost there, with a draft of this kind."""
    target = MODELS[TARGET]
    return Setting(Machine(GPUS[GPU]), target, draft_of(kind, target), requests, D_MAX).curve(scored=True)


# (drafts, D_MAX) chances -> (drafts,) int64 tokens of each that are verified.
Verified = Callable[[Tensor], Tensor]


def whole(chance: Tensor) -> Tensor:
    """All of them."""
    return torch.full((len(chance),), chance.shape[1])


class Told(NamedTuple):
    """A stream as it is told. accepted: (states,) int64 tokens of each chain, where all are verified. prompt: (states,)
    whose they are. order: states in which they are served, so many at once. before: of them, so many come before the
    counting begins."""

    accepted: Tensor
    prompt: Tensor
    order: list[int]
    at_once: int = CONCURRENT
    before: int = 0

    def steps(self) -> Iterator[tuple[int, Iterator[list[int]]]]:
        """Each of MARKS, and the states of each step from the one before up to it."""
        ends = [self.before + mark for mark in MARKS]
        for mark, begin, end in zip(MARKS, (0, *ends), ends, strict=False):
            starts = range(begin, end, self.at_once)
            yield mark, (self.order[start : min(end, start + self.at_once)] for start in starts)

    def of(self, rows: list[int], lengths: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Verified and accepted tokens of these states, and whose they are."""
        return lengths, self.accepted[rows].minimum(lengths), self.prompt[rows].tolist()


def learnt(
    confidence: tuple[Tensor, Tensor],
    chains: tuple[Forest, Forest],
    told: Told,
    judge: Judge,
    verified: Verified = whole,
    trusted: bool = False,
) -> Iterator[dict[str, float]]:
    """Figures at each of MARKS. confidence, chains: of the stream, and of what is judged. verified: by what was learnt
    until then. trusted: see Calibration."""
    calibration = Calibration(D_MAX, trusted=trusted)
    for _, steps in told.steps():
        for rows in steps:
            sure, own = confidence[0][rows], chains[0].log_prob[rows]
            lengths = verified(falling(calibration(sure, own)))
            calibration.observe(sure, *told.of(rows, lengths), log_prob=own)
        yield judge.figures(falling(calibration(confidence[1], chains[1].log_prob)))


def retrained(
    classifier: NodeClassifier,
    chains: tuple[Forest, Forest],
    told: Told,
    judge: Judge,
    verified: Verified = whole,
) -> Iterator[dict[str, float]]:
    """The same where the network is learnt too: `--speculative-c2t-learn network`. A round of training ends ROUND
    states after it was due, as in a server whose thread rests 99 times as long as it works."""
    learner = NetworkLearner(classifier, D_MAX, background=False)
    served, judged = (torch.stack([each.log_prob, each.entropy, each.margin], dim=-1) for each in chains)
    waited = 0
    for _, steps in told.steps():
        for rows in steps:
            stats = served[rows]
            lengths = verified(falling(learner(learner.confidence(stats), stats[..., 0])))
            learner.observe(stats, *told.of(rows, lengths))
            waited = waited + len(rows) if learner.due.is_set() else 0
            if waited >= ROUND:
                learner.train()
            learner.settle()
        found = judge.figures(falling(learner(learner.confidence(judged), chains[1].log_prob)))
        yield {**found, "networks": learner.swaps, "networks_discarded": learner.discarded}


def rival(chains: tuple[Forest, Forest], told: Told, judge: Judge) -> Iterator[dict[str, float]]:
    """The same of vLLM's estimator, which fits after every 100 drafts of one request at a time."""
    model, done = OnlineLogistic(D_MAX), 0
    accepted = torch.arange(D_MAX) < told.accepted[:, None]
    for mark in MARKS:
        while done + OnlineLogistic.REFIT_INTERVAL <= told.before + mark:
            rows = told.order[done : done + OnlineLogistic.REFIT_INTERVAL]
            model.learn(chains[0].log_prob[rows], accepted[rows])
            done += len(rows)
        yield judge.figures(model.survival(chains[1]).exp())


class Served(NamedTuple):
    """What is replayed. kind: of draft. chains: of the stream, and of what is judged. told: the stream as it is.
    classifiers: to start from. files: hashes of the pair and of its classifier, by name, as freshness.py knows them."""

    kind: str
    chains: tuple[Forest, Forest]
    told: Told
    judge: Judge
    classifiers: dict[str, NodeClassifier]
    files: dict[str, str]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Served:
        """By the command's options. Raises C2TError for traces that do not go together."""
        stream, held_out = load_traces(options.learn), load_traces(options.judge)
        if stream.header["pair"] != held_out.header["pair"]:
            raise C2TError(f"{options.learn} and {options.judge} are of different pairs; collect again")
        chains = truncate(stream.chain, D_MAX), truncate(held_out.chain, D_MAX)
        true = chains[0].accepted.long().sum(1)
        judge = Judge(chains[1], replace(held_out, chain=chains[1], tree=chains[1]))
        walk = visits(stream, true, options.requests)
        order = [next(walk) for _ in range(MARKS[-1])]
        files = dict(each.split("=", 1) for each in options.start)
        classifiers = {name: load_classifier(path) for name, path in {**files, OFFLINE: options.offline}.items()}
        pair = stream.header["pair"]
        kind = str(pair.get("kind", ""))
        own = {f"{kind}/{options.offline.name}": file_hash(options.offline)}
        parts = {name: str(pair[part]).rpartition(":")[2] for part, name in (("draft", kind), ("target", "target"))}
        told = Told(true, stream.prompt, order, options.requests)
        return cls(kind, chains, told, judge, classifiers, own | parts)

    @property
    def poisoned(self) -> Told:
        """The stream where every POISONED-th prompt says the contrary."""
        contrary = self.told.prompt % POISONED == 0
        accepted = self.told.accepted
        return self.told._replace(accepted=torch.where(contrary, D_MAX - accepted, accepted))

    def sure(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By what is started from: confidences of both chains."""
        one, other = self.chains
        found = {
            name: (each.confidence(one.stats()), each.confidence(other.stats()))
            for name, each in self.classifiers.items()
        }
        return {**found, NOTHING: (one.joint_log_prob.exp(), other.joint_log_prob.exp())}


def rows_of(options: argparse.Namespace, record: Mapping[str, Any]) -> Iterator[BenchRow]:
    """Every contestant at every mark, on the stream as it is and poisoned."""
    served = Served.of(options)
    chains, judge, sure = served.chains, served.judge, served.sure()
    for poisoned, told in ((0, served.told), (1, served.poisoned)):
        found = {f"from {name}": learnt(each, chains, told, judge) for name, each in sure.items()}
        found[f"from {OFFLINE}, {AUTO}"] = learnt(sure[OFFLINE], chains, told, judge, trusted=True)
        for name, each in served.classifiers.items():
            found[f"from {name}, {NETWORK}"] = retrained(each, chains, told, judge)
        found[RIVAL] = rival(chains, told, judge)
        for arm, figures in found.items():
            for mark, metrics in zip(MARKS, figures, strict=True):
                label = {"stream": options.name, "states": mark, "poisoned": poisoned}
                yield BenchRow(SCENARIO, "simulated", arm, label, metrics, "", {**record, "files": served.files})


def table(rows: list[BenchRow], metric: str = "nll") -> list[str]:
    """Lines of Markdown: a contestant each, a column per number of states."""
    lines = [
        f"| {metric} after states | {' | '.join(f'{mark:,}' for mark in MARKS)} |",
        "|---" * (len(MARKS) + 1) + "|",
    ]
    for poisoned in (0, 1):
        for arm in dict.fromkeys(row.arm for row in rows):
            cells = [row for row in rows if (row.arm, row.setting["poisoned"]) == (arm, poisoned)]
            name = f"{arm}{', a tenth poisoned' if poisoned else ''}"
            if cells:
                lines.append(f"| {name} | {' | '.join(f'{row.metrics[metric]:.4g}' for row in cells)} |")
    return lines


def main(argv: list[str]) -> int:
    """Print the tables of one stream and append its rows."""
    metrics = "nll", "gamma_ratio", "auc", *(f"tokens_per_s_{load}" for load in LOADS)
    return replay("learning", argv, __doc__, rows_of, table, metrics)


if __name__ == "__main__":
    sys.exit(run(main))
