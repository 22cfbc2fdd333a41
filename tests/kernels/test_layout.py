"""Tree layouts: a tree worked by hand, properties of the reference, and the kernels against it.

Longer than most files, as layouts and masks are tested on the same trees.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2t_kernels.fused import layout, masks
from c2t_kernels.reference.layout import ORDERS, TreeLayout, build_tree
from c2t_kernels.reference.masks import full_mask, pack_mask_bits
from tests.support.kernels.strided import apart

QUIET = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# The interpreter takes some 30 ms for each tree.
INTERPRETED = settings(QUIET, max_examples=15)


class Trees(tuple):
    """parent_ids, keep, token_ids, root_tokens, prefix_lens."""

    def to(self, device: str) -> Trees:
        return Trees(tensor.to(device) for tensor in self)


def trees(parents: list[list[int]], keep: list[list[bool]], prefixes: list[int]) -> Trees:
    parent_ids = torch.tensor(parents, dtype=torch.int32)
    bs, slots = parent_ids.shape
    token_ids = 100 + torch.arange(bs * slots).view(bs, slots)
    return Trees((parent_ids, torch.tensor(keep), token_ids, 50 + torch.arange(bs), torch.tensor(prefixes)))


@st.composite
def forests(draw: st.DrawFn, max_requests: int = 3, max_slots: int = 14) -> tuple[Trees, int]:
    """Random trees with an ancestor-closed kept part, and a bucket that may be too small for them."""
    bs, slots = draw(st.integers(1, max_requests)), draw(st.integers(1, max_slots))
    parents, keep = [], []
    for _ in range(bs):
        parents.append([draw(st.integers(-1, slot - 1)) for slot in range(slots)])
        kept: list[bool] = []
        for slot in range(slots):
            above = parents[-1][slot]
            kept.append(draw(st.sampled_from([True, True, True, False])) and (above < 0 or kept[above]))
        keep.append(kept)
    prefixes = draw(st.lists(st.integers(0, 30), min_size=bs, max_size=bs))
    return trees(parents, keep, prefixes), draw(st.integers(1, slots + 4))


def equal(found: TreeLayout, expected: TreeLayout) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )  # field by field, so that a failure shows both layouts


def reachable(tree: TreeLayout, i: int) -> list[tuple[int, int]]:
    """(place, parent's place) of every node that a verifier can walk to, children before next siblings."""
    found = []
    waiting = [(int(tree.retrieve_next_token[i, 0]), 0)]
    while waiting:
        place, parent = waiting.pop()
        if place >= 0:
            found.append((place, parent))
            waiting.append((int(tree.retrieve_next_sibling[i, place]), parent))
            waiting.append((int(tree.retrieve_next_token[i, place]), place))
    return found


#        root
#     0    1    2        slots; 4 is not kept
#     3   4 5   6
#               7
HAND = trees([[-1, -1, -1, 0, 1, 1, 2, 6]], [[True] * 4 + [False] + [True] * 3], [10])


def test_a_tree_worked_by_hand():
    tree = build_tree(*HAND, bucket=10)
    assert tree.slots.tolist() == [[-1, 0, 1, 2, 3, 5, 6, 7, -2, -2]]
    assert tree.counts.tolist() == [8]
    assert tree.draft_tokens.tolist() == [[50, 100, 101, 102, 103, 105, 106, 107, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 2, 3, 6, -1, -1]]
    assert tree.positions.tolist() == [[10, 11, 11, 11, 12, 12, 12, 13, 10, 10]]
    assert tree.retrieve_index.tolist() == [list(range(10))]
    assert tree.retrieve_next_token.tolist() == [[1, 4, 5, 6, -1, -1, 7, -1, -1, -1]]
    assert tree.retrieve_next_sibling.tolist() == [[-1, 2, 3, -1, -1, -1, -1, -1, -1, -1]]
    assert tree.mask[0, 7].nonzero().flatten().tolist() == [0, 3, 6, 7]
    assert tree.mask[0, 9].nonzero().flatten().tolist() == [9]


def test_orders_worked_by_hand():
    assert build_tree(*HAND, bucket=8, order="depth_first").slots.tolist() == [[-1, 0, 3, 1, 5, 2, 6, 7]]
    # the subtree of 2 has three nodes, those of 0 and 1 have two each
    assert build_tree(*HAND, bucket=8, order="heavy_path").slots.tolist() == [[-1, 2, 6, 7, 0, 3, 1, 5]]


def test_a_full_bucket_drops_the_last_slots():
    tree = build_tree(*HAND, bucket=4, order="heavy_path")
    assert tree.slots.tolist() == [[-1, 0, 1, 2]] and tree.counts.tolist() == [4]


def test_a_tree_without_nodes_is_its_root():
    tree = build_tree(*trees([[-1, 0]], [[False, False]], [7]), bucket=3)
    assert tree.counts.tolist() == [1] and tree.slots.tolist() == [[-1, -2, -2]]
    assert tree.retrieve_next_token.tolist() == [[-1] * 3] and tree.positions.tolist() == [[7] * 3]
    assert torch.equal(tree.mask[0], torch.eye(3, dtype=torch.bool))


@QUIET
@given(forest=forests(), order=st.sampled_from(ORDERS))
def test_links_mask_and_positions_say_the_same_tree(forest: tuple[Trees, int], order: str):
    given_trees, bucket = forest
    parent_ids, keep, token_ids, root_tokens, prefix_lens = given_trees
    tree = build_tree(*given_trees, bucket=bucket, order=order)
    for i in range(len(keep)):
        count = int(tree.counts[i])
        assert count == min(bucket, 1 + int(keep[i].sum()))
        slots = tree.slots[i].tolist()
        assert sorted(slots[1:count]) == keep[i].nonzero().flatten().tolist()[: count - 1]
        assert tree.draft_tokens[i, 0] == root_tokens[i]
        walked = reachable(tree, i)
        # each node but the root once, and never a pad
        assert sorted(place for place, _ in walked) == list(range(1, count))
        for place, parent in walked:
            assert parent < place and tree.parents[i, place] == parent
            assert max(int(parent_ids[i, slots[place]]), -1) == slots[parent]
            assert tree.draft_tokens[i, place] == token_ids[i, slots[place]]
            assert torch.equal(tree.mask[i, place], tree.mask[i, parent] | (torch.arange(bucket) == place))
        depth = tree.mask[i].sum(dim=1) - 1
        assert torch.equal(tree.positions[i], prefix_lens[i] + depth)
        assert torch.equal(tree.mask[i, count:], torch.eye(bucket, dtype=torch.bool)[count:])
        if order != "insertion":
            # depth first: a subtree is one run of places
            assert [place for place, _ in walked] == list(range(1, count))


@QUIET
@given(forest=forests())
def test_heavy_path_visits_larger_subtrees_first(forest: tuple[Trees, int]):
    given_trees, bucket = forest
    tree = build_tree(*given_trees, bucket=bucket, order="heavy_path")
    for i in range(len(tree.counts)):
        size = tree.mask[i].sum(dim=0).tolist()
        for place in range(1, int(tree.counts[i])):
            sibling = int(tree.retrieve_next_sibling[i, place])
            assert sibling < 0 or size[place] >= size[sibling]


@INTERPRETED
@given(forest=forests(), order=st.sampled_from(ORDERS))
def test_kernel_equals_reference(forest: tuple[Trees, int], order: str, device: str):
    given_trees, bucket = forest[0].to(device), forest[1]
    assert equal(
        layout.build_tree(*given_trees, bucket=bucket, order=order),
        build_tree(*given_trees, bucket=bucket, order=order),
    )


# 257 requests with one draft token or none: many programs, smallest bucket with a link
def test_kernel_on_257_requests(device: str):
    keep = [[i % 3 > 0] for i in range(257)]
    many = trees([[-1]] * 257, keep, list(range(257))).to(device)
    tree = build_tree(*many, bucket=2)
    assert equal(layout.build_tree(*many, bucket=2), tree)
    prefixes, counts = many[4] % 3, tree.counts
    # the last two elements do not fit
    capacity = int((counts * (prefixes + counts)).sum()) - 2
    expected, found = (op(tree.mask, prefixes, capacity=capacity, counts=counts) for op in (full_mask, masks.full_mask))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_tables_of_several_requests_may_lie_apart(device: str):
    several = trees([[-1, 0, 0], [-1, -1, 1], [-1, 0, 1]], [[True] * 3, [True, True, False], [True] * 3], [7, 8, 9])
    several = several.to(device)
    found = layout.build_tree(*(apart(table) for table in several[:3]), *several[3:], bucket=4)
    assert equal(found, build_tree(*several, bucket=4))


# 70 places: several tiles of nodes, a bucket that is no power of two; 90 slots do not all fit
@pytest.mark.parametrize("order", ORDERS)
def test_kernel_on_a_large_tree_with_strided_tables(order: str, device: str):
    generator = torch.Generator().manual_seed(3)
    parents = [[int(torch.randint(-1, s, (1,), generator=generator)) if s else -1 for s in range(90)]]
    large = trees(parents, [[True] * 90], [1000])
    wide = [torch.cat([table, table], dim=1)[:, :90].to(device) for table in large[:3]]
    arguments = Trees((*wide, *large.to(device)[3:]))
    expected = build_tree(*arguments, bucket=70, order=order)
    out = TreeLayout(*(torch.empty_like(tensor) for tensor in expected))
    found = layout.build_tree(*arguments, bucket=70, order=order, out=out)
    assert found.mask is out.mask and equal(found, expected)


def test_an_empty_batch_is_no_error(device: str):
    none = Trees(torch.zeros(0, 3, dtype=torch.int64, device=device) for _ in range(3))
    columns = (torch.zeros(0, dtype=torch.int64, device=device),) * 2
    assert layout.build_tree(none[0], none[1].bool(), none[2], *columns, bucket=4).mask.shape == (0, 4, 4)


def test_full_mask_worked_by_hand():
    tree = build_tree(*trees([[-1, -1]], [[True, True]], [2]), bucket=3)
    mask, indptr = full_mask(tree.mask, torch.tensor([2]), capacity=15)
    assert indptr.tolist() == [0, 15]
    assert mask.view(3, 5).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]


