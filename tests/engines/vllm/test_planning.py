"""The planner in vLLM's scheduler: what it makes of times and confidences, and where it is refused."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.metrics.stats import SchedulerStats  # noqa: E402

from c2t_plugin.engines.patching import ATTRIBUTE  # noqa: E402
from c2t_plugin.engines.vllm import config  # noqa: E402
from c2t_plugin.engines.vllm.ending import Ending, Sent  # noqa: E402
from c2t_plugin.engines.vllm.metrics import classified, packed  # noqa: E402
from c2t_plugin.engines.vllm.planned import PlanningScheduler  # noqa: E402
from c2t_plugin.engines.vllm.planning import Drafted, Planning, cut  # noqa: E402
from c2t_plugin.engines.vllm.requests import OwnSettings  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from c2t_plugin.planner import CostCurve, OwnLimits, step_planner  # noqa: E402
from c2t_plugin.planner.calibration import Calibration  # noqa: E402
from c2t_plugin.planner.planner import TAUGHT  # noqa: E402
from c2t_plugin.planner.sparing import EVERY, FIRST, SCORED  # noqa: E402
from c2t_plugin.planner.step_costs import StepCosts  # noqa: E402
from tests.engines.vllm.test_config import resolved  # noqa: E402

D_MAX = 4
# seconds: of a target's pass and of each of its tokens, of a draft's first pass and of its others
PASS, TOKEN, EXTEND = 8.0, 0.25, 2.0


class Machine:
    """A scheduler and a worker whose time passes as it is told."""

    def __init__(
        self,
        draft_pass: float,
        confidence: float,
        curve: CostCurve | None = None,
        d_max: int = D_MAX,
        ends: bool = False,
        scores: float | None = None,
    ) -> None:
        """scores: seconds that scores of a token take; a planner may then spare them."""
        self.now, self.draft_pass, self.confidence = 0.0, draft_pass, confidence
        # only who learns goes without
        ways = {} if scores is None else {"spares": True, "calibration": Calibration(d_max)}
        self.planning = Planning(curve, None, d_max, clock=lambda: self.now, ends=ends, **ways)
        self.scores = scores or 0.0
        self.scored: list[bool] = []
        # whether the depth was a probe
        self.probes: list[bool] = []
        self.ending = Ending()
        # whether the workers compute, so that the scheduler has time
        self.computing = False
        self.waiting: dict[str, list[int]] = {}
        self.depths: list[int] = []

    def step(self, requests: int = 2, prompt: int = 0, spared: bool = False) -> list[int]:
        """One step of requests that verify what they were left; prompt: tokens of one more, that is read. spared: vLLM
        has the draft read what was accepted, and make none."""
        names = [f"r{row}" for row in range(requests)]
        self.planning.begin(decoding=not prompt)
        depth = self.planning[requests + bool(prompt)]
        sent = self.planning.sent(requests, ["new"] * bool(prompt))
        self.computing = True
        self.planning.learn()
        self.computing = False
        depth = self.ended(sent, names, depth)
        self.depths.append(depth)
        self.scored.append(self.ending.scores)
        decides = self.planning.planner._planner if self.scored[-1] else self.planning.planner._static
        self.probes.append(decides is not None and decides.probing)
        reads, depth = spared or depth > 0, 0 if spared else depth
        drafts = {name: self.waiting.pop(name) for name in names if self.waiting.get(name)}
        tokens = {name: 1 + len(drafts.get(name, ())) for name in names} | ({"new": prompt} if prompt else {})
        scores = self.scores * depth * self.scored[-1]
        drafting = EXTEND * reads + self.draft_pass * max(0, depth - 1) + scores
        self.now += PASS + TOKEN * sum(tokens.values()) + drafting
        self.planning.ran(tokens, drafts)
        handed = types.SimpleNamespace(req_ids=names, draft_token_ids=[[7] * depth for _ in names])
        chances = [self.confidence ** (place + 1) if self.scored[-1] else math.nan for place in range(depth)]
        first = scores / depth if depth else 0.0
        told = Drafted([chances for _ in names], EXTEND * reads + first, drafting, classifier_s=scores)
        setattr(handed, ATTRIBUTE, told)
        cut(self.planning, handed, lambda name: True, [None] * requests)
        self.waiting = dict(zip(names, handed.draft_token_ids, strict=True))
        return [len(row) for row in handed.draft_token_ids]

    def ended(self, sent: Sent | None, names: list[str], depth: int) -> int:
        """Where the worker ends a draft that is to be so deep."""
        self.ending.sent = sent
        present = [*names, "new"] if sent and sent.reading else names
        self.ending.begin(present, [None] * len(present))
        for drafted in range(1, depth):
            newest = [[self.confidence**drafted] * (len(names) + 1), [math.nan] * (len(names) + 1)]
            if not self.ending.goes_on(types.SimpleNamespace(newest=lambda newest=newest: newest)):
                return drafted
        return depth

    def run(self, steps: int, **what: int) -> list[int]:
        for _ in range(steps):
            last = self.step(**what)
        return last


def test_the_first_steps_measure_what_a_step_costs():
    machine = Machine(draft_pass=1.0, confidence=0.9)
    machine.run(22)
    assert set(machine.depths) == set(range(D_MAX + 1))
    machine.run(3)
    curve = machine.planning.planner.curve
    assert curve is not None
    assert curve.draft_extend == pytest.approx(EXTEND) and curve.draft_s(2) == pytest.approx(1.0)
    for tokens, seconds in curve.verify:
        assert seconds == pytest.approx(PASS + TOKEN * tokens, rel=0.05)


def test_what_steps_cost_is_worked_out_while_the_workers_compute(monkeypatch: pytest.MonkeyPatch):
    machine, fit, curves = Machine(0.5, 0.9), StepCosts.fit, set()
    waited: list[bool] = []

    def fitted(curve: CostCurve, *rest: Any) -> StepCosts:
        curves.add(curve)
        waited.append(not machine.computing)
        return fit(curve, *rest)

    monkeypatch.setattr(StepCosts, "fit", fitted)
    machine.run(200)
    # what another curve leaves has to be known at once
    assert 0 < waited.count(True) <= len(curves)
    assert waited.count(False) > 20 and not any(waited[-20:])


def test_scores_are_spared_where_they_do_not_pay():
    """All chains are alike, so that confidences say nothing of one that the mean does not say."""
    machine = Machine(draft_pass=0.1, confidence=0.8, ends=True, scores=0.5)
    machine.run(FIRST)
    assert all(machine.scored)
    machine.run(100)
    last = slice(-2 * EVERY, None)
    assert sum(machine.scored[last]) == 2 * SCORED
    drafted = zip(machine.depths[last], machine.probes[last], strict=True)
    assert {depth for depth, probe in drafted if not probe} == {D_MAX}
    curve = machine.planning.planner.curve
    assert curve is not None and curve.draft_extend == pytest.approx(EXTEND) and curve.draft_s(2) == pytest.approx(0.1)


def test_what_came_of_drafts_without_scores_says_how_deep_the_next_ones_are():
    machine = Machine(draft_pass=0.1, confidence=0.8, ends=True, scores=0.5)
    machine.run(200)
    for _ in range(100):
        kept = machine.step()
        machine.planning.judged({"r0": kept[0], "r1": kept[1]}, {"r0": 0, "r1": 0}, {}, {}, none_ends)
    unscored = [depth for depth, scored in zip(machine.depths, machine.scored, strict=True) if not scored]
    assert unscored[0] == D_MAX and set(unscored[-8:]) <= {0, 1}


def test_a_draft_that_vllm_spares_says_nothing_of_what_drafts_cost():
    machine = Machine(draft_pass=1.0, confidence=0.9)
    for number in range(50):
        machine.step(spared=number % 2 == 1)
    curve = machine.planning.planner.curve
    assert curve is not None
    assert curve.draft_s(2) == pytest.approx(1.0)
    machine.step(spared=True)
    assert machine.planning.planner.depth == 0


@pytest.mark.parametrize(("draft_pass", "confidence", "depth"), [(0.01, 0.99, D_MAX), (30.0, 0.99, 1), (0.01, 0.01, 0)])
def test_depth_follows_from_costs_and_confidences(draft_pass: float, confidence: float, depth: int):
    machine = Machine(draft_pass, confidence)
    # plain decoding waits for drafts to teach
    machine.run(60 + TAUGHT // 2)
    assert machine.depths[-10:].count(depth) >= 9
    assert machine.step() == [depth] * 2 or depth == 0


def test_a_draft_ends_where_its_own_confidences_say_so():
    machine = Machine(draft_pass=0.3, confidence=0.95, ends=True)
    machine.run(60)
    assert set(machine.depths[-10:]) == {D_MAX}
    machine.confidence = 0.2
    # at once, and not when means have come down
    assert machine.run(1) is not None and machine.depths[-1] < D_MAX
    machine.confidence = 0.95
    machine.run(1)
    assert machine.depths[-1] == D_MAX
    # a prompt that is read beside has no say
    machine.run(1, prompt=500)
    assert machine.depths[-1] == D_MAX
    machine.confidence = 0.2
    machine.run(1, prompt=500)
    assert machine.depths[-1] < D_MAX


def test_the_passes_of_a_draft_that_has_ended_are_those_that_it_had():
    machine = Machine(draft_pass=0.3, confidence=0.95, ends=True)
    machine.run(60)
    machine.confidence = 0.2
    machine.run(2)
    ended = machine.depths[-1]
    assert 0 < ended < D_MAX and machine.planning.planner.depth == ended
    assert str(ended) in machine.planning.planner.state()["step_seconds"]["2"]


NOTHING, FREE = OwnLimits(None, 0, exact=False), None


def test_beside_a_request_with_limits_of_its_own_drafts_end_all_the_same():
    machine = Machine(draft_pass=0.3, confidence=0.95, ends=True)
    machine.run(60)
    # no probe, which is as deep as was said
    machine.planning.planner._planner.probe_every = 1000
    # more of them than the step has requests, as where one that runs is left out of it
    machine.planning.own = lambda: [OwnLimits(None, 3, exact=False)] * 3
    machine.planning.begin(decoding=True)
    assert machine.planning[2] == D_MAX
    sent = machine.planning.sent(2, [])
    assert sent is not None and machine.planning.sent(0, ["new"]) is None
    # a request of which nothing is verified says nothing about its neighbours' drafts
    for unsure in (0, 1):
        chances = [0.999, 0.999]
        chances[unsure] = 0.001
        own = [NOTHING if row == unsure else FREE for row in range(2)]
        assert begun(sent, own).goes_on(scored(chances))
        assert not begun(sent, own[::-1]).goes_on(scored(chances))


def begun(sent: Sent | None, own: Sequence[OwnLimits | None], names: Sequence[str] = ("a", "b")) -> Ending:
    ending = Ending()
    ending.sent = sent
    ending.begin(names, own)
    return ending


def scored(chances: list[float]) -> types.SimpleNamespace:
    """A worker's scorer, of which these are the newest tokens' confidences."""
    return types.SimpleNamespace(newest=lambda: (chances, [math.nan] * len(chances)))


@pytest.mark.parametrize("unlike", ["another version", "other requests", "nothing sent"])
def test_a_worker_that_cannot_tell_goes_on(unlike: str):
    machine = Machine(draft_pass=30.0, confidence=0.9, ends=True)
    machine.run(60)
    machine.planning.begin(decoding=True)
    # else it would end behind its first token
    assert machine.planning[2] == D_MAX
    sent = machine.planning.sent(2, [])
    assert sent is not None
    assert not begun(sent, [FREE] * 2).goes_on(scored([0.01] * 2))
    found = {
        "another version": sent._replace(prices=sent.prices._replace(version=0)),
        "other requests": sent,
        "nothing sent": None,
    }
    names = ("a",) if unlike == "other requests" else ("a", "b")
    assert begun(found[unlike], [FREE] * len(names), names).goes_on(scored([0.01] * 2))


def test_it_learns_what_became_of_its_drafts():
    planning = Planning(CURVE, None, D_MAX, calibration=Calibration(D_MAX))
    handed = types.SimpleNamespace(req_ids=["a", "b", "c"], draft_token_ids=[[7, 7], [7, 7], [7, 7]])
    setattr(handed, ATTRIBUTE, Drafted([[0.9, 0.8], [0.7, 0.6], [0.5, 0.4]], 1.0, 1.0))
    planning.begin(decoding=True)
    cut(planning, handed, lambda name: True, [None] * 3)
    # one that wants nothing learnt is left out, and one that nobody knows
    planning.judged({"b": 2, "c": 1, "d": 1}, {"b": 1, "c": 1, "d": 0}, {}, {}, none_ends)
    planning.learn()
    learnt = planning.planner.state()["learnt"]
    assert learnt["seen"] == 3
    planning.judged({}, {}, {}, {}, none_ends)
    planning.learn()
    assert planning.planner.state()["learnt"] == learnt


def test_it_learns_when_the_next_step_was_sent_off_and_forgets_nothing_where_nobody_asks(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(step_planner, "TOGETHER", 1)
    planning = Planning(CURVE, None, 1, calibration=Calibration(1))
    calibration = planning.planner._calibration
    planning.kept(Drafted([[0.9], [0.7]], 1.0, 1.0), ["a", "b"], [1, 1], [False] * 2)
    planning.judged({"a": 1}, {"a": 1}, {"a": 7}, {}, none_ends)
    assert calibration.seen == 0
    # of the drafts that were judged, though the next ones are here
    planning.kept(Drafted([[0.2]], 1.0, 1.0), ["b"], [1], [False])
    monkeypatch.setattr(Scheduler, "get_grammar_bitmask", lambda self, output: f"for {output}")
    scheduler = PlanningScheduler.__new__(PlanningScheduler)
    scheduler.planning = planning
    assert scheduler.get_grammar_bitmask("a step") == "for a step"
    assert calibration.seen == 1 and calibration._expected[0, 0, 0] == pytest.approx(0.9, rel=1e-6)
    planning.judged({"b": 1}, {"b": 0}, {"b": 8}, {}, none_ends)
    planning.judged({}, {}, {}, {}, none_ends)
    assert calibration.seen == 2


class Operations(TorchDispatchMode):
    """Counts torch's operations; those that only show the same memory to numpy do not count."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func not in (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_a_step_takes_few_operations_however_many_requests_share_it(requests: int):
    """Of the scheduler, which vLLM waits for on a CPU. Fits of what is learnt and of what
    steps cost come on top, every few steps."""
    machine = Machine(0.1, 0.95, ends=True)
    calibration = Calibration(D_MAX)
    machine.planning.planner._calibration = calibration
    for _ in range(60):
        names = machine.waiting
        machine.planning.judged(
            {name: len(row) for name, row in names.items()}, dict.fromkeys(names, 1), {}, {}, none_ends
        )
        machine.step(requests)
    counted: list[int] = []
    for _ in range(10):
        names, fits = machine.waiting, calibration.fits
        with Operations() as operations:
            machine.planning.judged(
                {name: len(row) for name, row in names.items()}, dict.fromkeys(names, 1), {}, {}, none_ends
            )
            machine.step(requests)
        counted += [operations.count] * (calibration.fits == fits)
    assert calibration.in_force is not None and counted
    # with everything in torch they were 281; of several steps what is learnt together counts in one
    assert sum(counted) / len(counted) <= 30


