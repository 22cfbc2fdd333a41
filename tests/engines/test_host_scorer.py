"""Chains scored in numpy have the numbers of the torch references, also of logits that are not numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from c2t_kernels import draft_stats
from c2t_kernels.network import FEATURES
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.engines.host_scorer import VALUES, HostScorer, host_stats
from c2t_plugin.errors import ConfigError
from c2t_plugin.request_options import RequestOptions
from c2t_plugin.scorer import ChainScorer

ROWS, D_MAX, VOCAB = 5, 4, 300


def logits_of(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def classifier_of(features: tuple[str, ...] = FEATURES, top_m: int = 100, depth_origin: int = 1) -> NodeClassifier:
    torch.manual_seed(3)
    n = len(features)
    shift, scale = tuple(0.1 * i for i in range(n)), tuple(1.0 + i for i in range(n))
    spec = ClassifierSpec(features, shift, scale, hidden=16, top_m=top_m, depth_origin=depth_origin)
    return NodeClassifier(spec).requires_grad_(False)


def device_scorer(classifier: NodeClassifier, beta: float, keep_stats: bool = False) -> ChainScorer:
    return ChainScorer(
        classifier, slots=ROWS, rows=ROWS, max_depth=D_MAX, beta=beta, device="cpu", keep_stats=keep_stats
    )


def draft(scorer: HostScorer, steps: list[torch.Tensor]) -> None:
    for number, logits in enumerate(steps):
        scorer.score(logits, first=number == 0)


def draft_on_device(scorer: ChainScorer, steps: list[torch.Tensor]) -> None:
    slots = torch.arange(len(steps[0]))
    scorer.write_seed(slots, steps[0])
    scorer.begin(slots)
    for logits in steps[1:]:
        scorer.step(logits)


def assert_stats_agree(logits: torch.Tensor, top_m: int) -> None:
    with np.errstate(all="ignore"):
        found = host_stats(logits.float().numpy(), top_m)
    wanted = draft_stats(logits, top_m)
    for mine, theirs in zip(found[1:], (wanted.log_probs[:, 0], wanted.entropy, wanted.margin), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs, atol=2e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("top_m", [1, 2, 100, VOCAB - 1, VOCAB, 10 * VOCAB])
def test_statistics_are_those_of_the_reference(top_m: int):
    logits = logits_of(0)
    assert_stats_agree(logits, top_m)
    assert host_stats(logits.numpy(), top_m).token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_m", [1, 2, 100, VOCAB])
def test_statistics_of_words_that_a_vocabulary_lacks_and_of_equal_ones(top_m: int):
    absent = logits_of(1).masked_fill(torch.rand((ROWS, VOCAB)) < 0.8, float("-inf"))
    one_word = torch.full((1, VOCAB), float("-inf"))
    one_word[0, 7] = 2.0
    for logits in (absent, one_word, torch.zeros(2, VOCAB), logits_of(2).round(), logits_of(3).bfloat16()):
        assert_stats_agree(logits, top_m)


def test_statistics_of_one_word_and_of_two():
    assert_stats_agree(logits_of(4, vocab=1), 5)
    assert_stats_agree(logits_of(5, vocab=2), 1)


def test_logits_that_are_not_numbers_have_no_statistics():
    logits = logits_of(6)
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), float("inf"), float("-inf")
    assert_stats_agree(logits, 100)


def test_every_feature_has_a_twin():
    assert tuple(VALUES) == FEATURES


@pytest.mark.parametrize("depth_origin", [0, 1])
@pytest.mark.parametrize("name", FEATURES)
def test_confidences_are_those_of_the_reference(name: str, depth_origin: int):
    classifier = classifier_of((name,), depth_origin=depth_origin)
    mine, theirs = HostScorer(classifier, rows=ROWS, max_depth=D_MAX, beta=0.5), device_scorer(classifier, 0.5)
    steps = [logits_of(10 + step) * (1 + 20 * (step == 2)) for step in range(D_MAX)]
    draft(mine, steps)
    draft_on_device(theirs, steps)
    torch.testing.assert_close(mine.confidence(ROWS), theirs.confidence(ROWS), atol=2e-5, rtol=0)


@pytest.mark.parametrize("max_depth", range(D_MAX + 1))
@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_chains_end_where_the_reference_ends_them(quantile: float, max_depth: int):
    """Also where a token has no confidence, and asked after every step whether any may grow."""
    classifier = classifier_of()
    steps = [logits_of(20 + step) for step in range(D_MAX)]
    steps[1][2, 5] = float("nan")
    trial = HostScorer(classifier, rows=ROWS, max_depth=D_MAX, beta=0.0)
    draft(trial, steps)
    beta = float(trial.confidence(ROWS).nan_to_num(0.5).quantile(quantile))
    mine, theirs = HostScorer(classifier, rows=ROWS, max_depth=D_MAX, beta=beta), device_scorer(classifier, beta)
    for scorer in (mine, theirs):
        scorer.set_max_depth(max_depth)
    for number, logits in enumerate(steps):
        mine.score(logits, first=number == 0)
        draft_on_device(theirs, steps[: number + 1])
        assert mine.any_alive() == theirs.any_alive()
    assert mine.end(ROWS).tolist() == theirs.end(ROWS).tolist()
    assert mine.non_finite == 1


def test_a_draft_starts_anew_and_takes_the_limits_as_they_are_then():
    classifier = classifier_of()
    scorer = HostScorer(classifier, rows=ROWS, max_depth=D_MAX, beta=1.0)
    steps = [logits_of(30 + step) for step in range(2)]
    draft(scorer, steps)
    assert scorer.end(ROWS).tolist() == [0] * ROWS and not scorer.any_alive()
    scorer.set_beta(0.0)
    draft(scorer, [logits[:3] for logits in steps])
    assert scorer.end(3).tolist() == [2] * 3 and scorer.any_alive()
    fresh = HostScorer(classifier, rows=3, max_depth=D_MAX, beta=0.0)
    draft(fresh, [logits[:3] for logits in steps])
    torch.testing.assert_close(scorer.confidence(3), fresh.confidence(3))


def test_statistics_are_kept_as_the_reference_keeps_them():
    classifier = classifier_of()
    mine, theirs = (
        HostScorer(classifier, rows=ROWS, max_depth=D_MAX, beta=0.0, keep_stats=True),
        device_scorer(classifier, 0.0, keep_stats=True),
    )
    steps = [logits_of(40 + step) for step in range(3)]
    draft(mine, steps)
    draft_on_device(theirs, steps)
    found, wanted = mine.stats(ROWS), theirs.stats(ROWS)
    assert found is not None and wanted is not None
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    assert HostScorer(classifier, rows=1, max_depth=1, beta=0.0).stats(1) is None


def test_a_batch_larger_than_the_buffers_is_an_error():
    with pytest.raises(ConfigError, match="buffers hold 2"):
        HostScorer(classifier_of(), rows=2, max_depth=2, beta=0.5).score(logits_of(1), first=True)


@pytest.mark.parametrize("lower", [False, True])
def test_requests_are_cut_by_limits_of_their_own(lower: bool):
    classifier = classifier_of()
    steps = [logits_of(50 + step) for step in range(D_MAX)]
    trial = HostScorer(classifier, rows=ROWS, max_depth=D_MAX, beta=0.0)
    draft(trial, steps)
    beta = float(trial.confidence(ROWS).median())
    betas, depths = [None, 0.0, 1.0, None, 0.0], [None, None, None, 2, 1]
    mine, theirs = HostScorer(classifier, rows=ROWS, max_depth=D_MAX, beta=beta), device_scorer(classifier, beta)
    mine.lower = theirs.lower = lower
    plain = mine
    draft(plain, steps)
    as_the_server = plain.end(ROWS).tolist()
    mine.limit([RequestOptions(beta=one, max_depth=most) for one, most in zip(betas, depths, strict=True)])
    theirs.set_requests(torch.arange(ROWS), betas, depths)
    draft(mine, steps)
    draft_on_device(theirs, steps)
    assert mine.end(ROWS).tolist() == theirs.end(ROWS).tolist() != as_the_server
    assert mine.any_alive() == theirs.any_alive()
    mine.limit([RequestOptions()] * ROWS)
    draft(mine, steps)
    assert mine.end(ROWS).tolist() == as_the_server
