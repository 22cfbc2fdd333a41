"""What a server says it did for each request, and what an independent simulation says it should have done."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.cpu_engine.server import CpuServer
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from tests.support.sglang.simulate import Draft, Simulation, Target, Text, load_draft, simulate

DRAFTS = {"standalone": "draft", "eagle3": "eagle3", "eagle": "eagle1"}
NEW_TOKENS = 24
# of the longest chain that is simulated, at least
MOST_DRAFTS = 9
BETA = 0.45
# Server and simulation sum the same numbers in another order; a confidence this near to beta may fall either way.
UNDECIDED = 1e-4


def save_hand_made_classifier(path: Path) -> Path:
    """A classifier that every feature moves: confidence falls with -log P, with both entropies and with the depth."""
    spec = ClassifierSpec(
        features=("joint_log_prob", "entropy", "depth", "path_entropy"), shift=(0.0,) * 4, scale=(1.0,) * 4
    )
    classifier = NodeClassifier(spec)
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.zero_()
        for unit, (feature, sign) in enumerate(((0, 1), (0, -1), (1, 1), (2, 1), (3, 1))):
            classifier.hidden.weight[unit, feature] = sign
        classifier.out.weight[0, :5] = torch.tensor([1.5, -1.5, -0.2, -0.3, -0.1])
        classifier.out.bias.fill_(3.0)
    save_classifier(classifier, path)
    return path


def save_untaught_classifier(path: Path) -> Path:
    """A classifier that is as sure of every token, so that there is much for it to learn."""
    features = ("joint_log_prob", "entropy", "depth", "margin")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        classifier = NodeClassifier(ClassifierSpec(features, shift=(-1.5, 1.5, 2.0, 1.5), scale=(1.0,) * 4))
    with torch.no_grad():
        classifier.out.weight.zero_()
        classifier.out.bias.zero_()
    save_classifier(classifier, path)
    return path


@dataclass
class Rule:
    """C2T chain mode written out in plain Python over a classifier file: which drafts of a chain are kept."""

    path: Path
    beta: float
    undecided: bool = False
    weights: dict[str, list] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with safe_open(self.path, framework="pt") as handle:
            self.spec = json.loads(handle.metadata()["spec"])
            self.weights = {name: handle.get_tensor(name).double().tolist() for name in handle.keys()}  # noqa: SIM118

    def keep_length(self, logits: torch.Tensor) -> int:
        for before, confidence in enumerate(self.confidences(logits)):
            self.undecided |= abs(confidence - self.beta) < UNDECIDED
            if confidence < self.beta:
                return before
        return len(logits)

    def confidences(self, logits: torch.Tensor) -> Iterator[float]:
        """Of each token of a chain, from the logits it is the argmax of."""
        joint, path_entropy = 1.0, 0.0
        for depth, row in enumerate(logits.double(), start=1):
            probs = row.softmax(-1).sort(descending=True).values[: self.spec["top_m"]].tolist()
            joint *= probs[0]
            entropy = -sum(p * math.log(p) for p in probs if p > 0)
            path_entropy += entropy
            own = {"log_prob": math.log(probs[0]), "margin": math.log(probs[0] / probs[1]), "rank": 0.0}
            yield self.confidence(math.log(joint), entropy, depth, path_entropy, **own)

    def confidence(
        self, joint_log_prob: float, entropy: float, depth: int, path_entropy: float, **others: float
    ) -> float:
        """others: features of the same name."""
        raw = {
            **others,
            "joint_log_prob": joint_log_prob,
            "joint_prob": math.exp(joint_log_prob),
            "entropy": entropy,
            "depth": depth + self.spec["depth_origin"] - 1,
            "path_entropy": path_entropy,
        }
        columns = zip(self.spec["features"], self.spec["shift"], self.spec["scale"], strict=True)
        x = [(raw[name] - shift) / scale for name, shift, scale in columns]
        units = zip(self.weights["hidden.weight"], self.weights["hidden.bias"], strict=True)
        hidden = [max(0.0, sum(w * v for w, v in zip(row, x, strict=True)) + bias) for row, bias in units]
        logit = sum(w * h for w, h in zip(self.weights["out.weight"][0], hidden, strict=True))
        return 1 / (1 + math.exp(-logit - self.weights["out.bias"][0]))


@dataclass(frozen=True)
class Counts:
    """Of one request: output, verify steps, and how many steps had so many drafts verified."""

    output_ids: tuple[int, ...]
    verify_count: int
    draft_lengths: tuple[tuple[int, int], ...]

    @classmethod
    def of_answer(cls, answer: dict[str, Any]) -> Counts:
        meta = answer["meta_info"]
        histogram = {length - 1: steps for length, steps in enumerate(meta["spec_cap_lens_histogram"]) if steps}
        return cls(tuple(answer["output_ids"]), meta["spec_verify_ct"], tuple(sorted(histogram.items())))

    @classmethod
    def of_simulation(cls, simulation: Simulation) -> Counts:
        lengths = Counter(simulation.draft_lengths)
        return cls(tuple(simulation.output_ids), simulation.verify_count, tuple(sorted(lengths.items())))


class Remembered:
    """A draft that drafts a text once: greedy chains are the front of longer ones, and texts come again at each depth
    and threshold, since the output is plain decoding's at all of them."""

    def __init__(self, draft: Draft) -> None:
        self.features = draft.features
        self._draft = draft
        self._chains: dict[tuple[int, ...], torch.Tensor] = {}

    def chain(self, tokens: Sequence[int], features: torch.Tensor | None, length: int) -> torch.Tensor:
        known = self._chains.get(tuple(tokens))
        if known is None or len(known) < length:
            known = self._chains[tuple(tokens)] = self._draft.chain(tokens, features, length)
        return known[:length]


