"""Cost curves from data sheets by hand, and how far a measured one goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.simulation.roofline import GPUS, MODELS, Assumptions, Gpu, Machine, Measured, Model, draft_of
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import CostCurve
from c2t_plugin.profiling import CostProfile

L40 = Machine(GPUS["L40"])
LLAMA = MODELS["llama-3.1-8b"]
# Round enough to reckon with: one layer has 192 + 384 weights, the body 1,152, the LM head 8,000; 32 bytes of keys and
# values a token; half of a gigabyte and of a GFLOP a second
TOY = Model("toy", layers=2, hidden=8, inner=16, heads=2, kv_heads=1, vocab=1000, head_dim=4)
SLOW = Machine(
    Gpu("slow", 1e9, 1e9, 1e9, 1e8, "made up"),
    assumed=Assumptions(0.5, 0.5, host=1e-3, all_reduce=1e-5, launch=2e-4, score=3e-4, context=100),
)


def test_the_weights_are_those_of_the_published_model():
    """8.03 billion parameters, less the embedding's 0.53 billion, of which a pass reads single rows."""
    assert pytest.approx(8.03e9 - 128_256 * 4096, rel=0.001) == LLAMA.weights
    assert MODELS["llama-3-70b"].weights == pytest.approx(70.55e9 - 128_256 * 8192, rel=0.001)


def test_a_short_pass_reads_and_a_long_one_multiplies():
    share = Assumptions()
    reading = 2 * LLAMA.weights / (0.864e12 * share.bandwidth_share)
    multiplying = 2 * LLAMA.weights * 4096 / (181.05e12 * share.flops_share)
    assert L40.pass_s(LLAMA, 1) == L40.pass_s(LLAMA, 64) == pytest.approx(reading)
    assert L40.pass_s(LLAMA, 4096) == pytest.approx(multiplying)


def test_gpus_that_share_a_model_are_faster_but_not_by_their_number():
    alone, four = Machine(GPUS["H200"]), Machine(GPUS["H200"], tp=4)
    assert alone.pass_s(LLAMA, 8) / 4 < four.pass_s(LLAMA, 8) < alone.pass_s(LLAMA, 8)
    assert four.cache_s(LLAMA, 8) == pytest.approx(alone.cache_s(LLAMA, 8) / 4)


def test_what_does_not_fit_is_known():
    models = (MODELS["llama-3-70b"], draft_of("eagle3", MODELS["llama-3-70b"]))
    assert not L40.fits(models, 1)
    assert Machine(GPUS["A100"], tp=4).fits(models, 1)


def test_plain_decoding_pays_for_no_draft_and_c2t_for_its_statistics():
    plain_curve = L40.curve(LLAMA, None, 8)
    unscored_curve = L40.curve(LLAMA, MODELS["llama-3.2-1b"], 8)
    scored_curve = L40.curve(LLAMA, MODELS["llama-3.2-1b"], 8, scored=True)
    assert plain_curve.keep_up == 0.0
    assert scored_curve.draft_s(8) > unscored_curve.draft_s(8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Assumptions(bandwidth_share=0.0),
        lambda: Assumptions(flops_share=1.5),
        lambda: Assumptions(host=-1.0),
        lambda: Machine(GPUS["L40"], tp=0),
        lambda: draft_of("medusa", LLAMA),
    ],
)
def test_assumptions_that_cannot_be_are_refused(make: Callable[[], object]):
    with pytest.raises(ConfigError):
        make()


def test_a_measured_curve_takes_the_place_of_a_data_sheet():
    curve = CostCurve(verify=((1, 1.0), (9, 2.0)), draft=((1, 0.1), (9, 0.5)), keep_up=0.2)
    measured = Measured(curve)
    assert measured.curve(LLAMA, None, 4).keep_up == 0.0
    assert measured.curve(LLAMA, LLAMA, 4) == curve
    assert measured.curve(LLAMA, LLAMA, 4, width=2).draft_s(4) == pytest.approx(curve.draft_s(8))


@pytest.mark.parametrize(
    ("tokens", "drafting", "says"),
    [(9, 4, ""), (10, 4, "verify passes were measured up to 9, this would take 10"), (9, 5, "draft passes")],
)
def test_a_measured_curve_ends_where_it_was_measured(tokens: int, drafting: int, says: str):
    measured = Measured(CostCurve(verify=((1, 1.0), (9, 2.0)), draft=((1, 0.1), (4, 0.5))))
    found = measured.beyond(tokens, drafting)
    assert says in found and bool(says) == bool(found)


