"""Entropy-shaped trees, figures 2, 5 and 6: what entropy-driven widths and depths save over chains of four tokens.

The paper measures seconds. Here draft passes, verify steps and candidates are counted, and the time that they would
take is modelled: a draft pass costs DRAFT_COST of a verify step, whatever the number of tokens in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.papers import live
from benchmarks.papers.entropy_trees_entropy import DRAFTS, compared_tokens, crossing
from benchmarks.papers.experiment import Bench, Cell, Experiment, Findings, Row
from c2t_plugin.lab.grow import TreePolicy
from c2t_plugin.lab.policies.presets import preset
from c2t_plugin.lab.replay import Outcomes, visited

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The paper's: target temperature, depth of its trees and length of its baseline (section 4).
TEMPERATURE, DEPTH = 0.4, 4
PROMPTS, NEW = 10, 40
QUICK_PROMPTS, QUICK_NEW = 2, 6
# Parameters of GPT-2, the paper's draft, and of GPT-2 large, its target, in millions.
DRAFT_COST = 124 / 774
# More than any vocabulary here: the paper's entropy is of the whole distribution.
ALL = 1_000_000

BASELINE, STATIC = "chain of 4", "static, 2 wide"
OWN_STOP = "early stop, our limit"
# method -> preset, changes, the paper's average time saved (figure 2)
METHODS: dict[str, tuple[str, dict[str, Any], float | None]] = {
    BASELINE: ("chain-4", {}, 0.0),
    STATIC: ("static-width", {}, 0.023),
    "early stop, H > 1": ("entropy-stop", {}, 0.0443),
    "early stop, H > 1, failing token kept": ("entropy-stop", {"keep_failing": True}, None),
    OWN_STOP: ("entropy-stop", {}, None),
    "naive width": ("naive-width", {}, None),
    "dynamic width and depth": ("dynamic-width-depth", {}, 0.0665),
    "dynamic width and depth, failing node's children kept": ("dynamic-width-depth", {"keep_failing": True}, None),
    "dynamic width": ("dynamic-width", {}, 0.0716),
}
# figure -> method, what it is compared with
PANELS = {
    "5 (a)": ("early stop, H > 1", BASELINE),
    "5 (b)": ("naive width", BASELINE),
    "5 (c)": ("dynamic width", BASELINE),
    "5 (d)": ("dynamic width and depth", BASELINE),
    "6": ("dynamic width", STATIC),
}
# "only one outlier prompt out of 45 actually performing significantly worse" (section 5)
PAPER_WORSE = {"5 (a)": 1 / 45}


def policies(own_limit: float) -> dict[str, TreePolicy]:
    """The policies of METHODS. own_limit: entropy above which mismatches are likelier on our pair, nats."""
    found = {}
    for method, (name, changes, _) in METHODS.items():
        own: dict[str, Any] = {"max_entropy": own_limit} if method == OWN_STOP else {}
        found[method] = preset(name).policy(top_m=ALL, **changes, **own)
    return found


def served(bench: Bench, draft: str) -> tuple[Tensor, Mapping[str, Outcomes]]:
    """Prompt numbers and outcomes of every method at the same live states."""
    at = crossing(*compared_tokens(bench.traces(draft, "train"), DEPTH))
    return _served(bench.live(draft), draft, bench.seed, bench.quick, math.inf if at is None else at)


@lru_cache(maxsize=4)
def _served(pair: Path, draft: str, seed: int, quick: bool, limit: float) -> tuple[Tensor, Mapping[str, Outcomes]]:
    prompts, new = (QUICK_PROMPTS, QUICK_NEW) if quick else (PROMPTS, NEW)
    plan = live.Plan(prompts, new, DEPTH, TEMPERATURE, seed=seed)
    return live.by_text(pair, draft, plan, policies(limit))


@dataclass(frozen=True)
class Sums:
    """What serving each prompt took, (prompts,) float64 each; tokens: output, bonus tokens included."""

    steps: Tensor
    tokens: Tensor
    gamma: Tensor
    passes: Tensor
    wasted: Tensor

    @classmethod
    def of(cls, outcomes: Outcomes, prompt: Tensor) -> Sums:
        """Over the states that serving visits. prompt: (states,) as in replay.visited."""
        mask = visited(prompt, outcomes.accepted)
        owner = prompt[mask].unique(return_inverse=True)[1]

        def total(values: Tensor) -> Tensor:
            return owner.bincount(values[mask].double())

        each = torch.ones_like(outcomes.gamma)
        return cls(
            total(each),
            total(outcomes.accepted + 1),
            total(outcomes.gamma),
            total(outcomes.passes),
            total(outcomes.wasted),
        )

    def time(self) -> Tensor:
        """Modelled, in verify steps per output token: (prompts,) float64."""
        return (self.steps + DRAFT_COST * self.passes) / self.tokens

    def all(self) -> Sums:
        """Of all prompts together, as one."""
        return Sums(*(value.sum(0, keepdim=True) for value in (getattr(self, name) for name in self.__annotations__)))


def figure_2(bench: Bench) -> Findings:
    rows: list[Row] = []
    said = []
    for draft, title in DRAFTS.items():
        prompt, outcomes = served(bench, draft)
        sums = {method: Sums.of(found, prompt).all() for method, found in outcomes.items()}
        mine = [_row(title, method, sums[method], sums[BASELINE]) for method in METHODS]
        order = sorted(METHODS, key=lambda method: float(sums[method].time()))
        widest = max(mine, key=lambda row: float(row["candidates per step"] or 0.0))
        said.append(
            f"{title}: {order[0]} first, {order[-1]} last, {BASELINE} number {order.index(BASELINE) + 1}; "
            f"{widest['method']} verifies {widest['candidates per step']:.0f} candidates a step"
        )
        rows += mine
    remark = (
        f"By modelled time, of {len(METHODS)}: {'; '.join(said)}. Target temperature {TEMPERATURE}, "
        f"{QUICK_PROMPTS if bench.quick else PROMPTS} prompts. The model charges nothing for candidates."
    )
    return Findings(rows, remark, _saved_figure(rows))


def _saved_figure(rows: Sequence[Row]) -> Figure:
    """Time saved by each method, the paper's beside ours, one panel per draft."""
    from c2t_plugin.lab.pictures import bars_figure

    drawn: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in rows:
        both = {"modelled, ours": row["time saved, modelled"], "paper": row["paper time saved"]}
        cells = {name: None if value is None else float(value) for name, value in both.items()}
        drawn.setdefault(str(row["draft"]), {})[str(row["method"])] = cells
    return bars_figure(drawn, "share of the time saved", 8.0)


