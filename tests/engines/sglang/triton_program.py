"""Runs RaggedTritonAttnBackend on the CPU in Triton's interpreter, for test_triton_ragged.py.

Usage: python triton_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes, per case,
the largest distance from c2t_kernels' reference attention, and what rows of nobody hold.

The backend is made without its constructor, which needs a model runner; the server test has one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

from c2t_kernels.reference import tree_attention
from c2t_plugin.engines.sglang.triton_ragged import RaggedTritonAttnBackend

HEADS, KV_HEADS, DIM = 4, 2, 16
MOST, WIDTH, CONTEXT = 6, 9, 64
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


def make_backend(generator: torch.Generator) -> RaggedTritonAttnBackend:
    backend = RaggedTritonAttnBackend.__new__(RaggedTritonAttnBackend)
    slots = torch.randperm(POOL, generator=generator)[: (MOST + 1) * CONTEXT].view(MOST + 1, CONTEXT)
    pool = [torch.randn(POOL, KV_HEADS, DIM, generator=generator) for _ in "kv"]
    vars(backend).update(
        device="cpu",
        req_to_token=slots.to(torch.int32),
        req_to_token_pool=SimpleNamespace(size=MOST),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: pool[0], get_value_buffer=lambda _: pool[1]),
        kv_index_translator=Translator(slots),
        _translate_kv_loc=None,
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
        max_kv_splits=1,
        v_head_dim=DIM,
        swa_v_head_dim=None,
        lean_total_programs=1,
        lean_block_m=1,
        skip_prefill=False,
        is_draft_runner=False,
        dllm_attention=None,
        dcp_size=1,
        page_size=1,
        use_mla=False,
        enable_deterministic=False,
        use_verify_splitkv=False,
        use_verify_shared_kv=False,
        use_dense_fp8_chunked_prefill=False,
        allow_bidirectional_attention_in_extend=False,
        extend_attention_fwd=extend_attention_fwd,
        pool=pool,
    )
    return backend


LAYER = SimpleNamespace(
    layer_id=0,
    qk_head_dim=DIM,
    v_head_dim=DIM,
    tp_q_head_num=HEADS,
    tp_k_head_num=KV_HEADS,
    scaling=DIM**-0.5,
    logit_cap=0.0,
    logit_capping_method="tanh",
    k_scale=None,
    v_scale=None,
    is_cross_attention=False,
    attn_type=None,
    sliding_window_size=-1,
    xai_temperature_len=-1,
)


def view(lengths: list[int], rows: int, prefixes: list[int], mask: torch.Tensor | None, requests: int) -> Any:
    layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=torch.tensor(lengths), graph_num_tokens=rows)
    pads = requests - len(prefixes)
    seq_lens = torch.tensor(prefixes + [1] * pads)
    return SimpleNamespace(
        batch_size=requests,
        forward_mode=ForwardMode.TARGET_VERIFY,
        input_ids=torch.zeros(rows, dtype=torch.int64),
        req_pool_indices=torch.tensor([*range(1, len(prefixes) + 1), *[0] * pads]),
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
            ragged_verify_layout=layout, custom_mask=mask, num_tokens_per_req=WIDTH, draft_token_num=WIDTH
        ),
    )


def random_tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """(nodes, nodes) bool: which nodes each node sees, itself and its ancestors."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(node, (1,), generator=generator))]
    return seen


def run(
    lengths: list[int], rows: int, trees: bool, prepare: Callable[[Any, Any, torch.Tensor | None], None]
) -> dict[str, float]:
    """One verify forward whose metadata `prepare` makes."""
    generator = torch.Generator().manual_seed(sum(lengths) + rows)
    backend = make_backend(generator)
    backend.init_cuda_graph_state(MOST, MOST * WIDTH)
    # On a CPU SGLang makes room for the rows' part of the mask only.
    backend._verify_mask = SimpleNamespace(buffer=torch.zeros(MOST * WIDTH * (CONTEXT + WIDTH), dtype=torch.uint8))
    prefixes = list(PREFIXES[: len(lengths)])
    seen = [random_tree(n, generator) for n in lengths] if trees else None
    full = None
    if seen is not None:
        parts = (
            torch.cat([torch.ones(len(tree), prefix, dtype=torch.bool), tree], dim=1).flatten()
            for prefix, tree in zip(prefixes, seen, strict=True)
        )
        full = torch.cat(list(parts))
    prepare(backend, view(lengths, rows, prefixes, full, len(lengths)), full)
    q = torch.randn(rows, HEADS * DIM, generator=generator)
    k, v = (torch.randn(rows, KV_HEADS, DIM, generator=generator) for _ in "kv")
    live = view(lengths, rows, prefixes, full, len(lengths))
    found = backend.forward_extend(q, k, v, LAYER, live, save_kv_cache=False).view(rows, HEADS, DIM)
    used = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    kv = [backend.req_to_token[i + 1, :prefix].long() for i, prefix in enumerate(prefixes)]
    masks = {} if seen is None else {"mask": torch.cat([tree.flatten() for tree in seen])}
    if seen is not None:
        masks["mask_indptr"] = torch.tensor([0, *(len(tree) ** 2 for tree in seen)]).cumsum(0)
    expected = tree_attention(
        q.view(rows, HEADS, DIM),
        k,
        v,
        *backend.pool,
        starts,
        torch.tensor([0, *prefixes]).cumsum(0),
        torch.cat(kv),
        **masks,
    )
    padding = found[used:].abs().max().item() if rows > used else 0.0
    return {"distance": (found[:used] - expected[:used]).abs().max().item(), "padding": padding}


def eager(backend: Any, live: Any, _full: torch.Tensor | None) -> None:
    backend.init_forward_metadata(live)


def graph(backend: Any, live: Any, full: torch.Tensor | None) -> None:
    """Metadata made at capture, for another layout, and then refilled; what the graph holds are the first tensors."""
    rows = len(live.input_ids)
    slots = min(rows, MOST)
    lens = build_capture_verify_lens(num_tokens=rows, num_slots=slots, num_draft_tokens=WIDTH)
    # SGLang captures with the buffer that it later copies masks into
    captured_mask = None if full is None else backend.verify_mask.buffer
    backend.init_forward_metadata_out_graph(view(lens, rows, [1] * slots, captured_mask, slots), in_capture=True)
    captured = backend.forward_metadata, backend._padding
    lengths = live.spec_info.ragged_verify_layout.verify_lens.tolist()
    backend.init_forward_metadata_out_graph(view(lengths, rows, live.seq_lens.tolist(), full, slots))
    backend.forward_metadata, backend._padding = captured


CASES: dict[str, tuple[list[int], int, bool]] = {
    "chains": ([1, 5, 3, 2], 11, False),
    "chains_with_padding": ([1, 5, 3, 2], 16, False),
    "one_request": ([4], 8, False),
    "roots_only": ([1, 1, 1, 1], 4, False),
    "the_whole_window": ([WIDTH] * 4, 4 * WIDTH, False),
    "trees": ([1, 9, 4, 7], 21, True),
    "trees_with_padding": ([2, 9, 1, 6], 24, True),
}


def main(output: Path) -> None:
    torch.empty_like = lambda t: torch.full_like(t, torch.nan)  # type: ignore[assignment]
    results = {}
    for name, (lengths, rows, trees) in CASES.items():
        for how in (eager, graph):
            results[f"{name}-{how.__name__}"] = run(lengths, rows, trees, how)
    output.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
