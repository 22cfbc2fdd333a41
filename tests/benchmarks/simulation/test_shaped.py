"""C2T's planner over trees of any width and depth, simulated, against each shape alone where it knows all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.simulation.shaped import Drafts, ShapedTrees
from benchmarks.simulation.steps import Simulated, planned_tree, serve, walk
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.shapes import Shape
from c2t_plugin.traces.file import Traces
from tests.benchmarks.simulation.test_simulate import traces_of

WIDTH, DEPTH, PROMPTS, EACH = 4, 4, 160, 60
# rows are free up to 96 a pass of the target, and 32 of the draft: the trees of eight requests
VERIFY = ((1, 10e-3), (96, 10e-3), (960, 100e-3))
ROWS = ((1, 0.3e-3), (32, 0.3e-3), (320, 9e-3))
COSTS = {"fixed": 0.3e-3, "draft_extend": 0.6e-3}
CURVES = {
    1: CostCurve(verify=VERIFY, draft=ROWS, **COSTS),
    WIDTH: CostCurve(verify=VERIFY, draft=tuple((max(1, rows // WIDTH), took) for rows, took in ROWS), **COSTS),
}


def drafts(seed: int) -> dict[Shape, Drafts]:
    """Each layer has one node that may be accepted, in one of three places: of a chain it is in the first one."""
    generator = torch.Generator().manual_seed(seed)
    states = PROMPTS * EACH
    place = torch.rand(states, DEPTH, generator=generator)
    likely, further = 0.6, 0.25
    first, other = place < likely, (place >= likely) & (place < likely + further)
    found = {}
    for depth in range(1, DEPTH + 1):
        chain = torch.full((states, depth), likely).cumprod(1)
        found[Shape(1, depth)] = Drafts(chain, first[:, :depth].int().cumprod(1).bool())
        # of a tree two nodes of each layer, below the one that was accepted
        through = (first | other)[:, :depth].int().cumprod(1)
        above = torch.cat([torch.ones(states, 1, dtype=torch.int32), through[:, :-1]], dim=1).bool()
        hit = torch.stack([first[:, :depth] & above, other[:, :depth] & above], dim=2).flatten(1)
        reach = (likely + further) ** torch.arange(depth)
        chance = torch.stack([reach * likely, reach * further], dim=1).flatten()
        order = chance.argsort(descending=True, stable=True)
        found[Shape(WIDTH, depth)] = Drafts(chance[order].expand(states, -1), hit[:, order])
    return found


def alone(found: dict[Shape, Drafts], shape: Shape, slots: int) -> Simulated:
    curve, own = CURVES[shape.width], found[shape]
    return serve(traces(), own.chances, curve, planned_tree(curve, shape.depth), slots, own.accepted)


def traces() -> Traces:
    states = PROMPTS * EACH
    return traces_of(torch.zeros(states, 8, dtype=torch.bool), torch.arange(PROMPTS).repeat_interleave(EACH).int())


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "width"), [(1, WIDTH), (4, WIDTH), (24, 1), (28, 1)])
def test_it_is_near_the_best_shape_of_every_load(slots: int, width: int):
    found = drafts(3)
    speeds = {shape: alone(found, shape, slots).tokens_per_s for shape in found}
    best = max(speeds, key=lambda shape: speeds[shape])
    step = ShapedTrees(found, CURVES)
    served = walk(traces(), step, slots)
    assert served.tokens == PROMPTS * EACH
    assert served.tokens_per_s >= 0.96 * speeds[best], speeds
    usual = max(step.taken, key=lambda shape: step.taken[shape])
    assert best.width == usual.width == width
    # at depth 1 both are the same
    assert usual.depth > 1


def test_a_step_costs_what_its_shape_costs():
    found, at = drafts(3), torch.tensor([5, 9])
    step = ShapedTrees(found, CURVES)
    first = step(at)
    # nothing is known: a whole tree
    assert step.taken == {Shape(WIDTH, DEPTH): 1}
    curve = CURVES[WIDTH]
    expected = curve.verify_s(2 + first.kept.sum()) + (DEPTH - 1) * curve.draft_s(2) + curve.beside
    assert first.seconds == pytest.approx(float(expected))
    hits = [
        int(found[Shape(WIDTH, DEPTH)].accepted[state, :kept].sum()) for state, kept in zip(at, first.kept, strict=True)
    ]
    assert first.accepted.tolist() == hits


def seen(step: ShapedTrees, shape: Shape, at: Tensor) -> Tensor:
    return step._by_layers(*shape, at)


def test_what_it_learns_are_a_shapes_own_nodes_layer_by_layer():
    found = drafts(3)
    told = seen(ShapedTrees(found, CURVES), Shape(WIDTH, 2), torch.tensor([5, 9]))
    assert told.shape == (2, 2, found[Shape(WIDTH, DEPTH)].chances.shape[1])
    for layer in (1, 2):
        own = found[Shape(WIDTH, layer)].chances[5].double()
        assert told[0, layer - 1, : len(own)].tolist() == own.tolist()
        assert told[0, layer - 1, len(own) :].sum() == 0
