"""Tree attention over a paged prefix against its float32 reference, torch's own attention and DySpec's block counts.

The interpreter runs one program at a time, so a shape is here only for an edge that no other shape has. One file, since
every test makes its batch with the same builder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from c2t_kernels.attention import kernel as attention_kernel
from c2t_kernels.attention import split as attention_split
from c2t_kernels.attention.kernel import tree_attention
from c2t_kernels.attention.reference import tree_attention as reference
from c2t_kernels.attention.split import Launch, default_launch, requests_at_a_time

# 0: padding request; 1: plain decode; 9, 30, 17: trees that end inside, at two and at one more than a tile of 16 rows
NODES = (0, 1, 9, 30, 17, 0)
# nothing, one key, one less and one more than a block of 64 keys, several shares
PREFIXES = (64, 300, 0, 63, 65, 1)
SMALL = Launch(block_rows=16, block_keys=32)
# float32 sums of at most 330 terms in another order: a few units in the last place of values around 1
FLOAT_TOLERANCE = 5e-6
# On a GPU two compilations of the kernel, as with and without a mask, may add the same numbers in another order.
OTHER_FORM = dict.fromkeys(("atol", "rtol"), FLOAT_TOLERANCE if torch.cuda.is_available() else 0.0)


@dataclass
class Case:
    """One batch, the arguments of tree_attention in order."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_pool: Tensor
    v_pool: Tensor
    cu_nodes: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    mask: Tensor | None
    mask_indptr: Tensor | None

    def __iter__(self):
        return iter(vars(self).values())


def random_parents(nodes: int, generator: torch.Generator) -> list[int]:
    """Every node's parent, any earlier node with equal chance; -1 for the root, which is node 0."""
    return [-1, *(int(torch.randint(node, (1,), generator=generator)) for node in range(1, nodes))][:nodes]


def tree_mask(parents: list[int]) -> Tensor:
    """(nodes, nodes) bool: each node sees itself and its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def random_tree(nodes: int, generator: torch.Generator) -> Tensor:
    return tree_mask(random_parents(nodes, generator))


def ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def make_case(
    device: str,
    nodes: Sequence[int] = NODES,
    prefixes: Sequence[int] = PREFIXES,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    chains: Sequence[int] = (),
    trees: bool = True,
    pad_rows: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Case:
    generator = torch.Generator().manual_seed(sum(nodes) + heads + head_dim)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows, slots = sum(nodes) + pad_rows, sum(prefixes) + 7
    masks = [
        torch.zeros(0, dtype=torch.bool) if i in chains else random_tree(n, generator).flatten()
        for i, n in enumerate(nodes)
    ]
    return Case(
        noise(rows, heads, head_dim),
        noise(rows, kv_heads, head_dim),
        noise(rows, kv_heads, head_dim),
        noise(slots, kv_heads, head_dim),
        noise(slots, kv_heads, head_dim),
        ends(nodes).to(device),
        ends(prefixes).to(device),
        torch.randperm(slots, generator=generator)[: sum(prefixes)].int().to(device),
        torch.cat(masks).to(device) if trees else None,
        ends([len(m) for m in masks]).to(device) if trees else None,
    )


def assert_matches(case: Case, tolerance: float = FLOAT_TOLERANCE, **how) -> None:
    out = tree_attention(*case, **how)
    expected = reference(*(t.float() if t is not None and t.is_floating_point() else t for t in case))
    last = int(case.cu_nodes[-1])
    torch.testing.assert_close(out[:last].float(), expected[:last], atol=tolerance, rtol=tolerance)
    assert out[last:].isnan().all(), "padding rows were written"


def one_request(device: str, nodes: int, prefix: int, **shape) -> Case:
    return make_case(device, (nodes,), (prefix,), pad_rows=0, **shape)


def torch_attention(case: Case) -> Tensor:
    """The only request of a tree case by torch's attention."""
    slots = case.kv_indices.long()
    nodes = len(case.q)
    keys, values = (
        torch.cat([pool[slots], new]) for pool, new in ((case.k_pool, case.k_new), (case.v_pool, case.v_new))
    )
    seen = torch.cat([torch.ones(nodes, len(slots), dtype=torch.bool), case.mask.cpu().view(nodes, nodes)], dim=1)
    q, k, v = (t.transpose(0, 1)[None] for t in (case.q, keys, values))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen.to(q.device), enable_gqa=True)[0].transpose(0, 1)


