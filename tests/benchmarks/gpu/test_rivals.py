"""The GPU run's rivals, on stubs that read their arguments as the libraries' documentation says."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu import rivals as gpu_rivals
from benchmarks.gpu import stats as gpu_stats
from benchmarks.gpu.cases import Case, Provider, needs
from benchmarks.gpu.part import PARTS, measure_case
from benchmarks.gpu.rivals import built_once
from benchmarks.gpu.table5 import (
    TOLERANCE,
    ancestor_mask,
    manual_attention,
    scaled_error,
    xformers_attention,
    xformers_inputs,
)
from benchmarks.gpu.trees import attention_case
from benchmarks.papers.blocks import uniform_attachment
from c2t_kernels.attention.reference import tree_attention

CPU = torch.device("cpu")


class PagedPrefill:
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper in CUDA-graph mode: reads the caller's buffers alone.

    A request's mask begins at byte mask_indptr[i]; element (row, key) of it is bit row * keys + key from there, the
    lowest bit of a byte first.
    """

    def __init__(self, workspace: Tensor, layout: str, **buffers: Any) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD" and buffers["use_cuda_graph"]
        self.buffers = SimpleNamespace(**buffers)

    def plan(self, **given: Any) -> None:
        self.given = SimpleNamespace(**given)
        buffers = self.buffers
        buffers.qo_indptr_buf.copy_(given["qo_indptr"])
        buffers.paged_kv_indptr_buf.copy_(given["paged_kv_indptr"])
        # as FlashInfer 0.6.15 has it: elements, where the kernel reads bytes
        lengths = given["qo_indptr"].diff() * given["paged_kv_indptr"].diff()
        buffers.mask_indptr_buf.copy_(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        buffers, given = self.buffers, self.given
        out = torch.empty_like(q) if out is None else out
        for i in range(len(buffers.qo_indptr_buf) - 1):
            rows = slice(int(buffers.qo_indptr_buf[i]), int(buffers.qo_indptr_buf[i + 1]))
            slots = buffers.paged_kv_indices_buf[
                int(buffers.paged_kv_indptr_buf[i]) : int(buffers.paged_kv_indptr_buf[i + 1])
            ]
            begin, keys = int(buffers.mask_indptr_buf[i]), len(slots)
            places = torch.arange((rows.stop - rows.start) * keys)
            seen = (buffers.custom_mask_buf[begin + places // 8] >> (places % 8)) & 1
            k, v = (pool[slots.long(), 0].repeat_interleave(q.shape[1] // pool.shape[2], 1) for pool in pools)
            scores = torch.einsum("nhd,khd->hnk", q[rows], k) * given.sm_scale
            weights = scores.masked_fill(seen.view(-1, keys) == 0, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hnk,khd->nhd", weights, v)
        return out


def top_k(logits: Tensor, k: int, sorted: bool = False) -> tuple[Tensor, Tensor]:
    assert sorted, "unsorted values have no leading ones"
    found = logits.topk(k)
    return found.values, found.indices


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flashinfer")
    vars(module).update(top_k=top_k, BatchPrefillWithPagedKVCacheWrapper=PagedPrefill)
    vars(module)["sampling"] = SimpleNamespace(softmax=lambda logits: logits.softmax(-1))
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("benchmarks.gpu.cases.find_spec", lambda package: package == "flashinfer" or None)
    return module


def faults(case: Case, *names: str) -> dict[str, str]:
    chosen = replace(case, providers=[provider for provider in case.providers if provider.name in names])
    return {row.provider: row.absent or row.fault for row in measure_case("part", chosen, {}, None)}


@pytest.mark.usefixtures("flashinfer")
def test_flashinfers_top_k_and_softmax_make_the_statistics():
    for case in PARTS["stats"](CPU, True):
        assert faults(case, "flashinfer", "flashinfer.top_k alone") == {"flashinfer": "", "flashinfer.top_k alone": ""}


def test_a_build_that_fails_is_tried_once(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch):
    builds = []

    def broken(logits: Tensor, k: int, sorted: bool) -> None:
        builds.append(k)
        raise RuntimeError("Ninja build failed\nin many lines")

    vars(flashinfer)["top_k"] = broken
    monkeypatch.setattr(gpu_stats, "_top_k", built_once(gpu_stats._top_k.__wrapped__))  # type: ignore[attr-defined]
    case, *_ = PARTS["stats"](CPU, True)
    rows = [row for row in measure_case("stats", case, {}, None) if row.provider.startswith("flashinfer")]
    assert [(row.fault, row.absent) for row in rows] == [
        ("RuntimeError: Ninja build failed", ""),
        ("", "did not work at first: RuntimeError: Ninja build failed"),
    ]
    assert len(builds) == 1


def test_a_shape_that_fails_later_fails_alone():
    @built_once
    def root(x: float) -> float:
        if x < 0:
            raise RuntimeError("out of memory")
        return x**0.5

    assert root(4.0) == 2.0
    with pytest.raises(RuntimeError, match="out of memory"):
        root(-1.0)
    assert root(9.0) == 3.0


# a bias whose rows need padding, no prefix, one node, one request
@pytest.mark.parametrize(("batch", "prefix", "nodes"), [(3, 17, 3), (2, 0, 5), (2, 8, 1), (1, 9, 6)])
def test_sdpa_gets_query_heads_as_rows(batch: int, prefix: int, nodes: int):
    case = attention_case(CPU, batch, prefix, nodes)
    assert faults(case, "sdpa, contiguous") == {"sdpa, contiguous": ""}
    inputs = case.inputs(torch.Generator().manual_seed(0))
    q, k, _, bias = gpu_rivals.contiguous(prefix, nodes, *inputs)
    # what torch's memory-efficient kernel takes: no groups of heads, and a bias of q's dtype in aligned rows
    assert q.shape[:2] == k.shape[:2] and bias.dtype == q.dtype
    assert bias.shape[2:] == (q.shape[2], k.shape[2]) and bias.stride(2) % 8 == 0


def test_sdpa_with_rows_of_other_nodes_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    """Planted fault: the mask's rows lie as if heads came first."""

    def bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
        return original(seen.unflatten(2, (3, -1)).transpose(2, 3).flatten(2, 3), dtype)

    original = gpu_rivals.aligned_bias
    monkeypatch.setattr(gpu_rivals, "aligned_bias", bias)
    assert "error" in faults(attention_case(CPU, 2, 9, 3), "sdpa, contiguous")["sdpa, contiguous"]


def test_manual_attention_in_bfloat16_is_right_by_the_gpu_runs_measure():
    nodes, heads, head_dim = 256, 64, 128
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(nodes, heads, head_dim, generator=generator).bfloat16() for _ in range(3))
    mask = ancestor_mask(torch.tensor(uniform_attachment(nodes, np.random.default_rng(1))))
    pool, ends, none = k.new_zeros(1, heads, head_dim), torch.tensor([0, nodes]), torch.zeros(2, dtype=torch.int64)

    def given(q: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return q, k, v, pool, pool, ends, none, none[:0], mask.flatten(), ends * nodes

    expected = tree_attention(*given(q, mask))
    assert scaled_error(expected, manual_attention(*given(q, mask))) < 0.7 * TOLERANCE
    blind = mask.clone()
    blind[nodes - 1, 0] = False
    for fault in (given(q, blind), given(1.05 * q, mask)):
        assert scaled_error(expected, manual_attention(*fault)) > 2 * TOLERANCE


# masks whose bits do not end with a byte, no prefix, one node, one request
@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(("batch", "prefix", "nodes"), [(3, 17, 3), (2, 0, 5), (2, 8, 1), (1, 9, 6)])
def test_flashinfer_attends_like_the_reference(batch: int, prefix: int, nodes: int):
    found = faults(attention_case(CPU, batch, prefix, nodes), "flashinfer", "FlashInferTree")
    assert found == {"flashinfer": ""} | ({"FlashInferTree": ""} if batch == 1 else {})


@pytest.mark.usefixtures("flashinfer")
def test_offsets_of_masks_that_count_elements_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    """Planted fault: FlashInfer's own offsets stay."""

    def elements(mask: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        packed, begins = original(mask, lengths)
        return torch.cat([packed, packed.new_zeros(len(mask))]), begins * 8

    original = gpu_rivals.pack_mask
    monkeypatch.setattr(gpu_rivals, "pack_mask", elements)
    assert "error" in faults(attention_case(CPU, 3, 17, 3), "flashinfer")["flashinfer"]


def test_the_stock_extend_kernel_gets_its_full_mask(monkeypatch: pytest.MonkeyPatch):
    def extend(*arguments: Any) -> None:
        q, k, v, out, k_pool, v_pool, rows, pages_at, pages = arguments[:9]
        mask, causal, mask_at, longest, k_scale, v_scale = arguments[9:]
        assert causal is True and k_scale == v_scale == 1.0
        for i in range(len(rows) - 1):
            own = slice(int(rows[i]), int(rows[i + 1]))
            old = pages[int(pages_at[i]) : int(pages_at[i + 1])]
            seen = mask[int(mask_at[i]) : int(mask_at[i + 1])].view(longest, len(old) + longest)
            group = q.shape[1] // k.shape[1]
            keys, values = (
                torch.cat([pool[old], new[own]]).repeat_interleave(group, 1) for pool, new in ((k_pool, k), (v_pool, v))
            )
            scores = torch.einsum("nhd,khd->hnk", q[own], keys) * q.shape[2] ** -0.5
            out[own] = torch.einsum("hnk,khd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)

    case = attention_case(CPU, 3, 11, 4)
    names = ["sglang", "kernels", "ops", "attention", "extend_attention"]
    for depth in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), ModuleType(".".join(names[:depth])))
    vars(sys.modules[".".join(names)])["extend_attention_fwd"] = extend
    inputs = case.inputs(torch.Generator().manual_seed(0))
    found = gpu_rivals.stock_extend(*gpu_rivals.extend_inputs(11, 4, *inputs))
    assert case.error(case.reference(*inputs), found) < case.tolerance


def test_xformers_gets_a_bias_with_aligned_rows(monkeypatch: pytest.MonkeyPatch):
    def attend(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor) -> Tensor:
        assert attn_bias.stride(-2) % 8 == 0
        scores = torch.einsum("bnhd,bkhd->bhnk", q, k) * q.shape[-1] ** -0.5 + attn_bias
        return torch.einsum("bhnk,bkhd->bnhd", scores.softmax(-1), v)

    case = next(iter(PARTS["table5"](CPU, True)))
    for name in ("xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["xformers.ops"])["memory_efficient_attention"] = attend
    inputs = case.inputs(torch.Generator().manual_seed(0))
    found = xformers_attention(*xformers_inputs(*inputs))
    assert case.error(case.reference(*inputs), found) < case.tolerance


def test_what_is_missing_is_said():
    provider = Provider("rival", lambda: None)
    assert needs("no_such_package_at_all", provider).absent == "no_such_package_at_all is not installed"
    assert needs("torch", provider, CPU).absent == "needs a GPU"
    assert needs("torch", provider, torch.device("cuda")) == needs("torch", provider) == provider
