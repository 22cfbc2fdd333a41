"""How deep drafts of model runner V2 go where the scheduler's planner decides, and what it is told of them.

Over a stub of vLLM's stand-alone speculator, which drafts to the end whatever it is told.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

import torch  # noqa: E402

from benchmarks.operations.vllm_steps import configuration  # noqa: E402
from c2t_plugin.classifier import load_classifier  # noqa: E402
from c2t_plugin.engines.vllm import draft_times, v2  # noqa: E402
from c2t_plugin.engines.vllm.config import KEY, Settings  # noqa: E402
from c2t_plugin.engines.vllm.draft_times import BEGIN, END, FIRST, DraftTimes  # noqa: E402
from c2t_plugin.planner.network import Network  # noqa: E402
from c2t_plugin.planner.network_learner import NetworkLearner  # noqa: E402

ROWS, DEPTH, VOCABULARY = 3, 6, 40
# seconds of one pass
PASS = 2.0


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(draft_times, "time", made)
    return made


class Stock:
    method = "draft_model"

    def __init__(self, clock: Clock, planned: bool, learn: str = "auto") -> None:
        self.vllm_config, self.device = configuration(ROWS, planned=planned), torch.device("cpu")
        self.vllm_config.additional_config[KEY]["learn"] = learn
        self.max_num_reqs, self.num_speculative_steps = ROWS, DEPTH
        self.draft_tokens = torch.arange(ROWS * DEPTH).view(ROWS, DEPTH)
        generator = torch.Generator().manual_seed(3)
        self.logits = torch.randn(DEPTH, ROWS, VOCABULARY, generator=generator) * 3
        self._clock, self.passes, self.acceptance_estimator = clock, 0, SimpleNamespace()

    def load_model(self) -> None:
        pass

    def _run_model(self) -> None:
        self.passes += 1
        self._clock.now += PASS

    def _multi_step_decode(self, at: torch.Tensor, confidences: torch.Tensor) -> None:
        for number in range(1, DEPTH):
            self._pass(number, at, confidences)

    def propose(self, batch: Any, *, dummy_run: bool, num_speculative_tokens: int | None) -> torch.Tensor:
        at, confidences = torch.zeros((), dtype=torch.int64), torch.zeros(ROWS, DEPTH)
        self._pass(0, at, confidences)
        self._multi_step_decode(at, confidences)
        return self.draft_tokens

    def _pass(self, number: int, at: torch.Tensor, confidences: torch.Tensor) -> None:
        self._run_model()
        at.fill_(number)
        self.acceptance_estimator.predict(self.logits[number], torch.arange(ROWS), at, confidences, confidences[:, 0])


# ours over it
Speculator: Any = type("Speculator", (v2._StandaloneMixin, Stock), {})


def drafter(clock: Clock, *, planned: bool = True, learn: str = "auto") -> Any:
    made = Speculator(clock, planned, learn)
    made.load_model()
    return made


BATCH = SimpleNamespace(req_ids=["a", "b", "c"], num_reqs=ROWS)


@pytest.mark.parametrize("depth", [0, 1, 3, DEPTH])
def test_a_draft_is_as_deep_as_the_scheduler_says(clock: Clock, depth: int):
    made = drafter(clock)
    made.propose(BATCH, num_speculative_tokens=depth)
    # the first pass reads what the target has accepted
    assert made.passes == max(depth, 1)
    assert (made.drafts, made.draft_steps) == (int(depth > 0), depth)
    told = made.tell()
    assert told.overlaps and (told.extend_s, told.seconds) == (PASS, made.passes * PASS)
    log_prob = made.logits[:depth].log_softmax(-1).amax(-1).T
    torch.testing.assert_close(torch.tensor(told.log_prob).view(ROWS, depth), log_prob, atol=1e-5, rtol=0)
    assert told.tokens == made.draft_tokens[:, :depth].tolist()
    assert told.confidence == made.scorer._state.confidence[:, :depth].tolist()
    assert len(told.confidence) == ROWS
    assert made.tell() is None


@pytest.mark.parametrize("learn", ["calibrate", "network"])
def test_a_network_is_learnt_from_statistics_and_scores_by_what_it_is_sent(clock: Clock, learn: str):
    made = drafter(clock, learn=learn)
    made.propose(BATCH, num_speculative_tokens=DEPTH)
    told = made.tell()
    if learn == "calibrate":
        assert not len(told.stats)
        return
    sure = torch.from_numpy(told.sure(stats=True))
    assert torch.equal(sure[..., 1:], made.scorer.stats(ROWS)[..., 1:])
    learner = NetworkLearner(load_classifier(Settings.of(made.vllm_config).classifier), DEPTH, background=False)
    torch.testing.assert_close(learner.confidence(sure[..., 1:]), sure[..., 0], atol=1e-5, rtol=0)
    other = Network(*(0.5 * each for each in learner.network))
    made.scorer.take([torch.from_numpy(each) for each in other])
    made.propose(BATCH, num_speculative_tokens=DEPTH)
    again = torch.from_numpy(made.tell().sure(stats=True))
    learner.network = other
    assert not torch.equal(again[..., 0], sure[..., 0])
    torch.testing.assert_close(learner.confidence(again[..., 1:]), again[..., 0], atol=1e-5, rtol=0)


def test_one_draft_says_nothing_of_the_next(clock: Clock):
    made = drafter(clock)
    made.propose(BATCH, num_speculative_tokens=2)
    made.propose(SimpleNamespace(req_ids=["a"], num_reqs=1), num_speculative_tokens=DEPTH)
    assert made.passes == 2 + DEPTH
    told = made.tell()
    assert [len(row) for row in told.confidence] == [DEPTH] and told.seconds == DEPTH * PASS
    # what vLLM warms up with is as deep as it likes, and nobody's
    made.propose(BATCH, dummy_run=True, num_speculative_tokens=1)
    assert made.passes == 2 + 2 * DEPTH and made.tell() is None


def test_without_a_planner_there_is_nothing_to_tell(clock: Clock):
    made = drafter(clock, planned=False)
    made.propose(BATCH)
    assert made.passes == DEPTH and made.tell() is None


def test_a_heads_first_tokens_are_there_behind_its_first_pass():
    marked: list[int] = []
    for kind in (v2.C2TEagleSpeculator, v2.C2TMTPSpeculator):
        made: Any = object.__new__(kind)
        made.share_mtp_topk_indices, made._times = False, SimpleNamespace(mark=marked.append)
        made.on_prefill_end(1)
    assert marked == [FIRST, FIRST]


def test_a_draft_of_first_tokens_alone_ends_with_them(clock: Clock):
    times = DraftTimes(torch.device("cpu"))
    for first, expected in ((True, (1.0, 5.0)), (False, (5.0, 5.0))):
        times.mark(BEGIN)
        clock.now += 1.0
        if first:
            times.mark(FIRST)
        clock.now += 4.0
        times.mark(END)
        assert times.seconds() == expected


def test_a_gpu_tells_by_its_own_clock(monkeypatch: pytest.MonkeyPatch):
    """Which counts milliseconds."""

    class Event:
        now = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = Event.now

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = DraftTimes(torch.device("cuda"))
    for moment, Event.now in ((BEGIN, 100.0), (FIRST, 103.0), (END, 108.0)):
        times.mark(moment)
    assert times.seconds() == (0.003, 0.008)