@INTERPRETED
@given(forest=forests(), ragged=st.booleans(), short=st.integers(0, 9))
def test_full_mask_kernel_equals_reference(forest: tuple[Trees, int], ragged: bool, short: int, device: str):
    given_trees, bucket = forest[0].to(device), forest[1]
    prefix_lens = given_trees[4]
    tree = build_tree(*given_trees, bucket=bucket)
    counts = tree.counts if ragged else None
    needed = int(full_mask(tree.mask, prefix_lens, capacity=1, counts=counts)[1][-1])
    capacity = max(needed - short, 1)
    expected, expected_indptr = full_mask(tree.mask, prefix_lens, capacity=capacity, counts=counts)
    found, indptr = masks.full_mask(tree.mask, prefix_lens, capacity=capacity, counts=counts)
    assert torch.equal(indptr, expected_indptr) and torch.equal(found, expected)
    for i in range(len(tree.counts)):
        size = int(tree.counts[i]) if ragged else bucket
        if expected_indptr[i + 1] <= capacity:
            rows = expected[expected_indptr[i] : expected_indptr[i + 1]].view(size, -1)
            assert rows[:, : prefix_lens[i]].all()
            assert torch.equal(rows[:, prefix_lens[i] :], tree.mask[i, :size, :size])


def test_bits_worked_by_hand():
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1, 0, 1], [0, 1, 1, 0, 0, 0, 0, 0, 1, 0]]).bool()
    assert pack_mask_bits(mask).tolist() == [[129, 2], [6, 1]]
    # FlashInfer's form: one run of bits over all rows
    assert pack_mask_bits(mask.flatten()).tolist() == [129, 0b00011010, 0b0100]


