"""Runs SGLang's FlashInfer backend, made ragged, on the CPU with stubs, for test_flashinfer.py.

Usage: python -m tests.support.sglang.flashinfer_program OUTPUT.json, in the CPU engine's environment with
TRITON_INTERPRET=1. Writes, per case, the largest distance from c2t_kernels' reference attention, and what rows of
nobody hold, with NaN in every key and value that no real row may read; and which backends SGLang's registry builds.

Stubs are FlashInfer's wrappers and the model runner; the backend's constructor, its metadata of both modes, its
indices updater and the kernel that lists the slots of keys are SGLang's.

Longer than most files, as it runs in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import attention_registry, flashinfer_backend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

from c2t_kernels import pack_ragged
from c2t_kernels.attention.reference import tree_attention
from c2t_plugin.config import PACKINGS
from c2t_plugin.engines.sglang import algo
from c2t_plugin.engines.sglang.drafters.tree_input import build_verify_input
from c2t_plugin.engines.sglang.step import Step, attach, step_of
from c2t_plugin.engines.sglang.verify import backends, choice, flashinfer
from c2t_plugin.engines.sglang.verify.flashinfer import PackedFlashInferAttnBackend, PackedRows
from tests.support.engines.undone import sglang_undone
from tests.support.sglang.attention_layer import attention_layer
from tests.support.sglang.flashinfer_wrapper import PagedWrapper

# of the last graph that was replayed
PLANNED_BY: dict[str, str] = {}
HEADS, KV_HEADS, DIM = 4, 2, 16
MOST, WIDTH, CONTEXT = 5, 30, 80
SLOTS = (MOST + 1) * CONTEXT
PREFIXES = (7, 20, 1, 33, 12)
TIERS = (60, 90)


class Pool:
    """Keys and values of one layer, by slot."""

    dtype, scales = torch.float32, (1.0, 1.0)

    def __init__(self, generator: torch.Generator) -> None:
        drawn = [torch.randn(SLOTS, KV_HEADS, DIM, generator=generator) for _ in "kv"]
        self.k, self.v = (each.to(self.dtype) for each in drawn)

    def get_kv_buffer(self, _layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def set_kv_buffer(self, _layer: Any, written: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        assert [each is not None for each in scales] == [self.dtype != torch.float32] * 2
        for buffer, new, scale in zip((self.k, self.v), (k, v), self.scales, strict=True):
            # torch has no assignment of 8 bits by index
            buffer.view(torch.uint8)[written.loc] = (new / scale).to(self.dtype).view(torch.uint8)

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is read of these where they are written."""
        pairs = zip((k, v), self.scales, strict=True)
        return tuple((each / scale).to(self.dtype).float() * scale for each, scale in pairs)

    def get_kv_cache_quant_method(self) -> Any:
        return SimpleNamespace(
            resolve_attention_access=lambda *_: SimpleNamespace(kind=None, scale_recipe=None),
            needs_global_scale=lambda: False,
        )


class BytesPool(Pool):
    """Of 8 bits, of a checkpoint that has scales."""

    dtype, scales = torch.float8_e4m3fn, (0.5, 2.0)


