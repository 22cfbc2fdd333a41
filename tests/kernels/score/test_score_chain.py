"""score_chain against its twin, and the twin against the core's classifier."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from c2t_kernels import draft_stats
from c2t_kernels.network import FEATURES, PathSums, children
from c2t_kernels.score import ChainState, reference
from c2t_kernels.score import kernel as fused
from c2t_plugin import scorer as scoring
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.scorer import ChainScorer
from tests.support.kernels import sides
from tests.support.kernels.networks import PAPER, random_network
from tests.support.kernels.strided import apart

D_MAX = 4

# the interpreter computes with numpy, which warns of the infinities that some of these tests are about
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]


def statistics(rows: int, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """log_prob (strided, as a column of a wider tensor), entropy, margin."""
    generator = torch.Generator().manual_seed(seed)
    log_prob = -torch.rand(rows, 3, generator=generator) * 3
    entropy, margin = torch.rand(2, rows, generator=generator) * 6
    return log_prob.to(device)[:, 1], entropy.to(device), margin.to(device)


def assert_states_equal(found: ChainState, expected: ChainState) -> None:
    # Sums of up to 64 products in another order, and two approximations of exp: some units of float32's last place.
    torch.testing.assert_close(found.confidence, expected.confidence, atol=5e-6, rtol=0, equal_nan=True)
    for name in ("joint_log_prob", "path_entropy"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


# 1: the smallest; 257: several programs and a last one with a single row
@pytest.mark.parametrize("rows", [1, 257])
# 1 and 64: both ends; 48: the paper's, which no power of two is
@pytest.mark.parametrize(("features", "hidden"), [(PAPER, 48), (FEATURES, 64), (("margin", "depth"), 1)])
def test_a_draft_matches_the_reference(rows: int, features: tuple[str, ...], hidden: int, device: str):
    net = random_network(features, hidden, device, depth_origin=hidden % 2)
    found, expected = (ChainState.create(rows + 2, D_MAX, device) for _ in range(2))
    for state in (found, expected):
        # what the last draft left must not reach this one, nor this one the rows of others
        state.joint_log_prob.fill_(-7.0)
        state.path_entropy.fill_(7.0)
        state.confidence.fill_(9.0)
    for depth in range(1, D_MAX + 1):
        log_prob, entropy, margin = statistics(rows, device, depth)
        if depth == 2:
            log_prob[0], margin[-1] = math.nan, math.inf
        fused.score_chain(found, net, log_prob, entropy, margin, depth)
        reference.score_chain(expected, net, log_prob, entropy, margin, depth)
    assert_states_equal(found, expected)
    assert (found.confidence[rows:] == 9.0).all() and (found.joint_log_prob[rows:] == -7.0).all()
    assert found.confidence[:rows].isnan().sum() == 1
    assert rows == 1 or expected.joint_log_prob[1:rows].std() > 0.1, "the case would not notice a wrong row"


def test_statistics_and_confidences_may_lie_apart(device: str):
    net = random_network(FEATURES, 8, device)
    found, expected = (ChainState.create(5, D_MAX, device) for _ in range(2))
    found = found._replace(confidence=apart(found.confidence))
    for depth in range(1, D_MAX + 1):
        own = statistics(5, device, depth)
        fused.score_chain(found, net, *map(apart, own), depth)
        reference.score_chain(expected, net, *own, depth)
    assert_states_equal(found, expected)


@pytest.mark.parametrize("op", [reference.score_chain, fused.score_chain], ids=["reference", "fused"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_statistics_has_no_confidence(op: Any, bad: float, device: str):
    net = random_network(PAPER, 8, device)
    state = ChainState.create(2, 2, device)
    log_prob, entropy, margin = statistics(2, device)
    entropy[0] = bad
    op(state, net, log_prob, entropy, margin, 1)
    assert state.confidence[:, 0].isnan().tolist() == [True, False]
    assert state.joint_log_prob[0] == state.path_entropy[0] == 0.0
    log_prob[0] = bad
    op(state, net, log_prob, entropy, margin, 2)
    assert state.confidence.isnan().tolist() == [[True, True], [False, False]]
    assert state.joint_log_prob[0] == state.path_entropy[0] == 0.0
    assert state.joint_log_prob[1].isfinite() and state.path_entropy[1] == 2 * entropy[1]


@pytest.mark.parametrize("op", [reference.score_chain, fused.score_chain], ids=["reference", "fused"])
def test_equals_the_core_classifier(op: Any, device: str):
    torch.manual_seed(5)
    spec = ClassifierSpec(FEATURES, (0.1,) * len(FEATURES), (1.5,) * len(FEATURES), hidden=48, depth_origin=0, top_m=20)
    node_classifier = NodeClassifier(spec).requires_grad_(False)
    rows = 5
    net = node_classifier.network(device)
    state = ChainState.create(rows, D_MAX, device)
    logits = torch.randn(D_MAX, rows, 50, generator=torch.Generator().manual_seed(6)) * 3
    logits[1, 3, 7] = math.nan
    logits[2, 4, 1:] = -math.inf  # margin is infinite
    joint, path = torch.zeros(2, rows)
    for depth in range(1, D_MAX + 1):
        stats = draft_stats(logits[depth - 1], spec.top_m)
        node = children(PathSums(joint, path), stats, depth)
        expected = node_classifier.confidence(node)[:, 0]
        joint = joint + stats.log_probs[:, 0].nan_to_num(nan=0.0)
        path = path + stats.entropy.nan_to_num(nan=0.0)
        op(state, net, *(part.to(device) for part in (stats.log_probs[:, 0], stats.entropy, stats.margin)), depth)
        found = state.confidence[:, depth - 1].cpu()
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=0, equal_nan=True)
    assert state.confidence.isnan().sum() == 1 and state.confidence.nan_to_num(0.5).std() > 0.01


def test_the_scorer_keeps_as_many_tokens_with_the_kernels(monkeypatch: pytest.MonkeyPatch, device: str):
    """The whole of ChainScorer, as on a GPU, against itself on the references."""
    torch.manual_seed(8)
    spec = ClassifierSpec(FEATURES, (0.1,) * len(FEATURES), (1.5,) * len(FEATURES), hidden=48, top_m=20)
    classifier = NodeClassifier(spec)
    logits = torch.randn(D_MAX, 5, 50, generator=torch.Generator().manual_seed(9)).to(device) * 3
    logits[1, 3, 7] = math.nan
    slots = torch.tensor([4, 0, 2, 6, 1], device=device)
    scorers = [
        ChainScorer(classifier, slots=8, rows=6, max_depth=D_MAX, beta=0.45, device=where) for where in ("cpu", device)
    ]
    ours = scorers[1]
    ours._draft_stats = scoring._fused_statistics(6, spec.top_m, torch.device(device))
    lengths = []
    for scorer, operations in zip(scorers, (sides.reference, sides.fused), strict=True):
        for name in ("score_chain", "early_stop"):
            monkeypatch.setattr(scoring, name, getattr(operations, name))
        at, steps = (part.to(scorer.beta.device) for part in (slots, logits))
        scorer.set_requests(at[:2], [0.2, None], [None, 2])
        scorer.write_seed(at, steps[0])
        scorer.begin(at)
        for step in steps[1:]:
            scorer.step(step)
        lengths.append(scorer.end(5).tolist())
    assert lengths[0] == lengths[1]
    assert 0 < sum(lengths[0]) < 5 * D_MAX
    expected, found = (scorer.confidence(5).cpu() for scorer in scorers)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0, equal_nan=True)


def test_an_empty_batch_changes_nothing(device: str):
    state = ChainState.create(2, 2, device)
    none = torch.zeros(0, device=device)
    fused.score_chain(state, random_network(PAPER, 8, device), none, none, none, 1)
    assert state.joint_log_prob.tolist() == [0, 0] and state.confidence.isnan().all()


STATE = ChainState.create(4, 2, "cpu")


@pytest.mark.parametrize("op", [reference.score_chain, fused.score_chain], ids=["reference", "fused"])
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"depth": 3}, ValueError, "depth must be between 1 and 2"),
        ({"depth": 0}, ValueError, "depth"),
        ({"margin": torch.ones(4).double()}, TypeError, "margin must be float32"),
        ({"margin": 0.5}, TypeError, "margin must be a tensor"),
        ({"entropy": torch.ones(5)}, ValueError, "entropy must have shape"),
        (
            {"state": STATE._replace(confidence=torch.ones(4, 2, device="meta"))},
            ValueError,
            "state.confidence must be on",
        ),
        ({"state": STATE._replace(confidence=torch.ones(3, 2))}, ValueError, "state.confidence holds 3 rows"),
        ({"log_prob": torch.ones(9), "entropy": torch.ones(9), "margin": torch.ones(9)}, ValueError, "holds 4 rows"),
    ],
)
def test_refuses_and_names_the_argument(op: Any, changes: dict[str, Any], error: type[Exception], says: str):
    given: dict[str, Any] = {name: torch.ones(4) for name in ("log_prob", "entropy", "margin")}
    given |= {"state": STATE, "depth": 1} | changes
    with pytest.raises(error, match=says):
        op(network=random_network(PAPER, 4, "cpu"), **given)


def test_a_network_that_no_kernel_can_hold_is_refused():
    with pytest.raises(ValueError, match="features"):
        random_network(("depth", "colour"), 4, "cpu")
    with pytest.raises(ValueError, match="hidden"):
        random_network(PAPER, 65, "cpu")
