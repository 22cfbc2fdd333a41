"""Chain mode against a scorer written out by hand, and the faults that would go unseen in output."""

from __future__ import annotations

import math

import pytest
import torch

from c2t_kernels import early_stop
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.errors import ClassifierError, ConfigError
from c2t_plugin.scorer import ChainScorer

NAN = math.nan
VOCAB = 40
SLOTS = 8


@pytest.fixture
def classifier() -> NodeClassifier:
    torch.manual_seed(3)
    return NodeClassifier(ClassifierSpec(top_m=30)).eval().requires_grad_(False)


def scorer_for(classifier: NodeClassifier, beta: float = 0.5, d_max: int = 4) -> ChainScorer:
    return ChainScorer(classifier, slots=SLOTS, rows=6, max_depth=d_max, beta=beta, device="cpu")


def logits(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def by_hand(classifier: NodeClassifier, per_step: list[torch.Tensor]) -> list[list[float]]:
    """Confidences of one chain per row: plain Python over softmax probabilities, as in C2T algorithm 1."""
    result = []
    for row in range(per_step[0].shape[0]):
        joint, confidences = 1.0, []
        for depth, step_logits in enumerate(per_step, start=1):
            probs = torch.softmax(step_logits[row].double(), dim=-1)
            joint *= probs.max().item()
            largest = sorted(probs.tolist(), reverse=True)[: classifier.spec.top_m]
            entropy = -sum(p * math.log(p) for p in largest if p > 0)
            features = torch.tensor([joint, entropy, float(depth)])
            confidences.append(torch.sigmoid(classifier(features)).item())
        result.append(confidences)
    return result


@pytest.mark.parametrize(
    ("confidence", "beta", "max_depth", "expected"),
    [
        ([0.9, 0.8, 0.7], 0.5, 3, 3),
        ([0.9, 0.4, 0.7], 0.5, 3, 1),  # what comes after the first dropped token goes too
        ([0.4, 0.9, 0.9], 0.5, 3, 0),
        ([0.9, 0.5, 0.4], 0.5, 3, 2),  # equality keeps
        ([NAN, 0.9, 0.4], 0.5, 3, 2),  # what is not known is kept
        ([0.0, 0.0, 0.0], 0.0, 3, 3),
        ([0.9, 0.9, 0.9], 1.0, 3, 0),
        ([0.9, 0.8, 0.7], 0.5, 2, 2),
        ([0.9, 0.8, 0.7], 0.0, 0, 0),
    ],
)
def test_kept_lengths(confidence: list[float], beta: float, max_depth: int, expected: int):
    assert early_stop(torch.tensor([confidence]), beta, max_depth).tolist() == [expected]


def test_scores_are_the_papers(classifier: NodeClassifier):
    scorer = scorer_for(classifier)
    slots = torch.tensor([5, 2, 7])
    steps = [logits(i, 3) for i in range(4)]
    scorer.write_seed(slots, steps[0])
    scorer.begin(slots)
    for step in steps[1:]:
        scorer.step(step)
    # float32 sums of logarithms against float64 products
    torch.testing.assert_close(scorer.confidence(3), torch.tensor(by_hand(classifier, steps)), atol=2e-5, rtol=0)


def test_seeds_follow_their_slot_and_not_their_row(classifier: NodeClassifier):
    scorer = scorer_for(classifier)
    seeds = logits(1, 2)
    scorer.write_seed(torch.tensor([4, 6]), seeds)
    scorer.begin(torch.tensor([6, 4]))
    expected = by_hand(classifier, [seeds.flip(0)])
    torch.testing.assert_close(scorer.confidence(2), torch.tensor(expected), atol=2e-5, rtol=0)


def test_joint_probability_starts_again_with_each_draft(classifier: NodeClassifier):
    scorer = scorer_for(classifier)
    slots = torch.tensor([1, 2])
    scorer.write_seed(slots, logits(2, 2))
    scorer.begin(slots)
    scorer.step(logits(3, 2))
    first = scorer.confidence(2).clone()
    scorer.begin(slots)
    scorer.step(logits(3, 2))
    assert torch.equal(scorer.confidence(2), first)


def test_rows_left_over_from_a_larger_batch_do_not_matter(classifier: NodeClassifier):
    scorer = scorer_for(classifier)
    scorer.write_seed(torch.arange(1, 6), logits(4, 5))
    scorer.begin(torch.arange(1, 6))
    scorer.step(logits(5, 5))
    scorer.begin(torch.tensor([3]))
    expected = by_hand(classifier, [logits(4, 5)[2:3]])
    torch.testing.assert_close(scorer.confidence(1), torch.tensor(expected), atol=2e-5, rtol=0)


def test_a_slot_without_a_seed_keeps_its_first_token_and_is_counted(classifier: NodeClassifier):
    scorer = scorer_for(classifier, beta=1.0)
    scorer.begin(torch.tensor([3]))
    scorer.step(logits(6, 1))
    assert scorer.end(1).tolist() == [1]
    assert scorer.non_finite.item() == 1
    # the missing probability counts as 1: the second token's joint probability is its own
    alone = torch.softmax(logits(6, 1).double(), -1).max().item()
    largest = torch.softmax(logits(6, 1).double(), -1).topk(30).values
    features = torch.tensor([alone, torch.special.entr(largest).sum().item(), 2.0])
    torch.testing.assert_close(scorer.confidence(1)[0, 1], torch.sigmoid(classifier(features)), atol=2e-5, rtol=0)


def test_a_cleared_seed_is_not_the_old_one(classifier: NodeClassifier):
    scorer = scorer_for(classifier)
    scorer.write_seed(torch.tensor([2, 3]), logits(7, 2))
    scorer.clear_seed(torch.tensor([2]))
    scorer.begin(torch.tensor([2, 3]))
    assert scorer.confidence(2).isnan().tolist() == [[True], [False]]


def test_broken_logits_keep_the_token_and_go_on(classifier: NodeClassifier):
    scorer = scorer_for(classifier, beta=0.0)
    slots = torch.tensor([1])
    scorer.write_seed(slots, logits(8, 1))
    scorer.begin(slots)
    broken = logits(9, 1)
    broken[0, 0] = NAN
    scorer.step(broken)
    scorer.step(logits(10, 1))
    assert scorer.confidence(1).isnan().tolist() == [[False, True, False]]
    assert scorer.end(1).tolist() == [3]
    assert scorer.non_finite.item() == 1


def test_beta_and_depth_can_change_between_drafts(classifier: NodeClassifier):
    scorer = scorer_for(classifier, beta=0.0)
    slots = torch.tensor([1, 2])
    scorer.write_seed(slots, logits(11, 2))
    scorer.begin(slots)
    scorer.step(logits(12, 2))
    assert scorer.end(2).tolist() == [2, 2]
    scorer.set_max_depth(1)
    assert scorer.end(2).tolist() == [1, 1]
    scorer.set_beta(1.0)
    assert scorer.end(2).tolist() == [0, 0]


def test_buffers_stay_where_they_are(classifier: NodeClassifier):
    """A captured graph reads and writes addresses, so that new tensors in their place would go unseen."""
    scorer = scorer_for(classifier)
    before = {name: value.data_ptr() for name, value in buffers(scorer).items()}
    for rows in (3, 6):
        lengths_with(scorer, list(range(rows)), [logits(seed, rows) for seed in range(4)])
        scorer.set_requests(torch.arange(rows), [0.2] * rows, [2] * rows)
        scorer.set_beta(0.3)
        scorer.set_max_depth(2)
    assert {name: value.data_ptr() for name, value in buffers(scorer).items()} == before
    assert len(before) >= 9


def buffers(scorer: ChainScorer) -> dict[str, torch.Tensor]:
    held = {**vars(scorer), **scorer._state._asdict()}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def test_nothing_waits_for_the_device(classifier: NodeClassifier):
    """On the meta device a tensor has no values, so that whatever needs one on the host raises."""
    scorer = ChainScorer(classifier, slots=SLOTS, rows=6, max_depth=4, beta=0.5, device="meta")
    slots = torch.arange(3, device="meta")
    scorer.write_seed(slots, torch.zeros(3, VOCAB, device="meta"))
    scorer.begin(slots)
    for _ in range(3):
        scorer.step(torch.zeros(3, VOCAB, device="meta"))
    assert scorer.confidence(3).shape == (3, 4)


def test_a_classifier_too_wide_for_the_kernels(classifier: NodeClassifier):
    wide = NodeClassifier(ClassifierSpec(hidden=65))
    with pytest.raises(ClassifierError, match="65 hidden units, an engine takes at most 64"):
        scorer_for(wide)


@pytest.mark.parametrize("beta", [-0.1, 1.1, NAN])
def test_set_beta_refuses(classifier: NodeClassifier, beta: float):
    with pytest.raises(ConfigError, match="beta"):
        scorer_for(classifier).set_beta(beta)


@pytest.mark.parametrize("depth", [-1, 5])
def test_set_max_depth_refuses(classifier: NodeClassifier, depth: int):
    with pytest.raises(ConfigError, match="max_depth"):
        scorer_for(classifier).set_max_depth(depth)


def test_a_batch_larger_than_the_buffers_is_an_error(classifier: NodeClassifier):
    with pytest.raises(ConfigError, match="buffers hold 6"):
        scorer_for(classifier).begin(torch.arange(7))


def lengths_with(scorer: ChainScorer, slots: list[int], per_step: list[torch.Tensor]) -> list[int]:
    at = torch.tensor(slots)
    scorer.write_seed(at, per_step[0])
    scorer.begin(at)
    for step_logits in per_step[1:]:
        scorer.step(step_logits)
    return scorer.end(len(slots)).tolist()


def test_a_request_has_its_own_beta_and_longest_chain(classifier: NodeClassifier):
    per_step = [logits(seed, 3) for seed in range(4)]
    confidence = by_hand(classifier, per_step)
    scorer = scorer_for(classifier, beta=1.0)
    scorer.set_requests(torch.tensor([5, 2, 0]), [0.0, None, 0.0], [None, None, 2])
    assert lengths_with(scorer, [5, 2, 0], per_step) == [4, 0, 2]
    beta = confidence[1][0] * 0.99
    scorer.set_requests(torch.tensor([2]), [beta], [None])
    expected = next((i for i, c in enumerate(confidence[1]) if c < beta), 4)
    assert lengths_with(scorer, [5, 2, 0], per_step) == [4, expected, 2]


def test_the_next_request_of_a_slot_starts_without_them(classifier: NodeClassifier):
    per_step = [logits(seed, 1) for seed in range(4)]
    scorer = scorer_for(classifier, beta=0.0)
    scorer.set_requests(torch.tensor([3]), [1.0], [1])
    assert lengths_with(scorer, [3], per_step) == [0]
    scorer.set_requests(torch.tensor([3]), [None], [None])
    assert lengths_with(scorer, [3], per_step) == [4]


def test_the_scorers_longest_chain_holds_for_every_request(classifier: NodeClassifier):
    per_step = [logits(seed, 2) for seed in range(4)]
    scorer = scorer_for(classifier, beta=0.0)
    scorer.set_requests(torch.tensor([0, 1]), [None, None], [3, None])
    scorer.set_max_depth(2)
    assert lengths_with(scorer, [0, 1], per_step) == [2, 2]
    scorer.set_max_depth(4)
    assert lengths_with(scorer, [0, 1], per_step) == [3, 4]


def test_a_batch_is_alive_while_one_chain_may_grow(classifier: NodeClassifier):
    per_step = [logits(seed, 2) for seed in range(3)]
    confidence = by_hand(classifier, per_step)
    (deeper, shallower) = sorted((0, 1), key=lambda row: min(confidence[row][:2]), reverse=True)
    beta = min(confidence[deeper][:2]) * 0.999
    scorer = scorer_for(classifier, beta=beta)
    at = torch.arange(2)
    scorer.write_seed(at, per_step[0])
    scorer.begin(at)
    scorer.step(per_step[1])
    assert scorer.any_alive()
    scorer.set_max_depth(2)
    assert not scorer.any_alive()
    scorer.set_max_depth(4)
    scorer.set_requests(at[[deeper]], [1.0], [None])
    assert scorer.any_alive() == (min(confidence[shallower][:2]) >= beta)
