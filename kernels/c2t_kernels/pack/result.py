"""What `pack_ragged` gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    """Rows of all requests end to end.

    values: one per source, (capacity,) or (capacity, hidden) of the source's dtype; rows past the last request hold
        that source's pad value.
    cu_seqlens: (bs + 1,) int32, or (slots + 1,); request i owns rows cu_seqlens[i] to cu_seqlens[i + 1]. At most the
        capacity.
    lengths: (bs,) int32, or (slots,); how many rows each has.
    """

    values: tuple[Tensor, ...]
    cu_seqlens: Tensor
    lengths: Tensor
