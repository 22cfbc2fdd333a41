"""The options of C2T: frozen, self-validating, each default in one place."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from c2t_plugin import envs
from c2t_plugin.errors import ConfigError
from c2t_plugin.request_options import shown

logger = logging.getLogger(__name__)

BASES = ("auto", "eagle", "eagle3", "standalone")
ON, OFF = "on", "off"
# What requests may set of their own: anything, what is less work than the server's own, nothing.
ALL, LOWER, NONE = REQUEST_SETTINGS = ("all", "lower", "none")
# What `planner on` was called for one release: beta AUTO, and a cost curve beside it.
AUTO = "auto"
OLD_CURVE = "cost_curve"
# What options were called for one release, and what they are called.
OLD_NAMES = {"ragged": "packing", "plan": "rows"}
MODES = ("chain", "tree")
# Of PACKINGS, those that verify the uniform window.
UNIFORM = ("off", "full")
# Of PACKING, those that take a mask for each request; the others pack chains only.
MASKED = ("triton", "flashinfer", "fa3", "cpu")
PACKING = (*MASKED, "trtllm_mha", "trtllm_mla", "cutedsl_mla", "flashmla")
PACKINGS = ("auto", *PACKING, *UNIFORM)
LAGGED = "lagged"
ROWS = (AUTO, "sync", LAGGED)
TREE_ATTENTION = "tree"
ATTENTIONS = (AUTO, "stock", TREE_ATTENTION)
STRICT = "strict"
SELF_CHECKS = (AUTO, ON, STRICT, OFF)
POLICIES = ("c2t", "prob", "eagle2", "dyspec", "entropy", "static")
PRECISIONS = ("coarse", "exact")
CALIBRATE = "calibrate"
NETWORK = "network"
LEARNING = (AUTO, CALIBRATE, NETWORK, OFF)
# The policies that cut below beta.
THRESHOLDS = ("c2t", "prob")
CHOICES = {
    **{"base": BASES, "mode": MODES, "packing": PACKINGS, "rows": ROWS, "attention": ATTENTIONS, "policy": POLICIES},
    **{"self_check": SELF_CHECKS, "learn": LEARNING, "trace_precision": PRECISIONS},
    **{"request_settings": REQUEST_SETTINGS, "request_tiers": (ON, OFF), "verify_attention": (AUTO, *MASKED)},
}


@dataclass(frozen=True)
class C2TConfig:
    """What a user can set. None means: take it from the classifier file.

    classifier: path or hub id of a classifier file; None: beside the draft checkpoint, else the shipped one.
    beta: confidence below which a draft token is dropped, in [0, 1].
    planner: ON decides draft depth and verified tokens each step, by what they cost; OFF does not; AUTO: for chains
        without a beta that nobody records. Any other value is
        ON, and the file of those costs: if it does not exist yet they are measured and written there.
    base: the engine's own algorithm that drafts and verifies; auto reads the draft checkpoint.
    mode: how drafts are laid out; chain is one sequence per request, tree one tree.
    policy: the rule by which a tree grows; chain mode has c2t alone.
    top_m: how many probabilities the entropy sums over; it must be what the classifier was trained with.
    packing: attention by which packed rows are verified; auto: the server's, where it can; off: the uniform window,
        in a few widths; full: in one.
    rows: how many such a pass has: sync waits for the number of kept tokens; lagged predicts it from steps before, and
        clips what does not fit; auto: lagged on a GPU, but for trees that no planner cuts.
    attention: kernel of packed verification on triton; stock: the engine's own, tree: c2t_kernels.tree_attention; auto:
        on a GPU whichever wins a contest at start.
    verify_attention: what the target verifies by, where that is not the server's attention (auto).
    self_check: ON: once at start packed verification and kernels are compared with the uniform window and with float32,
        and what fails is not used; AUTO: that on a GPU; STRICT: what fails is an error; OFF: nothing.
    trace_dir: directory that chains of served requests are recorded into, without their text; None records none.
    trace_share: share of the requests that is recorded, in (0, 1].
    trace_limit: millions of bytes that the directory's recordings may take; the oldest are removed for new ones.
    trace_precision: of their statistics: coarse is what a fit needs, exact float32, to compare servers by.
    request_settings: what requests may set of their own; lower: only what is less work than the server's own.
    learn: CALIBRATE: a planner of chains takes confidences for what they turn out to mean; OFF: as they are; AUTO: for
        what they turn out to mean; where the classifier was fitted on the very pair, once that has predicted better.
    learned: file that what is learnt is written to, and read from at start.
    request_tiers: ON tells each request how many rows its steps had, its neighbours' among them.
    """

    classifier: str | None = None
    beta: float | None = None
    planner: str = AUTO
    base: str = "auto"
    mode: str = "chain"
    policy: str = "c2t"
    top_m: int | None = None
    trace_dir: str | None = None
    trace_share: float = 0.05
    trace_limit: float = 1000.0
    trace_precision: str = "coarse"
    packing: str = "auto"
    rows: str = AUTO
    attention: str = AUTO
    verify_attention: str = AUTO
    self_check: str = AUTO
    learn: str = AUTO
    learned: str | None = None
    request_settings: str = ALL
    request_tiers: str = OFF

    @property
    def plans_chains(self) -> bool:
        """Whether confidences on chains are taken for probabilities each step."""
        return self.planned and self.mode == "chain"

    @property
    def planned(self) -> bool:
        """Whether a planner decides."""
        if self.planner != AUTO:
            return self.planner != OFF
        # what is recorded is drafted whole, which leaves a planner nothing
        return self.mode == "chain" and self.policy == "c2t" and self.beta is None and self.trace_dir is None

    @property
    def curve(self) -> Path | None:
        """The file of the planner's costs, if one is named."""
        return None if self.planner in (ON, OFF, AUTO) else Path(self.planner)

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.beta is not None and not (math.isfinite(self.beta) and 0.0 <= self.beta <= 1.0):
            raise ConfigError(f"beta must be a number in [0, 1], got {self.beta}")
        if self.planned and self.beta is not None:
            raise ConfigError(f"planner {self.planner} decides what beta {self.beta} would; leave one out")
        if self.rows == LAGGED and self.mode != "chain" and not self.planned:
            raise ConfigError(f"rows {LAGGED} clips chains, and trees that a planner cuts: set one, or leave rows out")
        if self.attention == TREE_ATTENTION and self.packing not in ("auto", "triton"):
            raise ConfigError(
                f"attention {TREE_ATTENTION} is a kernel of packing triton, packing is {self.packing}; leave one out"
            )
        if self.policy != "c2t" and self.mode != "tree":
            raise ConfigError(f"policy {self.policy} grows trees: set the mode to tree, or leave the policy out")
        if self.policy in THRESHOLDS and self.policy != "c2t" and self.beta is None and not self.planned:
            raise ConfigError(f"policy {self.policy} has no suggested beta: set one")
        if self.policy not in THRESHOLDS and (self.beta is not None or self.planned):
            raise ConfigError(f"policy {self.policy} has no beta and no planner: leave them out")
        if self.top_m is not None and self.top_m < 1:
            raise ConfigError(f"top_m must be at least 1, got {self.top_m}")
        if self.learned is not None and self.learn == OFF:
            raise ConfigError(f"learned {self.learned} is for what learn {OFF} does not learn; leave one out")
        if not 0.0 < self.trace_share <= 1.0:
            raise ConfigError(f"trace_share must be a number above 0 and at most 1, got {self.trace_share}")
        if not 1.0 <= self.trace_limit < math.inf:
            raise ConfigError(f"trace_limit must be a number of MB, 1 or more, got {self.trace_limit}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> C2TConfig:
        """Build from untyped values (flags, environment, JSON); an unknown key or a wrong type is an error."""
        values = _renamed(values)
        known = {field.name for field in fields(cls)}
        unknown = sorted(shown(name).strip("'") for name in set(values) - known)
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**{name: _typed(name, value) for name, value in values.items() if value is not None})

    @classmethod
    def resolve(cls, flags: Mapping[str, Any]) -> C2TConfig:
        """Merge by precedence: command-line flags, then C2T_<NAME> variables, then C2T_CONFIG, then defaults."""
        names = (*(field.name for field in fields(cls)), OLD_CURVE, *OLD_NAMES)
        merged: dict[str, Any] = {}
        for source in (envs.config(), {n: envs.option(n) for n in names}, {n: flags.get(n) for n in names}):
            merged |= _current(source)
        return cls.from_mapping(merged)


