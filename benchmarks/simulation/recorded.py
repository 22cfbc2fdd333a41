"""Recorded drafts ready to be replayed, and one arm's run over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.pairs.toy import pair_dir
from benchmarks.serving.closed_forms import TEMPERED, closed_form
from benchmarks.simulation.setting import Entrant, Setting
from benchmarks.simulation.steps import Simulated, serve, walk
from c2t_plugin.classifier import FILE_NAME, NodeClassifier, load_classifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.checkpoints import find_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.calibration import calibrated
from c2t_plugin.lab.pair_files import file_hash
from c2t_plugin.lab.rivals import OnlineLogistic
from c2t_plugin.lab.sweeps import truncate
from c2t_plugin.traces.file import Traces, load_traces

# Drafts of one refit of vLLM's estimator: requests that verify together.
ESTIMATOR_BATCH = 8
# As `c2t calibrate` takes it.
CALIBRATED_DEPTH = 6


@dataclass(frozen=True)
class Replay:
    """Recorded drafts to replay: held-out traces, the classifier beside their draft, vLLM's estimator if trained.

    calibrated: the classifier that a planner finds there. closed_form: the rule without training as a probability, by
    Platt's map of training chains. on_trees: the classifier as `c2t calibrate --on tree` makes it of training trees.
    files: hashes of the pair's files that were read, by name.
    """

    traces: Traces
    classifier: NodeClassifier
    estimator: OnlineLogistic | None
    calibrated: NodeClassifier | None = None
    closed_form: NodeClassifier | None = None
    on_trees: NodeClassifier | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, traces: Path, rivals_from: Path | None) -> Replay:
        """rivals_from: training traces of the same draft, for vLLM's estimator.

        C2TError if nobody knows how many tokens each recorded answer had, or if the drafts differ.
        """
        held_out = load_traces(traces)
        length = held_out.header.get("new_tokens")
        if not isinstance(length, int) or length < 1:
            raise C2TError(
                f"{traces} does not say how many tokens an answer had (new_tokens is {length!r}), as recordings of "
                "served requests do not; record with `c2t collect`"
            )
        kind = held_out.header["pair"].get("kind", "")
        folder = pair_dir() / kind
        classifier = load_classifier(folder / FILE_NAME)
        beside = Path(find_classifier(C2TConfig(), kind, str(folder), probabilities=True)[0])
        planned = load_classifier(beside)
        files = {f"{kind}/{path.name}": file_hash(path) for path in (folder / FILE_NAME, beside)}
        files |= {
            name: held_out.header["pair"][part].rpartition(":")[2]
            for part, name in (("draft", kind), ("target", "target"))
        }
        if rivals_from is None:
            return cls(held_out, classifier, None, planned, files=files)
        training = load_traces(rivals_from)
        if training.header["pair"] != held_out.header["pair"]:
            raise C2TError(f"{rivals_from} and {traces} are of different drafts; collect again")
        layers = training.chain.layers
        estimator = OnlineLogistic(layers).fit(training.chain, layers, ESTIMATOR_BATCH)
        chain = truncate(training.chain, min(CALIBRATED_DEPTH, layers))
        rule, _, _ = calibrated(closed_form(TEMPERED, training.header["top_m"]), chain)
        return cls(held_out, classifier, estimator, planned, rule, on_trees(classifier, training), files)

    @property
    def kind(self) -> str:
        return str(self.traces.header["pair"]["kind"])

    def chains(self) -> Traces:
        """The traces without their trees, which are large and matter to trees only."""
        return replace(self.traces, tree=self.traces.chain)


def on_trees(classifier: NodeClassifier, training: Traces) -> NodeClassifier:
    """See Replay."""
    tree = truncate(training.tree, min(CALIBRATED_DEPTH, training.tree.layers))
    return calibrated(classifier, tree)[0]


def requests_of(traces: Traces, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Requests with outputs of these lengths, each from the first state of a recorded prompt on, and on into the next
    prompts where it is longer than the record: rows and the number of the request, (sum of lengths,) int64 both."""
    starts = (torch.diff(traces.prompt.long(), prepend=torch.tensor([-1])) != 0).nonzero().flatten()
    rows = [(starts[i % len(starts)] + torch.arange(n)) % len(traces) for i, n in enumerate(lengths)]
    return torch.cat(rows), torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def replayed(traces: Traces, rows: Tensor, request: Tensor) -> Traces:
    """The traces that `steps.serve` walks through."""
    chain = traces.chain[rows]
    steps = torch.cat([torch.arange(int(n)) for n in request.unique_consecutive(return_counts=True)[1]])
    return Traces(chain, chain, request.int(), steps.short(), traces.novel[rows], header=traces.header)


def play(entrant: Entrant, traces: Traces, rows: Tensor, request: Tensor, setting: Setting) -> Simulated:
    """Serve these requests. Keys and values are paid for the requests that run, not for a full batch all the time."""
    again, own = replayed(traces, rows, request), entrant.step
    if own is None:
        told = entrant.acceptance[rows], entrant.curve, entrant.policy, setting.requests, entrant.accepted[rows]
        found = serve(again, *told)
    else:
        found = walk(again, lambda at: own(rows[at]), setting.requests)
    machine, target = setting.machine, setting.target
    absent = machine.cache_s(target, setting.requests) - machine.cache_s(target, found.requests)
    return replace(found, seconds=found.seconds - found.steps * absent)
