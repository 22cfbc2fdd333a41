"""The entropy-shaped trees' experiments and live drafting: rows on tiny data, and figures checked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.papers import entropy_trees_entropy as entropies
from benchmarks.papers import entropy_trees_shapes as shapes
from benchmarks.papers import live
from benchmarks.papers.experiment import Bench
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.collect import run_live
from c2t_plugin.lab.grow import grow_tree
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.lab.plans import CollectPlan, TreeShape
from c2t_plugin.lab.policies.chains import StaticChain
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import StaticTree
from c2t_plugin.lab.replay import Outcomes
from c2t_plugin.lab.verify import Sampler, Verification
from c2t_plugin.traces.file import Traces

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path: Path, tiny_pair: Path, make_traces: Callable[..., Traces]) -> Bench:
    bench = Bench(tiny_pair, tmp_path / "traces", quick=True)
    for seed, draft in enumerate(("draft", "eagle3")):
        for prompts in ("train", "held-out"):
            bench._traces[(draft, prompts)] = make_traces(prompts=3, steps=8, k=2, layers=5, seed=seed)
    return bench


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- figures 1 and 3


def test_histogram_by_hand() -> None:
    entropy, matched = torch.tensor([0.1, 0.49, 0.5, 1.7, 99.0]), torch.tensor([True, False, True, False, False])
    hits, misses = entropies.histogram(entropy, matched)
    assert hits.tolist() == [1, 1] + [0] * 11
    assert misses.tolist() == [1, 0, 0, 1] + [0] * 8 + [1]


def test_crossing_is_the_first_bin_with_more_mismatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropies, "LEAST", 3)
    # two in the second bin are too few, the third is even, the fifth has one match and two mismatches
    entropy = torch.tensor([0.1] * 3 + [0.6] * 2 + [1.2] * 4 + [2.1] * 3)
    matched = torch.tensor([True] * 3 + [False] * 2 + [True, True, False, False] + [True, False, False])
    assert entropies.crossing(entropy, matched) == 2.0
    assert entropies.crossing(entropy[:9], matched[:9]) is None


def test_only_tokens_that_serving_compares_count(make_traces: Callable[..., Traces]) -> None:
    traces = make_traces(prompts=1, steps=4, k=1, layers=4)
    accepted = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    traces.chain.accepted.copy_(accepted)
    traces.chain.entropy.copy_(torch.arange(16.0).view(4, 4))
    entropy, matched = entropies.compared_tokens(traces, 3)
    # state 0 accepts one token, so state 2 is next, then state 3
    assert entropy.tolist() == [0, 1, 8, 12, 13, 14]
    assert matched.tolist() == [True, False, False, True, True, True]


def test_entropy_figures_have_rows(bench: Bench) -> None:
    first, third = (experiment.findings(bench) for experiment in entropies.EXPERIMENTS)
    for draft, title in entropies.DRAFTS.items():
        _, matched = entropies.compared_tokens(bench.traces(draft))
        mine = [row for row in first.rows if row["draft"] == title]
        assert sum(row["matched"] for row in mine) == int(matched.sum())
        assert sum(row["mismatched"] for row in mine) == int((~matched).sum())
        found = [row["generations"] for row in third.rows if row["draft"] == title]
        assert sum(found) == len(bench.traces(draft))
    assert first.figure is not None and third.figure is not None
    heights = [line.get_ydata()[0] for line in third.figure.axes[0].lines]
    medians = [row["median"] for row in third.rows if row["draft"] == "stand-alone"]
    assert all(any(height == pytest.approx(median) for height in heights) for median in medians)


# ---- figures 2, 5 and 6


def outcomes(gamma: list[int], accepted: list[int], passes: list[int]) -> Outcomes:
    values = [torch.tensor(each) for each in (gamma, accepted, passes)]
    wasted = (values[2] - values[1] - 1).clamp_min(0)
    return Outcomes(*values, wasted, torch.zeros_like(values[0]))


def test_sums_by_hand() -> None:
    prompt = torch.tensor([3, 3, 3, 7, 7])
    found = shapes.Sums.of(outcomes([4, 9, 4, 4, 5], [1, 0, 0, 0, 2], [4, 4, 4, 4, 3]), prompt)
    # prompt 3 visits its states 0 and 2, prompt 7 both of its own
    assert found.steps.tolist() == [2, 2] and found.tokens.tolist() == [3, 4]
    assert found.gamma.tolist() == [8, 9] and found.passes.tolist() == [8, 7] and found.wasted.tolist() == [5, 3]
    assert found.time().tolist() == pytest.approx([(2 + shapes.DRAFT_COST * 8) / 3, (2 + shapes.DRAFT_COST * 7) / 4])
    assert found.all().tokens.tolist() == [7]
    wasted, time = shapes.gains(found, found.all())
    assert wasted.tolist() == pytest.approx([8 / 7 - 5 / 3, 8 / 7 - 3 / 4])
    assert shapes.correlation(wasted, time) == pytest.approx(1.0)
    assert shapes.correlation(wasted, torch.zeros(2)) is None


def test_shapes_run_on_a_tiny_pair(bench: Bench) -> None:
    second, panels = (experiment.findings(bench) for experiment in shapes.EXPERIMENTS)
    rows = {(row["draft"], row["method"]): row for row in second.rows}
    assert len(rows) == 2 * len(shapes.METHODS)
    for (_, method), row in rows.items():
        if method == shapes.BASELINE:
            assert row["candidates per step"] == 4 and row["time saved, modelled"] == row["verify steps saved"] == 0
        if method == shapes.STATIC:
            assert row["candidates per step"] == 2 + 4 + 8 + 16
        assert 0 <= row["tau"] <= 4
    assert len(panels.rows) == 2 * len(shapes.PANELS) and panels.figure is not None
    ours, papers = second.figure.axes[0].containers
    assert [bar.get_width() for bar in ours] == [row["time saved, modelled"] for row in second.rows[: len(ours)]]
    assert papers[1].get_width() == 0.023 and math.isnan(papers[3].get_width())


def test_our_limit_is_the_crossing_of_our_pair() -> None:
    found = shapes.policies(2.5)
    assert found[shapes.OWN_STOP].max_entropy == 2.5 and found["early stop, H > 1"].max_entropy == 1.0
    assert shapes.policies(math.inf)[shapes.OWN_STOP].max_entropy == math.inf


# ---- live drafting

PLAN = live.Plan(prompts=3, new=4, layers=3, temperature=0.0, together=2)


def test_the_judge_is_the_target(tiny_pair: Path) -> None:
    target, _ = load_pair(tiny_pair, "draft")
    for site in live.sites(tiny_pair, "draft", PLAN):
        with torch.inference_mode():
            logits = target(input_ids=site.texts.token_ids).logits
            judge = site.judge()
            found = judge.root().logits()[:, 0]
            roots = site.texts.roots
            assert torch.allclose(found, logits[:, roots.start : roots.stop].flatten(0, 1), atol=1e-4)
            # the next token of the text is the next root
            after = judge.extend(site.texts.continuation(1), torch.full((len(found), 1), -1)).logits()[:, 0]
            expected = logits[:, roots.start + 1 : roots.stop + 1].flatten(0, 1)
            assert torch.allclose(after, expected, atol=1e-4)


def test_greedy_texts_give_what_run_live_gives(tiny_pair: Path) -> None:
    policy = StaticChain(d_max=3)
    plan = CollectPlan("eagle3", TreeShape(1, 3, 100), trees=12, prompts="held-out", new_tokens=4)
    prompt, expected = run_live(tiny_pair, plan, {"chain": policy})
    numbers, found = live.by_text(tiny_pair, "eagle3", PLAN, {"chain": policy})
    assert numbers.tolist() == prompt.tolist()
    assert found["chain"].accepted.tolist() == expected["chain"].accepted.tolist()


PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0))


@pytest.mark.parametrize(
    ("policy", "verification"),
    [
        (StaticChain(d_max=3, temperature=0.6), Verification.CHAIN),
        (SpecInfer(branches=(3, 2, 1), temperature=0.6), Verification.MULTI_ROUND),
        (StaticTree(paths=PATHS, temperature=0.6), Verification.WITHOUT_REPLACEMENT),
    ],
)
def test_rejection_at_temperature_0_is_matching(tiny_pair: Path, policy, verification) -> None:
    for site in live.sites(tiny_pair, "draft", PLAN):
        with torch.inference_mode():
            expected = site.by_text(policy, generator())
            found = live.by_rejection(site, policy, verification, 0.6, 0.0, generator())
        assert found.accepted.tolist() == expected.accepted.tolist()
        assert found.gamma.tolist() == expected.gamma.tolist()


def test_a_draft_that_is_the_target_is_always_accepted(toy_draft, toy_logits) -> None:
    policy = StaticChain(d_max=5, temperature=0.7)
    grown = grow_tree(toy_draft(20, toy_logits(6, 1)), policy, generator())
    judge = toy_draft(20, toy_logits(6, 1))
    found = live.accept_lengths(grown, judge, Verification.CHAIN, 0.7, 0.7, Sampler(generator(1)))
    assert found.tolist() == [5] * 20


def test_acceptance_is_one_minus_the_variation(toy_draft) -> None:
    states, draft, target = 1000, (0.5, 0.5), (0.8, 0.2)

    def logits(words: tuple[float, ...]) -> Callable[[int, tuple[int, ...]], list[float]]:
        return lambda state, path: [math.log(word) for word in words]

    grown = grow_tree(toy_draft(states, logits(draft)), StaticChain(d_max=2, temperature=1.0), generator())
    judge = toy_draft(states, logits(target))
    lengths: Tensor = live.accept_lengths(grown, judge, Verification.CHAIN, 1.0, 1.0, Sampler(generator(1)))
    expected = 0.7 + 0.7**2
    assert abs(float(lengths.double().mean()) - expected) < 5 * math.sqrt(0.65 / states)


@pytest.mark.parametrize(
    ("policy", "verification", "message"),
    [
        (StaticChain(d_max=2), Verification.CHAIN, "no token was drawn"),
        (SpecInfer(branches=(2,), temperature=0.6), Verification.WITHOUT_REPLACEMENT, "these draws could repeat"),
        (StaticTree(paths=((0,), (1,)), temperature=0.6), Verification.MULTI_ROUND, "every sibling"),
        (SpecInfer(branches=(2,), temperature=0.6), Verification.K_SEQ, "cannot judge a tree node by node"),
    ],
)
def test_what_is_not_exact_is_not_run(toy_draft, toy_logits, policy, verification, message) -> None:
    grown, judge = (toy_draft(2, toy_logits(6, 1)) for _ in range(2))
    trees = grow_tree(grown, policy, generator())
    with pytest.raises(ConfigError, match=message):
        live.accept_lengths(trees, judge, verification, 0.6, 0.6, Sampler(generator()))
    with pytest.raises(ConfigError, match=message):
        live.accepted_children(trees, judge.root(), verification, 0.6, 0.6, Sampler(generator()))


def test_texts_follow_the_temperature(tiny_pair: Path) -> None:
    """Greedy texts do not depend on the seed, sampled ones do."""

    def text(temperature: float, seed: int) -> list[list[int]]:
        target, _ = load_pair(tiny_pair, "draft")
        plan = live.Plan(1, 8, 2, temperature, seed=seed)
        return next(texts.token_ids.tolist() for texts in live.written(target, {0: [5, 9, 11]}, plan))

    assert text(0.0, 0) == text(0.0, 1) and text(1.0, 0) == text(1.0, 0)
    assert text(1.0, 0) != text(1.0, 1)
