"""Tree layouts: a tree worked by hand, properties of the reference, and the kernel against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from c2t_kernels.tree_layout import kernel as fused
from c2t_kernels.tree_layout.reference import build_tree
from c2t_kernels.tree_layout.result import TreeLayout
from tests.support.kernels.forests import HAND, INTERPRETED, QUIET, Trees, forests, trees
from tests.support.kernels.strided import apart


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


def test_a_full_bucket_drops_the_last_slots():
    tree = build_tree(*HAND, bucket=4)
    assert tree.slots.tolist() == [[-1, 0, 1, 2]] and tree.counts.tolist() == [4]


def test_a_tree_without_nodes_is_its_root():
    tree = build_tree(*trees([[-1, 0]], [[False, False]], [7]), bucket=3)
    assert tree.counts.tolist() == [1] and tree.slots.tolist() == [[-1, -2, -2]]
    assert tree.retrieve_next_token.tolist() == [[-1] * 3] and tree.positions.tolist() == [[7] * 3]
    assert torch.equal(tree.mask[0], torch.eye(3, dtype=torch.bool))


@QUIET
@given(forest=forests())
def test_links_mask_and_positions_say_the_same_tree(forest: tuple[Trees, int]):
    given_trees, bucket = forest
    parent_ids, keep, token_ids, root_tokens, prefix_lens = given_trees
    tree = build_tree(*given_trees, bucket=bucket)
    for i in range(len(keep)):
        count = int(tree.counts[i])
        assert count == min(bucket, 1 + int(keep[i].sum()))
        slots = tree.slots[i].tolist()
        assert slots[1:count] == keep[i].nonzero().flatten().tolist()[: count - 1]
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


@INTERPRETED
@given(forest=forests())
def test_kernel_equals_reference(forest: tuple[Trees, int], device: str):
    given_trees, bucket = forest[0].to(device), forest[1]
    assert equal(
        fused.build_tree(*given_trees, bucket=bucket),
        build_tree(*given_trees, bucket=bucket),
    )


# requests with one draft token or none: many programs, smallest bucket with a link
def test_kernel_on_many_requests(device: str, many: int):
    keep = [[i % 3 > 0] for i in range(many)]
    drafted = trees([[-1]] * many, keep, list(range(many))).to(device)
    tree = build_tree(*drafted, bucket=2)
    assert equal(fused.build_tree(*drafted, bucket=2), tree)


def test_tables_of_several_requests_may_lie_apart(device: str):
    several = trees([[-1, 0, 0], [-1, -1, 1], [-1, 0, 1]], [[True] * 3, [True, True, False], [True] * 3], [7, 8, 9])
    several = several.to(device)
    found = fused.build_tree(*(apart(table) for table in several[:3]), *several[3:], bucket=4)
    assert equal(found, build_tree(*several, bucket=4))


# 70 places: several tiles of nodes, a bucket that is no power of two; 90 slots do not all fit
def test_kernel_on_a_large_tree_with_strided_tables(device: str):
    generator = torch.Generator().manual_seed(3)
    parents = [[int(torch.randint(-1, s, (1,), generator=generator)) if s else -1 for s in range(90)]]
    large = trees(parents, [[True] * 90], [1000])
    wide = [torch.cat([table, table], dim=1)[:, :90].to(device) for table in large[:3]]
    arguments = Trees((*wide, *large.to(device)[3:]))
    expected = build_tree(*arguments, bucket=70)
    assert equal(fused.build_tree(*arguments, bucket=70), expected)


def test_an_empty_batch_is_no_error(device: str):
    none = Trees(torch.zeros(0, 3, dtype=torch.int64, device=device) for _ in range(3))
    columns = (torch.zeros(0, dtype=torch.int64, device=device),) * 2
    assert fused.build_tree(none[0], none[1].bool(), none[2], *columns, bucket=4).mask.shape == (0, 4, 4)


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
        fused.build_tree(*arguments, bucket=8)


@pytest.mark.parametrize("bucket", [0, 2000])
def test_build_tree_refuses_such_a_bucket(bucket: int):
    with pytest.raises(ValueError, match="build_tree: bucket"):
        fused.build_tree(*HAND, bucket=bucket)