def test_reference_equals_torch_attention(device: str):
    case = one_request(device, 17, 40, heads=6, kv_heads=2)
    torch.testing.assert_close(reference(*case), torch_attention(case), atol=FLOAT_TOLERANCE, rtol=FLOAT_TOLERANCE)


def test_equals_torch_attention(device: str):
    case = one_request(device, 17, 40, heads=6, kv_heads=2)
    out = tree_attention(*case, launch=SMALL)
    torch.testing.assert_close(out, torch_attention(case), atol=FLOAT_TOLERANCE, rtol=FLOAT_TOLERANCE)


# 1 split writes the output itself; 2 and 4 combine, and with 4 most requests leave shares without a key
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_ragged_trees_with_padding(device: str, splits: int):
    assert_matches(make_case(device), launch=replace(SMALL, splits=splits))


# group 1: multi-head attention; 4 and 8: usual groups; 3: nodes that cross from one tile into the next
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (8, 1), (6, 2)], ids=["1", "4", "8", "3"])
def test_head_groups(device: str, heads: int, kv_heads: int):
    case = make_case(device, (9, 0, 2), (65, 5, 0), heads=heads, kv_heads=kv_heads)
    assert_matches(case, launch=replace(SMALL, splits=2))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_head_dims(device: str, head_dim: int):
    assert_matches(make_case(device, (9, 1), (65, 130), head_dim=head_dim), launch=replace(SMALL, splits=2))


@pytest.mark.parametrize("splits", [1, 4])
def test_chains_without_a_mask(device: str, splits: int):
    assert_matches(make_case(device, trees=False), launch=replace(SMALL, splits=splits))


def test_chains_beside_trees(device: str):
    assert_matches(make_case(device, chains=(2, 4)), launch=SMALL)


def test_a_chain_equals_its_mask(device: str):
    chain = one_request(device, 20, 33, trees=False)
    mask = torch.ones(20, 20, dtype=torch.bool, device=device).tril().flatten()
    masked = replace(chain, mask=mask, mask_indptr=ends([400]).to(device))
    torch.testing.assert_close(
        tree_attention(*chain, launch=SMALL), tree_attention(*masked, launch=SMALL), **OTHER_FORM
    )


def test_default_launch(device: str):
    # few programs, so the default splits; max_nodes bounds the grid
    assert default_launch(2, 9, 4, 1, 64).splits == attention_split.MAX_SPLITS
    assert_matches(make_case(device, (9, 3), (260, 7), heads=4), max_nodes=9)