def test_what_a_server_made_up_counts_as_not_measured():
    """It writes the point of its only size twice, since a curve needs two."""
    profile = CostProfile((4,), lambda: None, clock=iter(range(99)).__next__)
    while profile.curve() is None:
        assert profile.length(8) == 4
        for part, count in (("verify", 40), ("draft", 8), ("up", 8)):
            with profile.timed(part, lambda count=count: count):
                pass
    measured = Measured(profile.curve())
    assert not measured.beyond(40, 8)
    assert "up to 40" in measured.beyond(41, 8) and "up to 8" in measured.beyond(40, 9)


@pytest.mark.parametrize(
    ("name", "gigabytes", "terabytes_per_s", "dense_tflops", "link_gigabytes_per_s"),
    [("H200", 141, 4.8, 989.5, 900 / 2), ("A100", 80, 2.039, 312, 600 / 2), ("L40", 48, 0.864, 181.05, 64 / 2)],
)
def test_gpus_are_those_of_the_data_sheets(
    name: str, gigabytes: float, terabytes_per_s: float, dense_tflops: float, link_gigabytes_per_s: float
):
    """Links are printed for both directions together, an H200's 1,979 TFLOP/s with sparsity."""
    gpu = GPUS[name]
    assert (gpu.memory, gpu.bandwidth) == (gigabytes * 1e9, pytest.approx(terabytes_per_s * 1e12))
    assert (gpu.flops, gpu.link) == (pytest.approx(dense_tflops * 1e12), link_gigabytes_per_s * 1e9)


def test_gpus_that_share_a_pass_wait_for_each_other_by_hand():
    """5 tokens on 4 GPUs: four all-reduces in which 5 x 8 x 2 bytes cross the link 1.5 times, and three quarters of
    5 x 1,000 logits."""
    four = replace(SLOW, tp=4)
    assert four._all_reduce_s(TOY, 5) == pytest.approx(4 * (1e-5 + 120 / 1e8))
    assert four._gather_s(TOY, 5) == pytest.approx(1e-5 + 7500 / 1e8)
    multiplying = 2 * 9152 * 5 / 0.5e9 / 4
    assert four.pass_s(TOY, 5) == pytest.approx(multiplying + 4.48e-5 + 8.5e-5)
    assert SLOW._all_reduce_s(TOY, 5) == SLOW._gather_s(TOY, 5) == 0.0


# 3 requests: a token each multiplies for 109.824 us, four tokens for 439.296 us; keys and values take 19.2 us, the
# launch 200 us; C2T's kernels 300 us, and 12 us to read one token's logits of each
@pytest.mark.parametrize(
    ("scored", "width", "microseconds"),
    [(False, 1, 329.024), (True, 1, 641.024), (False, 4, 658.496), (True, 4, 1006.496)],
)
def test_a_draft_pass_by_hand(scored: bool, width: int, microseconds: float):
    found = SLOW.curve(TOY, TOY, 3, scored=scored, width=width).draft_s(3)
    assert found == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(
    ("scored", "width", "features", "microseconds"),
    [(False, 1, 0, 356.672), (True, 1, 0, 668.672), (True, 4, 0, 668.672), (False, 1, 100, 360.272)],
)
def test_keeping_up_by_hand(scored: bool, width: int, features: int, microseconds: float):
    """3 requests read 3 tokens each, for 41.472 us, and predict one, for 96 us; what reads features does so here."""
    curve = SLOW.curve(TOY, replace(TOY, features=features), 3, scored=scored, width=width)
    assert curve.keep_up == pytest.approx(microseconds * 1e-6)
    assert curve.draft_s(3) == SLOW.curve(TOY, TOY, 3, scored=scored, width=width).draft_s(3)


def test_eagle_heads_by_hand():
    """EAGLE-1 makes one state of two in every pass; EAGLE-3's q, k and v read two, and three become one at first."""
    mlp, square = 3 * 4096 * 14_336, 4096 * 4096
    eagle1, eagle3 = draft_of("eagle1", LLAMA), draft_of("eagle3", LLAMA)
    assert eagle1.weights == 2 * square + (2 * square + 2 * 4096 * 1024 + mlp) + 4096 * 128_256
    assert eagle3.weights == (3 * square + 4 * 4096 * 1024 + mlp) + 4096 * 32_000
    assert eagle3.of_features.weights - eagle3.weights == 3 * square
