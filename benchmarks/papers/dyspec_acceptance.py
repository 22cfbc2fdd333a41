"""DySpec's figures 2 and 5: acceptance against draft probability, and how large threshold trees are, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.papers import live
from benchmarks.papers.dyspec_trees import DRAFT, DRAFT_TEMPERATURE, LARGE
from benchmarks.papers.entropy_trees_shapes import correlation
from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.policies.dyspec import DySpecThreshold
from c2t_plugin.lab.verify import Sampler, Verification, probabilities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The paper does not say the target's for figure 2; figure 5's example is at .6 (B.1).
TARGET_TEMPERATURE = 0.6
PROMPTS, NEW = 24, 30
EDGES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CELLS = 20

THRESHOLDS = (0.1, 0.03, 0.01, 0.003, 0.001)
PAPER_SIZES = {0.001: 551.79}
DEPTH, TREE_PROMPTS, TREE_NEW = 30, 3, 10
QUICK = (2, 3)


def figure_2(bench: Bench) -> Findings:
    draft, target = probable_tokens(bench)
    accepted = (target / draft).clamp_max(1)
    rows = bins(draft, target, accepted)
    means = [float(row["acceptance"]) for row in rows if row["acceptance"] is not None]
    rises = sum(one < other for one, other in itertools.pairwise(means))
    found = correlation(draft, target)
    remark = (
        f"Mean acceptance rises in {rises} of {len(means) - 1} steps from bin to bin (the paper: as draft probability "
        f"grows, acceptance does). Correlation of draft and target probability: "
        f"{'none' if found is None else f'{found:.2f}'}. Words of at least {EDGES[0]} in the draft, both models at "
        f"temperature {DRAFT_TEMPERATURE}."
    )
    return Findings(rows, remark, _densities(draft, target, accepted))


def probable_tokens(bench: Bench) -> tuple[Tensor, Tensor]:
    """Draft and target probability of all tokens that the draft gives EDGES[0] or more: (tokens,) float64 each."""
    prompts, new = QUICK if bench.quick else (PROMPTS, NEW)
    plan = live.Plan(prompts, new, 1, TARGET_TEMPERATURE, seed=bench.seed)
    drafts, targets = [], []
    with torch.inference_mode():
        for site in live.sites(bench.live(DRAFT), DRAFT, plan):
            draft = _after(site.drafter().root().logits(), DRAFT_TEMPERATURE)[site.running]
            target = _after(site.judge().root().logits(), TARGET_TEMPERATURE)[site.running]
            drafts.append(draft[draft >= EDGES[0]])
            targets.append(target[draft >= EDGES[0]])
    return torch.cat(drafts), torch.cat(targets)


def _after(logits: Tensor, temperature: float) -> Tensor:
    return probabilities(logits[:, 0].double(), temperature)


def bins(draft: Tensor, target: Tensor, accepted: Tensor) -> list[Row]:
    """A row per bin of the draft's probability; all (tokens,) float64."""
    rows: list[Row] = []
    for index, (low, high) in enumerate(itertools.pairwise(EDGES)):
        last = index == len(EDGES) - 2
        inside = (draft >= low) & ((draft <= high) if last else (draft < high))
        chosen = accepted[inside]
        rows.append(
            {
                "draft probability from": low,
                "to": high,
                "words": int(inside.sum()),
                "acceptance": float(chosen.mean()) if len(chosen) else None,
                "accepted always": float((chosen == 1).double().mean()) if len(chosen) else None,
                "accepted below .1": float((chosen < 0.1).double().mean()) if len(chosen) else None,
                "target probability": float(target[inside].mean()) if len(chosen) else None,
            }
        )
    return rows


