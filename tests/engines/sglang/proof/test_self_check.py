"""What the self-check at start tries, and what it does about what fails."""

from __future__ import annotations

import logging
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from c2t_plugin.config import C2TConfig  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from c2t_plugin.kernel_checks import Checked  # noqa: E402

WRONG = Checked("draft_stats", 0.5, 2e-4, 10.0)
OFF = "10 rows of 4 requests, graph, depth 6: logits are off by 3, allowed 0.1"


@pytest.mark.parametrize(
    ("below", "rows", "requests", "width"), [(0, 7, 5, 7), (7, 14, 5, 7), (28, 35, 5, 7), (0, 2, 9, 5), (35, 70, 20, 7)]
)
def test_lengths_take_the_tier_and_are_ragged(proof: Any, below: int, rows: int, requests: int, width: int):
    for seed in range(20):
        found = proof.packed.lengths(rows, below, requests, width, random.Random(seed))
        assert found is not None
        assert below < sum(found) <= rows and min(found) >= 1 and max(found) <= width and len(found) <= requests


def test_a_tier_that_so_few_requests_cannot_fill_is_left_out(proof: Any):
    assert proof.packed.lengths(70, 35, 5, 7, random.Random(0)) is None


def test_the_spread_is_that_of_the_worst_row(proof: Any):
    spread, Spread = proof.packed.spread, proof.packed.Spread
    expected = torch.zeros(3, 200)
    found = expected.clone()
    found[1] += 0.5
    found[2, :10] = 9.0
    assert spread(found, expected) == Spread(0.5, 9.0)
    found[0, 0] = torch.nan
    assert spread(found, expected) == Spread(math.inf, math.inf)
    # nothing is within what is not a number
    assert not Spread(0.0, 0.0).within(Spread(math.nan, math.nan))


def worker(*, packing: bool = True, kernel: str = "stock", unproved: bool = False) -> Any:
    """unproved: packed rows are not to be compared."""
    backend = type("FlashAttentionBackend", (), {"c2t_kernel": kernel})()
    parts = SimpleNamespace(packing=object() if packing else None, configuration={}, planner=None)
    target = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    return SimpleNamespace(device="cpu", c2t=parts, target_worker=target, in_torch=[], unproved=unproved)


@pytest.fixture
def run(proof: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """at_start with these failures; returns whether packing was taken back."""

    def at_start(config: C2TConfig, on: Any, failures: list[str], *kernels: Checked, **said: Any) -> bool:
        unpacked: list[Any] = []
        whole_ones: list[bool] = []
        everywhere, draft = said.pop("everywhere", True), said.pop("draft", lambda _: (None, 8))
        counts = {"proved": 3, "tiers": 4, "poison": math.nan}
        found = proof.packed.Findings(failures=failures, **{**counts, **said})
        monkeypatch.setattr(proof.report, "prove", lambda _, whole: whole_ones.append(whole) or found)
        monkeypatch.setattr(proof.report, "compare", draft)
        monkeypatch.setattr(proof.report, "check", lambda *_, **__: iter(kernels))
        monkeypatch.setattr(proof.report, "_shapes", lambda _: None)
        monkeypatch.setattr(proof.report, "_unpack", lambda *given: unpacked.append(given))
        monkeypatch.setattr(proof.report, "compute_in_torch", on.in_torch.append)
        monkeypatch.setattr(proof.report, "_start_over", lambda *_: on.in_torch.append("and all graphs anew"))
        monkeypatch.setattr(proof.ranks, "all_hold", lambda here: here and everywhere)
        proof.report.at_start(on, config, lambda: None)
        # all sizes are tried where all have to hold, and none where what packs them is wrong
        assert whole_ones in ([], [config.self_check == "strict"])
        assert not (whole_ones and on.unproved)
        return bool(unpacked)

    return at_start


def test_what_holds_is_said_in_one_line(run: Any, caplog: pytest.LogCaptureFixture):
    served = worker()
    with caplog.at_level(logging.INFO):
        assert not run(C2TConfig(), served, [])
    assert len(caplog.records) == 1
    assert "packed verification is the uniform window's, off by 0, allowed 0, in 3 of 4 sizes, with nan" in caplog.text
    assert served.c2t.configuration["self_check"]["failures"] == []


def test_what_fails_is_the_uniform_window(run: Any, caplog: pytest.LogCaptureFixture):
    served = worker()
    assert run(C2TConfig(), served, [OFF])
    assert f"self-check on cpu: packed verification on FlashAttentionBackend is wrong: {OFF}. The unif" in caplog.text
    assert served.c2t.configuration["self_check"]["failures"] == [OFF]


@pytest.mark.parametrize(("failures", "expected"), [([], [{8: 5e-3, 16: 6e-3}]), ([OFF], [])])
def test_times_of_packed_rows_that_hold_seed_the_planner(run: Any, failures: list[str], expected: list[Any]):
    served, seeds = worker(), []
    served.c2t.planner = SimpleNamespace(seed=seeds.append)
    times = {"microseconds": {8: 5000.0, 16: 6000.0}, "window_microseconds": {8: 6000.0, 16: 6000.0}}
    run(C2TConfig(), served, failures, **times)
    assert served.c2t.configuration["self_check"]["window_microseconds"] == times["window_microseconds"]
    assert [pytest.approx(each) for each in seeds] == expected


def test_what_fails_on_another_rank_fails_here(run: Any, caplog: pytest.LogCaptureFixture):
    assert run(C2TConfig(), worker(), [], everywhere=False)
    assert "another rank found a fault" in caplog.text


@pytest.mark.parametrize(("failures", "kernels"), [([OFF], []), ([], [WRONG])])
def test_strict_is_an_error(run: Any, failures: list[str], kernels: list[Checked]):
    with pytest.raises(ConfigError, match=r"self-check on cpu: .*off by"):
        run(C2TConfig(self_check="strict"), worker(), failures, *kernels)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "1 of 4 sizes were not tried; start with"),
        ({"skipped": "MemoryError: no room"}, "it was not tried: MemoryError: no room; start with"),
    ],
)
def test_strict_is_an_error_where_something_was_not_tried(run: Any, said: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=f"self-check on cpu: {reason}"):
        run(C2TConfig(self_check="strict"), worker(), [], **said)
    assert not run(C2TConfig(self_check="strict"), worker(), [], proved=4)


