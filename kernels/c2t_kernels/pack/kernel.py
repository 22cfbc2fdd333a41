"""Ragged packing and its inverse; words (ids, positions, slots) of a batch are packed in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor
from c2t_kernels.pack.result import Packed
from c2t_kernels.pack.rows import as_number, scatter_rows

WORDS = 3  # sources that one launch packs beside each other
BLOCK_PAD = 128  # rows past the last request that one program fills
MAX_REQUESTS = 4096
FEWEST_REQUESTS, FEWEST_ROWS = 16, 8  # that a program is made for
ANY = (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _copy_words(p_source, stride, p_packed, i_request, start, b_at, b_own):
    b_words = tl.load(p_source + i_request * stride + b_at, mask=b_own)
    tl.store(p_packed + start + b_at, b_words, mask=b_own)


@triton.jit
def _pad_words(p_packed, pad, b_row, b_free):
    tl.store(p_packed + b_row, pad, mask=b_free)


# Other numbers in each step, and addresses within other tensors: none is a kernel of its own, compiled while it serves.
_VARIES = ("pad0", "pad1", "pad2", "stride0", "stride1", "stride2", "kept_stride", "bs", "slots", "capacity", "width")


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=("p_kept", "p_source0", "p_source1", "p_source2"))
def pack_words_kernel(
    p_kept,
    p_cu_seqlens,
    p_lengths,
    p_source0,
    p_source1,
    p_source2,
    p_packed0,
    p_packed1,
    p_packed2,
    pad0,
    pad1,
    pad2,
    stride0,
    stride1,
    stride2,
    kept_stride,
    bs,
    slots,
    capacity,
    width,
    FILL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
):
    i_program = tl.program_id(0)
    b_request = tl.arange(0, BLOCK_B)
    b_kept = tl.load(p_kept + b_request.to(tl.int64) * kept_stride, mask=b_request < bs, other=-1)
    b_length = tl.minimum(tl.maximum(b_kept, -1), width - 1) + 1
    if FILL:
        b_room = tl.where(b_request < slots, width - b_length, 0)
        b_spare = capacity - tl.sum(b_length) - (tl.cumsum(b_room, 0) - b_room)
        b_length += tl.minimum(tl.maximum(b_spare, 0), b_room)
    if i_program < slots:
        start = tl.minimum(tl.sum(tl.where(b_request < i_program, b_length, 0)), capacity)
        end = tl.minimum(tl.sum(tl.where(b_request <= i_program, b_length, 0)), capacity)
        tl.store(p_cu_seqlens + i_program + 1, end)
        tl.store(p_lengths + i_program, end - start)
        i_request = i_program.to(tl.int64)
        b_at = tl.arange(0, BLOCK_W)
        b_own = (b_at < end - start) & (i_program < bs)
        if p_source0 is not None:
            _copy_words(p_source0, stride0, p_packed0, i_request, start, b_at, b_own)
        if p_source1 is not None:
            _copy_words(p_source1, stride1, p_packed1, i_request, start, b_at, b_own)
        if p_source2 is not None:
            _copy_words(p_source2, stride2, p_packed2, i_request, start, b_at, b_own)
    else:
        if i_program == slots:
            tl.store(p_cu_seqlens, 0)
        b_row = (i_program - slots) * BLOCK_PAD + tl.arange(0, BLOCK_PAD)
        b_free = (b_row >= tl.sum(tl.where(b_request < bs, b_length, 0))) & (b_row < capacity)
        if p_source0 is not None:
            _pad_words(p_packed0, pad0, b_row, b_free)
        if p_source1 is not None:
            _pad_words(p_packed1, pad1, b_row, b_free)
        if p_source2 is not None:
            _pad_words(p_packed2, pad2, b_row, b_free)


def pack_ragged(
    kept: Tensor, sources: Sequence[Tensor], *, capacity: int, pads: Sequence[float], slots: int | None = None
) -> Packed:
    """As c2t_kernels.pack_ragged: one launch per three word sources, one per wide source.

    sources: words (bs, width) or wide rows (bs, width, hidden), int32, int64, float32, bfloat16 or float16, rows of any
        stride. Rows of a flat [bs * width, hidden] tensor are given as a view of three dimensions.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices and strides.
    """
    check_tensor("pack_ragged: kept", kept, dtype=torch.int32, shape=(None,), contiguous_last=False)
    bs, device = kept.shape[0], kept.device
    check_int("pack_ragged: capacity", capacity, 1)
    if not isinstance(sources, Sequence):
        raise TypeError(f"pack_ragged: sources must be a sequence of tensors, got {type(sources).__name__}")
    if not sources or len(pads) != len(sources):
        raise ValueError(
            f"pack_ragged: sources and pads must have one entry each, got {len(sources)} sources, {len(pads)} pads"
        )
    requests = bs if slots is None else slots
    check_int("pack_ragged: slots", requests, bs)
    if requests > MAX_REQUESTS:
        raise ValueError(f"pack_ragged: kept can have at most {MAX_REQUESTS} requests, got {requests}")
    for i, source in enumerate(sources):
        check_tensor(f"pack_ragged: sources[{i}]", source, dtype=ANY, contiguous_last=False)
    width = sources[0].shape[1] if sources[0].dim() > 1 else 0
    if width < 1:
        raise ValueError(f"pack_ragged: sources[0] must be (bs, width >= 1, ...), got {tuple(sources[0].shape)}")
    packed = []
    for i, source in enumerate(sources):
        shape = (bs, width) if source.dim() == 2 else (bs, width, None)
        check_tensor(f"pack_ragged: sources[{i}]", source, shape=shape, device=device)
        packed.append(torch.empty((capacity, *source.shape[2:]), dtype=source.dtype, device=device))
    cu_seqlens, lengths = (torch.empty(size, dtype=torch.int32, device=device) for size in (requests + 1, requests))
    words = [i for i, source in enumerate(sources) if source.dim() == 2]
    # The first launch also writes whose rows they are, so there is one even without a word source.
    for first in range(0, max(len(words), 1), WORDS):
        group = [(sources[i], packed[i], pads[i]) for i in words[first : first + WORDS]]
        _pack_words(kept, cu_seqlens, lengths, group, width, capacity, fill=slots is not None)
    for source, target, pad in zip(sources, packed, pads, strict=True):
        if source.dim() == 3:
            from c2t_kernels.pack.wide import pack_rows

            pack_rows(source, target, cu_seqlens[: bs + 1], pad)
    return Packed(tuple(packed), cu_seqlens, lengths)


def scatter_ragged(packed: Tensor, cu_seqlens: Tensor, width: int, *, fill: float) -> Tensor:
    """As c2t_kernels.scatter_ragged, in one launch.

    packed: int32, int64, float32, bfloat16 or float16, rows of any stride. cu_seqlens must not end above its rows.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices and strides.
    """
    device = packed.device if isinstance(packed, Tensor) else None
    shape = (None,) if isinstance(packed, Tensor) and packed.dim() == 1 else (None, None)
    check_tensor("scatter_ragged: packed", packed, dtype=ANY, shape=shape)
    check_tensor("scatter_ragged: cu_seqlens", cu_seqlens, dtype=torch.int32, shape=(None,), device=device)
    check_int("scatter_ragged: width", width, 1)
    bs = cu_seqlens.shape[0] - 1
    if bs < 0:
        raise ValueError("scatter_ragged: cu_seqlens must have bs + 1 entries, got none")
    out = torch.empty((bs, width, *packed.shape[1:]), dtype=packed.dtype, device=packed.device)
    if out.numel() > 0:
        scatter_rows(packed, out, cu_seqlens, fill)
    return out


def _pack_words(
    kept: Tensor,
    cu_seqlens: Tensor,
    lengths: Tensor,
    group: list[tuple[Tensor, Tensor, float]],
    width: int,
    capacity: int,
    fill: bool,
) -> None:
    bs, slots, missing = kept.shape[0], len(cu_seqlens) - 1, WORDS - len(group)
    pack_words_kernel[(slots + triton.cdiv(capacity, BLOCK_PAD),)](
        kept,
        cu_seqlens,
        lengths,
        *([source for source, _, _ in group] + [None] * missing),
        *([target for _, target, _ in group] + [None] * missing),
        *([as_number(pad, source.dtype) for source, _, pad in group] + [0] * missing),
        *([source.stride(0) for source, _, _ in group] + [0] * missing),
        kept.stride(0),
        bs,
        slots,
        capacity,
        width,
        FILL=fill,
        BLOCK_B=max(FEWEST_REQUESTS, triton.next_power_of_2(slots)),
        BLOCK_W=max(FEWEST_ROWS, triton.next_power_of_2(width)),
        BLOCK_PAD=BLOCK_PAD,
        num_warps=1 if slots <= 1024 else 4,
    )
