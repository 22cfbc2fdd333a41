"""The packed mask bit by bit; the FlashInfer adapter on a stub that reads buffers as FlashInfer's kernel does."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from benchmarks.gpu import flashinfer_tree
from benchmarks.gpu.flashinfer_tree import FlashInferTree, TreeShape, pack_mask, pack_mask_bits
from c2t_kernels.attention.reference import tree_attention

SHAPE = TreeShape(
    heads=4, kv_heads=2, head_dim=64, max_nodes=20, max_keys=100, dtype=torch.float32, node_step=8, key_step=32
)
SLOTS = 150


def bit(packed: Tensor, begin: int, place: int) -> bool:
    """FlashInfer's DefaultAttention: byte place / 8 after the request's first, shifted right by place % 8."""
    return bool((int(packed[begin + place // 8]) >> (place % 8)) & 1)


class Wrapper:
    """The documented interface of BatchPrefillWithPagedKVCacheWrapper, for one request, reading only its buffers."""

    made: list[Wrapper]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, **given: Any) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and given["use_cuda_graph"]
        self.buffers = SimpleNamespace(**given)
        self.plans: list[SimpleNamespace] = []
        self.workspace = float_workspace_buffer
        type(self).made.append(self)

    def plan(self, **given: Any) -> None:
        plan = SimpleNamespace(**given)
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"):
            # planning on the host from device tensors would wait for the device
            assert getattr(plan, name).device.type == "cpu" and getattr(plan, name).dtype == torch.int32
        self.plans.append(plan)
        buffers = self.buffers
        buffers.qo_indptr_buf.copy_(plan.qo_indptr)
        buffers.paged_kv_indptr_buf.copy_(plan.paged_kv_indptr)
        buffers.paged_kv_last_page_len_buf.copy_(plan.paged_kv_last_page_len)
        buffers.paged_kv_indices_buf[: len(plan.paged_kv_indices)].copy_(plan.paged_kv_indices)
        buffers.custom_mask_buf[: len(plan.packed_custom_mask)].copy_(plan.packed_custom_mask)
        buffers.mask_indptr_buf.zero_()

    def mask(self) -> Tensor:
        """(queries, keys) bool, unpacked from the buffer element by element."""
        queries, keys = int(self.buffers.qo_indptr_buf[1]), int(self.buffers.paged_kv_indptr_buf[1])
        places = [bit(self.buffers.custom_mask_buf, 0, place) for place in range(queries * keys)]
        return torch.tensor(places).view(queries, keys)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        (plan,) = self.plans
        k, v = (pool[self.buffers.paged_kv_indices_buf.long(), 0].float() for pool in paged_kv_cache)
        assert q.shape[0] == int(plan.qo_indptr[-1]) and plan.page_size == 1 and not plan.causal
        group = plan.num_qo_heads // plan.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.repeat_interleave(group, 1)) * plan.sm_scale
        weights = torch.softmax(scores.masked_fill(~self.mask(), -torch.inf), -1)
        return out.copy_(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))


@pytest.fixture(autouse=True)
def no_wrapper_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapper, "made", [], raising=False)


def random_mask(nodes: int, seed: int) -> Tensor:
    mask = torch.eye(nodes, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    for node in range(1, nodes):
        mask[node] |= mask[int(torch.randint(node, (1,), generator=generator))]
    return mask


def step(tree: FlashInferTree, prefix: int, nodes: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The adapter's output and the reference's for one random step."""
    generator = torch.Generator().manual_seed(seed)
    shape = tree.shape
    slots = torch.randperm(SLOTS - 1, generator=generator)[: prefix + nodes].add(1).int().to(device)
    q = torch.randn(nodes, shape.heads, shape.head_dim, generator=generator).to(device, shape.dtype)
    pools = torch.randn(2, SLOTS, shape.kv_heads, shape.head_dim, generator=generator).to(device, shape.dtype)
    free = torch.ones(SLOTS, dtype=torch.bool, device=device)
    free[slots.long()] = False
    pools[:, free] = torch.nan
    mask = random_mask(nodes, seed).to(device)
    tree.begin(slots[:prefix], slots[prefix:], mask)
    out = tree.run(q, *pools)
    own = slots[prefix:].long()
    ends = [torch.tensor([0, length]) for length in (nodes, prefix, nodes * nodes)]
    wide = [t.float() for t in (q, pools[0, own], pools[1, own], *pools)]
    return out, tree_attention(*wide, ends[0], ends[1], slots[:prefix], mask.flatten(), ends[2], scale=shape.scale)


