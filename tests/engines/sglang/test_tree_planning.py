"""One budget for the nodes of all trees, against every choice that there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from c2t_kernels import clip_trees, fill_spare_rows  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.profile import REPEATS, WARM_UP  # noqa: E402
from c2t_plugin.planner.tree_planner import TreePlanner  # noqa: E402
from c2t_plugin.trees.planning import plan  # noqa: E402
from tests.engines.sglang.test_tree_policies import STATES, grower, grown  # noqa: E402

NODES, STEPS, TOPK = 5, 3, 2
# With little else to pay for, rows beyond the sixth are dear.
CURVE = CostCurve(verify=((1, 1.0), (6, 1.1), (16, 6.0)), draft=((1, 0.05), (16, 0.1)), fixed=0.1)
SIZES = (4, 8, 12)
# of trees that are neither empty nor whole
SEED = 6


def planner_of(curve: CostCurve | None = CURVE, sizes: tuple[int, ...] = ()) -> TreePlanner:
    planner = TreePlanner(curve, None, topk=TOPK, steps=STEPS, most=NODES, device=torch.device("cpu"))
    planner.packed = True
    planner.sizes = lambda: sizes
    return planner


def deciding(planner: TreePlanner, own: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda counts, keys: planner.keep(counts, own, keys)


def random_trees(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, which columns belong to the tree, and the lowest confidence on the way: two requests."""
    generator = torch.Generator().manual_seed(seed)
    columns = NODES + 1
    parents = torch.stack(
        [torch.tensor([int(torch.randint(-1, c, (1,), generator=generator)) for c in range(columns)]) for _ in "ab"]
    )
    # of a few values only, so that some are equal
    own = torch.randint(1, 9, (2, columns), generator=generator) / 9
    key, keep = own.clone(), torch.rand(2, columns, generator=generator) < 0.8
    keep[0, int(torch.randint(columns, (1,), generator=generator))] = False
    keep[1, -1] = False
    for row, column in itertools.product(range(2), range(columns)):
        if parents[row, column] >= 0:
            key[row, column] = torch.minimum(own[row, column], key[row, parents[row, column]])
            keep[row, column] &= keep[row, parents[row, column]]
    return parents, keep, key


def closed(parents: list[int], nodes: set[int]) -> bool:
    return all(parents[node] < 0 or parents[node] in nodes for node in nodes)


def subsets(parents: Tensor, keep: Tensor) -> Iterator[set[int]]:
    """Every part of a tree that hangs together from the root."""
    columns = keep.nonzero().flatten().tolist()
    for count in range(len(columns) + 1):
        for chosen in itertools.combinations(columns, count):
            if closed(parents.tolist(), set(chosen)):
                yield set(chosen)


def rate(key: Tensor, forest: tuple[set[int], ...], sizes: tuple[int, ...]) -> float:
    """Expected output tokens per second of a step that verifies these nodes."""
    rows = len(forest) + sum(map(len, forest))
    padded = next((size for size in sizes if size >= rows), rows)
    expected = len(forest) + sum(float(key[row, node].double()) for row, tree in enumerate(forest) for node in tree)
    drafting = (STEPS - 1) * CURVE.draft_s(len(forest) * TOPK)
    return expected / (float(CURVE.verify_s(torch.tensor(padded))) + drafting + CURVE.fixed)


@pytest.mark.parametrize("sizes", [(), SIZES])
@pytest.mark.parametrize("seed", range(12))
def test_no_other_forest_gives_more_per_second(seed: int, sizes: tuple[int, ...]):
    parents, keep, key = random_trees(seed)
    found = plan(keep, key, NODES, deciding(planner_of(sizes=sizes), torch.zeros(2, dtype=torch.bool)))
    chosen = tuple(set(row.nonzero().flatten().tolist()) for row in found)
    assert all(closed(row.tolist(), tree) for row, tree in zip(parents, chosen, strict=True))
    assert not (found & ~keep).any()
    forests = list(itertools.product(*(list(subsets(parents[row], keep[row])) for row in range(2))))
    best = max(rate(key, forest, sizes) for forest in forests)
    assert rate(key, chosen, sizes) == pytest.approx(best, rel=1e-9)
    # of what is as good no larger one: what is not verified is not computed
    fewest = min(sum(map(len, forest)) for forest in forests if rate(key, forest, sizes) > best * (1 - 1e-9))
    assert sum(map(len, chosen)) == fewest


