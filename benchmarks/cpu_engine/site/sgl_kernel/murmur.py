"""torch.ops.sgl_kernel.murmur_hash32_cpu: the hash behind SGLang's per-request `sampling_seed`.

MurmurHash3 (32 bit, Austin Appleby, public domain) over four words: seed low, seed high, position, column.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ._guard import check

_Words = npt.NDArray[np.uint64]
_MASK = np.uint64(0xFFFFFFFF)
_C1, _C2 = np.uint64(0xCC9E2D51), np.uint64(0x1B873593)
_N = np.uint64(0xE6546B64)
_F1, _F2 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_BYTES = np.uint64(16)

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def _rotl(x: _Words, bits: int) -> _Words:
    return ((x << np.uint64(bits)) | (x >> np.uint64(32 - bits))) & _MASK


def _mix(h: _Words, k: _Words) -> _Words:
    k = (_rotl((k * _C1) & _MASK, 15) * _C2) & _MASK
    return (_rotl(h ^ k, 13) * np.uint64(5) + _N) & _MASK


def _finish(h: _Words) -> _Words:
    h = h ^ _BYTES
    h = ((h ^ (h >> np.uint64(16))) * _F1) & _MASK
    h = ((h ^ (h >> np.uint64(13))) * _F2) & _MASK
    return h ^ (h >> np.uint64(16))


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash [n, m] (uint32) of seed [n] (64 bit), positions [n] and col_indices [m] (low 32 bits of each)."""
    wide = (torch.uint64, torch.int64)
    for name, tensor in (("seed", seed), ("positions", positions), ("col_indices", col_indices)):
        check(name, tensor, (*wide, torch.int32), 1)
    seeds, rows, columns = (tensor.numpy().astype(np.uint64) for tensor in (seed, positions, col_indices))
    h = _mix(np.zeros_like(seeds), seeds & _MASK)
    h = _mix(h, seeds >> np.uint64(32))
    h = _mix(h, rows & _MASK)
    h = _finish(_mix(h[:, None], (columns & _MASK)[None, :]))
    return torch.from_numpy(h.astype(np.uint32))


_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
