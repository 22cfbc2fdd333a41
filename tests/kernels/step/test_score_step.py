"""score_step against its twin and against score_chain, and its chances against sums written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from c2t_kernels.network import FEATURES
from c2t_kernels.score import ChainState
from c2t_kernels.score import reference as chain
from c2t_kernels.step import Meaning, StepState, reference
from c2t_kernels.step import kernel as fused
from tests.support.kernels.networks import PAPER, random_network
from tests.support.kernels.strided import apart

D_MAX = 4
BOTH = pytest.mark.parametrize("op", [reference.score_step, fused.score_step], ids=["reference", "fused"])

# the interpreter computes with numpy, which warns of the infinities that some of these tests are about
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]


def statistics(rows: int, device: str, seed: int = 0) -> list[Tensor]:
    """log_prob (strided, as a column of a wider tensor), entropy, margin."""
    generator = torch.Generator().manual_seed(seed)
    log_prob = -torch.rand(rows, 3, generator=generator) * 3
    entropy, margin = torch.rand(2, rows, generator=generator) * 6
    return [log_prob.to(device)[:, 1], entropy.to(device), margin.to(device)]


class Draft:
    """One side's state and chances, which another draft and other rows have been in before."""

    def __init__(
        self, op: Any, rows: int, device: str, network: Any, beta: float = 0.5, max_depth: int = D_MAX
    ) -> None:
        self._op, self._network, self.device = op, network, device
        self.state = StepState.create(rows + 2, D_MAX, device)
        for each, left in zip(self.state, (-7.0, 7.0, 9.0, 0.01, 5), strict=True):
            each.fill_(left)
        self.chances = torch.full((rows + 3, D_MAX + 1), 8.0, device=device)
        self.stats: Tensor | None = torch.full((rows + 1, D_MAX, 4), 6.0, device=device)
        self.meaning: Meaning | None = None
        self._at = torch.zeros((), dtype=torch.int64, device=device)
        self._beta = torch.tensor([beta], device=device)
        self._longest = torch.tensor([max_depth], dtype=torch.int32, device=device)
        # the last one pads
        self.slots = torch.arange(rows, device=device).flip(0) - 1

    def step(self, number: int, *stats: Tensor) -> None:
        # vLLM keeps one tensor and writes into it
        self._at.fill_(number)
        given = (self._at, self.slots, self._beta, self._longest, self.chances, self.stats, self.meaning)
        self._op(self.state, self._network, *stats, *given)


def assert_drafts_equal(found: Draft, expected: Draft) -> None:
    # Sums of up to 64 products in another order, and two approximations of exp: some units of float32's last place.
    for name in ("confidence", "lowest"):
        mine, theirs = getattr(found.state, name), getattr(expected.state, name)
        torch.testing.assert_close(mine, theirs, atol=5e-6, rtol=0, equal_nan=True)
    # quotients of two of these, the smaller one above .1
    torch.testing.assert_close(found.chances, expected.chances, atol=1e-4, rtol=0)
    for name in ("joint_log_prob", "path_entropy", "unknown"):
        assert torch.equal(getattr(found.state, name), getattr(expected.state, name)), name


# 1: the smallest; 257: several programs and a last one with a single row
@pytest.mark.parametrize("rows", [1, 257])
@pytest.mark.parametrize(("features", "hidden"), [(PAPER, 48), (FEATURES, 64), (("margin", "depth"), 1)])
def test_a_draft_matches_the_reference(rows: int, features: tuple[str, ...], hidden: int, device: str):
    net = random_network(features, hidden, device, depth_origin=hidden % 2)
    found, expected = (Draft(op, rows, device, net) for op in (fused.score_step, reference.score_step))
    for number in range(D_MAX):
        stats = statistics(rows, device, number)
        if number == 1:
            stats[0][0], stats[2][-1] = math.nan, math.inf
        for draft in (found, expected):
            draft.step(number, *stats)
    assert float(expected.state.confidence[:rows].nan_to_num(nan=1.0).min()) > 0.1
    assert_drafts_equal(found, expected)
    assert (found.state.confidence[rows:] == 9.0).all() and (found.state.joint_log_prob[rows:] == -7.0).all()
    assert found.stats is not None and expected.stats is not None
    torch.testing.assert_close(found.stats, expected.stats, atol=0, rtol=0, equal_nan=True)
    assert (found.stats[rows:] == 6.0).all()
    assert (found.chances[rows:] == 8.0).all() and (found.chances[:, D_MAX] == 8.0).all()
    # of a row that pads none is counted
    assert found.state.unknown.item() == (5 if rows == 1 else 6)
    assert rows == 1 or expected.state.joint_log_prob[1:rows].std() > 0.1, "the case would not notice a wrong row"


