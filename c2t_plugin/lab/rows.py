"""Which states of some traces are trained on, and the rows that their nodes are."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.report import forest_features
from c2t_plugin.lab.training import FitRecipe
from c2t_plugin.traces.file import Traces

EVALUATION_SHARE = 0.05


def split_by_prompt(prompt: Tensor, seed: int) -> Tensor:
    """(states,) bool: the states to evaluate on, those of a twentieth of the prompts (C2T B.2), of one at least.

    Whole prompts, because a prompt's states overlap: one token further on, a tree is the accepted branch of the one
    before. prompt: (states,) prompt numbers. C2TError if there is one prompt only.
    """
    numbers = prompt.unique()
    if len(numbers) < 2:
        raise C2TError(f"the traces hold {len(numbers)} prompt; at least 2 are needed, to train on and to evaluate on")
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    return torch.isin(prompt, numbers[order[: max(1, round(EVALUATION_SHARE * len(numbers)))]])


def share_of_prompts(prompt: Tensor, share: float, seed: int) -> Tensor:
    """(states,) bool: the states of a share of the prompts, of one at least. prompt: (states,) prompt numbers."""
    numbers = prompt.unique()
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    return torch.isin(prompt, numbers[order[: max(1, round(share * len(numbers)))]])


def training_rows(traces: Traces, recipe: FitRecipe, depth_origin: int) -> tuple[Tensor, Tensor]:
    """Features (rows, F) float32 and labels (rows,) bool of all nodes that a recipe trains on, finite rows only."""
    forests = (traces.tree, *[traces.chain] * recipe.chains)
    features = torch.cat([forest_features(each, recipe.features, depth_origin).flatten(0, 1) for each in forests])
    accepted = torch.cat([each.accepted.flatten() for each in forests])
    # the paper drops rows with NA
    finite = features.isfinite().all(dim=1)
    return (features, accepted) if finite.all() else (features[finite], accepted[finite])


def parent_rows(traces: Traces, recipe: FitRecipe) -> Tensor:
    """Of every node that training_rows() lists, finite or not, the row of its parent, of itself below the root: (rows,)
    int64."""
    parts, start = [], 0
    for forest in (traces.tree, *[traces.chain] * recipe.chains):
        rows = torch.arange(forest.accepted.numel()).view_as(forest.accepted)
        parents = forest.parent_ids.long().repeat_interleave(forest.k, dim=1)
        parts.append(start + torch.where(parents < 0, rows, rows[:, :1] + parents).flatten())
        start += rows.numel()
    return torch.cat(parts)