def test_both_times_are_said(run: Any, caplog: pytest.LogCaptureFixture):
    times = {"microseconds": {8: 5000.0, 16: 6000.0}, "window_microseconds": {8: 8000.0, 16: 6000.0}}
    with caplog.at_level(logging.INFO):
        run(C2TConfig(), worker(), [], **times)
    assert "packed passes take 0.62 to 1.00 of the time of the same requests' windows" in caplog.text


def test_a_wrong_kernel_is_done_without(run: Any, caplog: pytest.LogCaptureFixture):
    """Torch computes it, in graphs that are captured for that."""
    served = worker()
    assert not run(C2TConfig(), served, [], WRONG, Checked("early_stop", 0.0, 0.0, 5.0))
    assert served.in_torch == ["draft_stats", "and all graphs anew"]
    said = "self-check on cpu: Triton kernel draft_stats off by 0.5, allowed 0.0002, 10 us. torch computes that, more s"
    assert [said in each.message for each in caplog.records] == [True]
    state = served.c2t.configuration["self_check"]
    assert state["kernels"] == ["draft_stats off by 0.5, allowed 0.0002, 10 us"]
    figures = {"name": "early_stop", "error": 0.0, "allowed": 0.0, "microseconds": 5.0, "failure": ""}
    assert state["checked"]["early_stop"] == figures and list(state["checked"]) == ["draft_stats", "early_stop"]


def test_a_kernel_that_is_wrong_on_another_rank_is_done_without_here(run: Any, caplog: pytest.LogCaptureFixture):
    """Ranks that cut by other numbers take other steps."""
    served = worker(packing=False)
    run(C2TConfig(), served, [], Checked("draft_stats", 0.0, 2e-4, 10.0), everywhere=False)
    assert served.in_torch == ["draft_stats", "and all graphs anew"]
    assert "Triton kernel draft_stats is wrong on another rank." in caplog.text


