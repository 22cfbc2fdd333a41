"""Tree attention of one request through FlashInfer's paged prefill wrapper, with a packed mask.

FlashInfer plans on the host from the lengths, which change with every step. Lengths are therefore rounded up to a
bucket and the rest is masked out: a bucket is planned once, and a step only rewrites the buffers that it reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from c2t_kernels.checks import check_int, check_tensor

BITS = 8


def pack_mask_bits(mask: Tensor) -> Tensor:
    """Eight mask elements to a byte, the first in the lowest bit: (..., n) bool -> (..., ceil(n / 8)) uint8.

    The last byte of a row is filled up with zeros. FlashInfer packs a request's mask as one row: it reads element
    i * kv_len + j of the flattened (rows, kv_len) mask, so flatten before packing.
    """
    bits = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % BITS)).unflatten(-1, (-1, BITS))
    weights = 2 ** torch.arange(BITS, device=mask.device)
    return (bits * weights).sum(dim=-1).to(torch.uint8)


def pack_mask(mask: Tensor, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Bits in FlashInfer's layout: eight elements a byte, the first in the lowest bit, each segment on its own bytes.

    mask: flat bool or uint8 (anything but 0 is True), the segments one after the other; a request's segment is its
        row-major (nodes, prefix + nodes) mask.
    lengths: elements of each segment, on the host; None means one segment.

    Returns the bytes, uint8, and where each segment begins in them, (segments + 1,) int32 on the mask's device, as
    FlashInfer's segment_packbits does with bitorder "little". The bits after a segment's last element are 0.
    Raises ValueError if the lengths do not add up to the mask.
    """
    check_tensor("pack_mask: mask", mask, dtype=(torch.bool, torch.uint8), shape=(None,))
    lengths = [len(mask)] if lengths is None else list(lengths)
    if min(lengths, default=0) < 0 or sum(lengths) != len(mask):
        raise ValueError(
            f"pack_mask: lengths must be at least 0 and add up to {len(mask)} mask elements, got {lengths}"
        )
    packed = [pack_mask_bits(segment != 0) for segment in mask.split(lengths)]
    begins = torch.tensor([0, *(len(segment) for segment in packed)]).cumsum(0)
    return torch.cat([mask.new_zeros(0, dtype=torch.uint8), *packed]), begins.to(mask.device, torch.int32)


