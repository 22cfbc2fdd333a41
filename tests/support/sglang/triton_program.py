"""Runs the packed Triton backends on the CPU in Triton's interpreter, for test_triton.py.

Usage: python triton_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes, per case,
the largest distance from c2t_kernels' reference attention, and what rows of nobody hold, with NaN in every key and
value that no real row may read.

SGLang's constructor is left out, since it needs a model runner; the server tests have one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from attention_layer import attention_layer
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention import verify_mask
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens
from torch.nn.functional import pad

from c2t_kernels import pack_ragged
from c2t_kernels.attention import split as attention_split
from c2t_kernels.attention.reference import tree_attention
from c2t_plugin.engines.sglang.drafters.tree_input import _mask
from c2t_plugin.engines.sglang.verify.tree_attention import TreeTritonAttnBackend
from c2t_plugin.engines.sglang.verify.triton import PackedTritonAttnBackend

HEADS, KV_HEADS, DIM = 4, 2, 64
MOST, WIDTH, CONTEXT = 6, 30, 64
POOL = (MOST + 1) * CONTEXT
PREFIXES = (7, 20, 1, 33)


class Translator:
    """SGLang 0.5.23's reader of slots, for a pool that needs no translation."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self.req_to_token = req_to_token

    def pack_read_stream(
        self, _plan: Any, *, req_pool_indices: Any, seq_lens: Any, indptr: Any, out: Any, **_: Any
    ) -> None:
        for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
            out[int(indptr[i]) : int(indptr[i]) + length] = self.req_to_token[row, :length]


def make_backend(generator: torch.Generator, kernel: str, masked: bool, page: int = 1) -> Any:
    pages = torch.randperm(POOL // page, generator=generator)[:, None] * page + torch.arange(page)
    slots = pages.view(MOST + 1, CONTEXT)
    pool = [torch.randn(POOL, KV_HEADS, DIM, generator=generator) for _ in "kv"]
    attributes = dict(
        device="cpu",
        req_to_token=slots.to(torch.int32),
        req_to_token_pool=SimpleNamespace(size=MOST),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: pool[0], get_value_buffer=lambda _: pool[1]),
        kv_index_translator=Translator(slots),
        _translate_kv_loc=None,
        _verify_mask=None,
        kv_indptr=torch.zeros(MOST + 1, dtype=torch.int32),
        qo_indptr=torch.zeros(MOST + 1, dtype=torch.int64),
        mask_indptr=torch.zeros(MOST + 1, dtype=torch.int64),
        window_kv_indptr=None,
        sliding_window_size=None,
        use_sliding_window_kv_pool=False,
        num_draft_tokens=WIDTH,
        target_verify_num_tokens_per_req=WIDTH,
        max_context_len=CONTEXT,
        num_head=HEADS,
        max_kv_splits=2,
        v_head_dim=DIM,
        swa_v_head_dim=None,
        lean_total_programs=1,
        lean_block_m=1,
        skip_prefill=False,
        is_draft_runner=False,
        dllm_attention=None,
        dcp_size=1,
        page_size=page,
        use_mla=False,
        enable_deterministic=False,
        use_verify_splitkv=False,
        use_verify_shared_kv=False,
        use_dense_fp8_chunked_prefill=False,
        allow_bidirectional_attention_in_extend=False,
        extend_attention_fwd=extend_attention_fwd,
        pool=pool,
    )
    with mock.patch.object(TritonAttnBackend, "__init__", lambda self, _: vars(self).update(attributes)):
        if kernel == "stock":
            return PackedTritonAttnBackend(None, nodes_alone=not masked)
        backend = TreeTritonAttnBackend(None, masked=masked, nodes_alone=not masked)
    # nothing falls back to the other kernel
    backend._stock_kernel = None
    return backend


LAYER = attention_layer(HEADS, KV_HEADS, DIM)