def test_a_prompt_is_no_decoding_step():
    machine = Machine(draft_pass=1.0, confidence=0.9)
    machine.run(40, prompt=500)
    assert machine.planning.planner.curve is None and set(machine.depths) == {D_MAX}
    machine.run(25)
    machine.run(1, prompt=500)
    curve = machine.planning.planner.curve
    assert curve is not None and max(count for count, _ in curve.verify) <= 2 * (1 + D_MAX)


def test_a_longest_chain_of_one_has_a_curve_too():
    machine = Machine(draft_pass=1.0, confidence=0.9, d_max=1)
    machine.run(30)
    assert machine.planning.planner.curve is not None and set(machine.depths[-8:]) <= {0, 1}


CURVE = CostCurve(verify=((1, 1.0), (2, 1.2), (12, 3.2)), draft=((1, 0.001), (16, 0.001)))


def test_all_requests_share_a_budget():
    planning = Planning(CURVE, None, D_MAX)
    planning.begin(decoding=True)
    assert planning[3] == D_MAX
    sure, unsure, unknown = [0.99, 0.98, 0.97, 0.96], [0.2, 0.01, 0.01, 0.01], [float("nan")] * D_MAX
    kept = planning.kept(Drafted([sure, unsure, unknown], 0.1, 0.2), "abc", [4, 4, 4], [False] * 3)
    assert kept == [4, 0, 4]
    # a request that takes no draft has no share, and one whose draft is short no more than that
    assert planning.kept(Drafted([sure, sure, sure], 0.1, 0.2), "abc", [None, 1, 4], [False] * 3) == [0, 1, 4]
    # what a beta of its own has left of one stays
    assert planning.kept(Drafted([sure, unsure, unknown], 0.1, 0.2), "abc", [4, 3, 4], [False, True, False]) == [
        4,
        3,
        4,
    ]