@pytest.mark.parametrize(
    ("name", "packing", "kernel", "unpacks"),
    [
        ("pack_ragged", True, "stock", True),
        ("pack_ragged", False, "stock", False),
        ("tree_attention", True, "tree", True),
        ("tree_attention", True, "stock", False),
    ],
)
def test_a_wrong_kernel_of_packed_rows_is_the_uniform_window(
    run: Any, caplog: pytest.LogCaptureFixture, name: str, packing: bool, kernel: str, unpacks: bool
):
    """Where it is one that the server runs; without a word where it is not."""
    served = worker(packing=packing, kernel=kernel, unproved=unpacks)
    assert run(C2TConfig(), served, [], Checked(name, math.inf, 0.0, 10.0)) == unpacks
    line = f"{name} off by inf, allowed 0, 10 us"
    said = f"self-check on cpu: packed verification on FlashAttentionBackend is wrong: {line}. The uniform window is"
    assert (said in caplog.text, served.in_torch) == (unpacks, [])
    state = served.c2t.configuration["self_check"]
    assert (state["kernels"], state["failures"]) == (([line], [line]) if unpacks else ([], []))


def test_strict_does_without_nothing(run: Any):
    served = worker()
    with pytest.raises(ConfigError, match=r"self-check on cpu: draft_stats off by 0.5, allowed 0.0002, 10 us; start"):
        run(C2TConfig(self_check="strict"), served, [], WRONG, proved=4)
    assert served.in_torch == []


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        ("cuda", "auto", True),
        ("cpu", "auto", False),
        ("cpu", "on", True),
        ("cpu", "strict", True),
        ("cuda", "off", False),
    ],
)
def test_when_it_runs(proof: Any, device: str, asked: str, expected: bool, monkeypatch: pytest.MonkeyPatch):
    ran: list[Any] = []
    monkeypatch.setattr(proof.report, "at_start", lambda *given: ran.append(given))
    proof.startup.prove(SimpleNamespace(device=device), C2TConfig(self_check=asked), lambda: None)
    assert bool(ran) == expected


def test_what_cannot_be_tried_is_no_failure(proof: Any, run: Any, caplog: pytest.LogCaptureFixture):
    pool = SimpleNamespace(post_capture_active=True)
    runner = SimpleNamespace(token_to_kv_pool=pool, model_config=SimpleNamespace(vocab_size=64))
    parts = SimpleNamespace(packing=SimpleNamespace(sizes=lambda: []))
    target = SimpleNamespace(model_runner=runner)
    found = proof.packed.prove(SimpleNamespace(target_worker=target, speculative_num_draft_tokens=5, c2t=parts))
    assert (found.failures, found.proved) == ([], 0)
    assert found.skipped.startswith("MemoryError: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
    served = worker()
    assert not run(C2TConfig(), served, [], skipped=found.skipped)
    assert "packed verification was not tried: MemoryError" in caplog.text


def test_no_size_in_time_proves_nothing(run: Any, caplog: pytest.LogCaptureFixture):
    """Five servers that compiled on one H200: 0 of 20 sizes were the uniform window's, it said."""
    assert not run(C2TConfig(), worker(), [], proved=0, tiers=20, seconds=16.2)
    assert "packed verification was not tried: 16.2 s went before the first of 20 sizes" in caplog.text
    assert "the uniform window's" not in caplog.text


def test_what_does_not_run_has_failed(proof: Any):
    found = proof.packed.prove(SimpleNamespace(target_worker=None))
    assert len(found.failures) == 1 and found.failures[0].startswith("it did not run (AttributeError")


def test_requests_have_states_of_linear_layers_of_their_own(proof: Any):
    free = [torch.tensor([3, 1, 4, 2])]

    def alloc(count: int) -> torch.Tensor | None:
        slots, free[0] = free[0][:count], free[0][count:]
        return slots if len(slots) == count else None

    cache = SimpleNamespace(conv=[torch.ones(2, 5, 3)], temporal=torch.ones(2, 5, 4, 4))
    allocator = SimpleNamespace(alloc=alloc, free=free.append, available_size=lambda: len(free[0]))
    rows = torch.zeros(6, dtype=torch.int32)
    pool = SimpleNamespace(
        mamba_allocator=allocator,
        mamba_pool=SimpleNamespace(mamba_cache=cache),
        req_index_to_mamba_index_mapping=rows,
    )
    assert (proof.linear.room(pool, 9), proof.linear.room(SimpleNamespace(), 9)) == (4, 9)
    states = proof.linear.LinearStates(pool, 3)
    assert rows.tolist() == [0, 3, 1, 4, 0, 0]
    states.clear()
    # of the others nothing is touched
    assert [each[0, :, 0].flatten()[:5].tolist() for each in cache.conv] == [[1, 0, 1, 0, 0]]
    assert cache.temporal.flatten(2).sum((0, 2)).tolist() == [32, 0, 32, 0, 0]
    with pytest.raises(MemoryError, match="no 3 states"):
        proof.linear.LinearStates(pool, 3)
    states.close()
    assert rows.tolist() == [0] * 6 and free[1].tolist() == [3, 1, 4]
    # models without such layers
    proof.linear.LinearStates(SimpleNamespace(), 3).close()


def drafts(proof: Any, **changes: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    plain = {
        "tokens": torch.arange(12).view(4, 3),
        "confidence": torch.rand(4, 3, generator=generator),
        "path": -9 * torch.rand(4, generator=generator),
    }
    return proof.drafted.Drafts(**{**plain, **changes})


def differing(proof: Any, graph: Any, again: Any = None) -> str | None:
    eager = drafts(proof)
    found: str | None = proof.drafted.differing(graph, eager, again or drafts(proof), dtype=torch.float32)
    return found


@pytest.mark.parametrize(("words", "expected"), [(None, 1000), (range(32), 32)])
def test_a_draft_is_asked_for_words_that_it_has(proof: Any, words: Any, expected: int):
    """Where a token map leaves fewer than its configuration says; another would end a GPU's context."""
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=1000))
    assert proof.drafted.words_of(SimpleNamespace(draft_runner=runner, hot_token_id=words)) == expected
    # a stand-alone draft has no map at all
    assert proof.drafted.words_of(SimpleNamespace(draft_runner=runner)) == 1000