# and where each request's begins, None in a batch of SGLang's own
Mask = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Batch:
    """Requests of a verify forward: rows and prefix tokens of each, and (nodes, nodes) bool of what nodes see.

    shift: by how much the places are wrong at which the masks are said to begin. nobody: the last request has the row
    of pads in the table of slots.
    """

    lengths: list[int]
    prefixes: list[int]
    trees: list[torch.Tensor] | None = None
    shift: int = 0
    nobody: bool = False

    def view(self, rows: int, requests: int, mask: Mask) -> Any:
        """As far as the backend reads a forward batch; requests: some of them nobody's."""
        pads = requests - len(self.prefixes)
        seq_lens = torch.tensor(self.prefixes + [1] * pads)
        owners = [*range(1, len(self.prefixes) + 1), *[0] * pads]
        if self.nobody:
            owners[len(self.prefixes) - 1] = 0
        return SimpleNamespace(
            batch_size=requests,
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=torch.zeros(rows, dtype=torch.int64),
            req_pool_indices=torch.tensor(owners),
            seq_lens=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            seq_lens_cpu=seq_lens,
            encoder_lens=None,
            out_cache_loc=torch.zeros(rows, dtype=torch.int64),
            kv_loc_plan=None,
            extend_seq_lens_cpu=None,
            mha_one_shot=False,
            attn_attend_prefix_cache=None,
            spec_info=SimpleNamespace(
                ragged_verify_layout=RaggedVerifyLayout.from_verify_lens_device(
                    verify_lens=torch.tensor(self.lengths), graph_num_tokens=rows
                ),
                custom_mask=mask[0],
                mask_starts=mask[1],
                num_tokens_per_req=WIDTH,
                draft_token_num=WIDTH,
            ),
        )

    def mask(self, backend: Any) -> Mask:
        """As the worker writes it, in the form that the backend asks for, which on a GPU is one over the prefix."""
        if self.trees is None:
            return None, None
        padded = torch.stack([pad(tree, (0, WIDTH - len(tree)) * 2) for tree in self.trees])
        counts = torch.tensor(self.lengths, dtype=torch.int32)
        layout: Any = SimpleNamespace(mask=padded, counts=counts, draft_tokens=torch.zeros(padded.shape[:2]))
        batch = SimpleNamespace(seq_lens=torch.tensor(self.prefixes), seq_lens_sum=sum(self.prefixes))
        mask, starts = _mask(layout, batch, backend, TreeMaskMode.FULL_MASK, packed=True)
        return mask, starts + self.shift * (starts > 0)


def random_tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """(nodes, nodes) bool: which nodes each node sees, itself and its ancestors."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(node, (1,), generator=generator))]
    return seen


def filled(lengths: list[int], rows: int) -> list[int]:
    """Rows of each request where packing.py has given a captured graph's spare ones of chains away."""
    kept, words = torch.tensor(lengths, dtype=torch.int32) - 1, torch.zeros(len(lengths), WIDTH, dtype=torch.int64)
    given: list[int] = pack_ragged(kept, [words], capacity=rows, pads=(0,), slots=min(rows, MOST)).lengths.tolist()
    assert sum(given[: len(lengths)]) == rows
    return given[: len(lengths)]


def run(
    kernel: str,
    lengths: list[int],
    rows: int,
    trees: bool,
    prepare: Prepare,
    fault: Callable[[Any], Any] | None = None,
    page: int = 1,
) -> dict[str, float]:
    """One verify forward whose metadata `prepare` makes, of what `fault` has made of the batch, or of the metadata."""
    if prepare is graph and not trees and fault is None:
        lengths = filled(lengths, rows)
    generator = torch.Generator().manual_seed(sum(lengths) + rows)
    backend = make_backend(generator, kernel, trees, page)
    batch = Batch(lengths, list(PREFIXES[: len(lengths)]))
    if trees:
        batch = replace(batch, trees=[random_tree(n, generator) for n in lengths])
    live = prepare(backend, batch if fault is None or fault in OF_METADATA else fault(batch), rows)
    if fault in OF_METADATA:
        fault(backend)
    q = torch.randn(rows, HEADS * DIM, generator=generator)
    k, v = (torch.randn(rows, KV_HEADS, DIM, generator=generator) for _ in "kv")
    kv = torch.cat([backend.req_to_token[i + 1, :prefix].long() for i, prefix in enumerate(batch.prefixes)])
    hidden = torch.ones(POOL, dtype=torch.bool)
    hidden[kv] = False
    for new, before in zip((k, v), backend.pool, strict=True):
        new[sum(lengths) :], before[hidden] = torch.nan, torch.nan
    found = backend.forward_extend(q, k, v, LAYER, live, save_kv_cache=False).view(rows, HEADS, DIM)
    used = sum(lengths)
    masks = {}
    if batch.trees is not None:
        masks["mask"] = torch.cat([tree.flatten() for tree in batch.trees])
        masks["mask_indptr"] = torch.tensor([0, *(n**2 for n in lengths)]).cumsum(0)
    expected = tree_attention(
        q.view(rows, HEADS, DIM),
        k,
        v,
        *backend.pool,
        torch.tensor([0, *lengths]).cumsum(0),
        torch.tensor([0, *batch.prefixes]).cumsum(0),
        kv,
        **masks,
    )
    padding = largest(found[used:]) if rows > used else 0.0
    return {"distance": largest(found[:used] - expected[:used]), "padding": padding}


def largest(differences: torch.Tensor) -> float:
    """NaN is no small one."""
    return float(torch.nan_to_num(differences.abs(), nan=torch.inf).max())


def eager(backend: Any, batch: Batch, rows: int) -> Any:
    live = batch.view(rows, len(batch.lengths), batch.mask(backend))
    backend.init_forward_metadata(live)
    return live