def test_the_cases_above_are_of_many_kinds():
    """Without trees of several shapes, of which a part is taken, they would say nothing."""
    kinds = set()
    for seed in range(12):
        _, keep, key = random_trees(seed)
        found = plan(keep, key, NODES, deciding(planner_of(), torch.zeros(2, dtype=torch.bool)))
        kinds.add((tuple(keep.sum(1).tolist()), tuple(found.sum(1).tolist())))
    assert len(kinds) > 8
    assert any(0 < sum(taken) < sum(sizes) for sizes, taken in kinds)
    assert any(0 in taken for _, taken in kinds)


def test_a_request_with_a_beta_of_its_own_keeps_its_tree():
    _, keep, key = random_trees(SEED)
    own = torch.tensor([False, True])
    found = plan(keep, key * 0.01, NODES, deciding(planner_of(), own))
    assert torch.equal(found[1], keep[1])
    assert keep[1].any()
    assert not found[0].any()


def test_every_size_is_tried_while_it_measures():
    planner = planner_of(curve=None)
    _, keep, key = random_trees(SEED)
    seen = set()
    for _ in range(WARM_UP + REPEATS * (NODES + 1)):
        planner.begin(2)
        found = plan(keep, key, NODES, deciding(planner, torch.zeros(2, dtype=torch.bool)))
        seen.add(tuple(found.sum(1).tolist()))
    sizes = keep.sum(1).tolist()
    assert seen == {tuple(min(size, length) for size in sizes) for length in range(NODES + 1)}


@pytest.mark.parametrize("name", ["c2t", "prob"])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 12])
def test_the_surest_nodes_of_a_grown_tree_hang_together(name: str, count: int):
    """The grower's own key, on trees with more places than nodes."""
    made = grower(name, 4, 3, 12)
    whole = grown(made, 3)
    parents, keep, _, key = made.end()
    found = plan(keep, key, 12, lambda sizes, keys: sizes.clamp(max=count))
    assert found.sum(1).tolist() == [min(count, len(tree)) for tree in whole]
    for row in range(STATES):
        nodes = set(found[row].nonzero().flatten().tolist())
        assert closed(parents[row].tolist(), nodes)
        left = keep[row] & ~found[row]
        assert not (nodes and left.any()) or key[row][found[row]].min() >= key[row][left].max()


def test_what_decides_sees_the_keys_from_the_surest_on():
    _, keep, key = random_trees(1)
    seen = []

    def note(sizes: Tensor, keys: Tensor) -> Tensor:
        seen.append((sizes, keys))
        return sizes

    assert torch.equal(plan(keep, key, NODES, note), keep)
    ((sizes, keys),) = seen
    for row in range(2):
        falling = key[row][keep[row]].sort(descending=True).values
        assert torch.equal(keys[row, : int(sizes[row])], falling)


