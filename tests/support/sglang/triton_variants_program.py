"""The same as triton_program.py of chains with sliding windows and sinks, of a cache of 8 bits and of latent keys.

Usage: python triton_variants_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes,
per case, the largest distance of real rows from attention as it is defined, and that with a fault planted.

SGLang's kernel rounds queries and weights to a cache of 8 bits, and new keys to nothing: the distance of that case is
the rounding of weights.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_layer import attention_layer
from torch import Tensor
from triton_program import (
    DIM,
    HEADS,
    KV_HEADS,
    MOST,
    POOL,
    PREFIXES,
    Batch,
    Prepare,
    Translator,
    eager,
    graph,
    lengths_of_another_step,
    make_backend,
    mask_offset_of_the_neighbour,
    random_tree,
)

from c2t_kernels.attention import split as attention_split

FP8 = torch.float8_e4m3fn
WINDOW = 9
EVERY_KEY = 1 << 20
SINKS = torch.linspace(-1.0, 2.0, HEADS)
SCALES = (0.5, 2.0)
# of latent keys, in the two parts that SGLang's kernel multiplies one after the other
RANK, ROPE = 256, 32
# rows of each request, of the pass
CASES: dict[str, tuple[list[int], int]] = {
    "chains": ([1, 5, 3, 2], 11),
    "chains_with_padding": ([1, 12, 3, 14], 36),
    "one_request": ([4], 8),
    "roots_only": ([1, 1, 1, 1], 4),
}
TREES = {"trees": ([1, 9, 4, 7], 24)}
# of which variant, and of which case
FAULTS: dict[str, tuple[str, str]] = {
    "a_window_of_every_key": ("window", "chains"),
    "window_of_another_request": ("window", "chains_with_padding"),
    "sinks_left_out": ("window", "chains_with_padding"),
    "scale_of_k_left_out": ("fp8", "chains"),
    "scale_of_v_left_out": ("fp8", "chains"),
    "mask_offset_of_the_neighbour": ("fp8", "trees"),
    "mask_offset_of_the_neighbour_latent": ("latent", "trees"),
    "lengths_of_another_step": ("latent", "chains_with_padding"),
}


class WindowTranslator(Translator):
    """The same, from a place of each request on."""

    window_kv_kind = None

    def pack_read_stream(self, _plan: Any, *, indptr: Any, out: Any, **given: Any) -> None:
        lengths, begun = given["seq_lens"].tolist(), given.get("kv_start_idx")
        begun = [0] * len(lengths) if begun is None else begun.tolist()
        for i, (row, first, length) in enumerate(zip(given["req_pool_indices"].tolist(), begun, lengths, strict=False)):
            out[int(indptr[i]) : int(indptr[i]) + length] = self.req_to_token[row, first : first + length]


def prepared(variant: str, generator: torch.Generator, masked: bool) -> tuple[Any, Any]:
    """SGLang's backend, made ours, and the layer that it is asked for."""
    backend, layer = make_backend(generator, "stock", masked), attention_layer(HEADS, KV_HEADS, DIM)
    if variant == "latent":
        layer = attention_layer(HEADS, 1, RANK + ROPE, v_dim=RANK)
        keys = torch.randn(POOL, 1, RANK + ROPE, generator=generator)
        backend.use_mla, backend.pool = True, [keys, keys[..., :RANK]]
        backend.token_to_kv_pool.get_key_buffer = lambda _: backend.pool[0]
        backend.token_to_kv_pool.get_value_buffer = lambda _: backend.pool[1]
    elif variant == "window":
        backend.sliding_window_size = layer.sliding_window_size = WINDOW
        backend.window_kv_indptr = torch.zeros(MOST + 1, dtype=torch.int32)
        backend.kv_index_translator = WindowTranslator(backend.req_to_token)
    else:
        backend.pool = [each.to(FP8) for each in backend.pool]
        backend.token_to_kv_pool.get_key_buffer = lambda _: backend.pool[0]
        backend.token_to_kv_pool.get_value_buffer = lambda _: backend.pool[1]
        for name, scale in zip("kv", SCALES, strict=True):
            setattr(layer, f"{name}_scale", torch.tensor(scale))
            setattr(layer, f"{name}_scale_float", scale)
    return backend, layer