def test_bits_worked_by_hand():
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1, 0, 1], [0, 1, 1, 0, 0, 0, 0, 0, 1, 0]]).bool()
    assert pack_mask_bits(mask).tolist() == [[129, 2], [6, 1]]
    # FlashInfer's form: one run of bits over all rows
    assert pack_mask_bits(mask.flatten()).tolist() == [129, 0b00011010, 0b0100]


# 7-9: around one byte
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64, 2056])
def test_bits_unpack(columns: int):
    rows = torch.rand(2, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    unpacked = (pack_mask_bits(rows)[..., None] >> torch.arange(8)) & 1
    assert torch.equal(unpacked.flatten(-2)[:, :columns].bool(), rows)


def assert_close(out: Tensor, expected: Tensor, tolerance: float = 5e-6) -> None:
    # float32 sums of at most 100 terms in another order, with the masked ones between them
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_packs_by_hand():
    # FlashInfer's documented example, in its kernel's bit order: the first element is the lowest bit
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    packed, begins = pack_mask(mask, [4, 3, 4])
    assert packed.tolist() == [0b1101, 0b100, 0b1011] and begins.tolist() == [0, 1, 2, 3]
    packed, begins = pack_mask(mask)
    assert packed.tolist() == [0b11001101, 0b101] and begins.tolist() == [0, 2]
    assert packed.dtype == torch.uint8 and begins.dtype == torch.int32


# segments that end on, before and after a byte, and empty ones at either end
@pytest.mark.parametrize("lengths", [[8], [7, 9, 16], [0, 1, 0, 65, 3, 0], [], [0]], ids=str)
def test_every_bit_is_where_flashinfer_reads_it(lengths: list[int]):
    mask = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(len(lengths))) < 0.5
    packed, begins = pack_mask(mask, lengths)
    segments = mask.split(lengths)
    for begin, segment in zip(begins.tolist(), segments, strict=False):
        assert [bit(packed, begin, place) for place in range(len(segment))] == segment.tolist()
    pieces = [numpy.packbits(segment.numpy(), bitorder="little") for segment in segments]
    assert packed.tolist() == numpy.concatenate([*pieces, numpy.zeros(0, numpy.uint8)]).tolist()
    assert begins.diff().tolist() == [-(-length // 8) for length in lengths]


def test_any_number_but_zero_is_true():
    assert pack_mask(torch.tensor([0, 1, 2, 255], dtype=torch.uint8))[0].tolist() == [0b1110]


def test_refuses_lengths_that_do_not_fit():
    for lengths in ([3], [5, -1]):
        with pytest.raises(ValueError, match="add up to 4"):
            pack_mask(torch.ones(4, dtype=torch.bool), lengths)
    with pytest.raises(TypeError, match="pack_mask: mask"):
        pack_mask(torch.ones(4))


# no prefix, a bucket filled to the last key, one key more, the largest tree with the longest prefix
@pytest.mark.parametrize(("prefix", "nodes"), [(0, 1), (0, 7), (24, 8), (25, 8), (80, 20)])
def test_equals_the_reference(prefix: int, nodes: int):
    assert_close(*step(FlashInferTree(SHAPE, "cpu", wrapper=Wrapper), prefix, nodes, seed=prefix + nodes))


def test_a_bucket_is_planned_once_and_its_buffers_reused():
    tree = FlashInferTree(SHAPE, "cpu", wrapper=Wrapper)
    addresses = set()
    # a large step first: what it left behind must not leak into the smaller ones
    for seed, (prefix, nodes) in enumerate([(24, 8), (20, 5), (3, 1), (24, 8)]):
        out, expected = step(tree, prefix, nodes, seed)
        assert_close(out, expected)
        addresses.add((out.data_ptr(), Wrapper.made[0].buffers.custom_mask_buf.data_ptr()))
    assert len(addresses) == 1 and tree.buckets == ((8, 32),)
    assert [len(wrapper.plans) for wrapper in Wrapper.made] == [1]
    assert_close(*step(tree, 30, 5, 9))
    assert tree.buckets == ((8, 32), (8, 64)) and [len(wrapper.plans) for wrapper in Wrapper.made] == [1, 1]
    assert Wrapper.made[0].workspace is Wrapper.made[1].workspace


def test_plan_arguments():
    step(FlashInferTree(SHAPE, "cpu", wrapper=Wrapper), 30, 5, 0)
    (wrapper,) = Wrapper.made
    (plan,) = wrapper.plans
    assert plan.qo_indptr.tolist() == [0, 8] and plan.paged_kv_indptr.tolist() == [0, 64]
    assert (plan.num_qo_heads, plan.num_kv_heads, plan.head_dim_qk) == (4, 2, 64)
    assert plan.sm_scale == 64**-0.5 and plan.q_data_type == plan.kv_data_type == torch.float32
    assert wrapper.buffers.custom_mask_buf.numel() == 8 * 64 // 8 and wrapper.buffers.backend == "fa2"
    mask = wrapper.mask()
    assert mask[:5, :30].all() and torch.equal(mask[:5, 30:35], random_mask(5, 0)) and not mask[:5, 35:].any()
    # padding rows see one key, so that their softmax is defined
    assert (mask[5:].sum(dim=1) == 1).all()


def test_the_bucket_unused_for_longest_is_dropped():
    tree = FlashInferTree(SHAPE, "cpu", wrapper=Wrapper, max_buckets=2)
    for seed, prefix in enumerate([10, 40, 10, 70]):
        assert_close(*step(tree, prefix, 3, seed))
    assert tree.buckets == ((8, 32), (8, 96)) and len(Wrapper.made) == 3


@pytest.mark.parametrize("fault", ["big_endian", "prefix_hidden", "mask_ignored"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch):
    sound = flashinfer_tree.pack_mask_bits

    def broken(segment: Tensor) -> Tensor:
        if fault == "big_endian":
            return sound(segment.view(-1, 8).flip(1).flatten())
        whole = torch.ones_like(segment).view(8, 64)
        if fault == "prefix_hidden":
            whole[:, 0] = False
            whole &= segment.view(8, 64)
            whole[5:, 1] = True
        return sound(whole.flatten())

    monkeypatch.setattr(flashinfer_tree, "pack_mask_bits", broken)
    out, expected = step(FlashInferTree(SHAPE, "cpu", wrapper=Wrapper), 30, 5, 0)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(out, expected)


def test_refuses_by_name():
    tree = FlashInferTree(SHAPE, "cpu", wrapper=Wrapper)
    slots, mask = torch.arange(30, dtype=torch.int32), random_mask(4, 0)
    q, pool = torch.zeros(4, 4, 64), torch.zeros(SLOTS, 2, 64)
    with pytest.raises(RuntimeError, match="before begin"):
        tree.run(q, pool, pool)
    for arguments, name in (
        ((slots.float(), slots[:4], mask), "prefix_slots"),
        ((slots, slots[:4].short(), mask), "node_slots"),
        ((slots, slots[:5], mask), "mask"),
        ((slots, slots[:21], random_mask(21, 0)), "nodes"),
        ((slots, slots[:0], mask[:0, :0]), "nodes"),
        ((torch.arange(99), slots[:4], mask), "keys"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"FlashInferTree: {name}"):
            tree.begin(*arguments)
    tree.begin(slots, slots[:4], mask)
    for arguments, name in (
        ((q[:3], pool, pool), "q"),
        ((q, pool.half(), pool), "k_pool"),
        ((q, pool, pool[1:]), "v_pool"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"FlashInferTree: {name}"):
            tree.run(*arguments)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        TreeShape(heads=3, kv_heads=2, head_dim=64, max_nodes=1, max_keys=1)
    with pytest.raises(ValueError, match="max_nodes"):
        TreeShape(heads=2, kv_heads=2, head_dim=64, max_nodes=0, max_keys=1)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(flashinfer_tree.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"c2t-plugin\[flashinfer\]"):
        FlashInferTree(SHAPE, "cpu")


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None, reason="needs a GPU and FlashInfer"
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flashinfer_itself_equals_the_reference(head_dim: int):
    shape = TreeShape(heads=8, kv_heads=2, head_dim=head_dim, max_nodes=20, max_keys=120, node_step=8, key_step=32)
    tree = FlashInferTree(shape, "cuda")
    for seed, (prefix, nodes) in enumerate([(80, 20), (70, 17), (0, 1)]):
        # bfloat16 weights and outputs of values below 4
        assert_close(*step(tree, prefix, nodes, seed, "cuda"), tolerance=2e-2)