@pytest.mark.parametrize(("beside", "kept"), [(None, 1), (0, 0)])
def test_a_request_of_whose_draft_nothing_is_left_has_a_row_all_the_same(beside: int | None, kept: int):
    """Two rows cost what one does; None: there is but one."""
    dear = CostCurve(verify=((1, 1.0), (2, 1.0), (3, 2.0), (12, 20.0)), draft=((1, 0.001), (16, 0.001)))
    planning = Planning(dear, None, D_MAX)
    planning.begin(decoding=True)
    assert planning[2] == D_MAX
    chances = [[0.9, 0.8, 0.7, 0.6]] * 2
    assert planning.kept(Drafted(chances, 0.1, 0.2), "ab", [beside, 4], [False] * 2) == [0, kept]


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        # all of it pays
        (None, 4),
        (OwnLimits(None, 3, exact=False), 3),
        (OwnLimits(None, 0, exact=False), 0),
        # equality keeps, and so does what is not known
        (OwnLimits(0.5, None, exact=True), 3),
        (OwnLimits(0.75, None, exact=True), 1),
        (OwnLimits(0.5, 2, exact=True), 2),
        (OwnLimits(1.0, None, exact=True), 0),
    ],
    ids=str,
)
def test_a_request_is_cut_by_what_it_has_set_where_its_worker_has_not(own: OwnLimits | None, kept: int):
    planning = Planning(CURVE, None, D_MAX)
    planning.begin(decoding=True)
    assert planning[2] == D_MAX
    chances = [0.75, 0.5, math.nan, 0.25]
    handed = types.SimpleNamespace(req_ids=["a", "b"], draft_token_ids=[[7] * D_MAX, [8] * D_MAX])
    sure = [0.99, 0.98, 0.97, 0.96]
    setattr(handed, ATTRIBUTE, Drafted([chances, sure], 0.1, 0.2))
    cheap = CostCurve(verify=((1, 1.0), (16, 1.001)), draft=((1, 0.001), (16, 0.001)))
    planning.planner.curve = cheap
    cut(planning, handed, lambda name: True, [own, None])
    assert handed.draft_token_ids == [[7] * kept, [8] * D_MAX]


