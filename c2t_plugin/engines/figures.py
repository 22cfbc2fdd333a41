"""What a planner has learnt, and what came of what it expected, as numbers for Prometheus; the same on both engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Labels of "by": what the classifier's confidences say, and what they turned out to mean.
BY = ("classifier", "learnt")
# name, help text, labels
GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("learnt_tokens", "Draft tokens that the planner has learnt from.", ()),
    ("learnt_discarded", "Times that what was learnt predicted worse than before, and was thrown away.", ()),
    ("learnt_turns", "Of them, times that the newest drafts said that the traffic has turned.", ()),
    ("learnt_slope", "What the confidences' logits are multiplied by.", ()),
    ("learnt_own", "What the draft's own logits are multiplied by.", ()),
    ("learnt_offset", "What is added to them, by depth.", ("depth",)),
    ("learnt_networks", "Networks that were learnt and put in force.", ()),
    ("learnt_networks_discarded", "Networks that were learnt, predicted worse, and were thrown away.", ()),
    ("expected_nll", "Nats per draft token between expected and actual acceptance.", ("by",)),
    ("expected_auc", "Chance that an accepted draft token was expected to be likelier than a rejected one.", ("by",)),
    ("expected_acceptance", "Expected share of verified draft tokens that is accepted.", ("by", "depth")),
    ("acceptance", "Share of verified draft tokens that is accepted.", ("depth",)),
    ("tokens_per_expected", "Output tokens of a step for each that the planner expected.", ()),
    ("seconds_per_expected", "Seconds of a step for each that the planner expected.", ()),
)


def figures(state: dict[str, Any]) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Name of a gauge, value and labels, of those that are known. state: see StepPlanner.state, of one that learns."""
    learnt = state["learnt"]
    yield "learnt_tokens", learnt["seen"], {}
    for name in ("discarded", "turns", "slope", "own"):
        yield f"learnt_{name}", learnt[name], {}
    if network := learnt.get("network"):
        yield "learnt_networks", network["swaps"], {}
        yield "learnt_networks_discarded", network["discarded"], {}
    for depth, (offset, here) in enumerate(zip(learnt["offsets"], learnt["depths"], strict=True), 1):
        yield "learnt_offset", offset, {"depth": str(depth)}
        if here["tokens"]:
            yield "acceptance", here["accepted"], {"depth": str(depth)}
            for by in BY:
                yield "expected_acceptance", here[by], {"by": by, "depth": str(depth)}
    for name in ("nll", "auc"):
        for by, value in zip(BY, learnt[name] or (), strict=False):
            yield f"expected_{name}", value, {"by": by}
    for name, value in state["came"].items():
        if value is not None:
            yield f"{name}_per_expected", value, {}
