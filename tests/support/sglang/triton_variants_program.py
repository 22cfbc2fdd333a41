"""The same as triton_program.py of chains with sliding windows, sinks and a cache of 8 bits.

Usage: python triton_variants_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes,
per case, the largest distance of real rows from attention as it is defined, and that with a fault planted.

SGLang's kernel rounds queries and weights to a cache of 8 bits, and new keys to nothing: the distance of that case is
the rounding of weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from attention_layer import attention_layer
from torch import Tensor
from triton_program import DIM, HEADS, KV_HEADS, MOST, PREFIXES, Batch, Prepare, Translator, eager, graph, make_backend

from c2t_kernels.attention import split as attention_split

FP8 = torch.float8_e4m3fn
WINDOW = 9
EVERY_KEY = 1 << 20
SINKS = torch.linspace(-1.0, 2.0, HEADS)
SCALES = (0.5, 2.0)
# rows of each request, of the pass
CASES: dict[str, tuple[list[int], int]] = {
    "chains": ([1, 5, 3, 2], 11),
    "chains_with_padding": ([1, 12, 3, 14], 36),
    "one_request": ([4], 8),
    "roots_only": ([1, 1, 1, 1], 4),
}
# of which variant, and of which case
FAULTS: dict[str, tuple[str, str]] = {
    "a_window_of_every_key": ("window", "chains"),
    "window_of_another_request": ("window", "chains_with_padding"),
    "sinks_left_out": ("window", "chains_with_padding"),
    "scale_of_k_left_out": ("fp8", "chains"),
    "scale_of_v_left_out": ("fp8", "chains"),
}


class WindowTranslator(Translator):
    """The same, from a place of each request on."""

    window_kv_kind = None

    def pack_read_stream(self, _plan: Any, *, indptr: Any, out: Any, **given: Any) -> None:
        lengths, begun = given["seq_lens"].tolist(), given.get("kv_start_idx")
        begun = [0] * len(lengths) if begun is None else begun.tolist()
        for i, (row, first, length) in enumerate(zip(given["req_pool_indices"].tolist(), begun, lengths, strict=False)):
            out[int(indptr[i]) : int(indptr[i]) + length] = self.req_to_token[row, first : first + length]


def prepared(variant: str, generator: torch.Generator) -> tuple[Any, Any]:
    """SGLang's backend, made ours, and the layer that it is asked for."""
    backend, layer = make_backend(generator, "stock", False), attention_layer(HEADS, KV_HEADS, DIM)
    if variant == "window":
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
            k, v = (
                torch.cat([old, fresh[begun : row + 1]])[first:].repeat_interleave(HEADS // KV_HEADS, 1)
                for old, fresh in zip(before, new, strict=True)
            )
            asked = torch.einsum("hd,khd->hk", q[row], k)
            if variant == "fp8":
                asked[:, : prefix - first] = torch.einsum("hd,khd->hk", q[row].to(FP8).float(), k[: prefix - first])
            weights = (asked * DIM**-0.5).exp()
            sums = weights.sum(1) + (SINKS.exp() if variant == "window" else 0.0)
            found.append(torch.einsum("hk,khd->hd", weights, v) / sums[:, None])
        begun += length
    return torch.stack(found)


def run(variant: str, case: str, prepare: Prepare, fault: str = "") -> float:
    lengths, rows = CASES[case]
    generator = torch.Generator().manual_seed(sum(lengths) + rows)
    backend, layer = prepared(variant, generator)
    batch = Batch(lengths, list(PREFIXES[: len(lengths)]))
    live = prepare(backend, batch, rows)
    q = torch.randn(rows, HEADS * DIM, generator=generator)
    new = [torch.randn(rows, KV_HEADS, DIM, generator=generator) for _ in "kv"]
    if fault == "a_window_of_every_key":
        layer.sliding_window_size = EVERY_KEY
    if fault == "window_of_another_request":
        metadata = backend.forward_metadata
        metadata.window_kv_indices.copy_(metadata.window_kv_indices.roll(1))
    for name in "kv":
        if fault == f"scale_of_{name}_left_out":
            setattr(layer, f"{name}_scale_float", 1.0)
    named = {"sinks": SINKS} if variant == "window" and fault != "sinks_left_out" else {}
    found = backend.forward_extend(q, *new, layer, live, save_kv_cache=False, **named).view(rows, HEADS, DIM)
    right = expected(variant, backend, batch, q.view(rows, HEADS, DIM), new)
    return float(torch.nan_to_num((found[: sum(lengths)] - right).abs(), nan=torch.inf).max())


def main(output: Path) -> None:
    torch.empty_like = lambda t: torch.full_like(t, torch.nan)  # type: ignore[assignment]
    # that of a small GPU: the interpreter runs one program after the other
    attention_split.WANTED_PROGRAMS = 16
    found: dict[str, float] = {}
    for how in (eager, graph):
        for variant in ("window", "fp8"):
            found |= {f"{variant}-{case}-{how.__name__}": run(variant, case, how) for case in CASES}
        found |= {f"{fault}-{how.__name__}": run(*FAULTS[fault], how, fault) for fault in FAULTS}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