def test_drafts_of_which_nothing_is_said_stay_as_they_are():
    planning = Planning(CURVE, None, D_MAX)
    planning.begin(decoding=True)
    drafts = types.SimpleNamespace(req_ids=["a", "b"], draft_token_ids=[[1, 2], [3]])
    cut(planning, drafts, lambda name: True, [None] * 2)
    assert drafts.draft_token_ids == [[1, 2], [3]]
    setattr(drafts, ATTRIBUTE, Drafted([[]], 0.0, 0.0))
    cut(planning, drafts, lambda name: True, [None] * 2)
    assert drafts.draft_token_ids == [[1, 2], [3]]


GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"


def changed(what: str, value: Any) -> types.SimpleNamespace:
    owner, _, name = what.rpartition(".")
    found = resolved(**({name: value} if owner == "speculative_config" else {}))
    if owner != "speculative_config":
        setattr(getattr(found, owner) if owner else found, name, value)
    return found


@pytest.mark.parametrize(
    ("what", "value", "reason"),
    [
        ("speculative_config.enable_adaptive_verification", True, "adaptive verification decides"),
        ("speculative_config.num_speculative_tokens_per_batch_size", [[1, 8, 2]], "per_batch_size decides"),
        ("parallel_config.worker_cls", GPU_WORKER, "on a GPU it takes model runner V2"),
        ("parallel_config.data_parallel_size", 2, "ranks of data parallelism"),
        ("scheduler_config.scheduler_cls", "mine.Scheduler", r"--scheduler-cls is mine\.Scheduler"),
    ],
)
def test_where_it_cannot_decide_it_is_refused_and_auto_has_none(what: str, value: Any, reason: str):
    with pytest.raises(ConfigError, match=f"planner on cannot decide here: .*{reason}"):
        config.settle(changed(what, value), config.C2TConfig(planner="on"))
    settings = config.settle(changed(what, value), config.C2TConfig())
    assert not settings.planned and settings.beta > 0


