"""A chain scorer on the host has the confidences, cuts and records of the one that dispatches torch operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from c2t_kernels.network import FEATURES
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.engines.host_chains import HostChainScorer
from c2t_plugin.scorer import ChainScorer

ROWS, D_MAX, VOCAB, SLOTS = 5, 4, 300, 9


def logits_of(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(params=[1, 100], ids=lambda top_m: f"top {top_m}")
def both(request: pytest.FixtureRequest) -> tuple[HostChainScorer, ChainScorer]:
    torch.manual_seed(3)
    n = len(FEATURES)
    shift, scale = tuple(0.1 * i for i in range(n)), tuple(1.0 + i for i in range(n))
    classifier = NodeClassifier(ClassifierSpec(FEATURES, shift, scale, hidden=16, top_m=request.param))
    made = {"slots": SLOTS, "rows": ROWS, "max_depth": D_MAX, "beta": 0.4, "device": "cpu", "keep_stats": True}
    classifier.requires_grad_(False)
    return HostChainScorer(classifier, **made), ChainScorer(classifier, **made)


def draft(scorer: ChainScorer, slots: torch.Tensor, seed: int, vocab: int = VOCAB) -> None:
    """Seeds of the draft, then its steps."""
    rows = len(slots)
    scorer.write_seed(slots, logits_of(seed, rows, vocab))
    scorer.begin(slots)
    for step in range(1, D_MAX):
        scorer.step(logits_of(seed + step, rows, vocab))


def assert_agree(both: tuple[HostChainScorer, ChainScorer], rows: int) -> None:
    mine, theirs = ((each.confidence(rows), each.stats(rows)) for each in both)
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5, equal_nan=True)
    ends = [each.end(rows).tolist() for each in both]
    assert ends[0] == ends[1]
    assert both[0].non_finite.equal(both[1].non_finite)


@pytest.mark.parametrize("slots", [[0], [3, 1], [8, 2, 4, 0, 7]])
def test_drafts_one_after_the_other(both: tuple[HostChainScorer, ChainScorer], slots: list[int]):
    for seed in (0, 10, 20):
        for scorer in both:
            draft(scorer, torch.tensor(slots), seed)
        assert_agree(both, len(slots))


def test_a_draft_without_a_seed_and_one_of_bad_logits(both: tuple[HostChainScorer, ChainScorer]):
    slots = torch.arange(3)
    bad = logits_of(4, 3)
    bad[1, 5], bad[2] = torch.nan, float("-inf")
    for scorer in both:
        scorer.write_seed(slots, logits_of(1, 3))
        scorer.clear_seed(slots[:1])
        scorer.begin(slots)
        scorer.step(bad)
        scorer.step(logits_of(2, 3))
        scorer.drafted(3)
    assert both[0].confidence(3).isnan().any()
    assert_agree(both, 3)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("own", [(), ((None, 0.7), (None, None)), ((None, None), (2, None))])
@pytest.mark.parametrize("limits", [(0.4, D_MAX), (0.0, D_MAX), (0.0, 2), (1.0, D_MAX), (0.3, 0)])
def test_where_chains_end(
    both: tuple[HostChainScorer, ChainScorer], limits: tuple[float, int], own: tuple[Any, ...], linked: bool
):
    slots, ends = torch.tensor([3, 1]), []
    for scorer in both:
        scorer.set_beta(limits[0])
        scorer.set_max_depth(limits[1])
        if own:
            scorer.set_requests(slots, *own)
        draft(scorer, slots, 40)
        links = torch.arange(2 * (D_MAX + 1)).view(2, -1) if linked else None
        scorer.confidence(2)[0, 2] = torch.nan
        # equality keeps a token
        scorer.confidence(2)[1, 1] = limits[0]
        ends.append((scorer.end(2, links).tolist(), links, scorer.non_finite.tolist(), scorer.own_beta(2).tolist()))
    (mine, mine_links, *mine_rest), (theirs, their_links, *their_rest) = ends
    assert (mine, mine_rest) == (theirs, their_rest)
    assert not linked or torch.equal(mine_links, their_links)
    assert mine_rest[0] == [1]


def test_what_a_batch_has_room_for(both: tuple[HostChainScorer, ChainScorer]):
    slots = torch.arange(3)
    for scorer in both:
        draft(scorer, slots, 50)
    for budget in (0, 2, 5, 12):
        mine, theirs = ([each.tolist() for each in scorer.end_within(3, budget)] for scorer in both)
        assert mine == theirs


def test_other_vocabularies(both: tuple[HostChainScorer, ChainScorer]):
    for vocab in (VOCAB, 7, 2 * VOCAB):
        for scorer in both:
            draft(scorer, torch.tensor([1, 2]), 30, vocab)
        assert_agree(both, 2)


def test_what_a_learning_planner_is_told_of_each_token():
    classifier = NodeClassifier(ClassifierSpec()).requires_grad_(False)
    made = {"slots": SLOTS, "rows": ROWS, "max_depth": D_MAX, "beta": 0.4, "device": "cpu"}
    slots = torch.tensor([4, 1])
    for kind in (HostChainScorer, ChainScorer):
        for keeps, width in (({"keep_stats": True}, 1), ({}, 2), ({"keep_stats": True}, 4)):
            scorer = kind(classifier, **made, keep_log_prob=width > 1, **keeps)
            draft(scorer, slots, 3)
            sure, known = scorer.sure(2), scorer.stats(2)
            assert torch.equal(sure.view(2, D_MAX, width)[..., 0], scorer.confidence(2))
            if width == 4:
                assert known is not None and torch.equal(sure[..., 1:], known[..., 1:])
                # a tensor of its own, which the next draft leaves alone
                draft(scorer, slots, 4)
                assert not torch.equal(scorer.sure(2), sure) and torch.equal(sure[..., 1:], known[..., 1:])
                if isinstance(scorer, HostChainScorer):
                    scorer.planner = SimpleNamespace(scores=False)  # type: ignore[assignment]
                    assert scorer.sure(2).shape == sure.shape and scorer.sure(2).isnan().all()


@pytest.mark.parametrize("keeps", [{}, {"keep_log_prob": True}])
def test_the_newest_token_of_each_chain(keeps: dict[str, bool]):
    classifier = NodeClassifier(ClassifierSpec()).requires_grad_(False)
    made = {"slots": SLOTS, "rows": ROWS, "max_depth": D_MAX, "beta": 0.4, "device": "cpu"}
    scorer = HostChainScorer(classifier, **made, **keeps)
    scorer.write_seed(torch.tensor([4, 1]), logits_of(1, 2))
    scorer.begin(torch.tensor([4, 1]))
    for step in range(2):
        confidence, own = scorer.newest()
        sure = scorer.sure(2)[:, -1]
        assert confidence == (sure[:, 0] if keeps else sure).tolist()
        assert own == sure[:, 1].tolist() if keeps else all(each != each for each in own)
        scorer.step(logits_of(2 + step, 2))


def test_half_precision(both: tuple[HostChainScorer, ChainScorer]):
    for scorer in both:
        scorer.write_seed(torch.arange(2), logits_of(7, 2).bfloat16())
        scorer.begin(torch.arange(2))
        scorer.step(logits_of(8, 2).half())
        scorer.drafted(2)
    assert_agree(both, 2)


def test_another_network_is_taken_between_two_drafts(both: tuple[HostChainScorer, ChainScorer]):
    slots = torch.arange(3)
    before = []
    for scorer in both:
        draft(scorer, slots, 0)
        before.append(scorer.confidence(3).clone())
        mine = scorer.network
        shapes = (mine.hidden_weight, mine.hidden_bias, mine.out_weight, mine.out_bias)
        scorer.take([torch.full_like(each, 0.1) * (1 + place) for place, each in enumerate(shapes)])
        draft(scorer, slots, 0)
    assert_agree(both, 3)
    assert not torch.allclose(before[0], both[0].confidence(3), atol=1e-3)


def test_a_scorer_that_takes_another_network_leaves_the_classifier_as_it_is():
    classifier = NodeClassifier(ClassifierSpec()).requires_grad_(False)
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    for kind in (HostChainScorer, ChainScorer):
        scorer = kind(classifier, slots=1, rows=1, max_depth=D_MAX, beta=0.4, device="cpu")
        network = scorer.network
        mine = (network.hidden_weight, network.hidden_bias, network.out_weight, network.out_bias)
        scorer.take([each + 1 for each in mine])
    assert all(torch.equal(value, before[name]) for name, value in classifier.state_dict().items())
