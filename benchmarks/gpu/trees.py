"""Cases of the standing GPU run for trees: one grown layer with the layout of the whole tree, and tree attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Provider, fused_or_reference, largest_error, operation
from benchmarks.gpu.chains import network_of
from benchmarks.gpu.rivals import attention_rivals
from c2t_kernels import DraftStats

WIDTH = 10
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DRY_HEADS, DRY_KV_HEADS = 4, 1


def growth_cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """grow_layer of a frontier of 10 nodes with 10 children each, then build_tree of a tree of 64."""
    nodes = 8 if dry_run else 64
    for batch in (2,) if dry_run else (1, 4, 16, 64):

        def inputs(generator: torch.Generator, batch: int = batch) -> tuple[Any, ...]:
            def random(*shape: int) -> Tensor:
                return torch.rand(*shape, generator=generator, device=device)

            rows = batch * WIDTH
            log_probs = (-4 * random(rows, WIDTH)).sort(dim=1, descending=True).values
            ids = torch.arange(WIDTH, device=device).repeat(rows, 1)
            stats = DraftStats(ids, log_probs, 8 * random(rows), random(rows))
            joint, path, alive = -random(batch, WIDTH), random(batch, WIDTH), random(batch, WIDTH) < 0.9
            parents = (random(batch, nodes) * torch.arange(nodes, device=device)).long() - 1
            tokens, roots = ids.view(-1)[:nodes].repeat(batch, 1), torch.zeros(batch, dtype=torch.int64, device=device)
            keep = torch.ones(batch, nodes, dtype=torch.bool, device=device)
            layer = network_of(generator, device), joint, path, alive, stats, torch.full((1,), 0.4, device=device)
            tree = parents, keep, tokens, roots, roots + 500
            return layer, tree

        def both(kind: str) -> Callable[..., Any]:
            grow, build = operation(kind, "growth", "grow_layer"), operation(kind, "tree_layout", "build_tree")

            def run(layer: Any, tree: Any) -> Any:
                return *grow(*layer, 2, width=WIDTH), *build(*tree, bucket=nodes + 1)

            return run

        size = batch * (WIDTH * WIDTH * 17 + nodes * 60 + (nodes + 1) ** 2)
        yield Case(
            shape={"bs": batch, "children": WIDTH * WIDTH, "nodes": nodes},
            device=device,
            inputs=inputs,
            reference=both("reference"),
            error=largest_error,
            # sums of 48 products in another order
            tolerance=1e-4,
            bytes_moved=size,
            input_bytes=size,
            # the reference of build_tree walks nodes in Python: a judge, no rival
            providers=(Provider("fused", both(fused_or_reference(device))),),
        )


def attention_cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """Verification shapes: chains and small trees over prefixes, larger trees at small batches."""
    if dry_run:
        shapes = [(2, 17, 3), (1, 0, 5)]
    else:
        shapes = [(bs, prefix, n) for bs in (1, 16, 64, 256) for prefix in (512, 2048, 8192) for n in (1, 4, 8)]
        shapes += [(bs, prefix, n) for bs in (1, 4, 16) for prefix in (512, 2048, 8192) for n in (16, 64)]
    for batch, prefix, nodes in shapes:
        yield attention_case(device, batch, prefix, nodes)


def attention_case(device: torch.device, batch: int, prefix: int, nodes: int) -> Case:
    """batch requests, each with `prefix` cached tokens and a random tree of `nodes` nodes; bf16 on a GPU.

    In the interpreter, which computes one head after the other, there are few of them, grouped as on a GPU.
    """
    is_gpu = device.type == "cuda"
    dtype, heads, kv_heads = (torch.bfloat16, HEADS, KV_HEADS) if is_gpu else (torch.float32, DRY_HEADS, DRY_KV_HEADS)
    per_token = 2 * kv_heads * HEAD_DIM * dtype.itemsize
    size = batch * ((prefix + nodes) * per_token + 2 * nodes * heads * HEAD_DIM * dtype.itemsize + nodes * nodes)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        rows, slots = batch * nodes, batch * prefix
        q, k, v = random(rows, heads, HEAD_DIM), random(rows, kv_heads, HEAD_DIM), random(rows, kv_heads, HEAD_DIM)
        pool = random(max(slots, 1), kv_heads, HEAD_DIM), random(max(slots, 1), kv_heads, HEAD_DIM)
        pages = torch.randperm(slots, generator=generator, device=device, dtype=torch.int64)
        counts = torch.arange(batch + 1, device=device, dtype=torch.int64)
        masks = random_trees(batch, nodes, generator, device)
        return q, k, v, *pool, counts * nodes, counts * prefix, pages, masks.flatten(), counts * nodes * nodes

    def fused() -> Callable[..., Any]:
        kind = fused_or_reference(device)
        attend = operation(kind, "attention", "tree_attention")
        limit = {"max_nodes": nodes} if kind == "fused" else {}
        return lambda *arguments: attend(*arguments, **limit)

    return Case(
        shape={"bs": batch, "prefix": prefix, "nodes": nodes},
        device=device,
        inputs=inputs,
        reference=operation("reference", "attention", "tree_attention"),
        error=largest_error,
        # bf16 holds 8 bits of an output near 1; the reference rounds once, others round the weights too
        tolerance=2e-2 if device.type == "cuda" else 1e-4,
        bytes_moved=size,
        input_bytes=size,
        providers=(Provider("fused", fused()), *attention_rivals(device, batch, prefix, nodes)),
    )


def random_trees(batch: int, nodes: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """(batch, nodes, nodes) bool ancestor masks of trees in which each node's parent is any earlier one."""
    draws = torch.rand(batch, nodes, generator=generator, device=device)
    parents = (draws * torch.arange(nodes, device=device)).long()
    mask = torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=device)
    for node in range(1, nodes):
        mask[:, node] |= mask[rows, parents[:, node]]
    return mask
