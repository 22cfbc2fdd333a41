"""References in the place of kernels that are wrong."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import c2t_kernels
from c2t_kernels.attention import kernel as attention
from c2t_kernels.masks import kernel as masks
from c2t_kernels.twins import TWINS, compute_in_torch
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.kernel_checks import Shapes, check
from c2t_plugin.scorer import _fused_statistics
from tests.support.kernels.sides import reference


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("a wrong kernel ran")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels that have a twin are wrong, for one test."""
    for name in TWINS:
        monkeypatch.setattr(import_module(f"{getattr(c2t_kernels, name).__module__}.kernel"), name, broken)


def faults(device: str) -> list[str]:
    small = {"vocabulary": 64, "requests": 3, "width": 4, "top_m": 20, "heads": (4, 2), "head_dim": 64, "prefix": 5}
    network = NodeClassifier(ClassifierSpec()).network(device)
    shapes = Shapes(torch.device(device), network, dtype=torch.float32, **small)  # type: ignore[arg-type]
    return [each.name for each in check(shapes) if not each.ok]


def test_twins_are_what_the_check_asks_of_kernels(device: str, wrong: None, monkeypatch: pytest.MonkeyPatch):
    # slow in the interpreter, and without a twin
    monkeypatch.setattr(attention, "tree_attention", reference.tree_attention)
    assert faults(device) == list(TWINS)
    for done, name in enumerate(list(TWINS), start=1):
        compute_in_torch(name)
        if done in (1, len(TWINS)):
            assert faults(device) == list(TWINS)[done:]


def test_an_operation_without_a_twin_is_refused():
    with pytest.raises(KeyError):
        compute_in_torch("pack_ragged")


def test_a_scorer_that_exists_already_takes_the_twin(device: str, wrong: None):
    """Its buffers are a kernel's; the twin fills them."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(device)
    statistics = _fused_statistics(2, 9, torch.device(device))
    with pytest.raises(RuntimeError):
        statistics(logits)
    compute_in_torch("draft_stats")
    for rows in (2, 3):
        found = statistics(logits[:rows])
        torch.testing.assert_close(tuple(found), tuple(reference.draft_stats(logits[:rows], 9)), atol=0, rtol=0)
    # the next call overwrites them
    assert statistics(logits[:1]).entropy.data_ptr() == statistics(logits[:2]).entropy.data_ptr()


def test_a_mask_is_written_where_it_is_asked_for_and_no_further(device: str, wrong: None):
    compute_in_torch("full_mask")
    tree, prefix = torch.ones(2, 3, 3, dtype=torch.bool, device=device).tril(), torch.tensor([4, 1], device=device)
    counts = torch.tensor([3, 2], dtype=torch.int32, device=device)
    expected, ends = reference.full_mask(tree, prefix, capacity=60, counts=counts)
    buffer = torch.ones(60, dtype=torch.bool, device=device)
    out, starts = masks.full_mask(tree, prefix, capacity=60, counts=counts, out=buffer)
    assert out is buffer and starts.tolist() == ends.tolist() and int(starts[-1]) == 27
    assert buffer[:27].tolist() == expected[:27].tolist() and bool(buffer[27:].all())
    made, _ = masks.full_mask(tree, prefix, capacity=20, counts=counts)
    assert made.tolist() == expected[:20].tolist()
