"""Runs SGLang's own backend of linear layers (KDA) on the CPU, on twins of its two kernels, for test_packed_linear.py.

Usage: python kda_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes, per case, how
far rows and the states behind them are from one request's recurrence after another, eager and out of a graph's buffers,
and with a fault planted. A twin computes what its arguments say; what they say is SGLang's, from where each request's
rows begin to the window that it lays them out in.
"""

from __future__ import annotations

import json
import sys
import types
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

mamba = types.ModuleType("sgl_kernel.mamba")
mamba.causal_conv1d_update_cpu = None  # type: ignore[attr-defined]
sys.modules.setdefault("sgl_kernel.mamba", mamba)

from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid  # noqa: E402
from sglang.srt.layers.attention.linear import kda_backend  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens  # noqa: E402

from c2t_kernels import pack_ragged  # noqa: E402

WIDTH, MOST, HEADS, DIM, KERNEL = 7, 5, 2, 4, 4
CHANNELS = 3 * HEADS * DIM
TIERS = (14, 28, 35)
# kept draft tokens of each request, rows of the pass (None: eager)
CASES: dict[str, tuple[list[int], int | None]] = {
    "pad_slots": ([0, 6, 3], 28),
    "whole": ([6, 6, 6, 6, 6], 35),
    "spare_rows": ([0, 6, 3, 4, 1], 28),
    "one_request": ([2], 14),
    "eager": ([0, 6, 3], None),
}
FAULTS = {
    "lengths_of_another_step": "spare_rows",
    "lengths_are_those_of_the_capture": "spare_rows",
    "the_state_of_the_neighbour": "pad_slots",
}


