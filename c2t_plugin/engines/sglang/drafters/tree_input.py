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
    """Trees without a fixed number of children, at most as deep as they have nodes."""

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
) -> TreeVerifyInput:
    """The verify input of a batch that is not idle, with its Step.

    trees: parent_ids, keep, token_ids as TreeGrower.end gives them. width: nodes of each request, root and pads
    included; what does not fit is dropped. attn_backend: the target's, which may own the mask's buffer and format.
    packed: the target computes no pads, so the mask has none: each request's is as large as its tree.
    wanted: see Step.
    """
    layout = build_tree(*trees, draft_input.bonus_tokens, batch.seq_lens, bucket=width)
    made = TreeVerifyInput(
        draft_token=layout.draft_tokens.flatten(),
        custom_mask=_mask(layout, batch, attn_backend, tree_mask_mode, packed),
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
    attach(made, Step(layout.counts - 1, wanted))
    return made


def _mask(layout: TreeLayout, batch: Any, attn_backend: Any, default_mode: TreeMaskMode, packed: bool) -> Tensor:
    """The mask as the target's attention reads it: its own columns only, or with the prefix in front of them."""
    owned = attn_backend.verify_mask
    buffer = owned.buffer if owned is not None and owned.fits(len(layout.counts)) else None
    mode = default_mode if owned is None else owned.mode
    prefix_lens, tokens = torch.zeros_like(batch.seq_lens), 0
    if mode == TreeMaskMode.FULL_MASK:
        prefix_lens, tokens = batch.seq_lens, batch.seq_lens_sum
    bs, width = layout.draft_tokens.shape
    counts = layout.counts if packed else None
    if buffer is None:
        # without this sum the host does not know the lengths
        capacity = width * ((bs * attn_backend.max_context_len if tokens is None else tokens) + bs * width)
        return full_mask(layout.mask, prefix_lens, capacity=capacity, counts=counts)[0]
    # A captured graph reads the backend's own buffer.
    if buffer.is_cuda:
        fill_mask(buffer, layout.mask, prefix_lens, counts)
    else:
        buffer.copy_(full_mask(layout.mask, prefix_lens, capacity=buffer.numel(), counts=counts)[0])
    return buffer


def fill_mask(buffer: Tensor, tree_mask: Tensor, prefix_lens: Tensor, counts: Tensor | None) -> None:
    """full_mask into the front of a buffer of bytes, which has room for the longest prefixes of the largest batch: a
    mask of its size, to be copied, would take as much memory again and move all of it each step."""
    from c2t_kernels.masks import kernel as fused

    fused.full_mask(tree_mask, prefix_lens, capacity=buffer.numel(), counts=counts, out=buffer.view(torch.bool))
