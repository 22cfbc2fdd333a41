"""What tree_attention is timed against: torch, SGLang's Triton extend kernel, FlashInfer.

What an engine does once per step and not per layer is prepared outside of the time: masks, page tables, plans. torch,
which has no attention over pages, gets its keys and values gathered into one tensor for nothing.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_cases import Provider, needs
from c2t_kernels.flashinfer_tree import FlashInferTree, TreeShape, flashinfer_wrapper, pack_mask

FLASHINFER_WORKSPACE = 256 << 20


def attention_rivals(device: torch.device, batch: int, prefix: int, nodes: int) -> list[Provider]:
    """For `batch` requests of `prefix` cached tokens and `nodes` nodes each, with the inputs of the reference."""
    rivals = [
        Provider("sdpa, contiguous", _sdpa, prepare=partial(contiguous, prefix, nodes)),
        needs("sglang", Provider("sglang extend", stock_extend, prepare=partial(extend_inputs, prefix, nodes)), device),
        needs("flashinfer", Provider("flashinfer", _run_plan, prepare=partial(planned, prefix, nodes))),
    ]
    if batch == 1:
        tree = Provider("FlashInferTree", FlashInferTree.run, prepare=partial(begun_tree, prefix, nodes))
        rivals.append(needs("flashinfer", tree))
    return rivals


def whole_masks(mask: Tensor, prefix: int, nodes: int) -> Tensor:
    """(requests, nodes, prefix + nodes) bool of flat (nodes, nodes) tree masks."""
    trees = mask.view(-1, nodes, nodes)
    return torch.cat([trees.new_ones(len(trees), nodes, prefix), trees], dim=2)


def contiguous(prefix: int, nodes: int, *inputs: Any) -> tuple[Tensor, ...]:
    """Queries, keys, values (requests, heads, tokens, head_dim) and masks (requests, 1, nodes, prefix + nodes)."""
    q, k, v, k_pool, v_pool, rows, _, pages, mask, _ = inputs
    requests = len(rows) - 1

    def whole(pool: Tensor, new: Tensor) -> Tensor:
        old = pool[pages].view(requests, prefix, *pool.shape[1:])
        return torch.cat([old, new.view(requests, nodes, *new.shape[1:])], dim=1).transpose(1, 2)

    queries = q.view(requests, nodes, *q.shape[1:]).transpose(1, 2)
    return queries, whole(k_pool, k), whole(v_pool, v), whole_masks(mask, prefix, nodes)[:, None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def extend_inputs(prefix: int, nodes: int, *inputs: Any) -> tuple[Any, ...]:
    """Arguments of SGLang's Triton extend kernel, whose mask holds the prefix too (0.5.17 and 0.5.23)."""
    q, k, v, k_pool, v_pool, rows, pages_at, pages, mask, _ = inputs
    seen = whole_masks(mask, prefix, nodes)
    at = torch.arange(len(seen) + 1, device=q.device) * nodes * (prefix + nodes)
    cache = k_pool, v_pool, rows, pages_at, pages
    return q, k, v, torch.empty_like(q), *cache, seen.flatten(), True, at, nodes, 1.0, 1.0


def stock_extend(*arguments: Any) -> Tensor:
    import_module("sglang.kernels.ops.attention.extend_attention").extend_attention_fwd(*arguments)
    out: Tensor = arguments[3]
    return out


def joint_pool(prefix: int, nodes: int, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pools with the new keys and values behind the old; slots (requests, prefix) and (requests, nodes)."""
    q, k, v, k_pool, v_pool, rows, _, pages, _, _ = inputs
    requests = len(rows) - 1
    new = torch.arange(len(q), device=q.device, dtype=torch.int32) + len(k_pool)
    old = pages.int().view(requests, prefix)
    return torch.cat([k_pool, k]), torch.cat([v_pool, v]), old, new.view(requests, nodes)


def planned(prefix: int, nodes: int, *inputs: Any) -> tuple[Any, ...]:
    """A FlashInfer wrapper that is planned for the whole batch, and what its run() takes."""
    q, _, _, _, _, _, _, _, mask, _ = inputs
    k_pool, v_pool, old, new = joint_pool(prefix, nodes, *inputs)
    slots = torch.cat([old, new], dim=1).flatten()
    requests, heads, head_dim = len(new), q.shape[1], q.shape[2]
    packed, begins = pack_mask(whole_masks(mask, prefix, nodes).flatten(), [nodes * (prefix + nodes)] * requests)
    ends, masks_at = torch.zeros(2, requests + 1, dtype=torch.int32, device=q.device)
    last = torch.ones(requests, dtype=torch.int32, device=q.device)
    wrapper = flashinfer_wrapper()(
        torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=ends,
        paged_kv_indptr_buf=ends.clone(),
        paged_kv_indices_buf=slots,
        paged_kv_last_page_len_buf=last,
        custom_mask_buf=packed,
        mask_indptr_buf=masks_at,
        backend="fa2",
    )
    steps = torch.arange(requests + 1, dtype=torch.int32)
    wrapper.plan(
        qo_indptr=steps * nodes,
        paged_kv_indptr=steps * (prefix + nodes),
        paged_kv_indices=slots.clone(),
        paged_kv_last_page_len=last.cpu(),
        num_qo_heads=heads,
        num_kv_heads=k_pool.shape[1],
        head_dim_qk=head_dim,
        page_size=1,
        packed_custom_mask=packed.clone(),
        causal=False,
        sm_scale=head_dim**-0.5,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    # plan() counts the packed mask's offsets in elements, the kernel adds them in bytes (FlashInfer 0.6.15)
    masks_at.copy_(begins)
    return wrapper, q, (k_pool[:, None], v_pool[:, None])


def _run_plan(wrapper: Any, q: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
    out: Tensor = wrapper.run(q, pools)
    return out


def begun_tree(prefix: int, nodes: int, *inputs: Any) -> tuple[FlashInferTree, Tensor, Tensor, Tensor]:
    """A FlashInferTree that has begun this step, and what its run() takes; for one request."""
    q, _, _, _, _, _, _, _, mask, _ = inputs
    k_pool, v_pool, old, new = joint_pool(prefix, nodes, *inputs)
    shape = TreeShape(
        heads=q.shape[1],
        kv_heads=k_pool.shape[1],
        head_dim=q.shape[2],
        max_nodes=nodes,
        max_keys=prefix + nodes,
        dtype=q.dtype,
    )
    tree = FlashInferTree(shape, q.device)
    tree.begin(old[0], new[0], mask.view(nodes, nodes))
    return tree, q, k_pool, v_pool
