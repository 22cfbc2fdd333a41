"""A plugin for tests only: on the CPU engine, the target verifies on the Triton backend, in Triton's interpreter.

The kernel is the one of the options. Every other verify forward takes the metadata of a captured graph: made once per
number of rows, for as many requests as the graph has room for, and afterwards only refilled. Prefill, and all of the
draft's, stay on the CPU engine's own attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import torch


def register() -> None:
    from c2t_cpu_engine import patches

    from c2t_plugin.engines.sglang import validate

    # Whichever plugin SGLang loads first, this name is looked up last.
    patches.ragged_attention = _create
    # a CPU engine has no Triton backend to name
    validate._BACKENDS = ()
    print("planted: the target verifies in Triton's interpreter", flush=True)


def _create(runner: Any) -> Any:
    from c2t_cpu_engine.ragged_attention import RaggedCpuAttnBackend
    from sglang.srt.runtime_context import get_server_args

    from c2t_kernels.attention import split as attention_split
    from c2t_plugin.engines.sglang.args import config_of
    from c2t_plugin.engines.sglang.verify.backends import packed_triton

    # that of a small GPU: the interpreter runs one program after the other
    attention_split.WANTED_PROGRAMS = 16

    class TritonVerifies(RaggedCpuAttnBackend):
        c2t_packing = "triton"

        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            self.triton = packed_triton(config_of(get_server_args()), runner)
            self.c2t_kernel = self.triton.c2t_kernel
            self.graphs = Graphs(self.triton, runner)
            self.forwards = 0

        @property
        def verify_mask(self) -> Any:
            return self.triton.verify_mask

        def init_forward_metadata(self, forward_batch: Any) -> None:
            if not forward_batch.forward_mode.is_target_verify():
                super().init_forward_metadata(forward_batch)
                return
            self.forwards += 1
            if self.forwards % 2:
                self.triton.init_forward_metadata(forward_batch)
            else:
                self.graphs.replay(forward_batch)

        def forward_extend(self, q, k, v, layer, forward_batch, *positional: Any, **keyword: Any) -> Any:
            if not forward_batch.forward_mode.is_target_verify():
                return super().forward_extend(q, k, v, layer, forward_batch, *positional, **keyword)
            return self.triton.forward_extend(q, k, v, layer, forward_batch, *positional, **keyword)

    return TritonVerifies(runner)


class Graphs:
    """The part of SGLang's graph runner that prepares metadata, without the graphs."""

    def __init__(self, backend: Any, runner: Any) -> None:
        from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
        from sglang.srt.speculative.eagle_utils import TreeMaskMode

        self.backend = backend
        self.width = runner.decode_num_tokens_per_req()
        self.requests = 8
        backend.init_cuda_graph_state(self.requests, self.requests * self.width)
        own = backend.verify_mask
        if backend.c2t_nodes_alone and own is not None:
            # what links chains on a CPU takes no other
            backend._verify_mask = msgspec.structs.replace(own, buffer=own.buffer.view(torch.bool))
        elif not backend.c2t_nodes_alone:
            # On a CPU SGLang's has the rows' own columns only, which is not what its kernel reads.
            elements = tree_mask_numel(TreeMaskMode.FULL_MASK, self.requests, self.width, backend.max_context_len)
            room = torch.zeros(elements, dtype=torch.bool)
            backend._verify_mask = VerifyMask(buffer=room, mode=TreeMaskMode.FULL_MASK, max_bs=self.requests)
        self.metadata: dict[int, tuple[Any, Any]] = {}

    def replay(self, live: Any) -> None:
        rows = live.input_ids.shape[0]
        if rows not in self.metadata:
            self.backend.init_forward_metadata_out_graph(self._capture_view(live, rows), in_capture=True)
            self.metadata[rows] = self.backend.forward_metadata, self.backend._padding
        self.backend.init_forward_metadata_out_graph(self._replay_view(live, rows))
        # what a graph has captured stays: only what lies behind its addresses is new
        self.backend.forward_metadata, self.backend._padding = self.metadata[rows]

    def _slots(self, rows: int) -> int:
        return min(rows, self.requests)

    def _capture_view(self, live: Any, rows: int) -> SimpleNamespace:
        from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

        slots = self._slots(rows)
        lens = build_capture_verify_lens(num_tokens=rows, num_slots=slots, num_draft_tokens=self.width)
        layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=torch.tensor(lens), graph_num_tokens=rows)
        nobody = torch.zeros(slots, dtype=live.req_pool_indices.dtype)
        return self._view(live, rows, nobody, torch.ones(slots, dtype=live.seq_lens.dtype), layout)

    def _replay_view(self, live: Any, rows: int) -> SimpleNamespace:
        free = self._slots(rows) - live.batch_size
        pools = torch.cat([live.req_pool_indices, live.req_pool_indices.new_zeros(free)])
        seq_lens = torch.cat([live.seq_lens, live.seq_lens.new_ones(free)])
        return self._view(live, rows, pools, seq_lens, live.spec_info.ragged_verify_layout)

    def _view(self, live: Any, rows: int, pools: Any, seq_lens: Any, layout: Any) -> SimpleNamespace:
        return SimpleNamespace(
            batch_size=len(pools),
            forward_mode=live.forward_mode,
            input_ids=live.input_ids,
            req_pool_indices=pools,
            seq_lens=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            seq_lens_cpu=seq_lens,
            encoder_lens=None,
            out_cache_loc=live.out_cache_loc,
            kv_loc_plan=live.kv_loc_plan,
            spec_info=SimpleNamespace(
                ragged_verify_layout=layout,
                custom_mask=live.spec_info.custom_mask,
                num_tokens_per_req=self.width,
            ),
        )
