"""What tree_attention is timed against: torch, SGLang's Triton extend kernel, FlashInfer.

What an engine does once per step and not per layer is prepared outside of the time: masks, page tables, plans. torch,
which has no attention over pages, gets its keys and values gathered into one tensor for nothing, and its queries and
outputs folded.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.cases import Provider, largest_error, needs
from benchmarks.gpu.flashinfer_tree import FlashInferTree, TreeShape, flashinfer_wrapper, pack_mask

FLASHINFER_WORKSPACE = 256 << 20
# What a library raises that cannot be imported, or cannot compile what it needs.
BUILD_FAILURES = (RuntimeError, ImportError, AttributeError, OSError, subprocess.SubprocessError)
P = ParamSpec("P")
T = TypeVar("T")


class Absent(Exception):
    """Why a rival that is installed cannot run on this machine after all."""


def built_once(call: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose first call in a process builds what it needs; after a failure of it all raise Absent.

    A failed build takes minutes, and libraries, which remember only what they could build, try it again at every shape.
    """
    built, reason = False, ""

    @wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal built, reason
        if reason:
            raise Absent(reason)
        try:
            result = call(*args, **kwargs)
        except BUILD_FAILURES as error:
            first = str(error).strip().splitlines()[:1]
            reason = "" if built else ": ".join(["did not work at first", type(error).__name__, *first])[:300]
            raise
        built = True
        return result

    return run


def attention_rivals(device: torch.device, batch: int, prefix: int, nodes: int) -> list[Provider]:
    """For `batch` requests of `prefix` cached tokens and `nodes` nodes each, with the inputs of the reference."""
    rivals = [
        Provider("sdpa, contiguous", _sdpa, prepare=partial(contiguous, prefix, nodes), judge=folded_error),
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
    """Keys and values (requests, kv_heads, tokens, head_dim); folded queries; the mask as a bias of their rows.

    The query heads of one key/value head become rows, (requests, kv_heads, nodes * group, head_dim): of torch's kernels
    flash takes no mask and the memory-efficient one no groups of heads, and what is left copies all keys to float32.
    """
    q, k, v, k_pool, v_pool, rows, _, pages, mask, _ = inputs
    requests, kv_heads = len(rows) - 1, k.shape[1]
    group = q.shape[1] // kv_heads

    def whole(pool: Tensor, new: Tensor) -> Tensor:
        old = pool[pages].view(requests, prefix, *pool.shape[1:])
        return torch.cat([old, new.view(requests, nodes, *new.shape[1:])], dim=1).transpose(1, 2)

    queries = q.view(requests, nodes, kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
    seen = whole_masks(mask, prefix, nodes).repeat_interleave(group, dim=1)[:, None]
    return queries, whole(k_pool, k), whole(v_pool, v), aligned_bias(seen, q.dtype)


def aligned_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, else -inf; its rows begin at multiples of 8 elements, as the kernel that reads them wants it."""
    keys = seen.shape[-1]
    bias = seen.new_zeros(*seen.shape[:-1], -(-keys // 8) * 8, dtype=dtype)[..., :keys]
    return bias.masked_fill_(~seen, -torch.inf)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def folded_error(expected: Tensor, found: Tensor) -> float:
    """Of an output whose query heads are folded into rows, as `contiguous` does it."""
    nodes = len(expected) // len(found)
    return largest_error(expected, found.unflatten(2, (nodes, -1)).transpose(1, 2).reshape(expected.shape))


def extend_inputs(prefix: int, nodes: int, *inputs: Any) -> tuple[Any, ...]:
    """Arguments of SGLang's Triton extend kernel, whose mask holds the prefix too (0.5.17 and 0.5.23)."""
    q, k, v, k_pool, v_pool, rows, pages_at, pages, mask, _ = inputs
    seen = whole_masks(mask, prefix, nodes)
    at = torch.arange(len(seen) + 1, device=q.device) * nodes * (prefix + nodes)
    cache = k_pool, v_pool, rows, pages_at, pages
    return q, k, v, torch.empty_like(q), *cache, seen.flatten(), True, at, nodes, 1.0, 1.0


@built_once
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


@built_once
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


@built_once
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
