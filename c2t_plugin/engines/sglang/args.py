"""Options of C2T on SGLang's command line, and how they reach every process.

The parsed options ride on the argument record as `_c2t`, a non-field that survives pickling into the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from c2t_plugin.config import (
    ATTENTIONS,
    BASES,
    LEARNING,
    MASKED,
    MODES,
    OLD_NAMES,
    PACKING,
    PACKINGS,
    POLICIES,
    PRECISIONS,
    REQUEST_SETTINGS,
    ROWS,
    SELF_CHECKS,
    C2TConfig,
)
from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.errors import C2TError

PREFIX = "speculative_c2t_"
# What --speculative-c2t-packing names, as SGLang's options name it.
ATTENTION_OF = {name: {"cpu": "intel_amx"}.get(name, name) for name in PACKING}

# On SGLang 0.5.17 arguments are resolved inside the record's constructor, before `_c2t` can be set on it.
_parsed: dict[str, Any] | None = None


def add_cli_args(_result: None, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
    """AFTER hook: add --speculative-c2t-*. Only store actions, which `--config` files can set as well."""
    group = parser.add_argument_group("C2T speculative decoding (--speculative-algorithm C2T)")
    group.add_argument("--speculative-c2t-classifier", help="Classifier file or hub id; default: beside the draft.")
    group.add_argument("--speculative-c2t-beta", help="Confidence below which a draft token is dropped.")
    group.add_argument(
        "--speculative-c2t-planner",
        help="Decide depth and verified tokens each step: on, off, or a file of costs, made if there is none.",
    )
    group.add_argument("--speculative-c2t-cost-curve", help="Old name of a planner's file.")
    group.add_argument("--speculative-c2t-base", help=f"Algorithm that drafts and verifies: {', '.join(BASES)}.")
    group.add_argument("--speculative-c2t-mode", help=f"Layout of the drafts: {', '.join(MODES)}.")
    group.add_argument("--speculative-c2t-policy", help=f"Rule by which trees grow: {', '.join(POLICIES)}.")
    group.add_argument("--speculative-c2t-top-m", help="Probabilities the entropy sums over; must be the classifier's.")
    group.add_argument("--speculative-c2t-trace-dir", help="Record chains of served requests here, for c2t fit.")
    group.add_argument("--speculative-c2t-trace-share", help="Share of the requests that is recorded, default 0.05.")
    group.add_argument("--speculative-c2t-trace-limit", help="MB that all recordings may take, default 1000.")
    group.add_argument("--speculative-c2t-trace-precision", help=f"Of statistics: {', '.join(PRECISIONS)}.")
    group.add_argument("--speculative-c2t-packing", help=f"Verify packed rows, by: {', '.join(PACKINGS)}.")
    group.add_argument("--speculative-c2t-rows", help=f"How many rows that takes is known by: {', '.join(ROWS)}.")
    group.add_argument("--speculative-c2t-attention", help=f"Kernel of packing triton: {', '.join(ATTENTIONS)}.")
    group.add_argument("--speculative-c2t-verify-attention", help=f"The target verifies by: auto, {', '.join(MASKED)}.")
    group.add_argument("--speculative-c2t-self-check", help=f"At start, of what it computes: {', '.join(SELF_CHECKS)}.")
    group.add_argument(
        "--speculative-c2t-learn", help=f"From what is accepted, for the planner: {', '.join(LEARNING)}."
    )
    group.add_argument("--speculative-c2t-learned", help="Keep that in this file, a classifier, and go on from it.")
    group.add_argument("--speculative-c2t-request-settings", help=f"Requests may set: {', '.join(REQUEST_SETTINGS)}.")
    for old, name in OLD_NAMES.items():
        group.add_argument(f"--speculative-c2t-{old}", help=f"Old name of --speculative-c2t-{name}.")
    group.add_argument("--speculative-c2t-request-tiers", help="on: each answer tells the rows of its whole batch.")


def from_cli_args(original: Callable[..., Any], *positional: Any, **keyword: Any) -> Any:
    """AROUND hook: keep C2T's options for resolution and put them on the record."""
    global _parsed
    namespace: argparse.Namespace = keyword.get("args", positional[-1])
    options = {
        name.removeprefix(PREFIX): value
        for name, value in vars(namespace).items()
        if name.startswith(PREFIX) and value is not None
    }
    _parsed = options
    _choose_topk(namespace, options)
    try:
        server_args = original(*positional, **keyword)
    finally:
        _parsed = None
    setattr(server_args, ATTRIBUTE, options)
    return server_args


def _choose_topk(namespace: argparse.Namespace, options: dict[str, Any]) -> None:
    """Write the mode's top-k where none is given, since SGLang chooses attention by it, before it asks `validate`.

    Not with pages of several tokens: there SGLang would take another attention for a top-k of 1 than for none.
    """
    given = getattr(namespace, "speculative_eagle_topk", None), getattr(namespace, "page_size", None)
    if not asks_for_c2t(namespace) or given not in ((None, None), (None, 1)):
        return
    try:
        mode = C2TConfig.resolve(options).mode
    except C2TError:
        return  # which `validate` says
    from c2t_plugin.trees.shape import DEFAULT_TOPK

    namespace.speculative_eagle_topk = DEFAULT_TOPK if mode == "tree" else 1


def flags_of(server_args: Any) -> dict[str, Any] | None:
    """C2T's command-line options of this record; None if it was not made from a command line."""
    return getattr(server_args, ATTRIBUTE, _parsed)


def override(server_args: Any, name: str, value: Any) -> None:
    """Have this record's C2T option say something else from now on."""
    options = {each: said for each, said in (flags_of(server_args) or {}).items() if OLD_NAMES.get(each) != name}
    setattr(server_args, ATTRIBUTE, {**options, name: value})


def asks_for_c2t(server_args: Any) -> bool:
    """Whether this record selects one of C2T's algorithms, be it resolved already or not."""
    return str(getattr(server_args, "speculative_algorithm", None)).upper().startswith("C2T")


def config_of(server_args: Any) -> C2TConfig:
    """The configuration for this record: flags, C2T_* variables, C2T_CONFIG, defaults."""
    return C2TConfig.resolve(flags_of(server_args) or {})


def draft_revision(server_args: Any) -> str | None:
    """Of the draft, as SGLang loads it."""
    found: str | None = getattr(server_args, "speculative_draft_model_revision", None)
    return found