def stand_ins() -> None:
    """In place of what SGLang's module takes from FlashInfer, CUDA and a running server."""
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        setattr(flashinfer_backend, name, _wrapper)
    flashinfer_backend.BatchPrefillWithRaggedKVCacheWrapper = lambda *_, **__: None
    flashinfer_backend.get_parallel = lambda: SimpleNamespace(attn_tp_size=1, attn_dcp_size=1)
    flashinfer_backend.get_exec = lambda: SimpleNamespace(
        features=SimpleNamespace(enable_mis=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    flashinfer_backend.get_platform = lambda: SimpleNamespace(is_sm100=False)
    flashinfer_backend.get_buffer = lambda _name, _make: torch.empty(1, dtype=torch.uint8)
    flashinfer_backend.get_cuda_graph_max_batch_size = lambda size: size
    flashinfer_backend.DllmConfig = SimpleNamespace(from_server_args=lambda _: None)
    empty, zeros = torch.empty, torch.zeros

    def unwritten(*sizes: Any, **named: Any) -> torch.Tensor:
        """No slot, so that nothing rests on what happened to be in memory."""
        return empty(*sizes, **named).fill_(-1 if named.get("dtype") == torch.int32 else 0)

    def on_the_cpu(*sizes: Any, device: Any = None, **named: Any) -> torch.Tensor:
        """SGLang names the device of its graph buffers."""
        return zeros(*sizes, device=None if device == "cuda" else device, **named)

    torch.empty, torch.zeros = unwritten, on_the_cpu  # type: ignore[assignment]


def _wrapper(*positional: Any, use_tensor_cores: bool = False, **named: Any) -> PagedWrapper:
    return PagedWrapper(*positional, **named)


def make_backend(generator: torch.Generator, kind: type[Pool] = Pool) -> PackedFlashInferAttnBackend:
    slots = torch.randperm(SLOTS, generator=generator).view(MOST + 1, CONTEXT).int()
    pool, allocator = kind(generator), SimpleNamespace(get_kvcache=lambda: None)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=MOST, req_to_token=slots),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        kv_index_translator=KVIndexTranslator(
            req_to_token=slots,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=pool,
            page_size=1,
            device="cpu",
        ),
        server_args=None,
        is_draft_worker=False,
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str="flashinfer",
        kv_cache_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
        page_size=1,
        sliding_window_size=None,
        device="cpu",
        model_config=SimpleNamespace(
            num_attention_heads=HEADS,
            get_num_kv_heads=lambda *_: KV_HEADS,
            get_max_num_attention_heads=lambda: HEADS,
            head_dim=DIM,
            context_len=CONTEXT,
            is_multimodal=False,
            is_encoder_decoder=False,
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        ),
    )
    backend = PackedFlashInferAttnBackend.of(flashinfer_backend.FlashInferAttnBackend(runner))
    # as every server asks at its start
    assert choice.verifier(backend) is backend
    # less than a real one, of which all lists here would fit
    with patch.object(flashinfer, "SPARE_ROOM", 2):
        backend.init_cuda_graph_state(MOST, TIERS[-1])
    # the stand-in refuses what does not fit
    (indices,), mask = backend.cuda_graph_kv_indices, backend.cuda_graph_custom_mask
    assert len(indices) == len(mask) == TIERS[-1] * (CONTEXT // 8 + 2)
    return backend


LAYER = attention_layer(HEADS, KV_HEADS, DIM)


def view(lengths: list[int], rows: int, prefixes: list[int], mask: torch.Tensor | None, requests: int) -> Any:
    layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=torch.tensor(lengths), graph_num_tokens=rows)
    pads = requests - len(prefixes)
    seq_lens = torch.tensor(prefixes + [1] * pads)
    return SimpleNamespace(
        batch_size=requests,
        forward_mode=ForwardMode.TARGET_VERIFY,
        input_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int64),
        req_pool_indices=torch.tensor([*range(1, len(prefixes) + 1), *[0] * pads]),
        seq_lens=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
        seq_lens_cpu=seq_lens.clone(),
        encoder_lens=None,
        out_cache_loc=None,
        out_cache_loc_is_physical=False,
        kv_loc_plan=None,
        spec_info=SimpleNamespace(ragged_verify_layout=layout, custom_mask=mask),
    )


def random_tree(nodes: int, generator: torch.Generator) -> torch.Tensor:
    """(nodes, nodes) bool: which nodes each node sees, itself and its ancestors."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(node, (1,), generator=generator))]
    return seen


def eager(backend: Any, live: Any) -> None:
    backend.init_forward_metadata(live)


def graph(backend: Any, live: Any) -> None:
    """Captured for every number of rows, with as many requests each; then one of them is replayed."""
    captured = {}
    masked, generator = live.spec_info.custom_mask is not None, torch.Generator().manual_seed(0)
    for rows in reversed(TIERS):
        lens = build_capture_verify_lens(num_tokens=rows, num_slots=MOST, num_draft_tokens=WIDTH)
        mask = torch.ones((MOST + rows) * WIDTH, dtype=torch.bool) if masked else None
        capture = view(lens, rows, [1] * MOST, mask, MOST)
        capture.out_cache_loc = torch.zeros(rows, dtype=torch.int64)
        backend.init_forward_metadata_out_graph(capture, in_capture=True)
        q, k, v = inputs(rows, generator)
        # FlashInfer's checks run at capture, and no more
        backend.forward_extend(q, k, v, LAYER, capture, save_kv_cache=False)
        captured[rows] = backend.forward_metadata, backend._padding
    rows, lengths = len(live.input_ids), live.spec_info.ragged_verify_layout.verify_lens.tolist()
    replayed = view(lengths, rows, live.seq_lens.tolist(), live.spec_info.custom_mask, MOST)
    replayed.req_pool_indices[: live.batch_size] = live.req_pool_indices
    replayed.seq_lens_cpu[: live.batch_size] = live.seq_lens_cpu
    if (step := step_of(live.spec_info)) is not None:
        replayed.spec_info.draft_token_num = WIDTH
        attach(replayed.spec_info, step)
    backend.init_forward_metadata_out_graph(replayed)
    # What a graph has captured stays: only what lies behind its addresses is new.
    backend.forward_metadata, backend._padding = captured[rows]
    PLANNED_BY["trees" if masked else "chains"] = PagedWrapper.planned_by
    PagedWrapper.replaying = True


def of_a_step(backend: Any, live: Any) -> None:
    """A graph that is replayed for a step of C2T's, where to read anything back is an error."""
    attach(live.spec_info, Step(torch.zeros(live.batch_size, dtype=torch.int32)))
    sound = PackedFlashInferAttnBackend._plan

    def planned(self: Any, *positional: Any, **keyword: Any) -> None:
        with patch.object(torch.Tensor, "cpu", side_effect=RuntimeError("read back")):
            sound(self, *positional, **keyword)

    with patch.object(PackedFlashInferAttnBackend, "_plan", planned):
        graph(backend, live)