def test_statistics_and_results_may_lie_apart(device: str):
    net = random_network(FEATURES, 8, device)
    found, expected = (Draft(op, 5, device, net) for op in (fused.score_step, reference.score_step))
    found.state = found.state._replace(confidence=apart(found.state.confidence))
    found.chances = apart(found.chances)
    # nor does anybody have to want the statistics
    found.stats = None
    for number in range(D_MAX):
        stats = statistics(5, device, number)
        found.step(number, *map(apart, stats))
        expected.step(number, *stats)
    assert_drafts_equal(found, expected)


@BOTH
def test_the_statistics_of_each_step_are_kept(op: Any, device: str):
    draft = Draft(op, 3, device, random_network(PAPER, 8, device))
    stats = [statistics(3, device, number) for number in range(D_MAX)]
    for number, each in enumerate(stats):
        draft.step(number, *each)
    assert draft.stats is not None
    own = torch.stack([torch.stack(each, dim=-1) for each in stats], dim=1)
    assert torch.equal(draft.stats[:3, :, 1:], own)
    torch.testing.assert_close(draft.stats[:3, :, 0], own[..., 0].cumsum(dim=1), atol=1e-6, rtol=0)


@BOTH
def test_confidences_are_those_of_score_chain(op: Any, device: str):
    net = random_network(FEATURES, 8, device, depth_origin=0)
    draft, expected = Draft(op, 5, device, net), ChainState.create(5, D_MAX, device)
    for number in range(D_MAX):
        stats = statistics(5, device, number)
        stats[1][2] = math.inf
        draft.step(number, *stats)
        chain.score_chain(expected, net, *stats, number + 1)
    torch.testing.assert_close(draft.state.confidence[:5], expected.confidence, atol=5e-6, rtol=0, equal_nan=True)
    assert torch.equal(draft.state.joint_log_prob[:5], expected.joint_log_prob)
    assert torch.equal(draft.state.path_entropy[:5], expected.path_entropy)
    assert draft.state.unknown.item() == 5 + D_MAX


def by_hand(confidence: list[float], beta: float, max_depth: int) -> list[float]:
    found, lowest = [], 1.0
    for place, each in enumerate(confidence):
        above, lowest = lowest, lowest if math.isnan(each) else min(lowest, each)
        found.append(0.0 if each < beta or place >= max_depth else lowest / above)
    return found


@BOTH
@pytest.mark.parametrize("max_depth", [0, 2, D_MAX])
@pytest.mark.parametrize("at", [None, 0, 1])
def test_chances_are_quotients_of_running_minima(op: Any, at: int | None, max_depth: int, device: str):
    """at: of whose confidence beta is, to the last bit: equality keeps."""
    net = random_network(PAPER, 8, device)
    stats = [statistics(6, device, number) for number in range(D_MAX)]
    stats[2][0][3] = math.nan
    first = Draft(op, 6, device, net)
    for number, each in enumerate(stats):
        first.step(number, *each)
    confidence = first.state.confidence[:6].tolist()
    beta = 0.0 if at is None else confidence[1][at]
    draft = Draft(op, 6, device, net, beta, max_depth)
    for number, each in enumerate(stats):
        draft.step(number, *each)
    expected = torch.tensor([by_hand(row, beta, max_depth) for row in confidence])
    torch.testing.assert_close(draft.chances[:6, :D_MAX].cpu(), expected, atol=1e-6, rtol=1e-6)
    if max_depth == D_MAX:
        # beta, the largest depth and rising confidences each would be noticed
        assert (expected == 0).any() == (at is not None) and (expected == 1).any() and (expected[:, 1:] < 1).any()


def learnt(slots: int, device: str) -> Meaning:
    """Slope and offsets that tell depths apart, and room that other requests have been in before."""
    slope, offsets = torch.tensor([0.7], device=device), torch.linspace(-1.0, 1.0, D_MAX + 1, device=device)
    return Meaning(slope, offsets, *torch.full((2, slots, D_MAX + 1), 3.0, device=device))