# 7-9: around one byte; 2056: two programs of 256 bytes, the second with one
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64, 2056])
def test_bits_kernel_equals_reference_and_unpacks(columns: int, device: str):
    mask = (torch.rand(2, 3, columns + 2, generator=torch.Generator().manual_seed(columns)) < 0.5).to(device)
    rows = mask[:, 0, 1 : columns + 1]
    expected = pack_mask_bits(rows)
    assert torch.equal(masks.pack_mask_bits(rows), expected)
    unpacked = (expected[..., None] >> torch.arange(8, device=device)) & 1
    assert torch.equal(unpacked.flatten(-2)[:, :columns].bool(), rows)
    whole = mask.contiguous()
    assert torch.equal(masks.pack_mask_bits(whole), pack_mask_bits(whole))


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (0, torch.zeros(1, 8), TypeError, "parent_ids"),
        (0, torch.zeros(1, 7, dtype=torch.int32), ValueError, "parent_ids"),
        (1, torch.zeros(1, 8), TypeError, "keep"),
        (1, torch.zeros(1, 0, dtype=torch.bool), ValueError, "slots"),
        (2, torch.zeros(8, 1, dtype=torch.int64), ValueError, "token_ids"),
        (3, torch.zeros(2, dtype=torch.int64), ValueError, "root_tokens"),
        (4, torch.zeros(1), TypeError, "prefix_lens"),
    ],
)
def test_build_tree_refuses_what_it_cannot_take(place: int, value: Tensor, error: type[Exception], message: str):
    arguments = list(HAND)
    arguments[place] = value
    with pytest.raises(error, match=message):
        layout.build_tree(*arguments, bucket=8)


