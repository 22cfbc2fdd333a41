"""The lagged plan: what it predicts, from what, and what the device clips."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.cpu_engine import SITE
from c2t_kernels import early_stop, pack_ragged
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.step import step_of
from c2t_plugin.engines.sglang.verify import lagged, predicted
from c2t_plugin.engines.sglang.verify.predicted import LaggedRows
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.readback import ROOM, Readback
from c2t_plugin.planner.step_planner import HELD, StepPlanner
from tests.support.sglang import lagged_rule
from tests.support.sglang.lagged_rule import LAG, MEMORY

D_MAX = 4
WIDTH = D_MAX + 1
BETA = 0.5
CAPTURED = (5, 10, 20, 40)
# Few values, so that there are equals; some on beta, some unknown.
confidences = st.sampled_from([0.1, 0.4, 0.5, 0.6, 0.6000001, 0.9, 1.0, float("nan")])
batches = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[str], Tensor]]:
    """Batches that stay for a while, with the confidences of their drafts."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rids = draw(batches)
        for _ in range(draw(st.integers(1, 5))):
            chain = st.lists(confidences, min_size=D_MAX, max_size=D_MAX)
            found.append((rids, torch.tensor([draw(chain) for _ in rids])))
    return found


def run(plan: LaggedRows, taken: Iterable[tuple[Sequence[str], Tensor]]) -> list[tuple[int, Tensor, Tensor]]:
    """Rows, what was wanted and what is kept of each step."""
    found = []
    for rids, confidence in taken:
        rows = plan.rows(rids, WIDTH)
        wanted = early_stop(confidence, BETA, D_MAX)
        plan.note(wanted, wanted)
        found.append((rows, wanted, early_stop(confidence, BETA, D_MAX, budget=rows - len(rids))))
    return found


def plan_of(captured: Sequence[int] = ()) -> LaggedRows:
    return LaggedRows(lambda: captured, "cpu", 16)


def rows_of(plan: LaggedRows, wanted: Iterable[tuple[Sequence[str], Sequence[int]]]) -> list[int]:
    found = []
    for rids, lengths in wanted:
        found.append(plan.rows(rids, WIDTH))
        wanted = torch.tensor(lengths, dtype=torch.int32)
        plan.note(wanted, wanted)
    return found


@given(steps(), st.sampled_from([(), CAPTURED]))
@settings(max_examples=150, deadline=None)
def test_every_step_is_the_rule_and_fits_its_rows(taken: list[tuple[list[str], Tensor]], captured: Sequence[int]):
    rule, plan = lagged_rule.Rule(WIDTH, captured), plan_of(captured)
    for (rids, confidence), (rows, wanted, kept) in zip(taken, run(plan, taken), strict=True):
        assert rows == rule.rows(rids)
        rule.wanted(rids, int(wanted.sum()))
        known = confidence.nan_to_num(nan=2.0).tolist()
        assert wanted.tolist() == [lagged_rule.above(each, BETA) for each in known]
        assert kept.tolist() == lagged_rule.clip(known, wanted.tolist(), rows - len(rids))
        sources = [torch.arange(len(rids) * WIDTH).view(-1, WIDTH)]
        packed = pack_ragged(kept, sources, capacity=rows, pads=(-1,))
        # every root and every kept token has a row
        assert int(packed.cu_seqlens[-1]) == len(rids) + int(kept.sum()) <= rows


@given(steps())
@settings(max_examples=50, deadline=None)
def test_ranks_with_the_same_numbers_choose_the_same_rows(taken: list[tuple[list[str], Tensor]]):
    one, another = (run(plan_of(CAPTURED), taken) for _ in range(2))
    assert [rows for rows, *_ in one] == [rows for rows, *_ in another]


@pytest.mark.parametrize("later", [[0, 0], [4, 4]])
def test_what_is_newer_than_the_lag_has_no_say(later: list[int]):
    """It may or may not have arrived by then."""
    before = [("ab", [1, 0])] * 3
    rows = rows_of(plan_of(), [*before, *[("ab", later)] * LAG])
    assert rows == [10, 10, 3, 3, 3]
    assert rows_of(plan_of(), [*before, *[("ab", later)] * (LAG + 1)])[-1] == (3 if later == [0, 0] else 10)


def test_an_explosion_after_a_quiet_phase_is_clipped_until_it_is_known():
    quiet, loud = (torch.full((8, D_MAX), each) for each in (0.1, 0.9))
    found = run(plan_of(), [("abcdefgh", quiet)] * 10 + [("abcdefgh", loud)] * 4)
    assert [rows for rows, *_ in found] == [40] * LAG + [8] * 10 + [40] * 2
    assert [int(kept.sum()) for *_, kept in found][-4:] == [0, 0, 32, 32]


