"""Runs SGLang's own fa3 and TensorRT-LLM backends on the CPU, on twins of their kernels, for test_packed_backends.py.

Usage: python packed_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes, per
backend and case, how far the real rows are from attention as it is defined, with NaN in every key that nobody of the
pass has written, and how far they are with a fault planted.

Stubs are the kernels and the model runner. The backends' constructors, their metadata of both modes and the kernels
that list pages are SGLang's; where each request's rows begin comes of `pack_ragged`, as in verify/packing.py.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from attention_layer import attention_layer
from attention_twins import (
    LatentWrapper,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
    stand_in,
    trtllm_decode,
    trtllm_decode_latent,
)
from torch import Tensor

WIDTH, MOST, HEADS, DIM, RANK, ROPE = 7, 5, 4, 16, 32, 16
TIERS = (14, 28, 35)
# kept draft tokens of each request, rows of the pass (None: eager), prefixes
CASES: dict[str, tuple[list[int], int | None, list[int]]] = {
    "pad_slots": ([0, 6, 3], 28, [7, 60, 1]),
    "whole": ([6, 6, 6, 6, 6], 35, [5, 1, 40, 12, 30]),
    "spare_rows": ([0, 6, 3, 4, 1], 28, [5, 1, 40, 12, 30]),
    "one_request": ([2], 14, [11]),
    "eager": ([0, 6, 3], None, [7, 60, 1]),
    "eager_of_all": ([1, 2, 0, 4, 6], None, [5, 1, 40, 12, 30]),
}
# As SGLang 34384 has them: the second graph is captured with a row of each request, and replayed with whole windows of
# few, with a row of each, and whole again.
OF_SLOTS = {"WIDTH": 4, "MOST": 12, "TIERS": (4, 12, 48)}
SLOT_CASES: dict[str, tuple[list[int], int | None, list[int]]] = {
    "whole_windows": ([3, 3, 3], 12, [7, 60, 1]),
    "a_row_of_each": ([0] * 12, 12, [7, 60, 1, 5, 40, 12, 30, 2, 3, 9, 21, 50]),
    "whole_windows_again": ([3, 3, 3], 12, [60, 1, 7]),
}


def on_the_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*sizes: Any, pin_memory: bool = False, device: Any = None, **named: Any) -> Tensor:
        return make(*sizes, device=None if str(device) == "cuda" else device, **named)

    return made


torch.zeros = on_the_cpu(torch.zeros)  # type: ignore[assignment]
stand_in()

from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.attention import cutedsl_mla_backend as cute  # noqa: E402
from sglang.srt.layers.attention import flashattention_backend as fa3  # noqa: E402
from sglang.srt.layers.attention import flashinfer_backend, flashinfer_mla_backend  # noqa: E402
from sglang.srt.layers.attention import trtllm_mha_backend as mha  # noqa: E402
from sglang.srt.layers.attention import trtllm_mla_backend as mla  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens  # noqa: E402

from c2t_kernels import pack_ragged  # noqa: E402
from c2t_plugin.engines.sglang.verify.backends import packing_flashinfer, packing_flashmla  # noqa: E402
from c2t_plugin.engines.sglang.verify.flashinfer_mla import PackedFlashInferMLABackend  # noqa: E402

UTILS = SimpleNamespace(get_device_sm_count=lambda _: 148, get_trtllm_gen_multi_ctas_kv_counter_bytes=lambda *_: 16)


class Pool:
    """Keys and values of one layer, by slot; of latent keys, one for both."""

    def __init__(self, slots: int, kv_heads: int, latent: bool, generator: torch.Generator) -> None:
        shape = (slots, 1, RANK + ROPE) if latent else (slots, kv_heads, DIM)
        self.v = torch.randn(*shape, generator=generator)
        self.k = self.v if latent else torch.randn(*shape, generator=generator)

    def get_kv_buffer(self, _layer: int) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def get_key_buffer(self, _layer: int) -> Tensor:
        return self.k

    def get_kv_cache_quant_method(self) -> Any:
        return SimpleNamespace(
            resolve_attention_access=lambda *_: SimpleNamespace(kind=None, scale_recipe=None),
            needs_global_scale=lambda: False,
        )


class Bench:
    """One of SGLang's backends, captured for every tier. windowed: its kernel gets a window of each request, where
    places without a row weigh 0, and its forward reads the captured batch's layout, which SGLang's runner renews."""

    kv_heads, latent, windowed, topk = 2, False, False, 1
    scale = DIM**-0.5
    # of packed_variants_program.py: keys before its own that a row sees, all if < 0; logits of sinks; and a cache of
    # another dtype with a scale of keys and one of values
    window = -1
    sinks: Tensor | None = None
    cache, scales = torch.float32, (1.0, 1.0)
    # that queries are rounded to; None: the cache's
    asked: torch.dtype | None = None

    def __init__(self, page: int, context: int) -> None:
        generator = torch.Generator().manual_seed(page)
        pages = (MOST + 1) * context // page
        order = torch.randperm(pages - 1, generator=generator) + 1
        self.page, self.generator = page, generator
        # row 0 is of pad slots, and page 0 nobody's
        self.table = torch.zeros(MOST + 1, context, dtype=torch.int32)
        own = order[: MOST * context // page, None] * page + torch.arange(page)
        self.table[1:] = own.view(MOST, context).int()
        self.pool = self.filled(pages * page)
        allocator = SimpleNamespace(get_kvcache=lambda: None)
        self.translator = KVIndexTranslator(
            req_to_token=self.table,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=self.pool,
            page_size=page,
            device="cpu",
        )
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(size=MOST, req_to_token=self.table),
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=allocator,
            kv_index_translator=self.translator,
            page_size=page,
            device="cpu",
            dtype=torch.float32,
            kv_cache_dtype=self.cache,
            kv_cache_dtype_str="auto" if self.cache == torch.float32 else "fp8_e4m3",
            sliding_window_size=self.window if self.window >= 0 else None,
            is_draft_worker=False,
            max_running_requests=MOST,
            server_args=None,
            spec_algorithm=SimpleNamespace(is_frozen_kv_mtp=lambda: False),
            prefill_attention_backend_str="",
            decode_attention_backend_str="",
            model=SimpleNamespace(modules=list),
            model_config=SimpleNamespace(
                is_encoder_decoder=False,
                is_multimodal=False,
                is_local_attention_model=False,
                context_len=context,
                attention_arch=AttentionArch.MLA if self.latent else AttentionArch.MHA,
                head_dim=RANK + ROPE if self.latent else DIM,
                v_head_dim=16 if self.latent else DIM,
                hidden_size=64,
                num_attention_heads=HEADS,
                kv_lora_rank=RANK,
                qk_nope_head_dim=16,
                qk_rope_head_dim=ROPE,
                scaling=self.scale,
                get_num_kv_heads=lambda *_: self.kv_heads,
                get_max_num_attention_heads=lambda: HEADS,
                hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
                hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
            ),
        )
        dims = (RANK + ROPE, RANK) if self.latent else (DIM, DIM)
        self.layer = attention_layer(HEADS, self.kv_heads, dims[0], v_dim=dims[1], scale=self.scale)
        self.backend = self.make()
        self.captures()
        self.captured: dict[int, tuple[Any, Any]] = {}
        for rows in reversed(TIERS):
            lens = build_capture_verify_lens(num_tokens=rows, num_slots=min(rows, MOST), num_draft_tokens=WIDTH)
            layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device="cpu", grid=TIERS)
            batch = self.view(layout, rows, [], min(rows, MOST))
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_in_graph(batch)
            self.captured[rows] = batch, self.metadata()

    def filled(self, slots: int) -> Pool:
        return Pool(slots, self.kv_heads, self.latent, self.generator)

    def captures(self) -> None:
        self.backend.init_cuda_graph_state(MOST, MOST * WIDTH)

    def make(self) -> Any:
        raise NotImplementedError

    def metadata(self) -> Any:
        return self.backend.forward_metadata

    def keep(self, metadata: Any) -> None:
        self.backend.forward_metadata = metadata

    def tables(self, metadata: Any) -> Tensor:
        table: Tensor = metadata.page_table
        return table

    def view(self, layout: Any, rows: int, prefixes: list[int], slots: int) -> Any:
        pads = slots - len(prefixes)
        none = ("seq_lens_cpu", "seq_lens_sum", "encoder_lens", "kv_loc_plan", "attn_attend_prefix_cache")
        return SimpleNamespace(
            batch_size=slots,
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            req_pool_indices=torch.tensor([*range(1, len(prefixes) + 1), *[0] * pads]),
            seq_lens=torch.tensor([*prefixes, *[1] * pads]),
            out_cache_loc=torch.zeros(rows, dtype=torch.int64),
            dcp_kv_mask=None,
            _attn_output=None,
            spec_algorithm=SimpleNamespace(is_uno=lambda: False),
            spec_info=SimpleNamespace(
                draft_token_num=WIDTH, num_tokens_per_req=WIDTH, ragged_verify_layout=layout, custom_mask=None
            ),
            **dict.fromkeys(none),
        )

    def queries(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.randn(rows, HEADS * DIM, generator=self.generator), {}

    def keys(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (
            scale * part[slots].repeat_interleave(HEADS // self.kv_heads, 1)
            for part, scale in zip((self.pool.k, self.pool.v), self.scales, strict=True)
        )
        return k, v

    def expected(self, q: Tensor, named: dict[str, Tensor], lengths: list[int], prefixes: list[int]) -> Tensor:
        """(rows, heads * dim) attention by its definition, of real rows alone."""
        found = []
        parts = [each.view(len(q), HEADS, -1) for each in (q, *named.values())]
        asked = torch.cat(parts, -1).to(self.asked or self.cache).float()
        rows = iter(asked)
        for request, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            for i in range(length):
                first = max(prefix + i - self.window, 0) if self.window >= 0 else 0
                k, v = self.keys(self.table[request + 1, first : prefix + i + 1].long())
                weights = (torch.einsum("hd,khd->hk", next(rows), k) * self.scale).exp()
                sums = weights.sum(1) + (0.0 if self.sinks is None else self.sinks.exp())
                found.append((torch.einsum("hk,khd->hd", weights, v) / sums[:, None]).flatten())
        return torch.stack(found)

    def run(self, case: str, fault: str = "") -> float:
        """Distance of the real rows; infinite where one of them is not a number."""
        kept, rows, prefixes = (CASES | SLOT_CASES)[case]
        requests, graph = len(kept), rows is not None
        counts = torch.tensor(kept, dtype=torch.int32)
        if rows is None:
            # with spare ones, as steps before may have wanted more
            rows = min(sum(kept) + requests + 2, requests * WIDTH)
        slots = min(rows, MOST) if graph else requests
        words = torch.zeros(requests, WIDTH, dtype=torch.int64)
        starts = pack_ragged(counts, [words], capacity=rows, pads=(0,), slots=slots).cu_seqlens
        lengths = starts[: requests + 1].diff().tolist()
        given = starts.diff()
        before = self.pool.k.clone(), self.pool.v.clone()
        # all that the pass may not read, page 0 included
        hidden = torch.ones(len(self.pool.v), dtype=torch.bool)
        for request, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
            ends = prefix + (WIDTH if self.windowed else length)
            hidden[self.table[request + 1, :ends].long()] = False
        self.pool.k[hidden], self.pool.v[hidden] = torch.nan, torch.nan
        if fault == "left_over_rows_to_the_last":
            lengths = [each + 1 for each in kept]
            given = torch.tensor(lengths)
        elif fault == "lengths_of_another_step":
            given = given.flip(0)
        layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=given, graph_num_tokens=rows)
        batch = self.view(layout, rows, prefixes, slots)
        if fault == "a_request_reads_slot_0":
            batch.req_pool_indices[requests - 1] = 0
        q, named = self.queries(rows)
        out = (self.replayed if graph else self.eager)(batch, rows, q, named, fault).view(rows, -1)
        expected = self.expected(q, named, lengths, prefixes)
        self.pool.k.copy_(before[0])
        self.pool.v.copy_(before[1])
        real = sum(lengths)
        return float(torch.nan_to_num((out[:real] - expected).abs(), nan=torch.inf).max())

    def eager(self, batch: Any, _rows: int, q: Tensor, named: dict[str, Tensor], fault: str) -> Tensor:
        batch.kv_loc_plan = self.translator.own_plan(batch)
        self.backend.init_forward_metadata(batch)
        if fault == "a_stale_page_table":
            self.tables(self.metadata()).zero_()
        return self.attend(q, batch, named)

    def replayed(self, batch: Any, rows: int, q: Tensor, named: dict[str, Tensor], fault: str) -> Tensor:
        captured, metadata = self.captured[rows]
        stale = self.tables(metadata).clone()
        own = captured.spec_info.ragged_verify_layout
        runner = SimpleNamespace(_captured_ragged_layouts={rows: own}, captured_req_width=WIDTH)
        given = batch.spec_info.ragged_verify_layout
        DecodeCudaGraphRunner._stage_ragged_verify_layout(runner, given, rows)
        if not fault and self.topk == 1:
            # chains: as many requests as at capture, whose rows are the graph's, so SGLang adds nothing
            assert own.bs == given.bs and torch.equal(own.verify_lens, given.verify_lens)
            assert int(own.qo_indptr_device[-1]) == rows and int(own.verify_lens.max()) <= WIDTH
        # the runner's buffers
        captured.seq_lens.copy_(batch.seq_lens)
        self.backend.init_forward_metadata_out_graph(batch)
        # what a graph has captured stays: only what lies behind its addresses is new
        self.keep(metadata)
        if fault == "rows_of_the_capture":
            assert captured.spec_info.ragged_verify_layout.verify_lens_cpu == [1] * MOST
            metadata.max_seq_len_q = 1
        if fault == "a_stale_page_table":
            # of a batch in another order
            self.tables(metadata).copy_(stale.roll(1, 0))
        return self.attend(q, captured if self.windowed else batch, named)

    def attend(self, q: Tensor, batch: Any, named: dict[str, Tensor]) -> Tensor:
        if self.sinks is not None:
            named = {**named, "sinks": self.sinks}
        found: Tensor = self.backend.forward_extend(q, None, None, self.layer, batch, save_kv_cache=False, **named)
        return found


class Fa3(Bench):
    """FlashAttention 3, a key for each pair of heads."""

    def make(self) -> Any:
        fa3.flash_attn_with_kvcache = flash_attn_with_kvcache
        fa3.get_device_capability = lambda *_: (9, 0)
        parallel = {"attn_cp_size": 1, "attn_tp_size": 1, "enable_prefill_cp": False, "attn_dp_enabled": False}
        fa3.get_parallel = lambda: SimpleNamespace(**parallel)
        spec = {"speculative_eagle_topk": self.topk, "speculative_num_draft_tokens": WIDTH}
        fa3.get_spec = lambda: SimpleNamespace(speculative_algorithm="EAGLE3", **spec)
        deterministic = SimpleNamespace(enable_deterministic_inference=False)
        fa3.get_exec = lambda: SimpleNamespace(deterministic=deterministic)
        fa3.get_model = lambda: SimpleNamespace(is_embedding=False)
        fa3.get_schedule = lambda: SimpleNamespace(chunked_prefill_size=8192)
        fa3.get_memory = lambda: SimpleNamespace(disable_radix_cache=False)
        fa3.get_kv_shard_pool = lambda _: None
        fa3.is_cp_active = lambda _: False
        return fa3.FlashAttentionBackend(self.runner)


class LatentFa3(Fa3):
    """The same of latent keys."""

    kv_heads, latent, scale = 1, True, 0.1

    def queries(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = torch.randn(rows, HEADS * (RANK + ROPE), generator=self.generator)
        return drawn, {}

    def keys(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        k = self.pool.k[slots].expand(-1, HEADS, -1)
        return k, k[..., :RANK]


class TrtllmMha(Bench):
    """TensorRT-LLM's for SM100."""

    def make(self) -> Any:
        _flashinfer_stubs()
        mha.flashinfer = SimpleNamespace(decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=trtllm_decode))
        # whose buffers it makes
        mla.flashinfer = SimpleNamespace(utils=UTILS)
        mha.get_platform = lambda: SimpleNamespace(is_sm90=False, is_sm120=False, is_sm100=True)
        mha.get_parallel = lambda: SimpleNamespace(attn_tp_size=1, attn_cp_size=1)
        mha.get_spec = lambda: SimpleNamespace(speculative_eagle_topk=1, speculative_num_draft_tokens=WIDTH)
        mha.get_buffer = lambda *_: torch.empty(1)
        mha.is_cp_active = lambda _: False
        return mha.TRTLLMHAAttnBackend(self.runner)