def graph(backend: Any, batch: Batch, rows: int) -> Any:
    """Metadata made at capture, for another layout, and then refilled twice; a graph holds the first tensors."""
    # as on a GPU
    with mock.patch.object(verify_mask, "default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK):
        backend.init_cuda_graph_state(MOST, MOST * WIDTH)
    # of each request's keys once; a window's own list SGLang makes as long
    assert len(backend.cuda_graph_kv_indices) == MOST * CONTEXT
    # which only decoding writes
    assert backend.cuda_graph_attn_logits.shape[2] == 1 < backend.max_kv_splits
    # which SGLang fills in each step: over the prefix where the kernel reads that, and nowhere else
    columns = 1 if backend.c2t_nodes_alone else CONTEXT
    assert backend.verify_mask.buffer.numel() == MOST * WIDTH * (columns + WIDTH)
    slots = min(rows, MOST)
    lens = build_capture_verify_lens(num_tokens=rows, num_slots=slots, num_draft_tokens=WIDTH)
    dummy = None if batch.trees is None else torch.ones((MOST + MOST * WIDTH) * WIDTH, dtype=torch.bool)
    captured = Batch(lens, [1] * slots).view(rows, slots, (dummy, None))
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    held = backend.forward_metadata, backend._padding
    trees = None if batch.trees is None else batch.trees[::-1]
    for each in (replace(batch, lengths=batch.lengths[::-1], prefixes=batch.prefixes[::-1], trees=trees), batch):
        live = each.view(rows, slots, each.mask(backend))
        backend.init_forward_metadata_out_graph(live)
    backend.forward_metadata, backend._padding = held
    return live


def mask_bit(batch: Batch) -> Batch:
    """One node of the last tree does not see the root."""
    assert batch.trees is not None
    trees = [tree.clone() for tree in batch.trees]
    trees[-1][-1, 0] = False
    return replace(batch, trees=trees)


def prefix(batch: Batch) -> Batch:
    """One token more than the second request has."""
    return replace(batch, prefixes=[length + (i == 1) for i, length in enumerate(batch.prefixes)])


def mask_begins(batch: Batch) -> Batch:
    """Each mask but the first is read from one element later."""
    return replace(batch, shift=1)


def lengths_of_another_step(batch: Batch) -> Batch:
    return replace(batch, lengths=batch.lengths[::-1])


def left_over_rows_to_the_last(batch: Batch) -> Batch:
    """As SGLang pads a layout that does not sum to its graph's rows."""
    return replace(batch, lengths=[*batch.lengths[:-1], batch.lengths[-1] + LEFT_OVER])


def a_request_reads_slot_0(batch: Batch) -> Batch:
    return replace(batch, nobody=True)


def a_stale_page_table(backend: Any) -> None:
    """Of a batch whose keys lay one place further."""
    listed = backend.forward_metadata.kv_indices
    listed.copy_(listed.roll(1))


def mask_offset_of_the_neighbour(backend: Any) -> None:
    begins = backend.forward_metadata.mask_indptr
    begins[1:] = begins[:-1].clone()


def a_mask_that_nobody_filled(backend: Any) -> None:
    """Chains under what SGLang has room for, where it has written nothing over the prefix."""
    room = torch.zeros(MOST * WIDTH * (CONTEXT + WIDTH), dtype=torch.uint8)
    backend.forward_metadata = replace(backend.forward_metadata, custom_mask=room)


Prepare = Callable[[Any, Batch, int], Any]
CASES: dict[str, tuple[list[int], int, bool]] = {
    "chains": ([1, 5, 3, 2], 11, False),
    "chains_with_padding": ([1, 5, 3, 2], 16, False),
    "one_request": ([4], 8, False),
    "roots_only": ([1, 1, 1, 1], 4, False),
    "the_whole_window": ([WIDTH] * 4, 4 * WIDTH, False),
    "trees": ([1, 9, 4, 7], 21, True),
    "trees_with_padding": ([1, 9, 30, 17], 64, True),
}
# tokens of a page, and of which case
PAGES: dict[str, tuple[int, str]] = {"chains_of_pages": (4, "chains_with_padding"), "trees_of_pages": (4, "trees")}
LEFT_OVER = 5
FAULTS: dict[Callable[[Any], Any], str] = {
    mask_bit: "trees_with_padding",
    prefix: "trees_with_padding",
    mask_begins: "trees_with_padding",
    lengths_of_another_step: "chains_with_padding",
    left_over_rows_to_the_last: "chains_with_padding",
    a_request_reads_slot_0: "chains_with_padding",
    a_stale_page_table: "chains_with_padding",
    mask_offset_of_the_neighbour: "trees",
    a_mask_that_nobody_filled: "chains_with_padding",
}
OF_METADATA = (a_stale_page_table, mask_offset_of_the_neighbour, a_mask_that_nobody_filled)


def main(output: Path) -> None:
    torch.empty_like = lambda t: torch.full_like(t, torch.nan)  # type: ignore[assignment]
    # that of a small GPU: the interpreter runs one program after the other
    attention_split.WANTED_PROGRAMS = 16
    results = {}
    for kernel in ("stock", "tree"):
        for how in (eager, graph):
            for name, case in CASES.items():
                results[f"{kernel}-{name}-{how.__name__}"] = run(kernel, *case, how)
            for name, (page, case_name) in PAGES.items():
                results[f"{kernel}-{name}-{how.__name__}"] = run(kernel, *CASES[case_name], how, page=page)
            for fault, name in FAULTS.items():
                results[f"{kernel}-{fault.__name__}-{how.__name__}"] = run(kernel, *CASES[name], how, fault)
    output.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