def inputs(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, HEADS * DIM, generator=generator)
    return q, *(torch.randn(rows, KV_HEADS, DIM, generator=generator) for _ in "kv")  # type: ignore[return-value]


def filled(lengths: list[int], rows: int) -> list[int]:
    """Rows of each slot of a captured graph, where packing.py has given the spare ones of chains away."""
    kept, words = torch.tensor(lengths, dtype=torch.int32) - 1, torch.zeros(len(lengths), WIDTH, dtype=torch.int64)
    given: list[int] = pack_ragged(kept, [words], capacity=rows, pads=(0,), slots=MOST).lengths.tolist()
    assert sum(given) == rows
    return given


def run(
    lengths: list[int],
    rows: int,
    trees: bool,
    prepare: Callable[[Any, Any], None],
    kind: type[Pool] = Pool,
    layer: Any = LAYER,
    fault: Callable[[Any], None] | None = None,
) -> dict[str, float]:
    """One verify forward whose metadata `prepare` makes. fault: in the forward batch, or in the metadata."""
    generator = torch.Generator().manual_seed(sum(lengths) + rows)
    backend = make_backend(generator, kind)
    prefixes = list(PREFIXES[: len(lengths)])
    given = filled(lengths, rows) if prepare is graph and not trees and fault is None else lengths
    lengths = given[: len(lengths)]
    seen = [random_tree(n, generator) for n in lengths] if trees else []
    full = None
    if trees:
        parts = [
            torch.cat([torch.ones(len(tree), prefix, dtype=torch.bool), tree], dim=1).flatten()
            for prefix, tree in zip(prefixes, seen, strict=True)
        ]
        # as trees/verify_input.py makes it: with room behind it
        full = torch.cat([*parts, torch.zeros(50, dtype=torch.bool)])
    slots = backend.req_to_token_pool.req_to_token
    own = [slots[i + 1, p : p + n] for i, (p, n) in enumerate(zip(prefixes, lengths, strict=True))]
    live = view(given, rows, prefixes, full, len(lengths))
    live.out_cache_loc = torch.cat([*own, torch.zeros(rows - sum(lengths))]).long()
    PagedWrapper.replaying = False
    q, k, v = inputs(rows, generator)
    starts, bounds = (torch.tensor([0, *each]).cumsum(0) for each in (lengths, prefixes))
    before = torch.cat([slots[i + 1, :prefix].long() for i, prefix in enumerate(prefixes)])
    masks = {}
    if trees:
        masks["mask"] = torch.cat([tree.flatten() for tree in seen])
        masks["mask_indptr"] = torch.tensor([0, *(len(tree) ** 2 for tree in seen)]).cumsum(0)
    pool = backend.token_to_kv_pool
    kept = [each.float() * scale for each, scale in zip((pool.k, pool.v), pool.scales, strict=True)]
    used = sum(lengths)
    new = pool.read(k, v)
    if kind is Pool:
        hidden = torch.ones(SLOTS, dtype=torch.bool)
        hidden[before] = False
        for fresh, stored in zip((k, v), (pool.k, pool.v), strict=True):
            fresh[used:], stored[hidden] = torch.nan, torch.nan
    if fault is not None and fault not in OF_METADATA:
        fault(live)
    prepare(backend, live)
    if fault in OF_METADATA:
        fault(backend.forward_metadata.prefill_wrappers[0])
    found = backend.forward_extend(q, k, v, layer, live).view(rows, HEADS, DIM)
    expected = tree_attention(q.view(rows, HEADS, DIM), *new, *kept, starts, bounds, before, **masks)
    # NaN is no small distance
    distance = torch.nan_to_num((found[:used] - expected[:used]).abs(), nan=torch.inf).max().item()
    # rows of a slot without a request may be anything
    nobodys = found[sum(given) :]
    padding = torch.nan_to_num(nobodys.abs(), nan=torch.inf).max().item() if len(nobodys) else 0.0
    return {"distance": distance, "padding": padding}