def of_v2(worker: str | None = None, most: int = 8) -> types.SimpleNamespace:
    found = changed("use_v2_model_runner", True)
    found.speculative_config.num_speculative_tokens = 6
    found.scheduler_config.max_num_seqs = most
    if worker is not None:
        found.parallel_config.worker_cls = worker
    return found


@pytest.mark.parametrize("worker", [None, GPU_WORKER])
def test_on_model_runner_v2_it_decides_where_it_is_asked_for(worker: str | None):
    found = of_v2(worker)
    assert not config.settle(found, config.C2TConfig()).planned
    assert found.speculative_config.num_speculative_tokens_per_batch_size is None
    found = of_v2(worker)
    settings = config.settle(found, config.C2TConfig(planner="on", learn="network"))
    assert settings.planned and settings.beta == 0
    # the scheduler cuts by them
    assert settings.request_settings == "all"
    assert settings.learn == "network"
    assert found.scheduler_config.scheduler_cls == config.PLANNING


def test_on_a_gpu_vllm_captures_graphs_of_each_depth():
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    found = of_v2(GPU_WORKER, most=5)
    config.settle(found, config.C2TConfig(planner="on"))
    table = found.speculative_config.num_speculative_tokens_per_batch_size
    assert build_dynamic_sd_schedule_lookup(table, 5, 6)[1:] == [6, 4, 2, 1, 0]
    with pytest.raises(ConfigError, match="each of its depths wants a size of batch, and --max-num-seqs leaves fewer"):
        config.settle(of_v2(GPU_WORKER, most=4), config.C2TConfig(planner="on"))