def expected(variant: str, backend: Any, batch: Batch, q: Tensor, new: list[Tensor]) -> Tensor:
    """(rows, heads, dim) attention by its definition, of real rows alone."""
    found, begun = [], 0
    scales = SCALES if variant == "fp8" else (1.0, 1.0)
    for request, (length, prefix) in enumerate(zip(batch.lengths, batch.prefixes, strict=True)):
        slots = backend.req_to_token[request + 1, :prefix].long()
        before = [scale * pool.float()[slots] for pool, scale in zip(backend.pool, scales, strict=True)]
        for place in range(length):
            row, last = begun + place, prefix + place
            first = max(last - WINDOW, 0) if variant == "window" else 0
            seen = torch.arange(place + 1) if batch.trees is None else batch.trees[request][place].nonzero().flatten()
            k, v = (
                torch.cat([old, fresh[begun + seen]])[first:].repeat_interleave(HEADS // fresh.shape[1], 1)
                for old, fresh in zip(before, new, strict=True)
            )
            asked = torch.einsum("hd,khd->hk", q[row], k)
            if variant == "fp8":
                asked[:, : prefix - first] = torch.einsum("hd,khd->hk", q[row].to(FP8).float(), k[: prefix - first])
            weights = (asked * q.shape[-1] ** -0.5).exp()
            sums = weights.sum(1) + (SINKS.exp() if variant == "window" else 0.0)
            found.append(torch.einsum("hk,khd->hd", weights, v) / sums[:, None])
        begun += length
    return torch.stack(found)


def run(variant: str, case: str, prepare: Prepare, fault: str = "") -> float:
    lengths, rows = (CASES | TREES)[case]
    generator = torch.Generator().manual_seed(sum(lengths) + rows)
    backend, layer = prepared(variant, generator, case in TREES)
    batch = Batch(lengths, list(PREFIXES[: len(lengths)]))
    if case in TREES:
        batch = replace(batch, trees=[random_tree(nodes, generator) for nodes in lengths])
    live = prepare(backend, lengths_of_another_step(batch) if fault == "lengths_of_another_step" else batch, rows)
    q = torch.randn(rows, HEADS, layer.qk_head_dim, generator=generator)
    new = [torch.randn(rows, layer.tp_k_head_num, layer.qk_head_dim, generator=generator) for _ in "kv"]
    if variant == "latent":
        new[1] = new[0][..., :RANK]
    if fault == "a_window_of_every_key":
        layer.sliding_window_size = EVERY_KEY
    if fault.startswith("mask_offset_of_the_neighbour"):
        mask_offset_of_the_neighbour(backend)
    if fault == "window_of_another_request":
        metadata = backend.forward_metadata
        metadata.window_kv_indices.copy_(metadata.window_kv_indices.roll(1))
    for name in "kv":
        if fault == f"scale_of_{name}_left_out":
            setattr(layer, f"{name}_scale_float", 1.0)
    named = {"sinks": SINKS} if variant == "window" and fault != "sinks_left_out" else {}
    found = backend.forward_extend(q.flatten(1), *new, layer, live, save_kv_cache=False, **named)
    right = expected(variant, backend, batch, q, new)
    return float(torch.nan_to_num((found.view(rows, HEADS, -1)[: sum(lengths)] - right).abs(), nan=torch.inf).max())


def main(output: Path) -> None:
    torch.empty_like = lambda t: torch.full_like(t, torch.nan)  # type: ignore[assignment]
    # that of a small GPU: the interpreter runs one program after the other
    attention_split.WANTED_PROGRAMS = 16
    found: dict[str, float] = {}
    for how in (eager, graph):
        for variant in ("window", "fp8", "latent"):
            cases = CASES if variant == "window" else CASES | TREES
            found |= {f"{variant}-{case}-{how.__name__}": run(variant, case, how) for case in cases}
        found |= {f"{fault}-{how.__name__}": run(*FAULTS[fault], how, fault) for fault in FAULTS}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
