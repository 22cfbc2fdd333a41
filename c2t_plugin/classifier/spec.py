"""What decides what a confidence means, as it travels in a classifier file (C2T 4.1, B)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from c2t_kernels.network import FEATURES
from c2t_plugin import json_text
from c2t_plugin.errors import ClassifierError

PAPER_FEATURES = ("joint_prob", "entropy", "depth")
# The paper's three, P as its logarithm, and four more that cost nothing: the draft step has computed them already.
EXTENDED_FEATURES = ("joint_log_prob", "entropy", "depth", "log_prob", "rank", "margin", "path_entropy")
PAPER_HIDDEN = 48
PAPER_PARAMETERS = 241
# Beyond them shift and scale are infinite or 0 as float32, or make features so.
LARGEST, SMALLEST = 1e30, 1e-30


@dataclass(frozen=True)
class ClassifierSpec:
    """All that decides what a confidence, and so a beta, means. It travels in the classifier file.

    features: names from FEATURES, in order. Feature i enters as (value - shift[i]) / scale[i].
    depth_origin: the number that a root's child has as its depth, 0 or 1 (the paper uses both).
    top_m: how many of the largest probabilities the entropy sums over.
    negatives_per_positive: of the training rows; None if all negatives were used.
    suggested_beta: threshold for users who set none, in [0, 1].
    pair: the draft/target pair it was fitted on, e.g. {"target": ..., "draft": ..., "draft_vocab_size": ...}.
    training: provenance and held-out scores.
    """

    features: tuple[str, ...] = PAPER_FEATURES
    shift: tuple[float, ...] = (0.0, 0.0, 0.0)
    scale: tuple[float, ...] = (1.0, 1.0, 1.0)
    hidden: int = PAPER_HIDDEN
    depth_origin: int = 1
    top_m: int = 1000
    negatives_per_positive: float | None = None
    suggested_beta: float = 0.5
    pair: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        odd = [name for name, kinds in _KINDS.items() if not _is(getattr(self, name), kinds)]
        if odd:
            raise ClassifierError(f"classifier spec has values of another type: {', '.join(odd)}; refit it")
        unknown = [name for name in self.features if not isinstance(name, str) or name not in FEATURES]
        if unknown or not self.features or len(set(self.features)) != len(self.features):
            raise ClassifierError(
                f"classifier features {list(self.features)}: this build computes {list(FEATURES)}, each at most once"
            )
        if not len(self.features) == len(self.shift) == len(self.scale):
            raise ClassifierError("classifier features, shift and scale must have one entry per feature")
        numbers = all(_is(x, (int, float)) and abs(x) <= LARGEST for x in (*self.shift, *self.scale))
        if not numbers or min(map(abs, self.scale)) < SMALLEST:
            raise ClassifierError(f"classifier shift {self.shift} and scale {self.scale} must be finite, scale not 0")
        if self.hidden < 1 or not 1 <= self.top_m < 2**31 or self.depth_origin not in (0, 1):
            raise ClassifierError(
                f"classifier needs hidden >= 1, top_m >= 1 and depth_origin 0 or 1, got hidden {self.hidden}, "
                f"top_m {self.top_m}, depth_origin {self.depth_origin}"
            )
        if not 0.0 <= self.suggested_beta <= 1.0:
            raise ClassifierError(f"classifier suggested_beta must be in [0, 1], got {self.suggested_beta}")

    @classmethod
    def from_json(cls, text: str) -> ClassifierSpec:
        """Inverse of to_json. Unknown or missing keys raise ClassifierError."""
        raw = json_text.parse(text, "classifier spec", ClassifierError)
        known = {item.name for item in fields(cls)}
        if not isinstance(raw, dict) or set(raw) != known:
            found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise ClassifierError(
                f"classifier spec must have exactly the keys {sorted(known)}, found {found}; refit it"
            )
        lists = ("features", "shift", "scale")
        # what is no list is refused with the other types
        tuples = {name: tuple(raw[name]) if isinstance(raw[name], list) else None for name in lists}
        return cls(**{**raw, **tuples})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("features", "shift", "scale"), tuple),
    **dict.fromkeys(("hidden", "depth_origin", "top_m"), int),
    "negatives_per_positive": (int, float, type(None)),
    "suggested_beta": (int, float),
    **dict.fromkeys(("pair", "training"), Mapping),
}


def _is(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