def _uniform(self: PackedRows, *positional: Any, **keyword: Any) -> Any:
    slots, keys, starts, mask = SOUND(self, *positional, **keyword)
    real = int((starts.diff() > 0).sum())
    even = torch.arange(len(starts)).clamp_max(real) * int(starts[-1]) // real
    return slots, keys, even.int(), mask


def _bit_off(self: PackedRows, *positional: Any, **keyword: Any) -> Any:
    slots, keys, starts, mask = SOUND(self, *positional, **keyword)
    mask = mask.clone()
    mask[0] = ~mask[0]
    return slots, keys, starts, mask


def _prefix_only(self: PackedRows, *positional: Any, **keyword: Any) -> Any:
    starts = self.starts
    with patch.object(self, "starts", torch.zeros_like(starts)):
        slots, keys, _, mask = SOUND(self, *positional, **keyword)
    return slots, keys, starts, mask


def lengths_of_another_step(live: Any) -> None:
    _lengths(live, live.spec_info.ragged_verify_layout.verify_lens.flip(0))


def left_over_rows_to_the_last(live: Any) -> None:
    """As SGLang pads a layout that does not sum to its graph's rows."""
    lengths = live.spec_info.ragged_verify_layout.verify_lens.clone()
    lengths[-1] += len(live.input_ids) - lengths.sum()
    _lengths(live, lengths)


def _lengths(live: Any, lengths: torch.Tensor) -> None:
    rows = len(live.input_ids)
    layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=lengths, graph_num_tokens=rows)
    live.spec_info.ragged_verify_layout = layout


def prefixes_of_another_step(live: Any) -> None:
    """On the host alone, which in a graph plans by them."""
    live.seq_lens_cpu = live.seq_lens_cpu.flip(0)


def a_request_reads_slot_0(live: Any) -> None:
    live.req_pool_indices[-1] = 0


def a_stale_page_table(wrapper: PagedWrapper) -> None:
    """Of a batch whose keys lay one place further."""
    listed = wrapper._paged_kv_indices_buf
    assert listed is not None
    listed.copy_(listed.roll(1))


def mask_offset_of_the_neighbour(wrapper: PagedWrapper) -> None:
    begins = wrapper._mask_indptr_buf
    assert begins is not None
    begins[1:] = begins[:-1].clone()


class _ByRequests(dict[int, Any]):
    """As SGLang keeps wrappers: those of the last graph captured for so many requests."""

    def __getitem__(self, _rows: int) -> Any:
        return next(reversed(self.values()))


def _forget_tiers(backend: Any, live: Any) -> None:
    backend._captured_wrappers = _ByRequests()
    graph(backend, live)


SOUND = PackedRows.generate_attn_arg_prefill
SIZES = [1, 9, 30, 17]
CASES: dict[str, tuple[list[int], int, bool]] = {
    "chains": (SIZES, 60, False),
    "trees": (SIZES, 60, True),
    "trees_larger_tier": (SIZES, 90, True),
    "one_chain": ([9], 60, False),
    "one_tree": ([17], 60, True),
    "roots_only": ([1, 1, 1, 1], 60, False),
    "every_slot_and_row": ([1, 9, 20, 13, 17], 60, True),
}
# name: case, and what answers in place of the verify input
FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "mask_bit_off": ("trees", _bit_off),
    "uniform_rows": ("chains", _uniform),
    "own_keys_left_out": ("chains", _prefix_only),
}
OF_METADATA = (a_stale_page_table, mask_offset_of_the_neighbour)
# what happens to the batch or to FlashInfer's wrapper, and of which case
PLANTED: dict[Callable[[Any], None], str] = {
    lengths_of_another_step: "chains",
    left_over_rows_to_the_last: "one_chain",
    a_request_reads_slot_0: "chains",
    a_stale_page_table: "chains",
    mask_offset_of_the_neighbour: "trees",
}


