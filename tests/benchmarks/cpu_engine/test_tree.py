"""The stub's tree build and greedy verification, on a hand-written tree and against slow definitions of both."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

NONE = -1


@dataclass
class Tree:
    """What a tree build fills in, for B requests of n nodes."""

    mask: torch.Tensor
    positions: torch.Tensor
    index: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor


def empty_tree(batch: int, n: int, mask_size: int) -> Tree:
    links = torch.full((3, batch, n), -1)
    return Tree(torch.ones(mask_size, dtype=torch.bool), torch.full((batch * n,), -1), *links)


def build(
    sgl_kernel: ModuleType,
    parent_list: list[list[int]],
    selected: list[list[int]],
    seq_lens: list[int],
    topk: int,
    depth: int,
    mode: int = 1,
) -> Tree:
    batch, n = len(selected), len(selected[0]) + 1
    tree = empty_tree(batch, n, batch * n * n if mode == 1 else sum(n * (length + n) for length in seq_lens))
    parents = torch.tensor(parent_list) if parent_list[0] else torch.empty(batch, 0, dtype=torch.int64)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        *(parents, torch.tensor(selected), torch.tensor(seq_lens), tree.mask, tree.positions),
        *(tree.index, tree.next_token, tree.next_sibling, topk, depth, n, mode),
    )
    return tree


# topk 2, 3 steps. Candidates 0, 1 grow from the root; step 2 expands candidates 0, 1 into 2..5, step 3 expands
# candidates 3, 4 into 6..9. parent_list: -1 for the root's block, then the parent of each later block of two.
PARENTS = [-1, 0, 1, 3, 4]
SELECTED = [0, 1, 3, 4, 6]
#   root -> c0 (node 1), c1 (node 2); c0 -> c3 (node 3); c1 -> c4 (node 4); c3 -> c6 (node 5)
PARENT_OF_NODE = [NONE, 0, 0, 1, 2, 3]


def test_a_tree_by_hand(sgl_kernel: ModuleType) -> None:
    tree = build(sgl_kernel, [PARENTS], [SELECTED], [7], topk=2, depth=3)
    assert tree.index.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert tree.next_token.tolist() == [[1, 3, 4, 5, NONE, NONE]]
    assert tree.next_sibling.tolist() == [[NONE, 2, NONE, NONE, NONE, NONE]]
    assert tree.positions.tolist() == [7, 8, 8, 9, 9, 10]
    assert tree.mask.view(6, 6).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


def test_chains(sgl_kernel: ModuleType) -> None:
    tree = build(sgl_kernel, [[-1, 0, 1, 2]] * 2, [[0, 1, 2, 3]] * 2, [3, 10], topk=1, depth=4)
    assert tree.index.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert tree.next_token.tolist() == [[1, 2, 3, 4, NONE]] * 2
    assert tree.next_sibling.tolist() == [[NONE] * 5] * 2
    assert tree.positions.tolist() == [*range(3, 8), *range(10, 15)]
    assert torch.equal(tree.mask.view(2, 5, 5), torch.ones(2, 5, 5, dtype=torch.bool).tril())


def test_one_step(sgl_kernel: ModuleType) -> None:
    """With a single step there is no parent list at all."""
    tree = build(sgl_kernel, [[]], [[0, 2]], [4], topk=3, depth=1)
    assert tree.next_token.tolist() == [[1, NONE, NONE]]
    assert tree.next_sibling.tolist() == [[NONE, 2, NONE]]


def test_a_child_without_its_parent_is_left_out(sgl_kernel: ModuleType) -> None:
    """Candidate 6 grows from candidate 3, which was not selected: SGLang links neither."""
    tree = build(sgl_kernel, [PARENTS], [[0, 1, 4, 6, 8]], [7], topk=2, depth=3)
    assert tree.next_token.tolist() == [[1, NONE, 3, 5, NONE, NONE]]
    assert tree.mask.view(6, 6)[4].int().tolist() == [1, 0, 0, 0, 1, 0]
    assert tree.positions.tolist() == [7, 8, 8, 9, 8, 10]


def test_full_mask_has_the_prefix_in_front(sgl_kernel: ModuleType) -> None:
    short = build(sgl_kernel, [PARENTS] * 2, [SELECTED] * 2, [3, 5], topk=2, depth=3)
    full = build(sgl_kernel, [PARENTS] * 2, [SELECTED] * 2, [3, 5], topk=2, depth=3, mode=0)
    first, second = full.mask[: 6 * 9].view(6, 9), full.mask[6 * 9 :].view(6, 11)
    assert first[:, :3].all()
    assert second[:, :5].all()
    assert torch.equal(torch.stack([first[:, 3:], second[:, 5:]]), short.mask.view(2, 6, 6))


def test_build_refuses_a_bit_packed_mask(sgl_kernel: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="got tree_mask_mode 2"):
        build(sgl_kernel, [PARENTS], [SELECTED], [7], topk=2, depth=3, mode=2)


def random_parents(rng: random.Random, n: int) -> list[int]:
    return [NONE, *(rng.randrange(node) for node in range(1, n))]


def paths_mask(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for start in range(len(parents)):
        node = start
        while node != NONE:
            mask[start, node] = True
            node = parents[node]
    return mask


def children(parents: list[int], of: int) -> list[int]:
    return [node for node, parent in enumerate(parents) if parent == of]


def links(forest: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """(next_token, next_sibling): the first child, and the next child of the same parent, in node order."""
    first, after = [], []
    for parents in forest:
        first.append([next(iter(children(parents, node)), NONE) for node in range(len(parents))])
        after.append(
            [
                NONE if parent == NONE else next((s for s in children(parents, parent) if s > node), NONE)
                for node, parent in enumerate(parents)
            ]
        )
    return first, after


@pytest.mark.parametrize("seed", range(5))
def test_links_from_a_mask(sgl_kernel: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    forest = [random_parents(rng, 9) for _ in range(3)]
    masks = torch.stack([paths_mask(parents) for parents in forest])
    tree = empty_tree(3, 9, 1)
    sgl_kernel.speculative.reconstruct_indices_from_tree_mask(
        *(masks.view(-1), torch.tensor([4, 0, 9]), tree.positions),
        *(tree.index, tree.next_token, tree.next_sibling, 3, 9),
    )
    assert (tree.next_token.tolist(), tree.next_sibling.tolist()) == links(forest)
    depth = masks.sum(-1) - 1
    assert torch.equal(tree.positions.view(3, 9), depth + torch.tensor([[4], [0], [9]]))
    assert tree.index.view(-1).tolist() == list(range(27))


def verify(
    sgl_kernel: ModuleType, forest: list[list[int]], tokens: list[list[int]], wanted: list[list[int]], max_nodes: int
) -> tuple[list[int], list[list[int]], list[int]]:
    """(predicts, accept_index, accept_token_num)"""
    batch, n = len(tokens), len(tokens[0])
    next_token, next_sibling = links(forest)
    predicts = torch.zeros(batch * n, dtype=torch.int32)
    accept_index = torch.full((batch, max_nodes), NONE, dtype=torch.int32)
    count = torch.full((batch,), NONE, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=count,
        candidates=torch.tensor(tokens),
        retrive_index=torch.arange(batch * n).view(batch, n),
        retrive_next_token=torch.tensor(next_token),
        retrive_next_sibling=torch.tensor(next_sibling),
        target_predict=torch.tensor(wanted),
    )
    return predicts.tolist(), accept_index.tolist(), count.tolist()


def test_verify_by_hand(sgl_kernel: ModuleType) -> None:
    """The second child matches, its only child too, and the bonus comes after that one."""
    tokens = [[50, 11, 12, 13, 14, 15]]
    wanted = [[12, 0, 14, 0, 99, 0]]
    predicts, accept_index, count = verify(sgl_kernel, [PARENT_OF_NODE], tokens, wanted, max_nodes=4)
    assert accept_index == [[0, 2, 4, NONE]]
    assert count == [2]
    assert [predicts[node] for node in (0, 2, 4)] == [12, 14, 99]


def test_verify_chains(sgl_kernel: ModuleType) -> None:
    """Nothing, one, all and, in the last, a chain cut to its root."""
    chain = [NONE, 0, 1, 2]
    tokens = [[9, 1, 2, 3]] * 4
    wanted = [[7, 2, 3, 4], [1, 7, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    predicts, accept_index, count = verify(
        sgl_kernel, [chain, chain, chain, [NONE, NONE, 1, 2]], tokens, wanted, max_nodes=4
    )
    assert count == [0, 1, 3, 0]
    assert accept_index == [[0, -1, -1, -1], [4, 5, -1, -1], [8, 9, 10, 11], [12, -1, -1, -1]]
    assert (predicts[0], predicts[4:6], predicts[8:12], predicts[12]) == (7, [1, 7], [1, 2, 3, 4], 1)


@pytest.mark.parametrize("seed", range(5))
def test_verify_follows_the_definition(sgl_kernel: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    forest = [random_parents(rng, 8) for _ in range(6)]
    tokens = [[rng.randrange(3) for _ in range(8)] for _ in forest]
    wanted = [[rng.randrange(3) for _ in range(8)] for _ in forest]
    predicts, accept_index, count = verify(sgl_kernel, forest, tokens, wanted, max_nodes=5)
    for row, parents in enumerate(forest):
        path = [0]
        while len(path) < 5:
            fitting = [c for c in children(parents, path[-1]) if tokens[row][c] == wanted[row][path[-1]]]
            if not fitting:
                break
            path.append(fitting[0])
        assert accept_index[row] == [8 * row + node for node in path] + [NONE] * (5 - len(path))
        assert count[row] == len(path) - 1
        assert [predicts[8 * row + node] for node in path] == [wanted[row][node] for node in path]


def test_verify_refuses_wrong_types(sgl_kernel: ModuleType) -> None:
    four = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"candidates: got dtype torch\.int32"):
        sgl_kernel.verify_tree_greedy_cpu(
            *(torch.zeros(4, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)),
            *(torch.zeros(1, dtype=torch.int32), four.int(), four, four, four, four),
        )


def test_bonus_tokens(sgl_kernel: ModuleType) -> None:
    bonus = torch.zeros(3, dtype=torch.int32)
    accepted = torch.arange(12, dtype=torch.int32).view(3, 4)
    sgl_kernel.fill_bonus_tokens_cpu(accepted, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


def test_slots_of_accepted_nodes(sgl_kernel: ModuleType) -> None:
    index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    out = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, torch.tensor([40, 41, 42, 43, 44, 45]), out)
    assert out.tolist() == [40, 42, 43, 0, 0, 0]


@pytest.mark.parametrize(
    ("select", "expected"), [(None, [2, 3, 70, 71, 6, 7, 72]), ([1, 3, 5], [2, 70, 3, 71, 6, 72, 7])]
)
def test_rotation_of_input_ids(sgl_kernel: ModuleType, select: list[int] | None, expected: list[int]) -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    where = None if select is None else torch.tensor(select)
    sgl_kernel.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3, 4]), torch.tensor([3, 1, 3]), torch.tensor([[70], [71], [72]]), where
    )
    assert ids.tolist() == expected