def test_a_step_that_hands_tokens_over_while_it_drafts_is_over_with_both():
    now, planning = [0.0], Planning(None, None, 2, clock=lambda: now[0], few=True)
    assert planning.planner.depths == (0, 1, 2)
    took: list[tuple[str, int, float]] = []
    planning.planner.took = lambda *what: took.append(what)
    for overlaps in (False, True):
        took.clear()
        now[0] = 10.0
        planning.begin(decoding=True)
        planning.planner.depth = 2
        now[0] += 5.0
        planning.ran({"a": 3}, {"a": [7, 7]})
        now[0] += 2.0
        planning.kept(Drafted([[0.9, 0.8]], 1.0, 3.0, overlaps=overlaps), ["a"], [2], [False])
        assert took[0] == ("verify", 3, 4.0 if overlaps else 2.0)
        assert took[1:] == [("draft_extend", 1, 1.0), ("draft", 1, 2.0)]


def test_what_is_recorded_is_drafted_whole(tmp_path: Path):
    with pytest.raises(ConfigError, match="what is recorded is drafted whole"):
        config.settle(resolved(), config.C2TConfig(planner="on", trace_dir=str(tmp_path)))


@pytest.mark.parametrize("planner", ["on", "auto"])
def test_elsewhere_it_decides_in_the_place_of_beta(planner: str):
    found = resolved()
    settings = config.settle(found, config.C2TConfig(planner=planner))
    assert settings.planned and settings.beta == 0
    assert found.scheduler_config.scheduler_cls == config.PLANNING