def attention() -> dict[str, dict[str, float]]:
    """All cases, faults included."""
    found: dict[str, dict[str, float]] = {}
    for name, case in CASES.items():
        for how in (eager, graph):
            found[f"{name}-{how.__name__}"] = run(*case, how)
    for name, (case_name, fault) in FAULTS.items():
        for how in (eager, graph):
            with patch.object(PackedRows, "generate_attn_arg_prefill", fault):
                found[f"{name}-{how.__name__}"] = run(*CASES[case_name], how)
    for planted, case_name in PLANTED.items():
        for how in (eager, graph):
            found[f"{planted.__name__}-{how.__name__}"] = run(*CASES[case_name], how, fault=planted)
    found["prefixes_of_another_step-graph"] = run(*CASES["chains"], graph, fault=prefixes_of_another_step)
    found["wrappers_by_requests-graph"] = run(*CASES["trees_larger_tier"], _forget_tiers)
    # SGLang's option to plan for rows of one width without waiting for the device
    with envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN.override(True):
        found["host_plan-graph"] = run(*CASES["trees"], graph)
    return found


def whole() -> dict[str, float]:
    """Of chains that are verified whole in a graph of their size, and of others, whose rows are read back."""
    found = run([WIDTH] * 2, 2 * WIDTH, False, of_a_step)
    try:
        run([WIDTH - 10] * 3, 2 * WIDTH, False, of_a_step)
    except RuntimeError as error:
        found["read_back"] = float(str(error) == "read back")
    return found


def of_bytes() -> dict[str, float]:
    """Distances with a cache of 8 bits, and with a scale of it left out where it is read."""
    found = {}
    for left_out in (None, "k", "v"):
        layer = attention_layer(HEADS, KV_HEADS, DIM)
        for name, scale in zip("kv", BytesPool.scales, strict=True):
            setattr(layer, f"{name}_scale", torch.tensor(scale))
            setattr(layer, f"{name}_scale_float", None if name == left_out else scale)
        for case in ("chains", "trees"):
            for how in (eager, graph):
                name = f"{case if left_out is None else f'scale_of_{left_out}_left_out-{case}'}-{how.__name__}"
                found[name] = run(*CASES[case], how, BytesPool, layer)["distance"]
    return found


WINDOW = 17
SMALL = [1, 9, 17, 12]


def padded_view(prefixes: list[int], parents: torch.Tensor, sizes: list[int], backend: Any) -> Any:
    """Trees of these sizes, the root counted, as tree mode hands them over where verification is not ragged."""
    lens, requests = torch.tensor(prefixes), len(prefixes)
    keep = torch.arange(WINDOW - 1) < torch.tensor(sizes)[:, None] - 1
    made = build_verify_input(
        SimpleNamespace(seq_lens=lens, seq_lens_sum=sum(prefixes)),
        SimpleNamespace(bonus_tokens=torch.zeros(requests, dtype=torch.int32)),
        (parents, keep, torch.zeros_like(parents)),
        WINDOW,
        attn_backend=backend,
        topk=4,
        num_steps=WINDOW - 1,
        tree_mask_mode=TreeMaskMode.FULL_MASK,
        packed=False,
    )
    rows = requests * WINDOW
    live = view([1] * requests, rows, prefixes, None, requests)
    slots = [backend.req_to_token_pool.req_to_token[i + 1, p : p + WINDOW] for i, p in enumerate(prefixes)]
    return SimpleNamespace(**{**vars(live), "spec_info": made, "out_cache_loc": torch.cat(slots).long()})


