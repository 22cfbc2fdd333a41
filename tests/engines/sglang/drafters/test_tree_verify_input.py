"""What tree mode hands to SGLang's verification, against what SGLang's own tree build makes of the same nodes."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

import c2t_kernels  # noqa: E402
from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.engines.sglang.step import step_of  # noqa: E402
from tests.benchmarks.cpu_engine.test_tree import PARENTS, SELECTED, build  # noqa: E402

# Candidate c of that tree grew from candidate PARENTS[c // 2].
PARENT_IDS = [PARENTS[candidate // 2] for candidate in range(10)]
PREFIXES = [3, 5]
STEPS = 3


@pytest.fixture
def verify_input(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.drafters import tree_input

    return tree_input


def made(
    verify_input: Any, width: int, form: str = "QLEN_ONLY", buffer: torch.Tensor | None = None, packed: bool = False
) -> Any:
    """Two requests, the second with its last node cut."""
    mode = verify_input.TreeMaskMode[form]
    owned = None if buffer is None else SimpleNamespace(buffer=buffer, mode=mode, fits=lambda bs: True)
    keep = torch.zeros(2, 10, dtype=torch.bool)
    keep[:, SELECTED] = True
    keep[1, SELECTED[-1]] = False
    return verify_input.build_verify_input(
        SimpleNamespace(seq_lens=torch.tensor(PREFIXES), seq_lens_sum=sum(PREFIXES)),
        SimpleNamespace(bonus_tokens=torch.tensor([50, 60], dtype=torch.int32)),
        (torch.tensor([PARENT_IDS] * 2), keep, torch.arange(100, 120).view(2, 10)),
        width,
        attn_backend=SimpleNamespace(verify_mask=owned, max_context_len=64),
        topk=2,
        num_steps=STEPS,
        tree_mask_mode=mode,
        packed=packed,
    )


@pytest.mark.parametrize(("form", "mode"), [("QLEN_ONLY", 1), ("FULL_MASK", 0)])
def test_sglang_builds_the_same_from_the_same_nodes(verify_input: Any, sgl_kernel: ModuleType, form: str, mode: int):
    found = made(verify_input, 6, form)
    stock = build(sgl_kernel, [PARENTS] * 2, [SELECTED] * 2, PREFIXES, topk=2, depth=STEPS, mode=mode)
    first = 36 if mode else 6 * (PREFIXES[0] + 6)
    assert torch.equal(found.custom_mask[:first], stock.mask[:first])
    assert found.positions[:6].tolist() == stock.positions[:6].tolist()
    for ours, theirs in (
        (found.retrieve_index, stock.index),
        (found.retrieve_next_token, stock.next_token),
        (found.retrieve_next_sibling, stock.next_sibling),
    ):
        assert ours[0].tolist() == theirs[0].tolist()
    assert found.draft_token.tolist() == [50, *(100 + c for c in SELECTED), 60, *(110 + c for c in SELECTED[:-1]), 0]
    assert step_of(found).kept.tolist() == [5, 4]


def reachable(found: Any, row: int) -> set[int]:
    """Nodes that a verifier can come to."""
    seen: set[int] = set()
    waiting = [0]
    while waiting:
        node = waiting.pop()
        if node >= 0 and node not in seen:
            seen.add(node)
            waiting += [int(found.retrieve_next_token[row, node]), int(found.retrieve_next_sibling[row, node])]
    return seen


@pytest.mark.parametrize("width", [6, 8, 16])
def test_no_pad_can_be_reached_or_seen(verify_input: Any, width: int):
    found = made(verify_input, width)
    masks = found.custom_mask.view(2, width, width)
    for row, nodes in enumerate((6, 5)):
        assert reachable(found, row) == set(range(nodes))
        assert torch.equal(masks[row, nodes:, :], torch.eye(width, dtype=torch.bool)[nodes:])
        assert not masks[row, :nodes, nodes:].any()


@pytest.mark.parametrize(("width", "deepest"), [(2, 2), (6, 4), (16, 4)])
def test_a_path_is_as_long_as_the_tree_allows(verify_input: Any, width: int, deepest: int):
    found = made(verify_input, width)
    assert (found.max_tree_depth, found.tree_topk, found.draft_token_num) == (deepest, -1, width)


def test_nodes_that_do_not_fit_are_dropped_from_the_last(verify_input: Any):
    found = made(verify_input, 4)
    assert step_of(found).kept.tolist() == [3, 3]
    assert found.draft_token.tolist() == [50, 100, 101, 103, 60, 110, 111, 113]


@pytest.mark.parametrize("form", ["QLEN_ONLY", "FULL_MASK"])
def test_the_backends_own_buffer_is_written(verify_input: Any, form: str):
    buffer = torch.zeros(2000, dtype=torch.uint8)
    found = made(verify_input, 6, form, buffer)
    assert found.custom_mask is buffer
    expected = made(verify_input, 6, form).custom_mask
    assert torch.equal(buffer[: expected.numel()].bool(), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_a_gpus_buffer_is_filled_in_place(verify_input: Any, packed: bool, monkeypatch: pytest.MonkeyPatch):
    """By the kernel, of which tests/kernels show that it writes there; here another takes its place."""

    def full_mask(trees: Any, prefix_lens: Any, *, capacity: int, counts: Any, out: torch.Tensor) -> Any:
        assert (out.dtype, len(out)) == (torch.bool, capacity)
        mask, indptr = c2t_kernels.full_mask(trees, prefix_lens, capacity=capacity, counts=counts)
        out[: indptr[-1]] = mask[: indptr[-1]]
        return out, indptr

    # by name: imported here, before the kernels' tests are, Triton would not interpret theirs
    monkeypatch.setattr("c2t_kernels.masks.kernel.full_mask", full_mask)
    lengths = [nodes * (prefix + nodes) for nodes, prefix in zip((6, 5) if packed else (6, 6), PREFIXES, strict=True)]
    counts = torch.tensor([6, 5], dtype=torch.int32) if packed else None
    trees = made(verify_input, 6).custom_mask.view(2, 6, 6)
    buffer = torch.full((200,), 7, dtype=torch.uint8)
    starts = verify_input.fill_mask(buffer, trees, torch.tensor(PREFIXES), counts)
    assert starts.tolist() == [0, lengths[0], sum(lengths)]
    expected = made(verify_input, 6, "FULL_MASK", packed=packed).custom_mask
    assert torch.equal(buffer[: sum(lengths)].bool(), expected[: sum(lengths)])
    assert (buffer[sum(lengths) :] == 7).all()


@pytest.mark.parametrize("width", [6, 16])
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize(("form", "prefixes"), [("QLEN_ONLY", [0, 0]), ("FULL_MASK", PREFIXES)])
def test_a_packed_mask_has_no_pads(verify_input: Any, form: str, prefixes: list[int], owned: bool, width: int):
    """Each request's own rows and columns, one request after the other, whatever the width of the window."""
    trees = made(verify_input, width).custom_mask.view(2, width, width)
    expected = [
        torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), tree[:nodes, :nodes]], dim=1).flatten()
        for tree, nodes, prefix in zip(trees, (6, 5), prefixes, strict=True)
    ]
    buffer = torch.zeros(2000, dtype=torch.uint8) if owned else None
    packed = made(verify_input, width, form, buffer, packed=True)
    first, both = len(expected[0]), sum(map(len, expected))
    assert torch.equal(packed.custom_mask.bool()[:both], torch.cat(expected))
    assert packed.mask_starts.tolist() == [0, first, both]
    assert made(verify_input, width, form, buffer).mask_starts is None