class TrtllmMla(LatentFa3):
    """The same of latent keys, which are padded to a window around the kernel."""

    windowed = True

    def make(self) -> Any:
        decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=trtllm_decode_latent)
        mla.flashinfer = SimpleNamespace(decode=decode, utils=UTILS)
        mla.get_parallel = _latent_stubs(lambda *_, **__: SimpleNamespace())
        mla.get_schedule = lambda: SimpleNamespace(disable_chunked_prefix_cache=True)
        mla.get_buffer = lambda *_: torch.empty(1)
        mla.get_spec = lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH)
        mla._jit_fixup_module = lambda _: None
        mla.can_use_set_mla_kv_concat_q = mla.can_use_set_mla_kv_concat_q_fp8 = lambda *_: False
        mla.concat_mla_absorb_q_general = lambda nope, rope: torch.cat([nope, rope], -1)
        return mla.TRTLLMMLABackend(self.runner)

    def captures(self) -> None:
        super().captures()
        # SGLang's has room for DeepSeek's rank
        self.backend.unpad_output_buffer = torch.zeros(MOST * WIDTH, HEADS, RANK)

    def metadata(self) -> Any:
        return self.backend.forward_decode_metadata

    def keep(self, metadata: Any) -> None:
        self.backend.forward_decode_metadata = metadata

    def tables(self, metadata: Any) -> Tensor:
        table: Tensor = metadata.block_kv_indices
        return table

    def queries(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        nope, rope = (torch.randn(rows, HEADS * size, generator=self.generator) for size in (RANK, ROPE))
        return nope, {"q_rope": rope}


class CuteDslMla(TrtllmMla):
    """That with another kernel behind it, and a workspace of its own."""

    def make(self) -> Any:
        super().make()
        mla.global_cute_dsl_workspace_buffer = torch.empty(1)
        mla.flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla = self.kernel
        return cute.CuteDslMLABackend(self.runner)

    @staticmethod
    def kernel(*, backend: str = "", **named: Any) -> Tensor:
        assert backend == "cute-dsl"
        return trtllm_decode_latent(**named)


class FlashInferMla(LatentFa3):
    """FlashInfer of latent keys, through our backend."""

    def make(self) -> Any:
        _latent_stubs(LatentWrapper)
        made = flashinfer_mla_backend.FlashInferMLAAttnBackend(self.runner)
        self.runner.server_args = SimpleNamespace(_c2t={})
        made = packing_flashinfer(lambda _: made)(self.runner)
        assert type(made) is PackedFlashInferMLABackend
        return made

    def view(self, layout: Any, rows: int, prefixes: list[int], slots: int) -> Any:
        batch = super().view(layout, rows, prefixes, slots)
        batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens, int(batch.seq_lens.sum())
        batch.kv_loc_plan, batch.attn_dcp_metadata = self.translator.own_plan(batch), None
        return batch

    def tables(self, metadata: Any) -> Tensor:
        slots: Tensor = metadata.prefill_wrapper.indices
        return slots

    def queries(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        nope, rope = (torch.randn(rows, HEADS * size, generator=self.generator) for size in (RANK, ROPE))
        return nope, {"q_rope": rope}


class FlashMla(LatentFa3):
    """FlashMLA, through our backend, which pads to a window around the kernel."""

    windowed = True

    def make(self) -> Any:
        flash_mla = types.ModuleType("flash_mla")
        interface = types.ModuleType("flash_mla.flash_mla_interface")
        flash_mla.fused_norm_rope_attn_rope_cast = interface.FlashMLASchedMeta = None  # type: ignore[attr-defined]
        sys.modules |= {"flash_mla": flash_mla, "flash_mla.flash_mla_interface": interface}
        from sglang.srt.layers.attention import flashmla_backend as base

        _latent_stubs(lambda *_, **__: SimpleNamespace())
        base.get_parallel = flashinfer_mla_backend.get_parallel
        base.get_spec = lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH)
        base.flash_mla_with_kvcache, base.get_mla_metadata = flash_mla_with_kvcache, self.schedule
        made = base.FlashMLABackend(self.runner)
        self.runner.server_args = SimpleNamespace(_c2t={})
        return packing_flashmla(lambda _: made)(self.runner)

    @staticmethod
    def schedule(lengths: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """For as many parts of the GPU as there can be requests; the lengths are what it is made of."""
        made = torch.zeros(MOST, 8, dtype=torch.int32)
        made[: len(lengths), 0] = lengths
        return made, torch.arange(len(lengths) + 1, dtype=torch.int32)

    def captures(self) -> None:
        properties = SimpleNamespace(multi_processor_count=2 * MOST)
        with (
            patch.object(torch.cuda, "get_device_properties", lambda _: properties),
            patch.object(torch, "full", on_the_cpu(torch.full)),
            patch.object(torch, "empty", on_the_cpu(torch.empty)),
            patch.object(torch, "ones", on_the_cpu(torch.ones)),
        ):
            super().captures()

    def tables(self, metadata: Any) -> Tensor:
        table: Tensor = metadata.block_kv_indices
        return table


def _latent_stubs(wrapper: Any) -> Any:
    """What SGLang's backends of latent keys have or inherit from FlashInfer's. Returns the places of ranks."""
    _flashinfer_stubs()
    base, parallel = flashinfer_mla_backend, SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, dcp_enabled=False)
    base.get_parallel = lambda: parallel
    base.get_schedule = lambda: SimpleNamespace(disable_chunked_prefix_cache=True)
    base.get_disagg = lambda: SimpleNamespace(disaggregation_mode="null")
    base.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(flashinfer_mla_disable_ragged=True))
    base.get_platform = lambda: SimpleNamespace(is_sm100=True)
    base.get_buffer = lambda *_: torch.empty(1)
    base.get_cuda_graph_max_batch_size = lambda size: size
    base.BatchMLAPagedAttentionWrapper = wrapper
    base.BatchPrefillWithRaggedKVCacheWrapper = lambda *_, **__: SimpleNamespace()
    return base.get_parallel


