"""References in the place of kernels that are wrong on the GPU at hand; imported where one is, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import c2t_kernels
from c2t_kernels.clip import reference as clip
from c2t_kernels.growth import reference as growth
from c2t_kernels.masks import reference as masks
from c2t_kernels.score import reference as score
from c2t_kernels.spare import reference as spare
from c2t_kernels.stats import reference as stats
from c2t_kernels.stop import reference as stop
from c2t_kernels.tree_layout import TreeLayout
from c2t_kernels.tree_layout import reference as tree_layout


def compute_in_torch(operation: str) -> None:
    """From here on this process computes an operation of TWINS by its reference on a GPU too. A graph that was captured
    before keeps the kernel."""
    package = getattr(c2t_kernels, operation).__module__
    setattr(import_module(f"{package}.kernel"), operation, TWINS[operation])


def _draft_stats(*arguments: Any, workspace: Any = None, **options: Any) -> Any:
    return stats.draft_stats(*arguments, **options)


def _build_tree(*tensors: Tensor, bucket: int) -> TreeLayout:
    """Tree after tree, so on the host."""
    found = tree_layout.build_tree(*(each.cpu() for each in tensors), bucket=bucket)
    return TreeLayout(*(each.to(tensors[0].device) for each in found))


def _full_mask(
    tree_mask: Tensor, prefix_lens: Tensor, *, capacity: int, counts: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same; no more of it is made than has a meaning, as room for the longest prefixes is much."""
    sizes = torch.full_like(prefix_lens, tree_mask.shape[1]) if counts is None else counts
    needed = min(capacity, int((sizes * (prefix_lens + sizes)).sum()))
    host = None if counts is None else counts.cpu()
    mask, starts = masks.full_mask(tree_mask.cpu(), prefix_lens.cpu(), capacity=needed, counts=host)
    out = tree_mask.new_empty(capacity) if out is None else out
    out[:needed] = mask.to(out.device)
    return out, starts.to(out.device)


# What a draft's graph calls asks nothing of the host. pack_ragged and tree_attention have none: rows may stay unpacked;
# nor has score_step, as no server of vLLM looks for wrong kernels.
TWINS: dict[str, Callable[..., Any]] = {
    "draft_stats": _draft_stats,
    "score_chain": score.score_chain,
    "early_stop": stop.early_stop,
    "grow_layer": growth.grow_layer,
    "fill_spare_rows": spare.fill_spare_rows,
    "clip_trees": clip.clip_trees,
    "build_tree": _build_tree,
    "full_mask": _full_mask,
}