def test_a_request_of_few_tokens_is_forgotten_only_after_the_memory():
    taken = [("a", [4])] + [("a", [0])] * (MEMORY + LAG)
    assert rows_of(plan_of(), taken) == [5] * (LAG + MEMORY) + [1]


@pytest.mark.parametrize(
    ("then", "now", "new"),
    [
        ("abcd", "abcd", False),
        ("abcd", "abef", False),  # half of it
        ("abcd", "aefg", True),
        ("ab", "abcd", False),
        ("ab", "abcde", True),
        ("abcd", "ab", False),
        ("abcde", "ab", True),
        ("a", "b", True),
    ],
)
def test_a_batch_is_new_when_it_shares_few_requests_with_the_step_before(then: str, now: str, new: bool):
    plan = plan_of()
    rows_of(plan, [(then, [0] * len(then))] * (LAG + 1))
    window = len(now) * WIDTH
    assert plan.rows(now, WIDTH) == (window if new else len(now))


def test_numbers_of_the_batch_before_that_are_still_unread_are_not_its_own():
    rows = rows_of(plan_of(), [("ab", [0, 0])] * 4 + [("cd", [4, 4])] * 3)
    assert rows == [10, 10, 2, 2, 10, 10, 10]


def test_the_best_filled_step_is_scaled_by_the_requests_of_now():
    # 7 of 4 requests are 14 for 8, after the second step
    rows = rows_of(plan_of(), [("abcd", [4, 3, 0, 0]), *[("abcdefgh", [0] * 8)] * 2])
    assert rows[-1] == 8 + 14


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_numbers_come_back_in_order(device: str):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    numbers, found, copies = Readback(device, capacity=6, dtype=torch.float32), [], []
    written = [torch.full((1 + i % 3, 2), float(i), device=device) for i in range(10)]
    for each in written:
        if numbers.full:
            found.append(numbers.read())
        copies.append(numbers.write(each))
        # those of the steps whose results may still be on their way
        standing = list(zip(copies, written, strict=False))[-ROOM:]
        if device == "cuda":
            torch.cuda.synchronize()
        assert all(copy.device.type == "cpu" and torch.equal(copy, then.cpu()) for copy, then in standing)
    assert len(found) == len(written) - LAG
    assert all(torch.equal(each, then.cpu()) for each, then in zip(found, written, strict=False))


# --- in the worker


class Drafts:
    """What a worker asks of a scorer, about one draft after another."""

    d_max = D_MAX
    drafts: Tensor

    def drafted(self, steps: int) -> None:
        assert steps == D_MAX

    def end_within(self, rows: int, budget: int, links: Tensor) -> tuple[Tensor, Tensor]:
        assert len(self.drafts) == rows
        return early_stop(self.drafts, BETA, D_MAX), early_stop(self.drafts, BETA, D_MAX, budget=budget, links=links)

    def sure(self, rows: int) -> Tensor:
        return self.drafts[:rows]


@pytest.fixture
def chain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    request.getfixturevalue("sgl_kernel")
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang import ranks
    from c2t_plugin.engines.sglang.drafters import chain

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    return chain


@pytest.mark.sglang
def test_the_drafter_cuts_the_links_where_the_clip_ends(chain: Any):
    scorer = Drafts()
    parts = Parts(scorer, Counts(D_MAX), None, None, {}, lagged=plan_of((4, 12)))  # type: ignore[arg-type]
    made = chain.ChainDrafter(SimpleNamespace(speculative_num_steps=D_MAX), parts)
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid=rid) for rid in "abc"])
    loud = torch.tensor([[0.9, 0.8, 0.7, 0.4], [0.95, 0.6, 0.6, 0.6], [0.3, 0.9, 0.9, 0.9]])
    found = []
    for confidence in [torch.zeros(3, D_MAX)] * LAG + [loud] * (LAG + 1):
        scorer.drafts = confidence
        links = torch.arange(1, WIDTH + 1).repeat(3, 1)
        links[:, -1] = -1
        verify_input = SimpleNamespace(retrieve_next_token=links, draft_token_num=WIDTH)
        assert made.decide(batch, verify_input) is verify_input
        step = step_of(verify_input)
        assert step is not None and step.wanted is not None
        assert ((links != -1).int().cumprod(1).sum(1) == step.kept).all()
        found.append((step.rows, step.wanted.tolist(), step.kept.tolist()))
    # one row of four is left over the roots, then all that is above beta is known to be wanted: 3 + 7
    none, wanted = [0, 0, 0], [3, 4, 0]
    assert found == [(15, none, none)] * LAG + [(4, wanted, [0, 1, 0])] * LAG + [(12, wanted, wanted)]


