"""The contestants that servers can run, as data: a name, and the flags that make an engine do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.errors import C2TError

STATIC = (1, 2, 4, 6)
# SGLang counts as many drafts for every step as the server was started with, however deep this one went.
UNCOUNTED = frozenset({"SGLang adaptive"})
# of beta auto, which measures what its steps cost in the first two dozen of each size of batch
PLANNED_WARM_UPS = 3
TREE = {"steps": 6, "topk": 10, "tokens": 60}


@dataclass(frozen=True)
class Arm:
    """name: in tables. flags: of the server, with {draft}, {base}, {method}, {d_max}, {width}, {beta},
    {threshold_classifier} and {threshold} to be filled in. classifier: the flag that names a classifier file, where a
    run names one. concurrency: the only one it is meant for, None for all. bases: the only kinds of draft it is for,
    empty for all; on others SGLang starts without it and only logs so. warm_ups: passes through a batch before one
    counts. absent: why this engine has no such arm, empty if it has one."""

    name: str
    flags: tuple[str, ...]
    classifier: str = ""
    concurrency: int | None = None
    bases: tuple[str, ...] = ()
    warm_ups: int = 1
    absent: str = ""

    def command(self, values: Mapping[str, object]) -> list[str]:
        """The flags, filled in."""
        named = self.classifier and values["classifier"]
        return [flag.format_map(values) for flag in self.flags] + ([self.classifier, str(named)] if named else [])


def chain(algorithm: str, steps: object, tokens: object, *more: str) -> tuple[str, ...]:
    """SGLang's flags for chains of at most `steps` tokens, {draft} to be filled in."""
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", "{draft}"),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(tokens), *more),
    )


def _c2t(*more: str) -> tuple[str, ...]:
    return chain("C2T", "{d_max}", "{width}", *more)


_CLASSIFIER = "--speculative-c2t-classifier"


SGLANG = (
    Arm("plain", ()),
    *(Arm(f"static {length}", chain("{base}", length, length + 1)) for length in STATIC),
    Arm("SGLang adaptive", chain("{base}", 3, 4, "--speculative-adaptive"), bases=("EAGLE", "EAGLE3")),
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
        _c2t(_CLASSIFIER, "{threshold_classifier}", "--speculative-c2t-beta", "{threshold}"),
    ),
    Arm("C2T", _c2t("--speculative-c2t-beta", "{beta}"), _CLASSIFIER),
    Arm("C2T auto", _c2t("--speculative-c2t-beta", "auto"), _CLASSIFIER, warm_ups=PLANNED_WARM_UPS),
    Arm(
        "C2T tree",
        (
            *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", "{draft}"),
            *("--speculative-c2t-mode", "tree", "--speculative-c2t-beta", "{beta}"),
            *("--speculative-num-steps", "{d_max}", "--speculative-eagle-topk", "4"),
        ),
        _CLASSIFIER,
    ),
)


_VLLM = "--speculative-config."
_VLLM_CLASSIFIER = f"{_VLLM}c2t_classifier"


def _vllm(method: str, steps: object, **more: object) -> tuple[str, ...]:
    """One flag a key: in a JSON object a path would need quoting."""
    values = {"method": method, "model": "{draft}", "num_speculative_tokens": steps, **more}
    return tuple(word for name, value in values.items() for word in (f"{_VLLM}{name}", str(value)))


VLLM = (
    Arm("plain", ()),
    *(Arm(f"static {length}", _vllm("{method}", length)) for length in STATIC),
    Arm("vLLM adaptive", _vllm("{method}", "{d_max}", enable_adaptive_verification="true")),
    Arm("EAGLE-2 tree", (), concurrency=1, absent="vLLM has no tree attention"),
    Arm(
        "threshold on P",
        _vllm("c2t:{method}", "{d_max}", c2t_classifier="{threshold_classifier}", c2t_beta="{threshold}"),
    ),
    Arm("C2T", _vllm("c2t:{method}", "{d_max}", c2t_beta="{beta}"), _VLLM_CLASSIFIER),
    # its own threshold would cut before the manager does
    Arm(
        "C2T adaptive",
        _vllm("c2t:{method}", "{d_max}", c2t_beta=0, enable_adaptive_verification="true"),
        _VLLM_CLASSIFIER,
    ),
    Arm("C2T auto", (), absent="beta auto is for SGLang; here vLLM's adaptive verification decides (C2T adaptive)"),
)
ENGINES: Mapping[str, tuple[Arm, ...]] = {"sglang": SGLANG, "vllm": VLLM}


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
