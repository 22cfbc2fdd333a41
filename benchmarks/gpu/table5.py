"""Cases of the standing GPU run that repeat DySpec's table 5: attention of large trees, as drafted and reordered.

The paper's setting: 64 heads, head_dim 128, blocks of 32, no prefix, random trees of 256 to 2048 nodes. Its generator
is not said; uniform attachment gives its block counts (docs/fidelity.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.cases import Case, Provider, fused_or_reference, largest_error, needs, operation
from benchmarks.gpu.rivals import aligned_bias
from benchmarks.papers.blocks import uniform_attachment
from benchmarks.papers.ordering import attention_blocks, depth_first_order, heavy_path_order, insertion_order, reorder

HEADS, HEAD_DIM, BLOCK = 64, 128, 32
FLEX_BLOCK = 128
# one for each size and block, and room for orders that it tells apart
COMPILATIONS = 64
# Manual attention rounds its scores to bfloat16 twice, each time by at most 2**-8 of them. The largest of all scores is
# about 5: a weight moves by up to 2 * 5 * 2**-8 = 4% of itself, and an average of two keys by about half of that.
# Rounding weights and output adds 2**-8 each: 2.8%. Computed so on the CPU the error is up to 2.0% (1,024 nodes); a
# scale that is wrong by 5% makes it 7%, a node that sees one key too many or too few 50%.
TOLERANCE = 3e-2
ORDERS = {"drafted": insertion_order, "depth-first": depth_first_order, "heavy paths": heavy_path_order}


def table5_cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """One tree a size, in three orders of its nodes."""
    for nodes in (40,) if dry_run else (256, 512, 1024, 2048):
        drafted = torch.tensor(uniform_attachment(nodes, np.random.default_rng(0)))
        for name, order in ORDERS.items():
            yield _case(device, reorder(drafted, order(drafted)), name, heads=2 if dry_run else HEADS)


def _case(device: torch.device, parent_ids: Tensor, order: str, heads: int) -> Case:
    nodes = len(parent_ids)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = 4 * nodes * heads * HEAD_DIM * dtype.itemsize + nodes * nodes
    mask = ancestor_mask(parent_ids).to(device)
    whole = torch.tensor([0, nodes], device=device)
    none = torch.zeros(2, dtype=torch.int64, device=device)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        shape = (nodes, heads, HEAD_DIM)
        q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3))
        pool = k.new_zeros(1, heads, HEAD_DIM)
        return q, k, v, pool, pool, whole, none, none[:0], mask.flatten(), whole * nodes

    return Case(
        shape={"nodes": nodes, "order": order, "blocks": attention_blocks(parent_ids, block=BLOCK)},
        device=device,
        inputs=inputs,
        reference=operation("reference", "attention", "tree_attention"),
        error=scaled_error,
        tolerance=TOLERANCE if device.type == "cuda" else 1e-4,
        bytes_moved=size,
        input_bytes=size,
        providers=(
            *_fused(device, nodes),
            Provider("manual", manual_attention),
            Provider("sdpa with a mask", _sdpa, prepare=heads_first),
            Provider("sdpa, memory-efficient", _efficient, prepare=heads_first),
            Provider("FlexAttention", _flex(device), prepare=partial(flex_inputs, FLEX_BLOCK)),
            Provider("FlexAttention, blocks of 32", _flex(device), prepare=partial(flex_inputs, BLOCK)),
            needs("xformers", Provider("xFormers", xformers_attention, prepare=xformers_inputs), device),
        ),
    )


def _fused(device: torch.device, nodes: int) -> tuple[Provider, ...]:
    if fused_or_reference(device) == "reference":
        return (Provider("fused", operation("reference", "attention", "tree_attention")),)
    from c2t_kernels.attention.kernel import Launch, tree_attention

    paper = partial(tree_attention, max_nodes=nodes, launch=Launch(BLOCK, BLOCK))
    return Provider("fused", partial(tree_attention, max_nodes=nodes)), Provider("fused, blocks of 32", paper)


def scaled_error(expected: Tensor, found: Tensor) -> float:
    """Largest difference, over the largest entry of that node's and head's output where it is above 1.

    A rounded weight moves every entry of an output by a share of the values, also where they cancel.
    """
    if expected.shape != found.shape:
        return math.inf
    size = expected.double().abs().amax(dim=-1, keepdim=True).clamp_min(1.0)
    return largest_error(expected.double() / size, found.double() / size)


def manual_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Two matrix products and a softmax over all scores."""
    mask = rest[5].view(len(q), len(q))
    scores = torch.einsum("nhd,khd->hnk", q, k) * HEAD_DIM**-0.5
    return torch.einsum("hnk,khd->nhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def heads_first(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """q, k, v as (1, heads, nodes, head_dim), torch's own layout, and the mask as (1, 1, nodes, nodes)."""
    return *(each.transpose(0, 1)[None].contiguous() for each in (q, k, v)), rest[5].view(1, 1, len(q), len(q))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def _efficient(*inputs: Tensor) -> Tensor:
    """torch's build of the kernel that is xFormers' memory-efficient attention; elsewhere than on a GPU its own."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION] if inputs[0].is_cuda else [SDPBackend.MATH]):
        return _sdpa(*inputs)


def flex_inputs(block: int, *inputs: Any) -> tuple[Any, ...]:
    """q, k, v as heads_first, FlexAttention's blocks of the mask, made once per tree, and the kernel's tile."""
    q, k, v, mask = heads_first(*inputs)
    tree = mask[0, 0]

    def seen(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return tree[row, column]

    nodes = len(tree)
    blocks = create_block_mask(seen, None, None, nodes, nodes, device=str(tree.device), BLOCK_SIZE=block)
    # tiles of its own choice do not divide smaller blocks
    return q, k, v, blocks, {} if block == FLEX_BLOCK else {"BLOCK_M": block, "BLOCK_N": block}


def _flex(device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention, compiled for each size on a GPU; its row's first_s holds the compilation."""
    torch._dynamo.config.recompile_limit = COMPILATIONS
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True) if device.type == "cuda" else flex_attention

    def run(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, tile: Any) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=blocks, kernel_options=tile)
        return out[0].transpose(0, 1)

    return run


def xformers_inputs(*inputs: Any) -> tuple[Tensor, ...]:
    """q, k, v as (1, nodes, heads, head_dim), and the mask as a bias whose rows begin at multiples of 8 elements."""
    q, k, v, mask = heads_first(*inputs)
    bias = aligned_bias(mask, q.dtype).expand(1, q.shape[1], -1, -1)
    return *(each.transpose(1, 2).contiguous() for each in (q, k, v)), bias


def xformers_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out: Tensor = import_module("xformers.ops").memory_efficient_attention(q, k, v, attn_bias=bias)
    return out[0]


def ancestor_mask(parent_ids: Tensor) -> Tensor:
    """(nodes, nodes) bool: a node sees itself and its ancestors."""
    mask = torch.eye(len(parent_ids), dtype=torch.bool)
    for node, parent in enumerate(parent_ids.tolist()):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