def test_of_equal_nodes_the_ones_drafted_first_are_taken():
    """A path as long as a sort that is not stable needs to turn equals around."""
    keep, key = torch.ones(1, 200, dtype=torch.bool), torch.full((1, 200), 0.5)
    found = plan(keep, key, 200, lambda sizes, keys: sizes // 2)
    assert found[0].nonzero().flatten().tolist() == list(range(100))


def test_no_more_is_taken_than_there_is():
    _, keep, key = random_trees(SEED)
    assert torch.equal(plan(keep, key, NODES, lambda sizes, keys: sizes + 1), keep)


# --- rows that earlier steps decide on


@pytest.mark.parametrize("room", [0, 1, 3, 6, 20])
@pytest.mark.parametrize("seed", range(12))
def test_the_surest_nodes_of_all_trees_are_left(seed: int, room: int):
    parents, keep, key = random_trees(seed)
    found, _, surest = clip_trees(keep, key, NODES, room)
    order = sorted(map(tuple, keep.nonzero().tolist()), key=lambda place: (-float(key[place]), place))
    assert {tuple(place) for place in found.nonzero().tolist()} == set(order[:room])
    for row in range(2):
        assert closed(parents[row].tolist(), set(found[row].nonzero().flatten().tolist()))
        falling = key[row][keep[row]].sort(descending=True).values
        assert torch.equal(surest[row], torch.cat([falling, torch.zeros(NODES - len(falling))]))


def rows_by_rule(steps: list[Tensor], requests: int, sizes: tuple[int, ...]) -> int:
    """Of the last eight known steps, the rows that would have brought most per second, the fewest of equals."""
    gains = [step.flatten().sort(descending=True).values.double().tolist() for step in steps[-8:]]
    drafting = (STEPS - 1) * CURVE.draft_s(requests * TOPK) + CURVE.fixed
    rates: dict[int, float] = {}
    for count in range(requests * NODES + 1):
        rows = next((size for size in sizes if size >= requests + count), requests + count)
        filled = min(rows - requests, requests * NODES)
        expected = requests + sum(sum(each[:filled]) for each in gains) / len(gains)
        rates.setdefault(rows, expected / (float(CURVE.verify_s(torch.tensor(rows))) + drafting))
    return max(rates, key=lambda rows: (rates[rows], -rows))


@pytest.mark.parametrize("sizes", [(), SIZES])
def test_rows_follow_from_trees_two_steps_ago(sizes: tuple[int, ...]):
    planner = planner_of(sizes=sizes)
    planner.wait_for_nothing(2, "cpu")
    generator, known, found = torch.Generator().manual_seed(4), list[Tensor](), set[int | None]()
    for step in range(30):
        planner.begin(2)
        rows = planner.plan_rows(2)
        found.add(rows)
        assert rows == (rows_by_rule(known[:-1], 2, sizes) if step >= 2 else 2 * (NODES + 1))
        scale = (0.02, 0.2, 1.0)[step // 10]
        known.append((scale * torch.rand(2, NODES, generator=generator)).sort(1, descending=True).values)
        planner.note(known[-1])
    assert len(found) > 1 + (not sizes), "there was nothing to decide"


def test_what_is_not_known_to_be_less_is_taken_for_certain():
    found = []
    for odd in (torch.inf, 2.0, torch.nan, 1.0):
        planner = planner_of()
        planner.wait_for_nothing(2, "cpu")
        for _ in range(4):
            planner.begin(2)
            found.append(planner.plan_rows(2))
            planner.note(torch.tensor([[odd, 0.5, 0.2, 0.1, 0.0]] * 2))
    assert found == found[-4:] * 4 and found[-1] not in (None, 2, 2 * (NODES + 1))


def test_whole_trees_are_verified_where_nothing_is_to_be_decided():
    measuring = planner_of(curve=None)
    measuring.wait_for_nothing(2, "cpu")
    found = set()
    for _ in range(WARM_UP + REPEATS * (NODES + 1)):
        measuring.begin(2)
        found.add(measuring.plan_rows(2))
    assert found == {2 * (length + 1) for length in range(NODES + 1)}
    planner = planner_of()
    assert planner.plan_rows(2) is None, "it waits"
    planner.wait_for_nothing(2, "cpu")
    for _ in range(4):
        planner.begin(2, whole=True)
        assert planner.plan_rows(2) == 2 * (NODES + 1)
        planner.note(torch.zeros(2, NODES))


# --- rows that a captured graph has beside those of the trees

NOBODY = torch.zeros(2, dtype=torch.bool)


def hanging(parents: Tensor, keep: Tensor) -> Tensor:
    """Which of the columns that are not kept hang on one that is, or on the root."""
    return ~keep & ((parents < 0) | keep.gather(1, parents.clamp_min(0)))


def next_best(keep: Tensor, key: Tensor, more: Tensor, spare: int) -> Tensor:
    """One node after the other, the surest first, as long as there is room in its tree."""
    found = keep.clone()
    for row, column in sorted(map(tuple, more.nonzero().tolist()), key=lambda place: (-float(key[place]), place)):
        if spare and found[row].sum() < NODES:
            found[row, column] = True
            spare -= 1
    return found


@pytest.mark.parametrize("sizes", [SIZES, (2, 9), (3,)])
@pytest.mark.parametrize("seed", range(12))
def test_spare_rows_are_the_next_best_nodes(seed: int, sizes: tuple[int, ...]):
    """Of all trees, never more than one may have, and none behind the largest graph."""
    parents, keep, key = random_trees(seed)
    more = hanging(parents, keep)
    # of what hangs on nothing the grower says that it is no node
    key = key.masked_fill(~(keep | more), -torch.inf)
    rows = 2 + int(keep.sum())
    spare = next((size for size in sizes if size >= rows), rows) - rows
    found = fill_spare_rows(keep, key, NODES, torch.tensor(sizes), None)
    assert torch.equal(found, next_best(keep, key, more, spare))
    trees = [set(tree.nonzero().flatten().tolist()) for tree in found]
    assert all(closed(row.tolist(), tree) for row, tree in zip(parents, trees, strict=True))


def test_the_passes_above_have_spare_rows_and_trees_without_room():
    found = []
    for seed in range(12):
        parents, keep, key = random_trees(seed)
        key = key.masked_fill(~(keep | hanging(parents, keep)), -torch.inf)
        found.append(fill_spare_rows(keep, key, NODES, torch.tensor(SIZES), NOBODY).sum(1) - keep.sum(1))
    given = torch.stack(found)
    assert (given[:, 0] > 0).any() and (given[:, 1] > 0).any() and (given.sum(1) == 0).any()


def test_a_node_of_unknown_confidence_takes_the_place_of_none_that_is_kept():
    keep = torch.zeros(2, 2 * NODES, dtype=torch.bool)
    keep[:, NODES:] = True
    key = torch.full(keep.shape, 0.5).masked_fill(~keep, torch.inf)
    assert torch.equal(fill_spare_rows(keep, key, NODES, torch.tensor([4 * NODES]), None), keep)
    keep[:, -1] = False
    assert fill_spare_rows(keep, key, NODES, torch.tensor([2 * NODES + 1]), None).sum(1).tolist() == [NODES, NODES - 1]


def test_a_threshold_of_ones_own_gets_no_spare_rows():
    parents, keep, key = random_trees(SEED)
    key = key.masked_fill(~(keep | hanging(parents, keep)), -torch.inf)
    found = [
        fill_spare_rows(keep, key, NODES, torch.tensor([12]), torch.tensor(own))
        for own in ([False, True], [True, True])
    ]
    assert torch.equal(found[0][1], keep[1]) and found[0][0].sum() > keep[0].sum()
    assert torch.equal(found[1], keep)


@pytest.mark.parametrize("most", [4, 9])
@pytest.mark.parametrize("name", ["c2t", "prob"])
def test_what_a_grower_offers_for_spare_rows_hangs_on_its_trees(name: str, most: int):
    """Whatever it drafted from dead places, or below a request's own depth, is no node."""
    made = grower(name, 3, 3, most, 0.15)
    made.set_requests(torch.tensor([4, 1, 6]), [None] * 3, [None, 1, 0])
    grown(made, 3)
    parents, keep, _, key = made.end()
    more = ~keep & (key > 0)
    whole = keep.sum(1, keepdim=True) == most
    assert more[:2].any(1).all() and not (more & ~hanging(parents, keep) & ~whole).any()
    assert not more[1, made.layers("cpu") > 1].any() and not more[2].any()


def test_a_slot_without_a_seed_offers_nothing():
    made = grower("c2t", 3, 2, 6, 0.15)
    made.begin(torch.tensor([3]))
    assert not (made.end()[3] > 0).any()