def padded(captured: bool, fault: Callable[[torch.Tensor], None] | None = None) -> dict[str, float]:
    """One verify forward over the window of the largest tree, by SGLang's own part of the backend; places behind a tree
    see the prefix and themselves. captured: as many requests as a graph holds, and it is replayed."""
    generator = torch.Generator().manual_seed(3)
    backend = make_backend(generator)
    sizes = [*SMALL, 1] if captured else SMALL
    prefixes, rows = list(PREFIXES[: len(sizes)]), len(sizes) * WINDOW
    parents = torch.stack(
        [
            torch.tensor([int(torch.randint(-1, node, (1,), generator=generator)) for node in range(WINDOW - 1)])
            for _ in sizes
        ]
    )
    seen = torch.eye(WINDOW, dtype=torch.bool).repeat(len(sizes), 1, 1)
    for tree, above, size in zip(seen, parents, sizes, strict=True):
        for node in range(1, size):
            tree[node] |= tree[above[node - 1] + 1]
    live = padded_view(prefixes, parents, sizes, backend)
    if fault is not None:
        fault(live.spec_info.custom_mask)
    PagedWrapper.replaying = False
    q, k, v = inputs(rows, generator)
    if captured:
        lone = padded_view([1] * MOST, parents, [WINDOW] * MOST, backend)
        backend.init_forward_metadata_out_graph(lone, in_capture=True)
        backend.forward_extend(q, k, v, LAYER, lone, save_kv_cache=False)
        kept = backend.forward_metadata
        backend.init_forward_metadata_out_graph(live)
        backend.forward_metadata, PagedWrapper.replaying = kept, True
    else:
        backend.init_forward_metadata(live)
    pool, slots = backend.token_to_kv_pool, backend.req_to_token_pool.req_to_token
    keys = pool.k.clone(), pool.v.clone()
    found = backend.forward_extend(q, k, v, LAYER, live).view(rows, HEADS, DIM)
    starts, bounds = (torch.tensor([0, *each]).cumsum(0) for each in ([WINDOW] * len(sizes), prefixes))
    before = torch.cat([slots[i + 1, :prefix].long() for i, prefix in enumerate(prefixes)])
    ends = torch.arange(len(sizes) + 1) * WINDOW**2
    heads = q.view(rows, HEADS, DIM)
    expected = tree_attention(heads, k, v, *keys, starts, bounds, before, mask=seen.flatten(), mask_indptr=ends)
    return {"distance": torch.nan_to_num((found - expected).abs(), nan=torch.inf).max().item()}


def _first_bit_off(mask: torch.Tensor) -> None:
    mask[0] = ~mask[0]


def uniform() -> dict[str, dict[str, float]]:
    """The window of one width, eager and captured, and a fault in each."""
    how = {"eager": False, "graph": True}
    found = {f"padded-{name}": padded(captured) for name, captured in how.items()}
    return found | {f"padded_bit_off-{name}": padded(captured, _first_bit_off) for name, captured in how.items()}


class ForLatentKeys(flashinfer_backend.FlashInferAttnBackend):
    """Another backend that SGLang builds under the same name."""


def registry() -> dict[str, Any]:
    """replaced: names whose backends are ours, by option; built: what the one for FlashInfer makes of two of SGLang's;
    modes: what the registry's factory for FlashInfer makes, by mode."""
    ours: dict[str, list[str]] = {}
    for wanted in PACKINGS:
        flashinfer = backends.packing_flashinfer(lambda runner: runner.kind.__new__(runner.kind))
        kinds = flashinfer_backend.FlashInferAttnBackend, ForLatentKeys
        made = [flashinfer(runner_of(packing=wanted, kind=kind)) for kind in kinds]
        with patch.object(backends, "packed_triton", lambda *_: "ours"):
            triton = backends.packing_triton(lambda _: "stock")(runner_of(packing=wanted))
        ours[wanted] = ["triton"] * (triton == "ours") + ["flashinfer"] * (type(made[0]) is not kinds[0])
        if wanted == "flashinfer":
            built = [type(each).__name__ for each in made]
    modes: dict[str, str] = {}
    for mode in ("chain", "tree"):
        now = {**attention_registry.ATTENTION_BACKENDS, "flashinfer": lambda runner: runner.kind.__new__(runner.kind)}
        with patch.object(attention_registry, "ATTENTION_BACKENDS", now):
            runner = runner_of(mode=mode, packing="flashinfer", kind=flashinfer_backend.FlashInferAttnBackend)
            algo._worker_class("EAGLE3", runner.server_args)
            modes[mode] = type(now["flashinfer"](runner)).__name__
            sglang_undone()
    return {"replaced": ours, "built": built, "modes": modes}


def runner_of(kind: Any = None, **options: str) -> SimpleNamespace:
    record, model = SimpleNamespace(_c2t=options), SimpleNamespace(is_encoder_decoder=False)
    return SimpleNamespace(kind=kind, server_args=record, model_config=model)


def main(output: Path) -> None:
    stand_ins()
    found = {"attention": attention(), "bytes": of_bytes(), "uniform": uniform(), "registry": registry()}
    output.write_text(json.dumps({**found, "whole": whole(), "planned_by": PLANNED_BY}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