def test_statistics_out_of_a_graph_are_eager_ones(proof: Any):
    assert differing(proof, drafts(proof)) is None
    # as far as eager passes in another order are apart
    noise = drafts(proof).path + 0.01
    assert differing(proof, drafts(proof, path=noise), drafts(proof, path=noise)) is None
    # one request that drafts another token, as near a tie, may be anything
    tokens, path = drafts(proof).tokens.clone(), drafts(proof).path.clone()
    tokens[2, 2], path[2] = 99, 50.0
    assert differing(proof, drafts(proof, tokens=tokens, path=path)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"confidence": lambda each: each.flip(0)}, "confidence of a draft's graph is off its eager passes' by"),
        ({"path": lambda each: each.roll(1, 0)}, "log probability of a draft's graph is off"),
        ({"path": lambda each: each * torch.nan}, "by inf"),
        ({"tokens": lambda each: each.roll(1, 0)}, "gives other tokens than eager passes: 4 of 4 requests"),
    ],
)
def test_statistics_of_an_earlier_replay_are_seen(proof: Any, changes: dict[str, Any], said: str):
    wrong = {name: change(getattr(drafts(proof), name)) for name, change in changes.items()}
    assert said in (differing(proof, drafts(proof, **wrong)) or "")


def test_statistics_that_are_off_are_said(run: Any, caplog: pytest.LogCaptureFixture):
    served = worker(packing=False)
    assert not run(C2TConfig(), served, [], draft=lambda _: ("confidence is off", 8))
    assert "self-check on cpu: confidence is off. Drafts may be cut in the wrong places" in caplog.text


def test_ranks_with_requests_of_their_own_try_no_pass(
    run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """All of them would have to be in each pass of made-up requests."""
    monkeypatch.setattr("c2t_plugin.engines.sglang.ranks.apart", lambda: True)
    served = worker(packing=False)
    with caplog.at_level(logging.INFO):
        assert not run(C2TConfig(), served, [], draft=lambda _: pytest.fail("a draft was made"))
    assert "statistics out of the draft's graph were not tried: DP attention" in caplog.text
    assert served.c2t.configuration["self_check"]["draft"]["untried"].startswith("DP attention")
    assert "packed verification" not in caplog.text
    assert not run(C2TConfig(), worker(), [OFF])
    assert "packed verification was not tried: DP attention" in caplog.text


def test_statistics_that_cannot_be_tried_are_no_failure(run: Any, caplog: pytest.LogCaptureFixture):
    def untried(_: Any) -> None:
        raise AttributeError("no sampling_info")

    served = worker(packing=False)
    with caplog.at_level(logging.INFO):
        assert not run(C2TConfig(self_check="strict"), served, [], draft=untried)
    assert "statistics out of the draft's graph were not tried: AttributeError: no sampling_info" in caplog.text
    assert served.c2t.configuration["self_check"]["draft"]["untried"] == "AttributeError: no sampling_info"
