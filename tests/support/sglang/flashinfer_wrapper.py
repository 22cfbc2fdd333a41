"""A stub for FlashInfer's paged prefill wrapper, which needs CUDA: it plans as FlashInfer's does and runs in torch.

What it computes it knows from its arguments alone: which request owns which rows from its own last plan, as FlashInfer
keeps that in a workspace of each wrapper, and where keys and mask bits are from the buffers, which wrappers share.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

BITS = 8


class PagedWrapper:
    """BatchPrefillWithPagedKVCacheWrapper for page size 1; float32, one row at a time."""

    # Set while a captured graph is replayed: no Python of FlashInfer runs then, and nothing is checked.
    replaying = False
    # who said so where rows and keys are: what was read off the device, or SGLang by numbers of the host
    planned_by = ""
    _plan: tuple[list[int], list[int], int, int] | None = None

    def __init__(
        self, workspace: Tensor, kv_layout: str, *, backend: str, use_cuda_graph: bool = False, **buffers: Any
    ) -> None:
        assert kv_layout == "NHD" and backend == "fa2"
        self.device, self.is_cuda_graph_enabled = workspace.device, use_cuda_graph
        self._qo_indptr_buf = buffers.get("qo_indptr_buf")
        self._paged_kv_indptr_buf = buffers.get("paged_kv_indptr_buf")
        self._paged_kv_indices_buf = buffers.get("paged_kv_indices_buf")
        self._custom_mask_buf, self._mask_indptr_buf = buffers.get("custom_mask_buf"), buffers.get("mask_indptr_buf")
        self._most: int | None = None
        self._backend, self._max_total_num_rows, self._cached_module = backend, None, None
        self._paged_kv_last_page_len_buf = buffers.get("paged_kv_last_page_len_buf")
        self._float_workspace_buffer = self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = workspace

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor | None = None,
        **rest: Any,
    ) -> None:
        """plan(): the checks are FlashInfer's own."""
        assert page_size == 1 and all(t.dtype == torch.int32 for t in (qo_indptr, paged_kv_indptr, paged_kv_indices))
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        rows, keys = qo_indptr.diff(), paged_kv_indptr.diff()
        assert rows.min() >= 0 and keys.min() >= 1 and len(paged_kv_indices) >= int(paged_kv_indptr[-1])
        packed = begins = None
        if custom_mask is not None:
            lengths = (rows * keys).tolist()
            packed, begins = _packed(custom_mask.flatten()[: sum(lengths)], lengths)
        if self.is_cuda_graph_enabled:
            self._most = int(qo_indptr[-1]) if self._most is None else self._most
            assert int(qo_indptr[-1]) <= self._most and len(qo_indptr) == len(self._qo_indptr_buf)
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(paged_kv_indptr)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
            assert (packed is None) == (self._custom_mask_buf is None)
            if packed is not None:
                self._custom_mask_buf[: len(packed)].copy_(packed)
                self._mask_indptr_buf.copy_(begins)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr, paged_kv_indptr
            self._paged_kv_indices_buf = paged_kv_indices
            self._custom_mask_buf, self._mask_indptr_buf = packed, begins
        self._plan = rows.tolist(), keys.tolist(), num_qo_heads, num_kv_heads
        self._cached_module = SimpleNamespace(plan=self._plan_on_host)
        PagedWrapper.planned_by = "device"

    def _plan_on_host(self, *given: Any) -> None:
        """What FlashInfer's module of a plan before does, with the arguments that SGLang gives it."""
        starts, ends, keys, most, requests, heads, kv_heads, page = given[3:11]
        assert all(each.device.type == "cpu" and each.dtype == torch.int32 for each in (starts, ends, keys))
        assert len(starts) == len(ends) == len(keys) + 1 == requests + 1 and page == 1
        assert int(starts[-1]) <= (self._most or most) and torch.equal(ends.diff(), keys)
        self._plan = starts.diff().tolist(), keys.tolist(), heads, kv_heads
        PagedWrapper.planned_by = "host"

    def forward(
        self,
        q: Tensor,
        pools: tuple[Tensor, Tensor],
        *,
        causal: bool,
        sm_scale: float,
        k_scale: float | None = None,
        v_scale: float | None = None,
        **rest: Any,
    ) -> Tensor:
        """(rows, heads, head_dim); rows of nobody are NaN, as memory that no one wrote may be. k_scale, v_scale: of the
        pools."""
        assert self._plan is not None
        rows, keys, heads, kv_heads = self._plan
        if not self.replaying and len(q) != sum(rows):
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({sum(rows)})")
        out = torch.full_like(q, torch.nan)
        for request, (count, length) in enumerate(zip(rows, keys, strict=True)):
            first = int(self._paged_kv_indptr_buf[request])
            slots = self._paged_kv_indices_buf[first : first + length].long()
            k, v = (_read(pool, slots).repeat_interleave(heads // kv_heads, 1) for pool in pools)
            for row in range(count):
                place = int(self._qo_indptr_buf[request]) + row
                scores = torch.einsum("hd,khd->hk", q[place].float(), k) * (sm_scale * (k_scale or 1))
                seen = self._seen(request, row, count, length, causal)
                weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
                out[place] = torch.einsum("hk,khd->hd", weights, v) * (v_scale or 1.0)
        return out

    def _seen(self, request: int, row: int, count: int, length: int, causal: bool) -> Tensor:
        if self._custom_mask_buf is None:
            last = length - count + row if causal else length - 1
            return torch.arange(length) <= last
        # A mask, wherever there is one, is the only word on what is seen.
        places = int(self._mask_indptr_buf[request]) * BITS + row * length + torch.arange(length)
        return (self._custom_mask_buf[places // BITS] >> (places % BITS)).bitwise_and(1).bool()


def _packed(mask: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """As FlashInfer's segment_packbits: each request's bits on its own bytes, the first lowest; where they begin."""
    parts = [numpy.packbits(part.cpu().numpy() != 0, bitorder="little") for part in mask.split(lengths)]
    begins = numpy.cumsum([0, *map(len, parts)])
    return torch.from_numpy(numpy.concatenate(parts)), torch.from_numpy(begins).to(torch.int32)


def _read(pool: Tensor, slots: Tensor) -> Tensor:
    """Where nothing was written about a slot, its number may be any, and what it holds is NaN."""
    unknown = (slots < 0) | (slots >= len(pool))
    return pool.float()[slots.masked_fill(unknown, 0)].masked_fill(unknown[:, None, None], torch.nan)
