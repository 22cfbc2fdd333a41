"""Sampled verification against exact enumeration on a tiny vocabulary, with planted biases that have to be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from scipy.stats import chisquare

from benchmarks.cpu_engine.site.c2t_cpu_engine import patches, sampling
from c2t_plugin.errors import ContractError

WORDS, REQUESTS = 4, 6_000
# One run in a million fails by chance, and the seed is fixed; a planted bias is far below it.
ALPHA = 1e-6

Outcome = tuple[int, ...]


class Forest:
    """REQUESTS copies of one draft tree, each node with a target distribution of its own."""

    def __init__(self, tokens: list[int], next_token: list[int], next_sibling: list[int], depth: int) -> None:
        torch.manual_seed(3)
        self.tokens, self.next_token, self.next_sibling, self.depth = tokens, next_token, next_sibling, depth
        self.probs = torch.softmax(torch.randn(len(tokens), WORDS, dtype=torch.float64), dim=-1)

    def expected(self) -> dict[Outcome, float]:
        """Probability of every sequence of committed tokens, when each is drawn from the target."""
        found: dict[Outcome, float] = {}

        def grow(node: int, outcome: Outcome, probability: float) -> None:
            below = self.children(node) if len(outcome) < self.depth - 1 else {}
            for token in range(WORDS):
                p = probability * float(self.probs[node, token])
                if token in below:
                    grow(below[token], (*outcome, token), p)
                else:
                    found[*outcome, token] = p

        grow(0, (), 1.0)
        return found

    def children(self, node: int) -> dict[int, int]:
        """Token to node."""
        found, child = {}, self.next_token[node]
        while child != -1:
            found[self.tokens[child]] = child
            child = self.next_sibling[child]
        return found

    def sample(self, bend: Callable[[torch.Tensor], torch.Tensor] = lambda coins: coins) -> Counter[Outcome]:
        """Committed tokens of each request; `bend` may plant a bias into the coins."""
        n = len(self.tokens)
        torch.manual_seed(5)
        predicts = torch.zeros(REQUESTS * n, dtype=torch.int32)
        accept_index = torch.full((REQUESTS, self.depth), -1, dtype=torch.int32)
        count = torch.zeros(REQUESTS, dtype=torch.int32)
        repeat = [torch.tensor(row).expand(REQUESTS, n) for row in (self.tokens, self.next_token, self.next_sibling)]
        sampling.tree_speculative_sampling(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=count,
            candidates=repeat[0],
            retrive_index=torch.arange(REQUESTS * n).view(REQUESTS, n),
            retrive_next_token=repeat[1],
            retrive_next_sibling=repeat[2],
            uniform_samples=bend(torch.rand(REQUESTS, n)),
            uniform_samples_for_final_sampling=torch.rand(REQUESTS),
            target_probs=self.probs.expand(REQUESTS, n, WORDS),
            draft_probs=torch.zeros(0),
        )
        rows = zip(accept_index.tolist(), count.tolist(), strict=True)
        return Counter(tuple(predicts[index[: accepted + 1]].tolist()) for index, accepted in rows)

    def p_value(self, counts: Counter[Outcome]) -> float:
        expected = self.expected()
        if not set(counts) <= set(expected):
            return 0.0
        observed = [counts[outcome] for outcome in expected]
        return float(chisquare(observed, [REQUESTS * p for p in expected.values()]).pvalue)


FORESTS = {
    "chain": Forest([9, 2, 0], [1, 2, -1], [-1, -1, -1], depth=3),
    "tree": Forest([9, 2, 0, 1, 3], [1, 3, -1, -1, -1], [-1, 2, -1, 4, -1], depth=3),
    # the second level's nodes may not be entered: the path is full
    "shallow": Forest([9, 2, 0, 1, 3], [1, 3, -1, -1, -1], [-1, 2, -1, 4, -1], depth=2),
    "cut to its root": Forest([9, 2, 0], [-1, 2, -1], [-1, -1, -1], depth=3),
}


@pytest.fixture(params=FORESTS, ids=lambda name: name.replace(" ", "-"))
def forest(request: pytest.FixtureRequest) -> Forest:
    return FORESTS[request.param]


def test_committed_tokens_are_distributed_as_the_targets(forest: Forest) -> None:
    assert sum(forest.expected().values()) == pytest.approx(1.0)
    assert forest.p_value(forest.sample()) > ALPHA


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_a_planted_coin_bias_is_seen(name: str) -> None:
    assert FORESTS[name].p_value(FORESTS[name].sample(bend=lambda coins: coins**1.5)) < ALPHA


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_drawing_a_refused_token_again_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = sampling._draw
    monkeypatch.setattr(sampling, "_draw", lambda probs, _refused, coin: draw(probs, [], coin))
    assert FORESTS[name].p_value(FORESTS[name].sample()) < ALPHA


def test_committing_the_argmax_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stock SGLang does on a CPU."""
    monkeypatch.setattr(sampling, "_draw", lambda probs, _refused, _coin: int(probs.argmax()))
    assert FORESTS["chain"].p_value(FORESTS["chain"].sample()) < ALPHA


@pytest.mark.parametrize(("coin", "token"), [(0.0, 1), (0.49, 1), (0.51, 3), (0.9999999, 3)])
def test_draw_leaves_out_zeros_and_refused(coin: float, token: int) -> None:
    assert sampling._draw(torch.tensor([0.0, 0.25, 0.5, 0.25]), [2], coin) == token


def test_draw_without_any_mass_left() -> None:
    assert sampling._draw(torch.tensor([0.0, 1.0, 0.0]), [1], 0.3) == 1


def test_top_k() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    got = sampling.top_k_renorm(probs, torch.tensor([2, 1 << 30]))
    # one float32 division each
    torch.testing.assert_close(got, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7], [0.1, 0.4, 0.2, 0.3]]))


def test_top_p() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]] * 3)
    got = sampling.top_p_renorm(probs, torch.tensor([0.35, 0.5, 1.0]))
    expected = [[0.0, 1.0, 0.0, 0.0], [0.0, 4 / 7, 0.0, 3 / 7], [0.1, 0.4, 0.2, 0.3]]
    # one float32 division each
    torch.testing.assert_close(got, torch.tensor(expected))


@pytest.mark.parametrize(("greedy", "expected"), [(True, True), (False, False)])
def test_verification_is_greedy_only_for_greedy_batches(greedy: bool, expected: bool) -> None:
    verdict = sampling.verify_uses_greedy(
        is_all_greedy=greedy, is_cpu=True, is_hip=False, is_xpu=False, use_rejection_sampling=False
    )
    assert verdict is expected


def test_rejection_sampling_is_refused() -> None:
    with pytest.raises(RuntimeError, match="--speculative-use-rejection-sampling needs a GPU"):
        sampling.verify_uses_greedy(
            is_all_greedy=False, is_cpu=True, is_hip=False, is_xpu=False, use_rejection_sampling=True
        )


def test_a_missing_symbol_is_named() -> None:
    module = ModuleType("sglang.example")
    module.present = 1  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match=r"sglang\.example has no absent, .* install sglang==0\.5\.23"):
        patches._replace(module, {"present": 2, "absent": 3})
    assert module.present == 1


def test_a_profile_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_PROFILES", [])
    monkeypatch.setattr(torch.autograd.profiler, "_disable_profiler", patches._disable_profiler)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(2).sum()
    assert profile.profiler is not None
    assert [profile.profiler.kineto_results] == patches._PROFILES