@pytest.mark.sglang
def test_rows_are_planned_by_the_sizes_of_the_depth_that_is_in_force(chain: Any, monkeypatch: pytest.MonkeyPatch):
    """Each depth has graphs of its own, of other sizes."""
    from c2t_plugin.engines.sglang import worker

    sizes, now = {D_MAX: (500,), 2: (7,)}, [D_MAX]
    curve = CostCurve(verify=((1, 1.0), (7, 1.1), (600, 300.0)), draft=((1, 0.3), (9, 0.3)))
    planner = StepPlanner(curve, None, steps=D_MAX, most=D_MAX, device=torch.device("cpu"), depths=(0, 2, D_MAX))
    planner.packed, planner.sizes = True, lambda: sizes[now[0]]
    planner.wait_for_nothing(3, "cpu")
    switch = object.__new__(worker.DepthSwitch)
    monkeypatch.setattr(worker.DepthSwitch, "switch", lambda _, depth: now.__setitem__(0, depth))
    step = object.__new__(type("Step", (worker.StepMixin,), {"c2t": SimpleNamespace(planner=planner, together=None)}))
    step.device, step.adaptive_controller, step._reqs = "cpu", switch, [SimpleNamespace(rid=rid) for rid in "abc"]
    script = iter([*([2] * (2 * HELD + 1)), D_MAX, 2])

    def planned(_: Any) -> int:
        planner.begin(3)
        planner.depth = next(script)
        return planner.depth

    step.planned_depth = planned
    found = []
    for _ in range(2 * HELD + 3):
        step.activate_step_by_batch(3)
        found.append(planner.rows)
        planner.note(torch.full((3, planner.depth), 0.6))
    # all of them, until steps of this depth are known
    assert found == [*([9] * 2 * HELD), 7, 3 * WIDTH, 7]


# --- what starts it


class Scorer:
    d_max = D_MAX
    beta = torch.zeros(1)

    def __init__(self, most: int) -> None:
        self.most = most

    def drafted(self, steps: int) -> None:
        self.steps = steps

    def lengths(self, rows: int, budget: int) -> None:
        assert self.steps == D_MAX
        if rows > self.most:
            raise ValueError("too many rows")


def started(most: int = 100, packing: Any = None, **options: str) -> LaggedRows | None:
    return lagged.start(C2TConfig(**options), packing, Scorer(most), 48)  # type: ignore[arg-type]


PACKED = SimpleNamespace(sizes=lambda: CAPTURED)


def test_sync_has_no_plan_of_its_own(caplog: pytest.LogCaptureFixture):
    assert started(packing=PACKED) is None
    assert started(packing=PACKED, rows="sync") is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "mode", "planned", "expected"),
    [
        ("meta", "chain", False, "LaggedRows"),
        ("meta", "chain", True, "PlannedRows"),
        ("meta", "tree", True, "PlannedRows"),
        # as many as the device has kept are verified
        ("meta", "tree", False, "NoneType"),
        ("cpu", "chain", True, "NoneType"),
        ("cpu", "tree", True, "NoneType"),
    ],
)
def test_by_default_a_gpu_waits_for_no_number_that_can_be_planned(
    device: str, mode: str, planned: bool, expected: str, monkeypatch: pytest.MonkeyPatch
):
    scorer, waits = Scorer(100), list[tuple[int, torch.device]]()
    scorer.beta = torch.zeros(1, device=device)
    monkeypatch.setattr(predicted, "LaggedRows", lambda *_: LaggedRows.__new__(LaggedRows))
    planner = SimpleNamespace(wait_for_nothing=lambda *told: waits.append(told)) if planned else None
    found = lagged.start(C2TConfig(mode=mode), PACKED, scorer, 48, planner)  # type: ignore[arg-type]
    assert type(found).__name__ == expected
    assert waits == ([(48, torch.device("meta"))] if expected == "PlannedRows" else [])


def test_tiers_are_those_of_the_captured_graphs():
    plan = started(packing=PACKED, rows="lagged")
    assert plan is not None
    assert rows_of(plan, [("abc", [1, 1, 1])] * 3) == [20, 20, 10]


def test_over_the_uniform_window_the_log_says_that_it_means_nothing(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert started(rows="lagged") is None
    assert "rows lagged chooses nothing over the uniform window" in caplog.text


def test_batches_that_cannot_be_clipped_are_refused():
    with pytest.raises(ConfigError, match=r"rows lagged cannot clip 48 requests \(too many rows\): use sync"):
        started(most=47, packing=PACKED, rows="lagged")