def test_a_file_that_is_no_curve_is_refused(tmp_path: Path):
    path = tmp_path / "curve.json"
    assert config.settle(resolved(), config.C2TConfig(planner=str(path))).curve == str(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no cost curve"):
        config.settle(resolved(), config.C2TConfig(planner=str(path)))


def none_ends(name: str) -> bool:
    """Whether a request has ended, where all go on."""
    return False


def judging(**requests: Any) -> tuple[Any, list[tuple[dict[str, int], ...]]]:
    """A PlanningScheduler as far as it judges drafts, and what its planner is told: verified, accepted, and the
    target's own."""
    told: list[tuple[dict[str, int], ...]] = []
    planning = types.SimpleNamespace(judged=lambda *each: told.append(each))
    own = types.SimpleNamespace(
        of=lambda names, requests: [types.SimpleNamespace(learn=name != "asked") for name in names]
    )
    scheduler = PlanningScheduler.__new__(PlanningScheduler)
    scheduler.planning, scheduler._own, scheduler.requests = planning, own, requests
    return scheduler, told


def test_what_a_grammar_forbids_is_not_learnt():
    free, forced = (types.SimpleNamespace(use_structured_output=each) for each in (False, True))
    scheduler, _ = judging(free=free, forced=forced, asked=free)
    assert scheduler._teaching(["forced", "gone", "asked", "free"]) == ["free"]


def test_what_lies_behind_the_end_of_a_text_is_not_learnt():
    scheduler, told = judging()
    drafts = {name: [7, 7, 7] for name in ("goes on", "ends", "ends at once")}
    # given by the target, its own last, and kept by vLLM, which drops what is behind the end
    given = {"goes on": 2, "ends": 4, "ends at once": 3, "cut to nothing": 1}
    kept = {"goes on": [7, 9], "ends": [7, 7], "ends at once": [7], "cut to nothing": [5]}
    scheduler._judge(drafts, given, kept)
    ((verified, accepted, own, text, ended),) = told
    assert text is kept and ended("ends")
    assert verified == {"goes on": 3, "ends": 2, "ends at once": 1, "cut to nothing": 0}
    assert accepted == {"goes on": 1, "ends": 2, "ends at once": 1, "cut to nothing": 0}
    assert own == {"goes on": 9, "cut to nothing": 5}


@pytest.mark.parametrize(
    ("accepted", "own", "expected"),
    [
        # the target's own token is the next one of the draft, which has no other; or is not
        (1, 8, (2, 2)),
        (1, 5, (2, 1)),
        # one before it was refused: it is no part of the text, whatever came
        (0, 8, (2, 0)),
        # the text ended there
        (1, None, (1, 1)),
    ],
)
def test_the_text_tells_of_the_token_that_was_cut(accepted: int, own: int | None, expected: tuple[int, int]):
    planning = Planning(CURVE, None, D_MAX, calibration=Calibration(D_MAX))
    found: list[list[list[int]]] = []
    planning.planner.learn = lambda now, *_: found.append([now[1].tolist(), now[2].tolist()])
    planning.kept = lambda drafted, names, lengths, own: [1, 0, 2, 2]
    planning._rows, planning._sure = dict(zip("abcd", range(4), strict=True)), np.full((4, 3, 2), 0.5, np.float32)
    handed = types.SimpleNamespace(req_ids=[*"abcd"], draft_token_ids=[[7, 8], [5, 7, 8], [5, 5], [7, 8, 9]])
    setattr(handed, ATTRIBUTE, Drafted([[0.9, 0.8, 0.7]] * 4, 1.0, 1.0))
    cut(planning, handed, lambda name: name != "d", [None] * 4)
    assert handed.draft_token_ids == [[7], [], [5, 5], [7, 8]]
    # of b nothing was verified; c was not cut; d takes no draft, so its next token is none that was drafted
    outcomes = {"a": 1, "b": 0, "c": 2, "d": 0}, {"a": accepted, "b": 0, "c": 1, "d": 0}
    planning.judged(*outcomes, {"b": 4, "c": 5, "d": 9} | ({} if own is None else {"a": own}), {}, none_ends)
    planning.learn()
    ((verified, hits),) = found
    assert (verified[0], hits[0]) == expected
    assert (verified[1:], hits[1:]) == ([3, 2, 0], [0, 1, 0])
    # a step that drafted nothing comes between
    planning.judged({"a": 0}, {"a": 0}, {"a": 8}, {}, none_ends)
    planning.learn()
    assert found[1] == [[0], [0]]


@pytest.mark.parametrize(("handed_over", "told"), [([7, 8, 9], ()), ([-1, -1, -1], [[7, 8, 9]])], ids=["V1", "V2"])
def test_of_a_drawn_token_that_was_cut_the_text_tells_nothing(handed_over: list[int], told: Sequence[list[int]]):
    """A target that draws too is sooner content with it than it draws the same. V2's tokens are told beside."""
    planning = Planning(CURVE, None, D_MAX, calibration=Calibration(D_MAX))
    planning.kept = lambda drafted, names, lengths, own: [1]
    for drawn in (False, True):
        handed = types.SimpleNamespace(req_ids=["a"], draft_token_ids=[handed_over])
        setattr(handed, ATTRIBUTE, Drafted([[0.9, 0.8, 0.7]], 1.0, 1.0, tokens=told))
        planning.drawn = drawn
        cut(planning, handed, lambda name: True, [None])
        assert planning.rest == ({} if drawn else {"a": (1, [8, 9])}) and handed.draft_token_ids == [handed_over[:1]]


def test_where_vllm_takes_less_of_a_draft_nothing_tells_of_the_next_token():
    planning = Planning(CURVE, None, D_MAX, calibration=Calibration(D_MAX))
    planning._rows, planning._sure, planning.rest = {"a": 0}, np.zeros((1, 3, 2), np.float32), {"a": (2, [8])}
    planning.judged({"a": 1}, {"a": 1}, {"a": 8}, {}, none_ends)
    ((_, known, hits, _),) = planning._outcomes
    assert (known.tolist(), hits.tolist()) == ([1], [1])


@pytest.mark.parametrize(
    ("texts", "ends", "expected"),
    [
        # by steps: the rest of the draft, all of it; another token; a step without one; the end before it is told
        ([[9, 4], [5]], "", (4, 4)),
        ([[9], [4, 5], [6]], "", (4, 4)),
        ([[9], [5]], "", (4, 3)),
        ([[], [2]], "", (4, 2)),
        ([[9]], "a", (3, 3)),
        ([[]], "a", (2, 2)),
    ],
)
def test_later_text_tells_of_what_was_cut_behind_that(texts: list[list[int]], ends: str, expected: tuple[int, int]):
    """Of a draft of 4 tokens one was verified, and the target's own was the second."""
    planning = Planning(CURVE, None, D_MAX, calibration=Calibration(D_MAX))
    found: list[Any] = []
    planning.planner.learn = lambda now, *since: found.extend(since)
    planning._rows, planning._sure = {"a": 0, "b": 1}, np.arange(16, dtype=np.float32).reshape(2, 4, 2)
    planning.rest = {"b": (1, [8, 9, 4])}
    planning.judged({"b": 1}, {"b": 1}, {"b": 8}, {"b": [7, 8]}, none_ends)
    planning.learn()
    assert found == [] and len(planning.untold["b"]) == 1
    # what others draft meanwhile is another matter
    planning._sure = np.zeros((2, 4, 2), dtype=np.float32)
    for number, text in enumerate(texts):
        over = bool(ends) and number == len(texts) - 1
        planning.judged({"a": 1}, {"a": 0}, {"a": 5}, {"a": [5], "b": text}, {"b": over}.get)
        planning.learn()
    ((sure, known, hits, names),) = found
    assert (known.tolist(), hits.tolist(), names) == ([expected[0]], [expected[1]], ["b"])
    assert sure.flatten().tolist() == list(range(8, 16))
    assert planning.untold == {}


def test_a_text_that_ends_with_the_targets_own_token_tells_of_that_one():
    planning = Planning(CURVE, None, D_MAX, calibration=Calibration(D_MAX))
    planning._rows, planning._sure = {"a": 0}, np.zeros((1, 3, 2), dtype=np.float32)
    planning.rest = {"a": (1, [8, 9])}
    planning.judged({"a": 1}, {"a": 1}, {"a": 8}, {"a": [7, 8]}, lambda name: True)
    ((_, known, hits, _),) = planning._outcomes
    assert (known.tolist(), hits.tolist(), planning.untold) == ([2], [2], {})


def test_tokens_are_of_requests_that_had_a_draft_and_are_still_there():
    scheduler, _ = judging()
    output = types.SimpleNamespace(req_id_to_index={"a": 0, "b": 1, "c": 2}, sampled_token_ids=[[1, 2], [], [3]])
    assert scheduler._tokens({"a": [7], "b": [7], "gone": [7]}, output) == {"a": [1, 2]}


def test_the_drafts_own_probabilities_travel_with_its_confidences():
    drafted = Drafted([[0.9, 0.8], [0.7, 0.6]], 1.0, 1.0, [[-0.1, -0.2], [-0.3, -0.4]])
    planning = Planning(CURVE, None, 2, calibration=Calibration(2))
    seen: list[Any] = []
    planning.planner.learn = lambda now, *_: seen.append(now[0])
    for each in (drafted, drafted._replace(log_prob=()), drafted._replace(log_prob=[[], []])):
        planning.kept(each, ["a", "b"], [2, 2], [False] * 2)
        planning.judged({"b": 2}, {"b": 1}, {"b": 8}, {}, none_ends)
        planning.learn()
    known, *unknown = (each[0].flatten().tolist() for each in seen)
    assert known == pytest.approx([0.7, -0.3, 0.6, -0.4])
    assert unknown == [pytest.approx([0.7, math.nan, 0.6, math.nan], nan_ok=True)] * 2


def test_statistics_carry_it_once(monkeypatch: pytest.MonkeyPatch):
    made: list[SchedulerStats] = []
    monkeypatch.setattr(Scheduler, "make_stats", lambda self: made.append(SchedulerStats()) or made[-1])
    planning = Planning(CURVE, None, 2, calibration=Calibration(2))
    state = planning.planner.state()
    scheduler = PlanningScheduler.__new__(PlanningScheduler)
    scheduler._tell(state)
    assert [stats.waiting_lora_adapters for stats in (scheduler.make_stats(), scheduler.make_stats())] == [
        packed(state),
        {},
    ]


def test_statistics_carry_the_classifiers_time_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "make_stats", lambda self: SchedulerStats())
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda self, drafts: None)
    scheduler = PlanningScheduler.__new__(PlanningScheduler)
    scheduler.planning, scheduler._told, scheduler.requests = Planning(CURVE, None, 2), {}, {}
    scheduler._own, scheduler._lower = OwnSettings("all", 1), False
    for seconds in (0.25, 0.5):
        handed = types.SimpleNamespace(req_ids=["gone"], draft_token_ids=[[7]])
        setattr(handed, ATTRIBUTE, Drafted([[0.5]], 1.0, 1.0, classifier_s=seconds))
        scheduler.update_draft_token_ids(handed)
    # of a step in which a worker has drafted nothing
    scheduler.update_draft_token_ids(types.SimpleNamespace(req_ids=[], draft_token_ids=[]))
    said = [stats.waiting_lora_adapters for stats in (scheduler.make_stats(), scheduler.make_stats())]
    assert said == [classified(0.75), {}]
