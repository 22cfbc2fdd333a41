"""How wide and how deep the next step's trees are drafted; a chain is a tree of width 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.budget import pass_seconds
from c2t_plugin.planner.curve import LEAST_SECONDS, CostCurve
from c2t_plugin.planner.planner import FORGET, FORGET_ONE, PROBE_EVERY, PROBES_COST, WHOLE_FIRST, draft_passes
from c2t_plugin.planner.step_costs import StepCosts


class Shape(NamedTuple):
    """width: nodes drafted from per layer. depth: layers, 1 or more."""

    width: int
    depth: int


class Shapes:
    """Chooses each step's shape before it drafts, so that expected output tokens per second are most.

    Of both widths and each number of layers it keeps what a request's best node, its second best and so on were worth:
    running means, weighted as those of Planner. The first drafts are whole trees: one draft of one request is mostly
    chance. A tree says what a chain would have been. What a step does not show is taken to change as what it does:
    layers below the deepest that was drafted as that one, and trees as chains while those are drafted.

    So some steps are probes: whole trees, at least PROBE_EVERY apart, as often as PROBES_COST pays for what they are
    expected to lose.

    Depth 1 has no draft pass, so it is plain decoding where no node of it is verified.
    """

    def __init__(self, width: int, d_max: int) -> None:
        """width: of the trees; chains have 1."""
        self.whole = Shape(width, d_max)
        self._passes = np.array([draft_passes(depth) for depth in range(1, d_max + 1)])
        # by width: (d_max, nodes) means, by layers and place; (d_max,) drafts that they come from
        self._means: dict[int, Array] = {}
        self._drafts = {width: np.zeros(d_max), 1: np.zeros(d_max)}
        # what is saved for the next probe, in steps
        self._saved, self._since_probe = 0.0, 0

    def choose(self, curve: CostCurve, requests: int) -> Shape:
        """The shape of the next step of so many requests. curve: its draft is by rows, requests times width."""
        if self._drafts[self.whole.width][-1] < WHOLE_FIRST:
            return self.whole
        found = {width: self._outcomes(curve, requests, width) for width in sorted(self._means)}
        best, rate, took = Shape(1, 1), 0.0, 1.0
        for width, (rates, seconds) in found.items():
            layer, nodes = divmod(int(rates.argmax()), rates.shape[1])
            if rates[layer, nodes] > rate:
                best, rate, took = Shape(width, layer + 1), rates[layer, nodes], seconds[layer, nodes]
        rates, seconds = (each[-1] for each in found[self.whole.width])
        nodes = int(rates.argmax())
        # what the best would have brought in its time, less what it brings, in steps of the best
        return self._probed(best, float(seconds[nodes] / took * (1 - rates[nodes] / rate)))

    def _outcomes(self, curve: CostCurve, requests: int, width: int) -> tuple[Array, Array]:
        """(d_max, nodes + 1) each, by layers and verified nodes a request: output tokens per second, and seconds."""
        means = self._means[width]
        nodes = means.shape[1]
        expected = requests * np.pad(1.0 + means.cumsum(1), ((0, 0), (1, 0)), constant_values=1.0)
        verify = pass_seconds(curve, requests, requests * nodes, (), StepCosts(curve.beside))[::requests]
        drafting = self._passes * curve.draft_s(requests * width)
        seconds = np.maximum(verify + curve.beside + drafting[:, None], LEAST_SECONDS)
        return expected / seconds, seconds

    def _probed(self, best: Shape, lost: float) -> Shape:
        """The shape to draft. lost: steps that a whole tree loses."""
        self._saved += PROBES_COST
        self._since_probe += 1
        if best != self.whole and (self._saved < lost or self._since_probe < PROBE_EVERY):
            return best
        self._saved, self._since_probe = 0.0, 0
        return self.whole

    def observe(self, width: int, chances: Array, chains: Array | None = None) -> None:
        """Learn from drafts of this width. chances: (requests, depth, nodes) of each one's best nodes, falling, if only
        1, 2, ... of its layers were there; 0 where it has fewer nodes. chains: of trees, the same of the chains in
        them."""
        if not len(chances):
            return
        change = self._learn(width, chances)
        if chains is not None:
            self._learn(1, chains)
        elif self.whole.width in self._means:
            _change(self._means[self.whole.width], change)

    def _learn(self, width: int, chances: Array) -> float:
        """The factor by which what its deepest layer was worth has changed."""
        requests, depth, nodes = chances.shape
        means = self._means.setdefault(width, np.zeros((self.whole.depth, nodes)))
        drafts, before = self._drafts[width], means[depth - 1].sum()
        drafts[:depth] += requests
        weight = np.maximum(min(FORGET, requests * FORGET_ONE), requests / drafts[:depth])
        means[:depth] += weight[:, None] * (chances.mean(0) - means[:depth])
        change = float(means[depth - 1].sum() / before) if before else 1.0
        _change(means[depth:], change)
        return change


def _change(means: Array, factor: float) -> None:
    """In place; no node is more than certain."""
    np.minimum(means * factor, 1.0, out=means)
