"""What C2T's classifier makes of P, H and d: v1 figures 9 and 10, v2 figure 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from c2t_plugin.classifier import NodeClassifier, NodeStats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SURFACE_PROBS = (0.05, 0.3, 0.9)
SURFACE_ENTROPIES = (0.5, 2.0, 4.0, 6.0)
SURFACE_DEPTHS = (1.0, 3.0, 6.0, 10.0)


def surface(classifier: NodeClassifier, prob: Tensor, entropy: Tensor, depth: Tensor) -> Tensor:
    """Confidences of a classifier of P, H and d at points that broadcast: P in (0, 1], H in nats, d from 1."""
    prob, entropy, depth = torch.broadcast_tensors(prob, entropy, depth)
    others = dict.fromkeys(NodeStats._fields, torch.zeros_like(prob))
    stats = NodeStats(**{**others, "joint_log_prob": prob.log(), "entropy": entropy, "depth": depth})
    with torch.no_grad():
        return classifier.confidence(stats)


def figure_10(bench: Bench) -> Findings:
    classifier, _ = common.small_fit(common.training(bench, "eagle3"), common.PAPER_RECIPE, bench.seed)
    grid = torch.tensor(SURFACE_PROBS)[:, None], torch.tensor(SURFACE_ENTROPIES)[None]
    depths = {depth: surface(classifier, *grid, torch.tensor(depth)) for depth in SURFACE_DEPTHS}
    rows: list[Row] = [
        {"P": prob, "H": entropy} | {f"C at d={depth:g}": float(depths[depth][i, j]) for depth in SURFACE_DEPTHS}
        for i, prob in enumerate(SURFACE_PROBS)
        for j, entropy in enumerate(SURFACE_ENTROPIES)
    ]
    # where the paper draws its points from (v1 D), without P = 0
    fine = surface(
        classifier,
        torch.linspace(0.02, 1, 50)[:, None, None],
        torch.linspace(0, 10, 51)[None, :, None],
        torch.arange(1.0, 11.0)[None, None],
    )
    shares = [float((fine.diff(dim=axis) * sign > 0).float().mean()) for axis, sign in ((0, 1), (1, 1), (2, -1))]
    return Findings(
        rows,
        "A classifier of the paper's recipe, EAGLE-3 head. On a grid of P in (0, 1], H in [0, 10] and d in [1, 10] "
        f"its confidence rises with P at {shares[0]:.0%} of the steps, with H at {shares[1]:.0%}, and falls with d at "
        f"{shares[2]:.0%}; the paper finds it rising with P, with H above 1, and falling with d. Not all of the grid "
        f"can occur: a P near 1 and a large H exclude each other at d = 1. {common.FITTED}",
        _surfaces(classifier),
    )


def _surfaces(classifier: NodeClassifier) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5.5))
    prob, entropy, depth = torch.linspace(0.02, 1, 40), torch.linspace(0, 10, 40), torch.linspace(1, 10, 40)
    panels = (
        ("P", SURFACE_PROBS, "H", entropy, "d", depth),
        ("H", SURFACE_ENTROPIES, "P", prob, "d", depth),
        ("d", SURFACE_DEPTHS, "P", prob, "H", entropy),
    )
    for place, (fixed, levels, across, x, along, y) in enumerate(panels, start=1):
        axis: Any = figure.add_subplot(1, 3, place, projection="3d")
        for level in levels:
            at = {fixed: torch.tensor(level), across: x[:, None], along: y[None]}
            heights = surface(classifier, at["P"], at["H"], at["d"])
            axis.plot_surface(*np.meshgrid(x, y, indexing="ij"), heights.numpy(), alpha=0.5)
        axis.set(title=f"{fixed} = {', '.join(f'{level:g}' for level in levels)}", xlabel=across, ylabel=along)
        axis.set_zlabel("confidence")
    figure.subplots_adjust(left=0.02, right=0.96, bottom=0.05, top=0.93, wspace=0.12)
    return figure


EXPERIMENTS = (
    Experiment(
        name="c2t-v1-figure-10",
        title="What the classifier learnt",
        source="C2T v1 figures 9 and 10, C2T v2 figure 2",
        columns=("P", "H", *(f"C at d={depth:g}" for depth in SURFACE_DEPTHS)),
        run=figure_10,
    ),
)