def convolved(state: Tensor, row: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """state: (channels, KERNEL - 1), the rows before. The convolution of a row, and the state behind it."""
    seen = torch.cat([state, row[:, None]], 1)
    return silu((seen * weights).sum(1)), seen[:, 1:]


def recurred(state: Tensor, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """state: (heads, values, keys). The delta rule, with a decay for each key: a row's output, and the state behind."""
    q, k = (normalize(row[name], dim=-1) for name in "qk")
    state = state * row["decay"].exp()[:, None, :]
    change = row["beta"].sigmoid()[:, None] * (row["v"] - torch.einsum("hvk,hk->hv", state, k))
    state = state + change[:, :, None] * k[:, None, :]
    return torch.einsum("hvk,hk->hv", state, q) * DIM**-0.5, state


def conv_twin(
    x: Tensor,
    conv_state: Tensor,
    weights: Tensor,
    bias: None,
    *,
    activation: str,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor,
    intermediate_state_indices: Tensor,
    **none: None,
) -> Tensor:
    """SGLang's causal_conv1d_update. x: (requests, channels, width). conv_state: (slots, channels, KERNEL - 1)."""
    assert bias is None and activation == "silu" and not any(each is not None for each in none.values())
    out = torch.full_like(x, torch.nan)
    for request, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        state = conv_state[slot].clone()
        for place in range(x.shape[2]):
            out[request, :, place], state = convolved(state, x[request, :, place], weights)
            intermediate_conv_window[int(intermediate_state_indices[request]), place] = state
        conv_state[slot] = state
    return out


def verify_twin(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    retrieve_parent_token: None,
    lower_bound: None,
) -> Tensor:
    """Its recurrence, of requests whose rows begin where `query_start_loc` says. q: (1, rows, heads, dim)."""
    assert cache_steps == WIDTH and retrieve_parent_token is None and lower_bound is None
    out, starts = torch.full_like(v, torch.nan), query_start_loc.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[request])
        if slot < 0:
            continue
        state = ssm_states[slot].clone()
        for row in range(start, end):
            given = {"q": q[0, row], "k": k[0, row], "v": v[0, row], "beta": b[row], "decay": decay(a[row])}
            out[0, row], state = recurred(state, given)
            intermediate_states_buffer[int(intermediate_state_indices[request]), row - start] = state
    return out


def decay(gate: Tensor) -> Tensor:
    return -softplus(gate)


class Bench:
    """SGLang's backend, captured for every tier, over a pool of states."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        slots = MOST + 3

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, generator=self.generator)

        self.conv, self.states = drawn(slots, KERNEL - 1, CHANNELS), drawn(slots, HEADS, DIM, DIM)
        self.windows = torch.full((MOST + 1, WIDTH, KERNEL - 1, CHANNELS), torch.nan)
        self.behind = torch.full((MOST + 1, WIDTH, HEADS, DIM, DIM), torch.nan)
        # row 0 is of pad slots
        self.slots = torch.tensor([0, 4, 2, 7, 1, 5], dtype=torch.int32)
        cache = SimpleNamespace(
            conv=[self.conv],
            temporal=self.states,
            intermediate_ssm=self.behind,
            intermediate_conv_window=[self.windows],
        )
        pool = SimpleNamespace(
            size=MOST,
            get_mamba_indices=lambda rows: self.slots[rows],
            translate_mamba_indices=lambda indices: indices,
            mamba2_layer_cache=lambda _: cache,
            mamba_pool=SimpleNamespace(enable_linear_replayssm=False),
        )
        runner = SimpleNamespace(
            server_args=SimpleNamespace(enable_mis=False),
            device="cpu",
            is_draft_worker=False,
            req_to_token_pool=pool,
            token_to_kv_pool=None,
        )
        self.layer = SimpleNamespace(
            layer_id=0,
            conv_weights=drawn(CHANNELS, KERNEL),
            bias=None,
            A_log=drawn(HEADS),
            dt_bias=drawn(HEADS * DIM),
            lower_bound=None,
            **dict.fromkeys(("q_dim", "k_dim", "v_dim"), HEADS * DIM),
            **dict.fromkeys(("head_q_dim", "head_k_dim", "head_v_dim"), DIM),
        )
        self.backend = made = kda_backend.KDAAttnBackend.__new__(kda_backend.KDAAttnBackend)
        with (
            patch.object(hybrid, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=1)),
            patch.object(hybrid, "get_memory", lambda: SimpleNamespace(enable_unified_memory=False)),
        ):
            hybrid.MambaAttnBackendBase.__init__(made, runner)
        made.kernel_dispatcher = SimpleNamespace(
            target_verify=verify_twin, verify_backend=SimpleNamespace(is_nv_cutedsl=lambda: False)
        )
        made._fused_chain_verify_fn = None
        made.verify_intermediate_state_indices = torch.arange(MOST, dtype=torch.int32)
        made.init_cuda_graph_state(MOST, MOST * WIDTH)
        self.captured: dict[int, tuple[Any, Any]] = {}
        for rows in reversed(TIERS):
            lens = build_capture_verify_lens(num_tokens=rows, num_slots=MOST, num_draft_tokens=WIDTH)
            layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device="cpu", grid=TIERS)
            batch = self.view(layout, rows, [], MOST)
            made.init_forward_metadata_out_graph(batch, in_capture=True)
            self.captured[rows] = batch, made.forward_metadata

    @staticmethod
    def view(layout: Any, rows: int, requests: list[int], slots: int) -> Any:
        mode = ForwardMode.TARGET_VERIFY
        none = ("seq_lens_cpu", "mamba_track_indices", "mamba_track_mask", "extend_start_loc", "extend_seq_lens")
        return SimpleNamespace(
            batch_size=slots,
            forward_mode=mode,
            logical_forward_mode=mode,
            input_ids=torch.zeros(rows, dtype=torch.int64),
            num_padding=slots - len(requests),
            req_pool_indices=torch.tensor([*requests, *[0] * (slots - len(requests))]),
            spec_info=SimpleNamespace(draft_token_num=WIDTH, ragged_verify_layout=layout),
            **dict.fromkeys(none),
        )

    def run(self, case: str, fault: str = "") -> float:
        """Largest distance of real rows and of the states behind them; infinite where one is not a number."""
        kept, rows = CASES[case]
        requests, graph = len(kept), rows is not None
        if rows is None:
            rows = min(sum(kept) + requests + 2, requests * WIDTH)
        words = torch.zeros(requests, WIDTH, dtype=torch.int64)
        packed = pack_ragged(
            torch.tensor(kept, dtype=torch.int32),
            [words],
            capacity=rows,
            pads=(0,),
            slots=MOST if graph else requests,
        )
        given = packed.lengths.flip(0) if fault == "lengths_of_another_step" else packed.lengths
        layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=given, graph_num_tokens=rows)
        who = [*range(1, requests + 1)]
        asked = [2, 1, *who[2:]] if fault == "the_state_of_the_neighbour" else who
        batch = self.view(layout, rows, asked, MOST if graph else requests)
        mixed = torch.randn(rows, CHANNELS, generator=self.generator)
        a = torch.randn(rows, HEADS, DIM, generator=self.generator)
        b = torch.randn(rows, HEADS, generator=self.generator)
        before = self.conv.clone()
        self.windows.fill_(torch.nan)
        self.behind.fill_(torch.nan)
        if graph:
            batch = self.replayed(batch, rows, fault)
        else:
            self.backend.init_forward_metadata(batch)
        with patch.object(kda_backend, "causal_conv1d_update", conv_twin):
            out = self.backend._forward_target_verify(self.layer, batch, mixed, a, b)[0]
        self.conv.copy_(before)
        apart = [torch.zeros(1)]
        starts = packed.cu_seqlens.tolist()
        for request in range(requests):
            window, state = self.conv[self.slots[who[request]]].T, self.states[self.slots[who[request]]]
            for place, row in enumerate(range(starts[request], starts[request + 1])):
                seen, window = convolved(window, mixed[row], self.layer.conv_weights)
                q, k, v = seen.view(3, HEADS, DIM)
                found, state = recurred(state, {"q": q, "k": k, "v": v, "beta": b[row], "decay": decay(a[row])})
                apart += [(out[row] - found).abs().max(), (self.behind[request, place] - state).abs().max()]
                apart += [(self.windows[request, place] - window.T).abs().max()]
        return float(torch.nan_to_num(torch.tensor([float(each) for each in apart]), nan=torch.inf).max())

    def replayed(self, batch: Any, rows: int, fault: str) -> Any:
        """The captured batch, with what SGLang renews of it before a replay."""
        captured, metadata = self.captured[rows]
        runner = SimpleNamespace(
            _captured_ragged_layouts={rows: captured.spec_info.ragged_verify_layout}, captured_req_width=WIDTH
        )
        DecodeCudaGraphRunner._stage_ragged_verify_layout(runner, batch.spec_info.ragged_verify_layout, rows)
        captured.req_pool_indices.copy_(batch.req_pool_indices)
        self.backend.init_forward_metadata_out_graph(batch)
        # what a graph has captured stays: only what lies behind its addresses is new
        assert self.backend.forward_metadata.query_start_loc.data_ptr() == metadata.query_start_loc.data_ptr()
        self.backend.forward_metadata = metadata
        if fault == "lengths_are_those_of_the_capture":
            lens = build_capture_verify_lens(num_tokens=rows, num_slots=MOST, num_draft_tokens=WIDTH)
            metadata.query_start_loc.copy_(torch.tensor([0, *lens]).cumsum(0))
        return captured


def main(output: Path) -> None:
    bench = Bench()
    # one after another on the same buffers: each replay finds what the one before has left
    found = {case: bench.run(case) for case in CASES}
    output.write_text(json.dumps(found | {fault: bench.run(case, fault) for fault, case in FAULTS.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