def _densities(draft: Tensor, target: Tensor, accepted: Tensor) -> Figure:
    """Acceptance and target probability over draft probability; each column sums to 1, as in the paper's figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = {"acceptance": accepted, "target probability": target}
    for axes, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.imshow(density(draft, values).T.numpy(), origin="lower", extent=(0, 1, 0, 1), aspect="auto")
        axes.set_xlabel("draft probability")
        axes.set_ylabel(title)
    return figure


def density(draft: Tensor, values: Tensor) -> Tensor:
    """(CELLS, CELLS) float64: share of the values of each column of draft probabilities; empty columns are 0."""
    column, place = ((each * CELLS).long().clamp(0, CELLS - 1) for each in (draft, values))
    counts = (column * CELLS + place).bincount(minlength=CELLS * CELLS).view(CELLS, CELLS).double()
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def figure_5(bench: Bench) -> Findings:
    prompts, new = QUICK if bench.quick else (TREE_PROMPTS, TREE_NEW)
    plan = live.Plan(prompts, new, DEPTH, TARGET_TEMPERATURE, together=1, seed=bench.seed)
    limits = THRESHOLDS[:2] if bench.quick else THRESHOLDS
    found = {limit: _trees(bench, plan, limit) for limit in limits}
    rows = [_size_row(limit, *found[limit]) for limit in limits]
    full = {limit: float((sizes == LARGE).double().mean()) for limit, (sizes, _, _) in found.items()}
    last = limits[-1]
    remark = (
        f"At {last:g} the trees are full in {full[last]:.0%} of the states (the paper's mean size at .001 is "
        f"{PAPER_SIZES[0.001]} of {LARGE}). {prompts * new} states; draft and target at temperature "
        f"{TARGET_TEMPERATURE}; depth at most {DEPTH}."
    )
    return Findings(rows, remark, _sizes(found))


def _trees(bench: Bench, plan: live.Plan, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes, accept lengths (bonus excluded) and depths of threshold trees: (states,) float64 each."""
    policy = DySpecThreshold(threshold=limit, max_nodes=LARGE, d_max=DEPTH, temperature=DRAFT_TEMPERATURE, sampled=True)
    generator = torch.Generator().manual_seed(bench.seed)
    parts = []
    with torch.inference_mode():
        for site in live.sites(bench.live(DRAFT), DRAFT, plan):
            grown = grow_tree(site.drafter(), policy, generator)
            lengths = live.accept_lengths(
                grown,
                site.judge(),
                Verification.WITHOUT_REPLACEMENT,
                DRAFT_TEMPERATURE,
                plan.temperature,
                Sampler(generator),
            )
            depths = (grown.tree.depths * grown.tree.alive).amax(1)
            parts.append(torch.stack([grown.tree.sizes(), lengths, depths])[:, site.running])
    sizes, lengths, depths = torch.cat(parts, dim=1).double()
    return sizes, lengths, depths


def _size_row(limit: float, sizes: Tensor, lengths: Tensor, depths: Tensor) -> Row:
    return {
        "threshold": limit,
        "paper mean size": PAPER_SIZES.get(limit),
        "mean size": float(sizes.mean()),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "mean depth": float(depths.mean()),
        "tokens per step": float(lengths.mean()) + 1,
        "correlation of size and tokens": correlation(sizes, lengths),
    }


def _sizes(found: dict[float, tuple[Tensor, Tensor, Tensor]]) -> Figure:
    """Tree size, and accepted tokens, of every state, a panel per threshold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(found), 3), layout="constrained")
    panels: Sequence = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (limit, (sizes, lengths, _)) in zip(panels, found.items(), strict=True):
        axes.scatter(sizes.tolist(), (lengths + 1).tolist(), s=12)
        axes.set_title(f"threshold {limit:g}", fontsize=9)
        axes.set_xlabel("nodes")
        axes.set_ylabel("tokens of the step")
    return figure


EXPERIMENTS = (
    Experiment(
        name="dyspec-figure-2",
        title="Acceptance and target probability against draft probability",
        source="DySpec figure 2; the paper prints no numbers",
        columns=(
            "draft probability from",
            "to",
            "words",
            "acceptance",
            "accepted always",
            "accepted below .1",
            "target probability",
        ),
        run=figure_2,
    ),
    Experiment(
        name="dyspec-figure-5",
        title=f"Sizes of threshold trees of at most {LARGE} nodes",
        source="DySpec figure 5 and B.1; tokens with bonus, over all states",
        columns=(
            "threshold",
            "paper mean size",
            "mean size",
            "smallest",
            "largest",
            "mean depth",
            "tokens per step",
            "correlation of size and tokens",
        ),
        run=figure_5,
    ),
)
