"""What `c2t doctor --gpu` and a server's self-check try: right kernels pass, and each planted fault is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from c2t_kernels.attention import kernel as attention
from c2t_kernels.clip import kernel as clip
from c2t_kernels.masks import kernel as masks
from c2t_kernels.pack import kernel as pack
from c2t_kernels.score import kernel as score
from c2t_kernels.spare import kernel as spare
from c2t_kernels.stats import kernel as stats
from c2t_kernels.step import kernel as step
from c2t_kernels.stop import kernel as stop
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.kernel_checks import Checked, Shapes, check
from c2t_plugin.step_check import step_check

CHAINS = ["draft_stats", "score_chain", "early_stop", "pack_ragged"]
TREES = ["grow_layer", "fill_spare_rows", "clip_trees", "build_tree", "full_mask", "tree_attention"]
NAMES = [*CHAINS, *TREES, "score_step"]


def checked(device: str, *, trees: bool = False) -> dict[str, Checked]:
    torch.manual_seed(0)
    small = {"vocabulary": 64, "requests": 3, "width": 4, "top_m": 20, "heads": (4, 2), "head_dim": 64, "prefix": 5}
    network = NodeClassifier(ClassifierSpec()).network(device)
    shapes = Shapes(torch.device(device), network, dtype=torch.float32, **small)  # type: ignore[arg-type]
    return {each.name: each for each in check(shapes, trees=trees, also=[step_check(shapes)])}


@pytest.mark.slow
def test_right_kernels_pass(device: str):
    found = checked(device, trees=True)
    assert list(found) == NAMES
    assert [str(each) for each in found.values() if not each.ok] == []


def a_row_late(right: Any) -> Any:
    def packed(kept: Any, *arguments: Any, **named: Any) -> Any:
        return right(kept.flip(0), *arguments, **named)

    return packed


def off(right: Any) -> Any:
    def statistics(*arguments: Any, **named: Any) -> Any:
        found = right(*arguments, **named)
        return found._replace(entropy=found.entropy + 1e-3)

    return statistics


def nothing(_: Any) -> Any:
    return lambda *_, **__: None


def hands_out_confidences(right: Any) -> Any:
    """In the place of quotients."""

    def scored(state: Any, *given: Any) -> None:
        right(state, *given)
        given[-1].copy_(state.confidence)

    return scored


def forgets_the_lowest(right: Any) -> Any:
    def scored(state: Any, *given: Any) -> None:
        right(state, *given)
        state.lowest.fill_(1.0)

    return scored


def ends_early(right: Any) -> Any:
    return lambda *arguments, **named: right(*arguments, **named) - 1


def counts_nothing(right: Any) -> Any:
    return lambda *arguments, **named: right(*arguments, **{**named, "unknown": None})


def cuts_no_links(right: Any) -> Any:
    return lambda *arguments, **named: right(*arguments, **{**named, "links": None})


def seeds_of_the_neighbour(right: Any) -> Any:
    def statistics(*arguments: Any, at: Any = None, **named: Any) -> Any:
        return right(*arguments, **named, at=None if at is None else at.roll(1))

    return statistics


def lengths_of_the_neighbour(right: Any) -> Any:
    def packed(*arguments: Any, **named: Any) -> Any:
        found = right(*arguments, **named)
        return found._replace(lengths=found.lengths.flip(0))

    return packed


def stops_without_a_budget(right: Any) -> Any:
    return lambda *arguments, **named: right(*arguments, **named) - (named.get("budget") is None)


def sees_a_chain(right: Any) -> Any:
    return lambda *arguments: right(*arguments[:8])


def sees_all(right: Any) -> Any:
    def mask(trees: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return right(torch.ones_like(trees), *arguments, **named)

    return mask


def fills_own_trees(right: Any) -> Any:
    return lambda *arguments: right(*arguments[:4])


def clips_too_late(right: Any) -> Any:
    return lambda keep, key, most, room: right(keep, key, most, room + 1)


def broken(_: Any) -> Any:
    def kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image for this GPU")

    return kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (pack, "pack_ragged", a_row_late),
        (pack, "pack_ragged", lengths_of_the_neighbour),
        (stats, "draft_stats", off),
        (stats, "draft_stats", seeds_of_the_neighbour),
        (score, "score_chain", nothing),
        (step, "score_step", nothing),
        (step, "score_step", hands_out_confidences),
        (step, "score_step", forgets_the_lowest),
        (stop, "early_stop", ends_early),
        (stop, "early_stop", counts_nothing),
        (stop, "early_stop", cuts_no_links),
        (stop, "early_stop", stops_without_a_budget),
        (stop, "early_stop", broken),
    ],
)
def test_a_planted_fault_is_named(module: Any, name: str, fault: Any, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    found = checked(device)
    assert [each.name for each in found.values() if not each.ok] == [name]
    if fault is broken:
        assert math.isinf(found[name].error)
        assert str(found[name]) == "did not run (RuntimeError: no kernel image for this GPU)"


@pytest.mark.slow
def test_faults_of_trees_are_named(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "tree_attention", sees_a_chain(attention.tree_attention))
    monkeypatch.setattr(masks, "full_mask", sees_all(masks.full_mask))
    monkeypatch.setattr(spare, "fill_spare_rows", fills_own_trees(spare.fill_spare_rows))
    monkeypatch.setattr(clip, "clip_trees", clips_too_late(clip.clip_trees))
    found = checked(device, trees=True)
    wrong = ["fill_spare_rows", "clip_trees", "full_mask", "tree_attention"]
    assert [each.name for each in found.values() if not each.ok] == wrong