def _row(title: str, method: str, sums: Sums, base: Sums) -> Row:
    def per_token(name: str) -> float:
        return float(getattr(sums, name) / sums.tokens)

    def saved(name: str) -> float:
        return 1 - per_token(name) / float(getattr(base, name) / base.tokens)

    return {
        "draft": title,
        "method": method,
        "paper time saved": METHODS[method][2],
        "time saved, modelled": 1 - float(sums.time() / base.time()),
        "tau": float(sums.tokens / sums.steps) - 1,
        "candidates per step": float(sums.gamma / sums.steps),
        "candidates per token": per_token("gamma"),
        "draft passes saved": saved("passes"),
        "wasted passes per token": per_token("wasted"),
        "verify steps saved": saved("steps"),
    }


def figures_5_and_6(bench: Bench) -> Findings:
    rows: list[Row] = []
    points: dict[str, tuple[Tensor, Tensor]] = {}
    for draft, title in DRAFTS.items():
        prompt, outcomes = served(bench, draft)
        sums = {method: Sums.of(found, prompt) for method, found in outcomes.items()}
        for panel, (method, base) in PANELS.items():
            wasted, time = gains(sums[method], sums[base])
            rows.append(
                {
                    "draft": title,
                    "figure": panel,
                    "method": method,
                    "baseline": base,
                    "paper prompts worse": PAPER_WORSE.get(panel),
                    "prompts worse": float((time < 0).double().mean()),
                    "wasted passes saved per token": float(wasted.mean()),
                    "time saved, modelled": float(time.mean()),
                    "correlation": correlation(wasted, time),
                }
            )
            points[f"{title}, {panel}"] = wasted, time
    strong = [row for row in rows if row["correlation"] is not None and float(row["correlation"]) > 0.5]
    remark = (
        f"Savings in wasted passes and in modelled time correlate above 0.5 in {len(strong)} of {len(rows)} panels; "
        "the paper: usually strongly, naive width excepted. Means over prompts."
    )
    return Findings(rows, remark, _scatter(points))


def gains(method: Sums, base: Sums) -> tuple[Tensor, Tensor]:
    """Per prompt, (prompts,) float64: wasted passes saved per output token, share of the modelled time saved."""
    wasted = base.wasted / base.tokens - method.wasted / method.tokens
    return wasted, 1 - method.time() / base.time()


def correlation(one: Tensor, other: Tensor) -> Cell:
    """Pearson's; None where either does not vary."""
    if len(one) < 2 or not one.std() > 0 or not other.std() > 0:
        return None
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def _scatter(points: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Time saved over wasted passes saved, a point per prompt, as the paper's figures 5 and 6."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(PANELS), 3 * len(DRAFTS)), layout="constrained")
    for axes, (title, (wasted, time)) in zip(
        figure.subplots(len(DRAFTS), len(PANELS)).flat, points.items(), strict=True
    ):
        axes.scatter(wasted.tolist(), time.tolist(), s=12)
        axes.axhline(0, color="black", linestyle="--", linewidth=0.8)
        axes.axvline(0, color="black", linestyle="--", linewidth=0.8)
        axes.axhline(float(time.mean()), color="red", linestyle="--", linewidth=0.8)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("wasted passes saved per token", fontsize=8)
        axes.set_ylabel("share of modelled time saved", fontsize=8)
    return figure


EXPERIMENTS = (
    Experiment(
        name="entropy-figure-2",
        title="Entropy-driven depth and width against chains of four tokens",
        source="Entropy trees figure 2; tau without bonus",
        columns=(
            "draft",
            "method",
            "paper time saved",
            "time saved, modelled",
            "tau",
            "candidates per step",
            "candidates per token",
            "draft passes saved",
            "wasted passes per token",
            "verify steps saved",
        ),
        run=figure_2,
    ),
    Experiment(
        name="entropy-figures-5-6",
        title="Per prompt: wasted draft passes and modelled time saved",
        source="Entropy trees figures 5 and 6",
        columns=(
            "draft",
            "figure",
            "method",
            "baseline",
            "paper prompts worse",
            "prompts worse",
            "wasted passes saved per token",
            "time saved, modelled",
            "correlation",
        ),
        run=figures_5_and_6,
    ),
)