@BOTH
def test_chances_are_what_they_turned_out_to_mean(op: Any, device: str):
    net = random_network(PAPER, 8, device)
    stats = [statistics(6, device, number) for number in range(D_MAX)]
    stats[2][0][3] = math.nan
    said = Draft(op, 6, device, net, beta=0.0)
    for number, each in enumerate(stats):
        said.step(number, *each)
    beta = float(said.state.confidence[:6, 0].median())
    plain, draft = (Draft(op, 6, device, net, beta, max_depth=3) for _ in range(2))
    draft.meaning = learnt(5, device)
    for number, each in enumerate(stats):
        plain.step(number, *each)
        draft.step(number, *each)
    own = said.chances[:6, :D_MAX].double().cpu()
    logits = torch.log(own.clamp(1e-4, 1 - 1e-4) / (1 - own.clamp(1e-4, 1 - 1e-4)))
    expected = 1 / (1 + torch.exp(-(0.7 * logits + torch.linspace(-1.0, 1.0, D_MAX + 1).double()[:D_MAX])))
    dropped = plain.chances[:6, :D_MAX].cpu() == 0
    assert dropped[:, 3].all() and not dropped[:, 0].all()
    found = draft.chances[:6, :D_MAX].cpu().double()
    torch.testing.assert_close(found, expected.masked_fill(dropped, 0.0), atol=1e-4, rtol=0)
    # rows are slots from behind, and the last one pads; what was dropped is noted as it would have been
    requests = torch.arange(5).flip(0)
    torch.testing.assert_close(draft.meaning.foretold[requests, :D_MAX].cpu().double(), expected[:5], atol=1e-4, rtol=0)
    torch.testing.assert_close(draft.meaning.logits[requests, :D_MAX].cpu().double(), logits[:5], atol=2e-3, rtol=0)
    assert (draft.meaning.foretold[:, D_MAX] == 3.0).all() and (draft.meaning.logits[:, D_MAX] == 3.0).all()
    # what a chain is kept by is not learnt
    torch.testing.assert_close(draft.state.confidence, plain.state.confidence, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(draft.state.lowest, plain.state.lowest, atol=0, rtol=0)


def test_an_empty_batch_changes_nothing(device: str):
    draft = Draft(fused.score_step, 0, device, random_network(PAPER, 8, device))
    none = torch.zeros(0, device=device)
    draft.step(0, none, none, none)
    assert draft.state.unknown.item() == 5 and (draft.chances == 8.0).all()


ONE = torch.zeros(1)


@BOTH
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"margin": torch.ones(4).double()}, TypeError, "margin must be float32"),
        ({"entropy": torch.ones(5)}, ValueError, "entropy must have shape"),
        ({"step": torch.zeros(2, dtype=torch.int64)}, ValueError, "step must have one element"),
        ({"step": torch.zeros((), dtype=torch.int32)}, TypeError, "step must be int64"),
        ({"step": 1}, TypeError, "step must be a tensor"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, ValueError, "slots must have shape"),
        ({"beta": ONE.double()}, TypeError, "beta must be float32"),
        ({"max_depth": ONE}, TypeError, "max_depth must be int32"),
        ({"chances": torch.zeros(3, 2)}, ValueError, r"chances must hold 4 rows of 2, got shape \(3, 2\)"),
        ({"chances": torch.zeros(4, 1)}, ValueError, "chances must hold 4 rows of 2"),
        ({"stats": torch.zeros(4, 2, 3)}, ValueError, r"stats must have shape \(4, 2, 4\)"),
        ({"stats": torch.zeros(3, 2, 4)}, ValueError, r"stats must have shape \(4, 2, 4\)"),
        ({"meaning": Meaning(ONE.double(), ONE, ONE[None], ONE[None])}, TypeError, "meaning.slope must be float32"),
        ({"meaning": Meaning(ONE, ONE, ONE[None], ONE[None])}, ValueError, "meaning must hold 2 steps, holds 1"),
        ({"meaning": Meaning(ONE, ONE, torch.ones(3, 2), torch.ones(2, 2))}, ValueError, "meaning.foretold must have"),
        ({"state": {"confidence": torch.ones(3, 2)}}, ValueError, "state.confidence holds 3 rows"),
        ({"state": {"lowest": torch.ones(5)}}, ValueError, "state.lowest must have shape"),
        ({"state": {"unknown": ONE}}, TypeError, "state.unknown must be int64"),
    ],
)
def test_refuses_and_names_the_argument(op: Any, changes: dict[str, Any], error: type[Exception], says: str):
    given: dict[str, Any] = {name: torch.ones(4) for name in ("log_prob", "entropy", "margin")}
    given |= {"step": torch.zeros((), dtype=torch.int64), "slots": torch.arange(4), "beta": ONE}
    given |= {"max_depth": torch.ones(1, dtype=torch.int32), "chances": torch.zeros(4, 2)}
    given |= changes | {"state": StepState.create(4, 2, "cpu")._replace(**changes.get("state", {}))}
    with pytest.raises(error, match=says):
        op(network=random_network(PAPER, 4, "cpu"), **given)
