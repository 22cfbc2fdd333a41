"""Layers of trees: a layer worked by hand, properties of the pruning, and the kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from c2t_kernels.growth import kernel as fused
from c2t_kernels.growth.reference import GrownLayer, grow_layer, select_children
from c2t_kernels.network import FEATURES, ScoringNetwork
from c2t_kernels.stats import DraftStats
from tests.support.kernels.networks import PAPER, random_network
from tests.support.kernels.strided import apart

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# The interpreter takes some 20 ms for each request.
INTERPRETED = settings(QUIET, max_examples=15)
NAN, INF = math.nan, math.inf


def exact_network(device: str) -> ScoringNetwork:
    """Logit 2 * entropy + log_prob: inputs in eighths make every sum exact, so that both sides tie alike."""
    one = torch.ones(1, device=device)
    return ScoringNetwork(
        features=("entropy", "log_prob"),
        shift=torch.tensor([0.0, -16.0], device=device),
        scale=torch.tensor([0.5, 1.0], device=device),
        hidden_weight=torch.ones(1, 2, device=device),
        hidden_bias=0 * one,
        out_weight=one,
        out_bias=-16 * one,
        depth_origin=1,
    )


def statistics(log_probs: Tensor, entropy: Tensor) -> DraftStats:
    token_ids = torch.arange(log_probs.numel(), device=log_probs.device).view(log_probs.shape) + 1000
    unread = torch.zeros_like(entropy)
    return DraftStats(token_ids, log_probs, entropy, unread)


def random_layer(bs: int, slots: int, k: int, device: str) -> tuple[Tensor, Tensor, Tensor, DraftStats]:
    generator = torch.Generator().manual_seed(bs + slots + k)
    log_probs = -torch.rand(bs * slots, k, generator=generator).mul(6).sort(dim=1).values
    rows = torch.rand(2, bs * slots, generator=generator) * 5
    token_ids = torch.randint(0, 32000, (bs * slots, k), generator=generator)
    stats = DraftStats(token_ids, log_probs, rows[0], rows[1])
    joint, path = torch.rand(2, bs, slots, generator=generator) * 4
    alive = torch.rand(bs, slots, generator=generator) < 0.8
    return -joint.to(device), path.to(device), alive.to(device), DraftStats(*(tensor.to(device) for tensor in stats))


@st.composite
def exact_layers(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, DraftStats, Tensor]:
    """A frontier with dead slots, unknown statistics, impossible words and many equal confidences; a beta each."""
    bs, slots, k = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def table(rows: int, columns: int, values: list[float]) -> Tensor:
        row = st.lists(st.sampled_from(values), min_size=columns, max_size=columns)
        return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)), dtype=torch.float32)

    log_probs = table(bs * slots, k, [-0.125, -0.5, -1.0, -2.0, -4.0, -INF, NAN])
    entropy = table(1, bs * slots, [0.0, 0.5, 1.0, 1.5, NAN])[0]
    joint = table(bs, slots, [0.0, -0.25, -3.0])
    path = table(bs, slots, [0.0, 0.5, 3.0])
    alive = table(bs, slots, [0.0, 1.0, 1.0]) > 0
    return joint, path, alive, statistics(log_probs, entropy), table(1, bs, [0.0, 0.25, 0.5, 0.75])[0]


def same(found: Tensor, expected: Tensor) -> bool:
    return (
        found.dtype == expected.dtype
        and torch.equal(found.isnan(), expected.isnan())
        and torch.equal(found.nan_to_num(), expected.nan_to_num())
    )


def close(found: Tensor, expected: Tensor) -> bool:
    # up to 64 products in another order: a few units of 1e-7 times sums of about 10, then a sigmoid of slope 1/4
    return torch.allclose(found, expected, rtol=0, atol=1e-5, equal_nan=True)


def test_a_layer_worked_by_hand():
    # logits 2 * entropy + log_prob: row 0 [.5, -.5], row 1 is dead, row 2 [0, -2]
    log_probs = torch.tensor([[-0.5, -1.5], [-0.5, -1.5], [-1.0, -3.0]])
    stats = statistics(log_probs, torch.tensor([0.5, 0.5, 0.5]))
    joint, path = torch.tensor([[-1.0, 0.0, -2.0]]), torch.tensor([[0.25, 0.0, 1.0]])
    alive = torch.tensor([[True, False, True]])
    grown = grow_layer(exact_network("cpu"), joint, path, alive, stats, 0.5, 2, width=3)
    expected = torch.sigmoid(torch.tensor([0.5, -0.5, NAN, NAN, 0.0, -2.0]))
    assert torch.equal(grown.confidence[0, [0, 1, 4, 5]], expected[[0, 1, 4, 5]])
    assert grown.confidence[0, 2:4].isnan().all()
    # a confidence of just beta is kept
    assert grown.kept.tolist() == [[True, False, False, False, True, False]]
    assert grown.children.tolist() == [[0, 4, -1]] and grown.parents.tolist() == [[0, 2, -1]]
    assert grown.token_ids.tolist() == [[1000, 1004, 0]]
    assert grown.joint_log_prob.tolist() == [[-1.5, -3.0, -INF]] and grown.alive.tolist() == [[True, True, False]]
    assert grown.path_entropy.tolist() == [[0.75, 1.5, 0.0]]


def test_a_number_for_beta_meets_confidences_on_any_device():
    # meta stands for a GPU, which a plain tensor of a number is not on either
    confidence = torch.zeros(2, 3, device="meta")
    assert select_children(confidence, confidence.bool(), 0.5, 2)[1].device.type == "meta"


def test_switches_of_the_two_prunings():
    confidence = torch.tensor([[0.6, 0.5, 0.4]])
    kept = {
        (prune, select): select_children(confidence, confidence > 0, 0.5, 1, prune=prune, select=select)[0].tolist()[0]
        for prune in (True, False)
        for select in (True, False)
    }
    assert kept == {
        (True, True): [True, False, False],
        (True, False): [True, True, False],
        (False, True): [True, False, False],
        (False, False): [True, True, True],
    }


def test_an_unknown_confidence_is_kept_first_and_an_impossible_word_never():
    stats = statistics(torch.tensor([[-0.5, NAN, -INF]]), torch.tensor([0.5]))
    root = (torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    grown = grow_layer(exact_network("cpu"), *root, stats, 0.0, 1, width=3)
    assert grown.children.tolist() == [[1, 0, -1]] and grown.kept.tolist() == [[True, True, False]]
    assert grown.joint_log_prob.tolist() == [[0.0, -0.5, -INF]]


def test_kernel_keeps_a_confidence_of_just_beta(device: str):
    # logits 0, -1 and 0 again
    stats = statistics(torch.tensor([[-1.0, -2.0, -1.0]], device=device), torch.tensor([0.5], device=device))
    zero = torch.zeros(1, 1, device=device)
    root = (zero, zero, torch.ones(1, 1, dtype=torch.bool, device=device))
    grown = fused.grow_layer(exact_network(device), *root, stats, 0.5, 1, width=3)
    assert grown.kept.tolist() == [[True, False, True]] and grown.children.tolist() == [[0, 2, -1]]


@QUIET
@given(layer=exact_layers(), width=st.integers(1, 18))
def test_pruning_keeps_the_best_that_pass(layer: tuple, width: int):
    *_, alive, stats, beta = layer
    grown = grow_layer(exact_network("cpu"), *layer, 1, width=width)
    k = stats.log_probs.shape[1]
    possible = (stats.log_probs != -INF).view(len(beta), -1) & alive.repeat_interleave(k, dim=1)
    for i in range(len(beta)):
        confidence = grown.confidence[i].tolist()
        passing = [c for c in range(len(confidence)) if possible[i, c] and not confidence[c] < float(beta[i])]
        best = sorted(passing, key=lambda c: -INF if math.isnan(confidence[c]) else -confidence[c])[:width]
        assert [c for c in grown.children[i].tolist() if c >= 0] == best
        assert grown.children[i].tolist()[len(best) :] == [-1] * (width - len(best))
        assert grown.kept[i].nonzero().flatten().tolist() == sorted(best)


@INTERPRETED
@given(layer=exact_layers(), width=st.integers(1, 18))
def test_kernel_equals_reference_where_sums_are_exact(layer: tuple, width: int, device: str):
    joint, path, alive, beta = (layer[i].to(device) for i in (0, 1, 2, 4))
    stats = DraftStats(*(tensor.to(device) for tensor in layer[3]))
    arguments = (exact_network(device), joint, path, alive, stats, beta, 1)
    expected = grow_layer(*arguments, width=width)
    found = fused.grow_layer(*arguments, width=width)
    assert close(found.confidence, expected.confidence)
    for name in GrownLayer._fields[1:]:
        assert same(getattr(found, name), getattr(expected, name)), name


# the paper's classifier; all features with a hidden layer in two parts of a ragged tile; one unit; depth counted from 0
@pytest.mark.parametrize(
    ("features", "hidden", "slots", "k", "depth_origin"),
    [(PAPER, 48, 4, 5, 1), (FEATURES, 61, 10, 10, 1), (("rank",), 1, 1, 10, 1), (("depth", "margin"), 64, 3, 3, 0)],
    ids=["paper", "all", "rank", "origin0"],
)
def test_kernel_on_real_valued_networks(
    features: tuple[str, ...], hidden: int, slots: int, k: int, depth_origin: int, device: str
):
    arguments = (random_network(features, hidden, device, depth_origin), *random_layer(2, slots, k, device))
    expected = grow_layer(*arguments, 0.5, 3, width=k)
    found = fused.grow_layer(*arguments, 0.5, 3, width=k)
    assert close(found.confidence, expected.confidence)
    # near a tie the two may differ in the last place; the choice must follow the kernel's own confidences
    _, joint, path, alive, stats = arguments
    possible = alive.repeat_interleave(k, dim=1)
    kept, children = select_children(found.confidence, possible, 0.5, k)
    assert torch.equal(found.kept, kept) and torch.equal(found.children, children)
    live = children >= 0
    chosen = children.clamp_min(0).long()
    joint = joint.repeat_interleave(k, dim=1) + stats.log_probs.view(2, -1)
    assert torch.equal(found.joint_log_prob[live], joint.gather(1, chosen)[live])
    path = (path + stats.entropy.view(path.shape)).repeat_interleave(k, dim=1)
    assert torch.equal(found.path_entropy[live], path.gather(1, chosen)[live])


def test_kernel_on_many_requests_with_strided_rows(device: str, many: int):
    joint, path, alive, stats = random_layer(many, 1, 2, device)
    wide = torch.cat([stats.log_probs, stats.log_probs - 1], dim=1)
    strided = stats._replace(
        log_probs=wide[:, :2],
        token_ids=stats.token_ids.repeat(1, 2)[:, 1:3],
        entropy=apart(stats.entropy),
        margin=apart(stats.margin),
    )
    beta = torch.linspace(0.1, 0.9, many).to(device)
    # margin and path entropy move the confidence as well
    network = random_network(("entropy", "margin", "log_prob", "path_entropy"), 8, device)
    arguments = (network, apart(joint), apart(path), apart(alive), strided, apart(beta), 1)
    expected = grow_layer(*arguments, width=1)
    found = fused.grow_layer(*arguments, width=1)
    assert close(found.confidence, expected.confidence)
    possible = alive.repeat_interleave(2, dim=1)
    kept, children = select_children(found.confidence, possible, beta[:, None], 1)
    assert torch.equal(found.kept, kept) and torch.equal(found.children, children)
    live = found.alive
    assert torch.equal(found.token_ids[live], expected.token_ids[live]) and close(
        found.joint_log_prob[live], expected.joint_log_prob[live]
    )


def test_an_empty_batch_is_no_error(device: str):
    layer = random_layer(0, 2, 3, device)
    assert fused.grow_layer(exact_network(device), *layer, 0.5, 1, width=2).alive.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"joint_log_prob": torch.zeros(2, 2, dtype=torch.float64)}, TypeError, "joint_log_prob"),
        ({"path_entropy": torch.zeros(2, 2, dtype=torch.float64)}, TypeError, "path_entropy"),
        ({"path_entropy": torch.zeros(2, 3)}, ValueError, "path_entropy"),
        ({"alive": torch.ones(2, 2)}, TypeError, "alive"),
        ({"alive": torch.ones(2, 3, dtype=torch.bool)}, ValueError, "alive"),
        ({"stats": statistics(torch.zeros(3, 2), torch.zeros(3))}, ValueError, "log_probs"),
        ({"stats": statistics(torch.zeros(4, 2), torch.zeros(3))}, ValueError, "entropy"),
        ({"stats": statistics(torch.zeros(4, 600), torch.zeros(4))}, ValueError, "children"),
        ({"beta": NAN}, ValueError, "beta"),
        ({"beta": torch.zeros(3)}, ValueError, "beta"),
        ({"depth": 0}, ValueError, "depth"),
        ({"width": 0}, ValueError, "width"),
        ({"width": 500}, ValueError, "width"),
    ],
)
def test_refuses_what_it_cannot_take(change: dict[str, Any], error: type[Exception], message: str):
    arguments = {
        "network": exact_network("cpu"),
        "joint_log_prob": torch.zeros(2, 2),
        "path_entropy": torch.zeros(2, 2),
        "alive": torch.ones(2, 2, dtype=torch.bool),
        "stats": statistics(torch.zeros(4, 2), torch.zeros(4)),
        "beta": 0.5,
        "depth": 1,
        "width": 2,
        **change,
    }
    with pytest.raises(error, match=message):
        fused.grow_layer(**arguments)


@pytest.mark.parametrize("op", [grow_layer, fused.grow_layer], ids=["reference", "fused"])
@pytest.mark.parametrize("beta", [NAN, float("inf"), -0.1])
def test_a_number_that_is_no_threshold_is_refused(op: Callable[..., GrownLayer], beta: float):
    stats = statistics(torch.zeros(4, 2), torch.zeros(4))
    alive = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"grow_layer: beta must be a number in \[0, 1\]"):
        op(exact_network("cpu"), torch.zeros(2, 2), torch.zeros(2, 2), alive, stats, beta, 1, width=2)
