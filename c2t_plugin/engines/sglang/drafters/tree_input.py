"""From grown trees to what SGLang verifies: links, positions and mask of trees of any shape, padded to one width."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from c2t_kernels import TreeLayout, build_tree, full_mask
from c2t_plugin.engines.sglang.step import Step, attach


class TreeVerifyInput(EagleVerifyInput):
    """Trees without a fixed number of children, at most as deep as they have nodes.

    mask_starts: (bs + 1,) int64, where each request's part of the mask begins; None: all are of one size.
    """

    mask_starts: Tensor | None = None

    @property
    def max_tree_depth(self) -> int:
        return min(super().max_tree_depth, self.draft_token_num)

    @property
    def tree_topk(self) -> int:
        return -1


def build_verify_input(
    batch: Any,
    draft_input: Any,
    trees: tuple[Tensor, Tensor, Tensor],
    width: int,
    *,
    attn_backend: Any,
    topk: int,
    num_steps: int,
    tree_mask_mode: TreeMaskMode,
    packed: bool,
    wanted: Tensor | None = None,
    depth: int | None = None,
    rows: int | None = None,
) -> TreeVerifyInput:
    """The verify input of a batch that is not idle, with its Step.

    trees: parent_ids, keep, token_ids as TreeGrower.end gives them. width: nodes of each request, root and pads
    included; what does not fit is dropped. attn_backend: the target's, which may own the mask's buffer and format.
    packed: the target computes no pads, so the mask has none: each request's is as large as its tree.
    wanted, depth, rows: see Step.
    """
    layout = build_tree(*trees, draft_input.bonus_tokens, batch.seq_lens, bucket=width)
    mask, starts = _mask(layout, batch, attn_backend, tree_mask_mode, packed)
    made = TreeVerifyInput(
        draft_token=layout.draft_tokens.flatten(),
        custom_mask=mask,
        positions=layout.positions.flatten(),
        retrieve_index=layout.retrieve_index,
        retrieve_next_token=layout.retrieve_next_token,
        retrieve_next_sibling=layout.retrieve_next_sibling,
        retrieve_cum_len=None,
        spec_steps=num_steps,
        topk=topk,
        draft_token_num=width,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
    if packed:
        made.mask_starts = starts
    attach(made, Step(layout.counts - 1, wanted, depth=depth, rows=rows))
    return made


def _mask(
    layout: TreeLayout, batch: Any, attn_backend: Any, default_mode: TreeMaskMode, packed: bool
) -> tuple[Tensor, Tensor]:
    """The mask as the target's attention reads it, its own columns only or with the prefix in front of them; and where
    each request's begins."""
    owned = attn_backend.verify_mask
    buffer = owned.buffer if owned is not None and owned.fits(len(layout.counts)) else None
    mode = default_mode if owned is None else owned.mode
    if mode == TreeMaskMode.FULL_MASK:
        prefix_lens, tokens = batch.seq_lens, batch.seq_lens_sum
    else:
        prefix_lens, tokens = torch.zeros_like(batch.seq_lens), 0
    bs, width = layout.draft_tokens.shape
    counts = layout.counts if packed else None
    if buffer is None:
        # without this sum the host does not know the lengths
        capacity = width * ((bs * attn_backend.max_context_len if tokens is None else tokens) + bs * width)
        return full_mask(layout.mask, prefix_lens, capacity=capacity, counts=counts)
    # A captured graph reads the backend's own buffer.
    if buffer.is_cuda:
        return buffer, fill_mask(buffer, layout.mask, prefix_lens, counts)
    mask, starts = full_mask(layout.mask, prefix_lens, capacity=buffer.numel(), counts=counts)
    return buffer.copy_(mask), starts


def fill_mask(buffer: Tensor, tree_mask: Tensor, prefix_lens: Tensor, counts: Tensor | None) -> Tensor:
    """full_mask into the front of a buffer of bytes, which has room for the longest prefixes of the largest batch: a
    mask of its size, to be copied, would take as much memory again and move all of it each step. Returns where each
    request's begins."""
    from c2t_kernels.masks import kernel as fused

    out = buffer.view(torch.bool)
    return fused.full_mask(tree_mask, prefix_lens, capacity=buffer.numel(), counts=counts, out=out)[1]