@dataclass(frozen=True)
class TreeShape:
    """What stays the same over a model's layers and steps.

    heads, kv_heads, head_dim: of the attention layer.
    max_nodes: the largest tree, root included.
    max_keys: the longest prefix plus the largest tree.
    dtype: of queries, keys and values, bfloat16 or float16.
    node_step, key_step: lengths are rounded up to multiples of these; a coarser step plans less often and reads more.
    scale: what q @ k is multiplied by; None means head_dim ** -0.5.
    """

    heads: int
    kv_heads: int
    head_dim: int
    max_nodes: int
    max_keys: int
    dtype: torch.dtype = torch.bfloat16
    node_step: int = 16
    key_step: int = 512
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "max_nodes", "max_keys", "node_step", "key_step"):
            check_int(f"TreeShape: {name}", getattr(self, name), 1)
        if self.heads % self.kv_heads != 0:
            raise ValueError(f"TreeShape: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    def bucket(self, nodes: int, keys: int) -> tuple[int, int]:
        """Nodes and keys that a step of this size is planned for."""
        check_int("FlashInferTree: nodes", nodes, 1, self.max_nodes)
        check_int("FlashInferTree: keys", keys, nodes, self.max_keys)
        return _round_up(nodes, self.node_step), _round_up(keys, self.key_step)


def flashinfer_wrapper() -> Callable[..., Any]:
    """FlashInfer's paged prefill wrapper class. Raises ImportError, saying what to install, where FlashInfer is not."""
    try:
        return importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    except ModuleNotFoundError as error:
        raise ImportError(
            f"FlashInferTree needs FlashInfer ({error}): install c2t-plugin[flashinfer], or use tree_attention"
        ) from error


class FlashInferTree:
    """Attention of one request's tree over its paged prefix (page size 1), equal in result to tree_attention.

    The tree's own keys and values must be in the pool already, as an engine writes them before attention. begin() sets
    a step; run() is then called once per layer. Within a bucket begin() only fills device buffers and run() only
    launches, on the same addresses every time.

    Every bucket keeps a wrapper of its own, to which FlashInfer gives 8 MiB on the device and 8 MiB pinned; all share
    one workspace. Past max_buckets the one unused for longest is dropped, so a captured graph must not hold it.
    """

    def __init__(
        self,
        shape: TreeShape,
        device: torch.device | str,
        *,
        max_buckets: int = 16,
        workspace_bytes: int = 128 << 20,
        wrapper: Callable[..., Any] | None = None,
    ) -> None:
        """wrapper: the class to use in place of FlashInfer's; None means FlashInfer's."""
        check_int("FlashInferTree: max_buckets", max_buckets, 1)
        self.shape = shape
        self._max_buckets = max_buckets
        self._make = flashinfer_wrapper() if wrapper is None else wrapper
        self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        # with the index that "cuda" leaves out
        self.device = self._workspace.device
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._current: _Bucket | None = None
        self._nodes = 0

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """The (nodes, keys) that plans are kept for, the one used last at the end."""
        return tuple(self._buckets)

    def begin(self, prefix_slots: Tensor, node_slots: Tensor, mask: Tensor) -> None:
        """Set the tree of the next run() calls.

        prefix_slots: (prefix,) int32 or int64, where the prefix is in the pool.
        node_slots: (nodes,) int32 or int64, where the tree's own keys and values are.
        mask: (nodes, nodes) bool or uint8, True where the row's node sees the column's.
        """
        nodes = len(node_slots)
        for name, slots in (("prefix_slots", prefix_slots), ("node_slots", node_slots)):
            check_tensor(
                f"FlashInferTree: {name}", slots, dtype=(torch.int32, torch.int64), shape=(None,), device=self.device
            )
        square = (nodes, nodes)
        check_tensor("FlashInferTree: mask", mask, dtype=(torch.bool, torch.uint8), shape=square, device=self.device)
        size = self.shape.bucket(nodes, len(prefix_slots) + nodes)
        bucket = self._buckets.pop(size, None)
        if bucket is None:
            bucket = _Bucket(self.shape, size, self.device, self._workspace, self._make)
        self._buckets[size] = bucket
        if len(self._buckets) > self._max_buckets:
            del self._buckets[next(iter(self._buckets))]
        self._current, self._nodes = bucket, nodes
        bucket.fill(prefix_slots, node_slots, mask)

    def run(self, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Attention of one layer: (nodes, heads, head_dim), a view of a buffer that this bucket's next run() fills.

        q: (nodes, heads, head_dim). k_pool, v_pool: (slots, kv_heads, head_dim).
        Raises RuntimeError before the first begin().
        """
        if self._current is None:
            raise RuntimeError("FlashInferTree: run() was called before begin(), which sets the tree")
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        for name, tensor, shape in (
            ("q", q, (self._nodes, heads, head_dim)),
            ("k_pool", k_pool, (None, kv_heads, head_dim)),
            ("v_pool", v_pool, (len(k_pool), kv_heads, head_dim)),
        ):
            check_tensor(f"FlashInferTree: {name}", tensor, dtype=self.shape.dtype, shape=shape, device=self.device)
        return self._current.run(q, k_pool, v_pool)[: self._nodes]


class _Bucket:
    """One plan and the buffers that it reads, at fixed addresses."""

    def __init__(
        self,
        shape: TreeShape,
        size: tuple[int, int],
        device: torch.device,
        workspace: Tensor,
        make: Callable[..., Any],
    ) -> None:
        self.nodes, self.keys = size
        self.q = torch.zeros(self.nodes, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        self.out = torch.zeros_like(self.q)
        self.seen = torch.zeros(self.nodes, self.keys, dtype=torch.bool, device=device)
        self.slots = torch.zeros(self.keys, dtype=torch.int32, device=device)
        self.packed = torch.zeros(-(-self.nodes * self.keys // BITS), dtype=torch.uint8, device=device)
        # FlashInfer's CUDA-graph mode is the one that reads the caller's buffers and not copies of them.
        self.wrapper = make(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(2, dtype=torch.int32, device=device),
            paged_kv_indptr_buf=torch.zeros(2, dtype=torch.int32, device=device),
            paged_kv_indices_buf=self.slots,
            paged_kv_last_page_len_buf=torch.zeros(1, dtype=torch.int32, device=device),
            custom_mask_buf=self.packed,
            mask_indptr_buf=torch.zeros(2, dtype=torch.int32, device=device),
            # the backend with custom masks on every generation, and the one that an ahead-of-time build carries
            backend="fa2",
        )
        self.wrapper.plan(
            qo_indptr=torch.tensor([0, self.nodes], dtype=torch.int32),
            paged_kv_indptr=torch.tensor([0, self.keys], dtype=torch.int32),
            paged_kv_indices=self.slots.clone(),
            paged_kv_last_page_len=torch.ones(1, dtype=torch.int32),
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.head_dim,
            page_size=1,
            packed_custom_mask=self.packed.clone(),
            causal=False,
            sm_scale=shape.head_dim**-0.5 if shape.scale is None else shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def fill(self, prefix_slots: Tensor, node_slots: Tensor, mask: Tensor) -> None:
        prefix, nodes = len(prefix_slots), len(node_slots)
        # a key that no row sees is still read, and 0 times a stale NaN would be NaN: the root's slot holds real numbers
        self.slots.copy_(node_slots[:1].expand(self.keys))
        self.slots[:prefix] = prefix_slots
        self.slots[prefix : prefix + nodes] = node_slots
        self.seen.zero_()
        self.seen[:nodes, :prefix] = True
        self.seen[:nodes, prefix : prefix + nodes] = mask != 0
        # a padding row that saw nothing would be 0/0
        self.seen[nodes:, 0] = True
        self.packed.copy_(pack_mask_bits(self.seen.view(-1)))

    def run(self, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        self.q[: len(q)] = q
        self.wrapper.run(self.q, (k_pool.unsqueeze(1), v_pool.unsqueeze(1)), out=self.out)
        return self.out


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
