"""The contestants that servers can run, as data: a name, and the flags that make an engine do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.errors import C2TError

STATIC = (1, 2, 4, 6)
TREE = {"steps": 6, "topk": 10, "tokens": 60}


@dataclass(frozen=True)
class Arm:
    """name: in tables. flags: of the server, with {draft}, {base}, {d_max}, {width}, {beta}, {threshold_classifier} and
    {threshold} to be filled in. concurrency: the only one it is meant for, None for all. bases: the only kinds of
    draft it is for, empty for all; on others SGLang starts without it and only logs so."""

    name: str
    flags: tuple[str, ...]
    concurrency: int | None = None
    bases: tuple[str, ...] = ()

    def command(self, values: Mapping[str, object]) -> list[str]:
        """The flags, filled in."""
        return [flag.format_map(values) for flag in self.flags]


def _chain(algorithm: str, steps: object, tokens: object, *more: str) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", "{draft}"),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(tokens), *more),
    )


def _c2t(*more: str) -> tuple[str, ...]:
    return _chain("C2T", "{d_max}", "{width}", *more)


SGLANG = (
    Arm("plain", ()),
    *(Arm(f"static {length}", _chain("{base}", length, length + 1)) for length in STATIC),
    Arm("SGLang adaptive", _chain("{base}", 3, 4, "--speculative-adaptive"), bases=("EAGLE", "EAGLE3")),
    Arm(
        "EAGLE-2 tree",
        (
            *("--speculative-algorithm", "{base}", "--speculative-draft-model-path", "{draft}"),
            *("--speculative-num-steps", str(TREE["steps"]), "--speculative-eagle-topk", str(TREE["topk"])),
            *("--speculative-num-draft-tokens", str(TREE["tokens"])),
        ),
        concurrency=1,
    ),
    Arm(
        "threshold on P",
        _c2t("--speculative-c2t-classifier", "{threshold_classifier}", "--speculative-c2t-beta", "{threshold}"),
    ),
    Arm("C2T", _c2t("--speculative-c2t-beta", "{beta}")),
    Arm("C2T auto", _c2t("--speculative-c2t-beta", "auto")),
)
ENGINES: Mapping[str, tuple[Arm, ...]] = {"sglang": SGLANG}


def chosen(engine: str, names: tuple[str, ...] | None) -> list[Arm]:
    """Arms of an engine by name, all for None, in the table's order. C2TError for a name that there is not."""
    arms = ENGINES[engine]
    unknown = set(names or ()) - {arm.name for arm in arms}
    if unknown:
        raise C2TError(f"{engine} has the arms {', '.join(arm.name for arm in arms)}; got {', '.join(sorted(unknown))}")
    return [arm for arm in arms if names is None or arm.name in names]


def write_threshold_classifier(path: Path, top_m: int) -> None:
    """A classifier file that looks at P alone, with confidence P / (1 + P): C2T with it is a threshold on P.

    One hidden unit carries -log P, which is never negative, so ReLU lets it pass.
    """
    classifier = NodeClassifier(ClassifierSpec(("joint_log_prob",), (0.0,), (1.0,), hidden=1, top_m=top_m))
    with torch.no_grad():
        for name, parameter in classifier.named_parameters():
            parameter.fill_(-1.0 if name.endswith("weight") else 0.0)
    save_classifier(classifier, path)


def threshold_beta(probability: float) -> float:
    """The beta of write_threshold_classifier's file that keeps tokens of at least this P."""
    return probability / (1.0 + probability)