@dataclass
class Oracle:
    """Simulated counts for a pair's drafts; simulations are kept, since several tests ask for the same ones."""

    pair: Path
    target: Target
    known: dict[tuple, Counts | None] = field(default_factory=dict)
    drafts: dict[str, Remembered] = field(default_factory=dict)
    texts: dict[tuple[int, ...], Text] = field(default_factory=dict)

    def text(self, prompt: Sequence[int]) -> Text:
        """Plain decoding's, with room for the drafts behind its last token."""
        key = tuple(prompt)
        if key not in self.texts:
            self.texts[key] = Text(self.target, prompt, NEW_TOKENS + MOST_DRAFTS)
        return self.texts[key]

    def counts(
        self, base: str, prompt: Sequence[int], d_max: int, rule_path: Path | None, beta: float = BETA
    ) -> Counts | None:
        """Static chain without rule_path, else C2T at beta; None if a confidence is too near to beta to tell."""
        key = (base, tuple(prompt), d_max, rule_path, beta)
        if key not in self.known:
            rule = Rule(rule_path, beta) if rule_path else None
            if base not in self.drafts:
                self.drafts[base] = Remembered(load_draft(self.pair, DRAFTS[base], self.target))
            draft = self.drafts[base]
            keep = rule.keep_length if rule else None
            simulation = simulate(self.text(prompt), draft, prompt, NEW_TOKENS, d_max, keep)
            self.known[key] = None if rule and rule.undecided else Counts.of_simulation(simulation)
        return self.known[key]


def server(pair: Path, base: str, d_max: int, classifier: Path, log: Path, *flags: str, **options: Any) -> CpuServer:
    """A C2T server, without prefix cache: at a cached prefix's edge a stand-alone draft reads keys of another text."""
    # a planner has no threshold
    beta = () if "--speculative-c2t-planner" in flags else ("--speculative-c2t-beta", str(BETA))
    return CpuServer(
        pair / "target",
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", base),
        *("--speculative-draft-model-path", str(pair / DRAFTS[base])),
        *("--speculative-num-steps", str(d_max)),
        *("--speculative-c2t-classifier", str(classifier), *beta),
        "--disable-radix-cache",
        *flags,
        log=log,
        **options,
    )


def control(running: CpuServer, **values: float) -> None:
    """Change beta or max_depth of a running server."""
    payload = {"server_args": {f"speculative_c2t_{name}": value for name, value in values.items()}}
    assert running.request("/set_internal_state", payload) == [True]


def answers(
    running: CpuServer,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    new_tokens: int = NEW_TOKENS,
    spread: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """Greedy answers of `new_tokens` to all prompts, `concurrency` at a time. spread: tokens more of one prompt after
    another, over and over, if they are not sent together."""
    if concurrency >= len(prompts) > 1:
        # as one call: on a busy machine some of many threads would send theirs when others' answers are done
        return running.generate_all(prompts, max_new_tokens=new_tokens, ignore_eos=True)
    with ThreadPoolExecutor(concurrency) as pool:
        lengths = (new_tokens + spread[row % len(spread)] for row in range(len(prompts)))
        return list(pool.map(lambda p, n: running.generate(p, max_new_tokens=n, ignore_eos=True), prompts, lengths))