def _current(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is set, with today's names for OLD_NAMES. Raises ConfigError where both come."""
    found = {name: value for name, value in values.items() if value is not None}
    for old, new in OLD_NAMES.items():
        if old not in found:
            continue
        if new in found:
            raise ConfigError(f"{old} {found[old]} is the old name of {new}, which is {found[new]}; leave {old} out")
        found[new] = found.pop(old)
        logger.warning("C2T: %s is called %s now: %s %s", old, new, new, found[new])
    return found


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """With the planner under its own name. Raises ConfigError where a curve comes without a planner."""
    found = _current(values)
    curve, planned = found.pop(OLD_CURVE, None), found.get("beta") == AUTO
    if planned:
        del found["beta"]
        found.setdefault("planner", ON)
    if curve is not None:
        if found.get("planner", AUTO) in (AUTO, OFF):
            named = ascii(curve).strip("'")
            raise ConfigError(f"{OLD_CURVE} is what a planner decides by; expected planner {named} in its place")
        found["planner"] = curve
    if planned or curve is not None:
        logger.warning("C2T: beta %s and %s are called planner now: planner %s", AUTO, OLD_CURVE, found["planner"])
    return found


def _typed(name: str, value: Any) -> Any:
    convert = {"beta": float, "top_m": int, "trace_share": float, "trace_limit": float}.get(name, str)
    if isinstance(value, bool) or (convert is str and not isinstance(value, str)):
        raise ConfigError(f"{name} has a value of the wrong type: {shown(value)}")
    if convert is str and not _is_a_name(value):
        raise ConfigError(f"{name} has characters that no name and no path has: {shown(value)}")
    try:
        found = convert(value)
        if convert is int and isinstance(value, float) and found != value:
            raise ValueError("a fraction")
        return found
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{name} must be {'a number' if convert is float else 'an integer'}, got {shown(value)}"
        ) from error


def _is_a_name(value: str) -> bool:
    """Whether the system takes it for a path, which JSON has others than."""
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