@pytest.mark.parametrize("slots", [40, 140])
@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("live", [(5, 0, 1, 1, 2), (1,) * 9, (0, 0, 3), ()])
def test_each_program_takes_requests_in_turn(
    device: str, monkeypatch: pytest.MonkeyPatch, live: tuple[int, ...], trees: bool, slots: int
):
    """Of a captured batch's slots most are empty: two requests at a time are enough for all that are not."""
    monkeypatch.setattr(attention_split, "WANTED_PROGRAMS", 4)
    monkeypatch.setattr(attention_kernel, "SLOTS", 64)
    asked: list[tuple[int, ...]] = []

    def noted(*numbers: int) -> int:
        asked.append(numbers)
        return requests_at_a_time(*numbers)

    monkeypatch.setattr(attention_kernel, "requests_at_a_time", noted)
    nodes = (*live, *[0] * (slots - len(live)))
    prefixes = [17 * (i % 4) for i in range(slots)]
    assert_matches(make_case(device, nodes, prefixes, trees=trees), launch=replace(SMALL, splits=2), max_nodes=7)
    assert asked == [(slots, -(-(sum(live) + 3) // 7), 2)] and requests_at_a_time(*asked[0]) == 2


@pytest.mark.parametrize(
    ("nodes", "max_nodes", "filled"),
    [((7, *[0] * 6), 7, 1), ((1,) * 7, 7, 1), ((1,) * 7, None, 7), ((3, 4, 2), 4, 3), ((2, 1), 4, 1)],
)
def test_a_captured_batch_is_cut_for_the_whole_windows_that_its_rows_are(
    device: str, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], max_nodes: int | None, filled: int
):
    """Capture leaves room for a request of each row, where one request with them all has the GPU to itself."""
    asked: list[tuple[int, ...]] = []

    def noted(*shape: int) -> Launch:
        asked.append(shape)
        return default_launch(*shape)

    monkeypatch.setattr(attention_kernel, "default_launch", noted)
    # so that a CPU has not too many programs to run
    monkeypatch.setattr(attention_split, "WANTED_PROGRAMS", 8)
    prefixes = (300, *[65] * 6)[: len(nodes)]
    assert_matches(make_case(device, nodes, prefixes, heads=4, pad_rows=0), max_nodes=max_nodes)
    assert asked == [(filled, max_nodes or sum(nodes), 4, 1, 64)]


@pytest.mark.parametrize(
    ("heads", "splits", "head_dim", "together"), [(6, 2, 64, 8), (3, 5, 128, 4), (5, 32, 128, 1), (3, 32, 256, 1)]
)
def test_shares_of_several_heads_are_put_together(device: str, heads: int, splits: int, head_dim: int, together: int):
    assert attention_split.combine_blocks(heads, splits, head_dim)["BLOCK_HEADS"] == together
    generator = torch.Generator().manual_seed(0)
    lse = 3 * torch.randn(4, heads, splits, generator=generator)
    partial = torch.randn(4, heads, splits, head_dim, generator=generator)
    # shares without a key, in one head all of them
    lse[0, :, 1], lse[1, heads - 1] = -torch.inf, -torch.inf
    expected = (torch.softmax(lse * math.log(2), -1)[..., None] * partial).sum(2)
    expected[1, heads - 1] = 0.0
    # nobody reads what they have, and the last row is nobody's
    partial[lse == -torch.inf] = torch.nan
    out = torch.full((4, heads, head_dim), torch.nan, device=device)
    attention_split.combine(partial.to(device), lse.to(device), torch.tensor([0, 1, 3], device=device), out)
    torch.testing.assert_close(out[:3].cpu(), expected[:3], atol=FLOAT_TOLERANCE, rtol=FLOAT_TOLERANCE)
    assert bool(out[3].isnan().all())


def test_default_launch_fits_its_rows():
    for requests, nodes, heads, kv_heads, head_dim in ((1, 1, 32, 8, 128), (256, 8, 28, 4, 128), (4, 64, 32, 32, 256)):
        launch = default_launch(requests, nodes, heads, kv_heads, head_dim)
        rows = nodes * heads // kv_heads
        assert min(rows, 32) <= launch.block_rows < max(2 * rows, 17)
    assert default_launch(256, 8, 32, 8, 128).splits == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device: str, dtype: torch.dtype):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 in tl.dot")
    # softmax weights and output are rounded to the dtype: 8 bits of bfloat16, 11 of float16, of values below 4
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert_matches(make_case(device, (9, 2), (65, 0), dtype=dtype), tolerance, launch=replace(SMALL, splits=2))


def test_strided_rows_and_wide_integers(device: str):
    case = make_case(device, (5, 9), (33, 2), heads=4, kv_heads=2)
    wide = torch.cat([case.q, case.k_new, case.v_new], dim=1)
    pools = torch.stack([case.k_pool, case.v_pool], dim=1)
    views = replace(
        case,
        q=wide[:, :4],
        k_new=wide[:, 4:6],
        v_new=wide[:, 6:],
        k_pool=pools[:, 0],
        v_pool=pools[:, 1],
        cu_nodes=case.cu_nodes.long(),
        kv_indptr=case.kv_indptr.long(),
        kv_indices=case.kv_indices.long(),
        mask=case.mask.to(torch.uint8),
        mask_indptr=case.mask_indptr.long(),
    )
    # heads with another head between them
    views = replace(
        views,
        **{name: torch.stack([x := getattr(views, name), x + 1], dim=2)[:, :, 0] for name in ("q", "k_new", "v_new")},
        **{name: torch.stack([x := getattr(views, name), x + 1], dim=2)[:, :, 0] for name in ("k_pool", "v_pool")},
    )
    assert not views.q.is_contiguous() and views.k_pool.stride(1) == 2 * case.k_pool.shape[2]
    how = {"launch": replace(SMALL, splits=2), "max_nodes": 9}
    last = int(case.cu_nodes[-1])
    torch.testing.assert_close(tree_attention(*views, **how)[:last], tree_attention(*case, **how)[:last], **OTHER_FORM)


def test_scale(device: str):
    case = one_request(device, 3, 9)
    out = tree_attention(*case, scale=0.5, launch=SMALL)
    torch.testing.assert_close(out, reference(*case, scale=0.5), atol=FLOAT_TOLERANCE, rtol=FLOAT_TOLERANCE)
    assert (out - tree_attention(*case, launch=SMALL)).abs().max() > 1e-2


@pytest.mark.parametrize("splits", [1, 2])
def test_a_node_that_sees_nothing_is_zero(device: str, splits: int):
    case = one_request(device, 4, 0)
    case.mask.view(4, 4)[2] = False
    out = tree_attention(*case, launch=replace(SMALL, splits=splits))
    assert torch.equal(out[2], torch.zeros_like(out[2])) and torch.equal(reference(*case)[2], out[2])
    assert out[3].abs().sum() > 0


def test_pool_slots_outside_the_prefix_do_not_matter(device: str):
    case = make_case(device, (9, 1), (33, 64))
    before = tree_attention(*case, launch=SMALL)
    free = torch.ones(len(case.k_pool), dtype=torch.bool, device=device)
    free[case.kv_indices.long()] = False
    case.k_pool[free] = case.v_pool[free] = torch.nan
    assert torch.equal(tree_attention(*case, launch=SMALL)[:10], before[:10])


def nonempty_blocks(mask: Tensor, block_nodes: int = 32, block_keys: int = 32) -> int:
    """How many blocks of a tree's mask hold anything (DySpec appendix C, definition 1 and the last column of table 5).

    mask: (nodes, nodes) bool or uint8. The last block of each direction may be partial.
    """
    nodes = mask.shape[0]
    fill = (0, -nodes % block_keys, 0, -nodes % block_nodes)
    blocks = pad(mask != 0, fill).unflatten(0, (-1, block_nodes)).unflatten(2, (-1, block_keys))
    return int(blocks.any(dim=3).any(dim=1).sum())


def made_and_depth_first(nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """The mask of one random tree in the order its nodes were made, and depth first with older children first."""
    parents = random_parents(nodes, torch.Generator().manual_seed(seed))
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, nodes):
        children[parents[node]].append(node)
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack += reversed(children[order[-1]])
    mask = tree_mask(parents)
    return mask, mask[order][:, order]


@pytest.fixture
def folded(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each block of keys that a program folds in; in the interpreter, where its parts can be watched."""
    if device == "cuda":
        pytest.skip("counted in the interpreter")
    fold, seen = attention_kernel._attend, list[int]()

    def watched(*arguments: object) -> object:
        seen.append(1)
        return fold(*arguments)

    monkeypatch.setattr(attention_kernel, "_attend", watched)
    return seen


@pytest.mark.parametrize("depth_first", [False, True], ids=["made", "depth_first"])
def test_the_nonempty_blocks_alone_are_computed(device: str, depth_first: bool, folded: list[int]):
    mask = made_and_depth_first(150, 0)[depth_first]
    case = replace(one_request(device, 150, 0, heads=1), mask=mask.flatten().to(device))
    out = tree_attention(*case, launch=Launch(32, 32))
    assert len(folded) == nonempty_blocks(mask)
    # 25 blocks, of which 15 are on or below the diagonal
    assert len(folded) < 15 if depth_first else len(folded) == 15
    torch.testing.assert_close(out, reference(*case), atol=FLOAT_TOLERANCE, rtol=FLOAT_TOLERANCE)


# DySpec's table 5, block count without and with reordering; the paper does not say how its random trees were drawn
@pytest.mark.parametrize(("nodes", "made", "ordered"), [(256, 36.0, 22.5), (512, 135.5, 52.8), (1024, 490.2, 119.3)])
def test_block_counts_of_dyspec_table_5(nodes: int, made: float, ordered: float):
    counts = [[nonempty_blocks(mask) for mask in made_and_depth_first(nodes, seed)] for seed in range(10)]
    found_made, found_ordered = (sum(column) / 10 for column in zip(*counts, strict=True))
    assert found_made == pytest.approx(made, rel=0.01)
    # a mean of 10 trees moves by a few percent from one set of seeds to the next
    assert found_ordered == pytest.approx(ordered, rel=0.1)


def test_grouped_heads_share_the_blocks_of_a_tile(device: str, folded: list[int]):
    # 16 rows of a group of 4 are 4 nodes, in 6 tiles, each of which has the prefix in one block
    case = one_request(device, 21, 5, heads=8, kv_heads=2)
    tree_attention(*case, launch=Launch(16, 16, splits=2))
    assert len(folded) == 2 * (nonempty_blocks(case.mask.view(21, 21), 4, 16) + 6)


def test_nonempty_blocks_by_hand():
    assert nonempty_blocks(torch.zeros(40, 40, dtype=torch.bool)) == 0
    assert nonempty_blocks(torch.eye(33, dtype=torch.bool)) == 2
    assert nonempty_blocks(torch.ones(65, 65, dtype=torch.bool).tril()) == 6
    corner = torch.zeros(65, 65, dtype=torch.bool)
    corner[64, 0] = True
    assert nonempty_blocks(corner) == 1
    assert nonempty_blocks(torch.eye(8, dtype=torch.bool), 4, 2) == 4


def without_mask(case: Case) -> Case:
    return replace(case, mask=torch.ones_like(case.mask))


def without_last_key(case: Case) -> Case:
    fewer = case.kv_indptr.clone()
    fewer[1:] -= 1
    return replace(case, kv_indptr=fewer)


def without_a_share(case: Case) -> Case:
    return replace(case, kv_indptr=torch.zeros_like(case.kv_indptr))


@pytest.mark.parametrize("fault", [without_mask, without_last_key, without_a_share])
def test_a_planted_fault_is_seen(device: str, fault, monkeypatch: pytest.MonkeyPatch):
    case = one_request(device, 9, 65)
    sound = tree_attention
    monkeypatch.setitem(globals(), "tree_attention", lambda *args, **how: sound(*fault(Case(*args)), **how))
    with pytest.raises(AssertionError, match="not close"):
        assert_matches(case, launch=SMALL)


def test_many_requests(device: str, many: int):
    nodes, prefixes = [i % 3 for i in range(many)], [i % 5 for i in range(many)]
    case = make_case(device, nodes, prefixes, heads=1, chains=range(0, many, 2))
    assert_matches(case, max_nodes=2, launch=SMALL)


def test_no_rows_or_requests(device: str):
    case = one_request(device, 0, 4)
    assert tree_attention(*case).shape == (0, 2, 64)
    none = make_case(device, (), (), pad_rows=2, trees=False)
    assert tree_attention(*none).isnan().all()


REFUSED = {
    "q": (lambda c: {"q": c.q.double()}, TypeError),
    "head_dim": (lambda c: {"q": c.q[..., :48]}, ValueError),
    "k_new must be a tensor, got NoneType": (lambda c: {"k_new": None}, TypeError),
    "k_pool must be a tensor, got NoneType": (lambda c: {"k_pool": None}, TypeError),
    "k_new": (lambda c: {"k_new": c.k_new[:-1]}, ValueError),
    "heads": (lambda c: {"q": c.q[:, :3], "k_new": c.k_new.expand(-1, 2, -1)}, ValueError),
    "v_new": (lambda c: {"v_new": c.v_new.half()}, TypeError),
    "k_pool": (lambda c: {"k_pool": c.k_pool.expand(-1, 2, -1)}, ValueError),
    "k_pool must have stride": (lambda c: {"k_pool": c.k_pool[..., ::2].repeat(1, 1, 4)[..., ::2]}, ValueError),
    "v_pool": (lambda c: {"v_pool": c.v_pool[1:]}, ValueError),
    "cu_nodes": (lambda c: {"cu_nodes": c.cu_nodes.float()}, TypeError),
    "kv_indptr": (lambda c: {"kv_indptr": c.kv_indptr[1:]}, ValueError),
    "kv_indices": (lambda c: {"kv_indices": c.kv_indices.short()}, TypeError),
    "mask": (lambda c: {"mask": c.mask.float()}, TypeError),
    "mask_indptr": (lambda c: {"mask_indptr": None}, ValueError),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_refuses_by_name(device: str, argument: str):
    change, error = REFUSED[argument]
    case = make_case(device, (3,), (4,), heads=4, pad_rows=0)
    with pytest.raises(error, match=f"tree_attention: .*{argument}"):
        tree_attention(*replace(case, **change(case)))


def test_refuses_what_has_no_meaning(device: str):
    case = one_request(device, 2, 2)
    for how in ({"scale": float("nan")}, {"max_nodes": -1}, {"out": torch.empty(1, 2, 64, device=device)}):
        with pytest.raises(ValueError, match=f"tree_attention: {next(iter(how))}"):
            tree_attention(*case, **how)
    for block in (8, 48):
        with pytest.raises(ValueError, match="block_rows"):
            Launch(block, 32)
    with pytest.raises(ValueError, match="splits"):
        Launch(16, 32, splits=33)
    with pytest.raises(ValueError, match="request 0 has 2 nodes and 3 mask"):
        reference(*replace(case, mask=case.mask[:3], mask_indptr=ends([3])))
    with pytest.raises(ValueError, match="together"):
        reference(*replace(case, mask_indptr=None))
