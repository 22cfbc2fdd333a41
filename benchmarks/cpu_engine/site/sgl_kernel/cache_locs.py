"""Bookkeeping of KV slots: the req_to_token table, the slots a step writes, and copies inside the pool.

`req_to_token` is int32 [rows, pool_len]; a slot list is int64 and laid out request after request.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ._guard import INDEX, INT32, INT64, check, check_size


def _check_table(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, out_cache_loc: torch.Tensor, pool_len: int
) -> None:
    check("req_pool_indices", req_pool_indices, INDEX, 1)
    check("req_to_token", req_to_token, INT32, 2)
    check("out_cache_loc", out_cache_loc, INT64, 1)
    if pool_len != req_to_token.shape[1]:
        raise RuntimeError(f"pool_len: got {pool_len}, expected the table's width {req_to_token.shape[1]}")


def _cells(req_pool_indices: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every table cell in [start, end) of each request, request after request."""
    check("start_offset", start, INDEX, 1)
    check("end_offset", end, INDEX, 1)
    lengths = (end - start).to(torch.int64)
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    rows = req_pool_indices.to(torch.int64).repeat_interleave(lengths, output_size=total)
    shift = (start - (ends - lengths)).repeat_interleave(lengths, output_size=total)
    return rows, torch.arange(total) + shift


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write `out_cache_loc` into the cells [start, end) of each request's row of `req_to_token`."""
    _check_table(req_pool_indices, req_to_token, out_cache_loc, pool_len)
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    check_size("out_cache_loc", out_cache_loc, rows.numel())
    req_to_token[rows, columns] = out_cache_loc.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the cells [start, end) of each request's row into the front of `out_cache_loc`, which may be longer."""
    _check_table(req_pool_indices, req_to_token, out_cache_loc, pool_len)
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    if rows.numel() > out_cache_loc.numel():
        raise RuntimeError(f"out_cache_loc: got {out_cache_loc.numel()} elements for {rows.numel()} cells")
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(torch.int64)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` slots that follow each request's `seq_lens` positions into `out_cache_loc`."""
    check_size("out_cache_loc", out_cache_loc, seq_lens.numel() * topk * num_steps)
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """Table [B * topk, pool_len] with one row per draft branch: the request's prefix, then the branch's own slots.

    The slots of branch t are the `num_steps` cells from `seq_lens[b] + t * num_steps` on. Cells past them are stale.
    """
    check("req_to_token", req_to_token, INT32, 2)
    check("req_pool_indices", req_pool_indices, INT64, 1)
    check("seq_lens", seq_lens, INT64, 1)
    table = req_to_token[:, :pool_len].index_select(0, req_pool_indices.repeat_interleave(topk))
    if topk == 1:
        return table
    target = seq_lens.repeat_interleave(topk)[:, None] + torch.arange(num_steps)
    source = target + (torch.arange(topk) * num_steps).repeat(seq_lens.numel())[:, None]
    return table.scatter(1, target, table.gather(1, source))


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots `src_loc` to `tgt_loc` in every KV buffer; reads everything before it writes, so lists may overlap.

    `data_ptrs` are raw addresses (uint64) of buffers whose slots are `strides` bytes wide.
    """
    check("data_ptrs", data_ptrs, (torch.uint64, torch.int64), 1)
    check("strides", strides, INT64, 1)
    check("tgt_loc", tgt_loc, INDEX, 1)
    check("src_loc", src_loc, INDEX, 1)
    check_size("src_loc", src_loc, tgt_loc.numel())
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.numpy(), src_loc.numpy()
    slots = int(max(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(slots, stride)
        buffer[target] = buffer[source]
