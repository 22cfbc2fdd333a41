"""Entropy-shaped trees, figures 1 and 3: the draft's entropy where the target agrees with it and where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from c2t_plugin.lab.replay import visited
from c2t_plugin.lab.scores import auc
from c2t_plugin.traces.file import Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAFTS = {"draft": "stand-alone", "eagle3": "EAGLE-3 head"}
# Of the paper's vanilla speculative decoding.
LENGTH = 4
# In nats; the last bin has no upper end.
BIN, BINS = 0.5, 13
# Where the paper finds mismatches to become likelier than matches (3.1).
PAPER_CROSSING = 1.0
# A bin with fewer tokens says nothing about which is likelier.
LEAST = 20


def compared_tokens(traces: Traces, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens of greedy chains that the target comes to compare: entropy (tokens,) float32, matched (tokens,) bool.

    Serving visits a state after each verification; behind the first mismatch of a chain nothing is compared.
    """
    accepted = traces.chain.accepted[:, :length]
    hits = accepted.int().cumprod(1).sum(1)
    states = visited(traces.prompt, hits)
    reached = torch.arange(accepted.shape[1]) <= hits[:, None]
    chosen = reached & states[:, None]
    return traces.chain.entropy[:, :length][chosen], accepted[chosen]


def histogram(entropy: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """Per bin the tokens that are flagged and those that are not: (BINS,) int64 each. entropy, flags: (tokens,)."""
    bins = (entropy / BIN).long().clamp(0, BINS - 1)
    return bins[flags].bincount(minlength=BINS), bins[~flags].bincount(minlength=BINS)


def crossing(entropy: Tensor, matched: Tensor) -> float | None:
    """Lower end of the first bin with more mismatches than matches, among bins of at least LEAST tokens; nats."""
    hits, misses = histogram(entropy, matched)
    above = ((misses > hits) & (hits + misses >= LEAST)).nonzero().flatten()
    return BIN * int(above[0]) if len(above) else None


def _drafts(bench: Bench) -> dict[str, str]:
    """Of the drafts that the pair has."""
    return {draft: title for draft, title in DRAFTS.items() if (bench.pair / draft).is_dir()}


def figure_1(bench: Bench) -> Findings:
    rows: list[Row] = []
    said = []
    for draft, title in _drafts(bench).items():
        entropy, matched = compared_tokens(bench.traces(draft))
        rows += _rows(title, *histogram(entropy, matched))
        at = crossing(entropy, matched)
        where = "nowhere" if at is None else f"from {at:g} nats"
        said.append(
            f"{title}: {int(matched.sum())} matches and {int((~matched).sum())} mismatches, mismatches likelier {where}"
        )
    remark = f"{'; '.join(said)}; the paper: from {PAPER_CROSSING:g}, matches far more frequent. Chains of {LENGTH}."
    return Findings(rows, remark, _picture(rows, "matched", "mismatched"))


def _rows(title: str, hits: Tensor, misses: Tensor) -> list[Row]:
    rows: list[Row] = []
    for index, (hit, miss) in enumerate(zip(hits.tolist(), misses.tolist(), strict=True)):
        rows.append(
            {
                "draft": title,
                "entropy from": BIN * index,
                "entropy to": BIN * (index + 1) if index < BINS - 1 else None,
                "matched": hit,
                "mismatched": miss,
                "mismatch share": miss / (hit + miss) if hit + miss else None,
            }
        )
    return rows


def _picture(rows: Sequence[Row], *columns: str) -> Figure:
    """Histograms of these columns, one panel per draft."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(DRAFTS), 3.5), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(DRAFTS)), DRAFTS.values(), strict=True):
        chosen = [row for row in rows if row["draft"] == title]
        lows = [float(row["entropy from"] or 0.0) for row in chosen]
        for column in columns:
            axes.bar(lows, [float(row[column] or 0) for row in chosen], BIN, align="edge", alpha=0.6, label=column)
        axes.set_title(title)
        axes.set_xlabel("entropy of the draft, nats")
        axes.legend()
    return figure


def figure_3(bench: Bench) -> Findings:
    rows: list[Row] = []
    said = []
    boxes: dict[str, list[Tensor]] = {}
    for draft, title in _drafts(bench).items():
        entropy, correct = generations(bench.traces(draft))
        boxes[title] = [entropy[correct], entropy[~correct]]
        rows += [
            {
                "draft": title,
                "generation": name,
                "generations": int(chosen.sum()),
                **_quartiles(entropy[chosen]),
            }
            for name, chosen in (("correct", correct), ("incorrect", ~correct))
        ]
        found = auc(-entropy, correct)
        said.append(f"{title}: {found:.3f}")
    remark = (
        "Chance that a correct generation has less entropy than an incorrect one: "
        f"{'; '.join(said)}. The paper has answers to GSM8K by one model; here a generation is a greedy chain of "
        f"{LENGTH} draft tokens, correct if the target writes the same."
    )
    return Findings(rows, remark, _boxes(boxes))


def _boxes(values: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Mean entropies of correct and of incorrect generations as boxes, one panel per draft."""
    from c2t_plugin.lab.pictures import panels

    figure, axes = panels(len(values), 4.0)
    for axis, (title, both) in zip(axes, values.items(), strict=True):
        axis.boxplot([each.numpy() for each in both], showfliers=False)
        axis.set_xticks([1, 2], ["correct", "incorrect"])
        axis.set(title=title, ylabel="mean entropy of the generation, nats")
    return figure


def generations(traces: Traces, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Mean entropy of every recorded greedy chain, (states,) float32, and whether the target writes it: bool."""
    return traces.chain.entropy[:, :length].mean(1), traces.chain.accepted[:, :length].all(1)


def _quartiles(values: Tensor) -> dict[str, float | None]:
    names = ("lower quartile", "median", "upper quartile")
    if not len(values):
        return dict.fromkeys(names)
    return dict(zip(names, values.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist(), strict=True))


EXPERIMENTS = (
    Experiment(
        name="entropy-figure-1",
        title="The draft's entropy (nats) at matched and mismatched tokens",
        source="Entropy trees figure 1 and section 3.1",
        columns=("draft", "entropy from", "entropy to", "matched", "mismatched", "mismatch share"),
        run=figure_1,
    ),
    Experiment(
        name="entropy-figure-3",
        title="Mean entropy (nats) of correct and incorrect generations",
        source="Entropy trees figure 3; the paper prints no numbers",
        columns=("draft", "generation", "generations", "lower quartile", "median", "upper quartile"),
        run=figure_3,
    ),
)
