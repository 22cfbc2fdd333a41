"""The reference for draft statistics against hand-written answers."""

from __future__ import annotations

import math

import pytest
import torch

from c2t_kernels import draft_stats


def naive(row: torch.Tensor, top_m: int) -> tuple[float, float, float]:
    """Largest log probability, top-M entropy and margin of one row, in float64 and plain Python."""
    finite = [x for x in row.double().tolist() if x != -math.inf]
    largest = max(finite)
    total = sum(math.exp(x - largest) for x in finite)
    probs = sorted((math.exp(x - largest) / total for x in finite), reverse=True)
    entropy = -sum(p * math.log(p) for p in probs[:top_m] if p > 0)
    margin = math.log(probs[0]) - math.log(probs[1]) if len(probs) > 1 else math.inf
    return math.log(probs[0]), entropy, margin


def test_uniform_row_has_entropy_log_vocab():
    stats = draft_stats(torch.zeros(1, 256), top_m=1000)
    assert stats.entropy.item() == pytest.approx(math.log(256), abs=1e-5)
    assert stats.log_probs[0, 0].item() == pytest.approx(-math.log(256), abs=1e-5)
    assert stats.margin.item() == 0.0


def test_entropy_is_over_the_largest_m_and_not_renormalised():
    stats = draft_stats(torch.zeros(1, 256), top_m=64)
    assert stats.entropy.item() == pytest.approx(64 / 256 * math.log(256), abs=1e-5)


# 1: one word; 2: the smallest with a margin; 999-1001: around M; 4096: a real draft vocabulary.
@pytest.mark.parametrize("vocab", [2, 3, 999, 1000, 1001, 4096])
@pytest.mark.parametrize("top_m", [1, 2, 1000, 5000])
def test_matches_plain_python(vocab: int, top_m: int):
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab + top_m)) * 3
    stats = draft_stats(logits, top_m)
    for row in range(3):
        log_prob, entropy, margin = naive(logits[row], top_m)
        # float32 softmax over up to 4096 words loses a few units in the last place of each term
        assert stats.log_probs[row, 0].item() == pytest.approx(log_prob, abs=2e-5)
        assert stats.entropy[row].item() == pytest.approx(entropy, abs=5e-5)
        assert stats.margin[row].item() == pytest.approx(margin, abs=2e-5)
        assert stats.token_ids[row, 0] == logits[row].argmax()


def test_single_word_vocabulary_is_certain():
    stats = draft_stats(torch.full((2, 1), 3.0), top_m=1000)
    assert stats.entropy.tolist() == [0.0, 0.0]
    assert stats.log_probs.tolist() == [[0.0], [0.0]]
    assert stats.margin.tolist() == [0.0, 0.0]


def test_missing_words_count_nothing():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([logits, torch.full((4, 100), -math.inf)], dim=1)
    # the zeros change the order of the sum, by which a float32 sum of 300 terms moves in its last places
    assert draft_stats(padded, 1000).entropy.tolist() == pytest.approx(draft_stats(logits, 1000).entropy, abs=2e-6)


def test_ties_are_counted_exactly():
    # five equal words, M = 3: three of the five count
    stats = draft_stats(torch.zeros(1, 5), top_m=3)
    assert stats.entropy.item() == pytest.approx(3 / 5 * math.log(5), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_broken_row_is_marked_and_leaves_others_alone(bad: float):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    good = draft_stats(logits, 10)
    logits[1, 7] = bad
    stats = draft_stats(logits, 10)
    assert stats.entropy[1].isnan() and stats.log_probs[1].isnan().all()
    assert stats.entropy[0] == good.entropy[0]


def test_a_row_without_a_finite_entry_is_marked():
    stats = draft_stats(torch.full((1, 9), -math.inf), 5)
    assert stats.entropy.isnan().all() and stats.log_probs.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: torch.dtype):
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(draft_stats(logits, 100).entropy, draft_stats(logits.float(), 100).entropy)


@pytest.mark.parametrize(
    ("shape", "top_m", "k"), [((4,), 10, 1), ((2, 0), 10, 1), ((2, 8), 0, 1), ((2, 8), 10, 0), ((2, 8), 10, 9)]
)
def test_refuses_what_has_no_meaning(shape: tuple[int, ...], top_m: int, k: int):
    with pytest.raises(ValueError, match="draft_stats"):
        draft_stats(torch.zeros(shape), top_m, k)