def _flashinfer_stubs() -> None:
    """What SGLang's backends of TensorRT-LLM inherit from those of FlashInfer."""
    for wrapper in (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ):
        setattr(flashinfer_backend, wrapper, lambda *_, **__: SimpleNamespace())
    flashinfer_backend.get_parallel = lambda: SimpleNamespace(attn_tp_size=1, attn_dcp_size=1)
    flashinfer_backend.get_exec = lambda: SimpleNamespace(
        features=SimpleNamespace(enable_mis=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    flashinfer_backend.get_platform = lambda: SimpleNamespace(is_sm100=True)
    flashinfer_backend.get_buffer = lambda *_: torch.empty(1, dtype=torch.uint8)
    flashinfer_backend.get_cuda_graph_max_batch_size = lambda size: size
    flashinfer_backend.DllmConfig = SimpleNamespace(from_server_args=lambda _: None)


# name: backend, tokens of a page, of a request's longest context
BENCHES: dict[str, tuple[type[Bench], int, int]] = {
    "fa3": (Fa3, 1, 96),
    "fa3_pages_of_16": (Fa3, 16, 96),
    "fa3_latent": (LatentFa3, 1, 96),
    "fa3_latent_pages_of_64": (LatentFa3, 64, 128),
    "trtllm_mha": (TrtllmMha, 16, 96),
    "trtllm_mla": (TrtllmMla, 64, 128),
    "cutedsl_mla": (CuteDslMla, 64, 128),
    "flashinfer_mla": (FlashInferMla, 1, 96),
    "flashinfer_mla_pages_of_16": (FlashInferMla, 16, 96),
    "flashmla": (FlashMla, 64, 128),
}
FAULTS = {
    "left_over_rows_to_the_last": "spare_rows",
    "a_stale_page_table": "pad_slots",
    "lengths_of_another_step": "spare_rows",
    "a_request_reads_slot_0": "pad_slots",
}


def main(output: Path) -> None:
    found: dict[str, dict[str, float]] = {}
    for name, (kind, page, context) in BENCHES.items():
        bench = kind(page, context)
        # one after another on the same graphs: each replay finds what the one before has left
        found[name] = {case: bench.run(case) for case in CASES}
        found[name] |= {fault: bench.run(case, fault) for fault, case in FAULTS.items()}
    globals().update(OF_SLOTS)
    slots: dict[str, dict[str, float]] = {}
    for name, (kind, page, context) in BENCHES.items():
        bench = kind(page, context)
        slots[name] = {case: bench.run(case) for case in SLOT_CASES}
        if hasattr(bench.metadata(), "max_seq_len_q"):
            slots[name]["rows_of_the_capture"] = bench.run("whole_windows", "rows_of_the_capture")
    output.write_text(json.dumps({"rows": found, "slots": slots}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