@pytest.mark.parametrize("change", [{"bucket": 0}, {"bucket": 2000}, {"bucket": 8, "order": "breadth_first"}])
def test_build_tree_refuses_what_it_does_not_know(change: dict):
    with pytest.raises(ValueError, match=r"build_tree: (bucket|order)"):
        layout.build_tree(*HAND, **change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tree_mask": torch.zeros(2, 3, 3)}, TypeError, "tree_mask must be bool"),
        ({"tree_mask": torch.zeros(2, 3, 4, dtype=torch.bool)}, ValueError, "tree_mask must be contiguous"),
        ({"tree_mask": torch.zeros(0, 3, 3, dtype=torch.bool)}, ValueError, "requests must be between 1"),
        ({"prefix_lens": torch.zeros(2)}, TypeError, "prefix_lens must be int32 or int64"),
        ({"prefix_lens": torch.zeros(3, dtype=torch.int64)}, ValueError, "prefix_lens must have shape"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, TypeError, "counts must be int32"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"out": torch.zeros(7, dtype=torch.bool)}, ValueError, "out must have shape"),
        ({"indptr": torch.zeros(3, dtype=torch.int32)}, TypeError, "indptr must be int64"),
    ],
)
def test_full_mask_refuses_what_it_cannot_take(change: dict, error: type[Exception], message: str):
    arguments = {
        "tree_mask": torch.zeros(2, 3, 3, dtype=torch.bool),
        "prefix_lens": torch.zeros(2, dtype=torch.int64),
        "capacity": 20,
        **change,
    }
    with pytest.raises(error, match=f"full_mask: {message}"):
        masks.full_mask(**arguments)


@pytest.mark.parametrize(
    ("mask", "out", "error", "message"),
    [
        (torch.zeros(8), None, TypeError, "mask must be bool"),
        (torch.zeros((), dtype=torch.bool), None, ValueError, "mask must be"),
        (torch.zeros(8, 4, dtype=torch.bool).t(), None, ValueError, "mask must have stride 1"),
        (torch.zeros(2, 3, 16, dtype=torch.bool)[..., :8], None, ValueError, r"mask must be \(n,\)"),
        (torch.zeros(9, dtype=torch.bool), torch.zeros(1, dtype=torch.uint8), ValueError, "out must have shape"),
    ],
)
def test_pack_mask_bits_refuses_what_it_cannot_take(
    mask: Tensor, out: Tensor | None, error: type[Exception], message: str
):
    with pytest.raises(error, match=f"pack_mask_bits: {message}"):
        masks.pack_mask_bits(mask, out=out)
