"""What a planned engine drafts and verifies in each step is what a simulation says, with drafts that end on their way.

The planner is in this process and the drafts are made in another, which is told with every step what they cost. How
deep a step drafts follows from all steps before it, so the simulation lives as long as the planner, and one engine
serves all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.engines.vllm.planning import Planning  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.engines.vllm.conftest import Engine, plan_anew  # noqa: E402
from tests.support.sglang.planned_rule import CURVE, D_MAX, FREE, Limits, Plan  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.sglang.verify_counts import Rule, save_hand_made_classifier  # noqa: E402
from tests.support.vllm.planned_counts import UNDECIDED, Group, cache_of, simulated  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps, UnnormedMtpDraft  # noqa: E402

NEW_TOKENS = 24
# Numbers of requests that start in one step.
GROUPS = (1, 3, 2, 4, 8, 2)
# The same of other drafts than EAGLE-3. A stand-alone one reads plain steps at once, so it is given many of them.
OTHERS = {"draft_model": GROUPS, "eagle": (3, 8, 2), "mtp": (3, 8, 2)}
# Most of the largest group end soon, after which drafts of those that are left pay again.
SOON, STAYING = 9, 2
# What single requests ask for, and what that leaves of their drafts; then of which of these each group's ask.
OWN: list[tuple[dict[str, Any], Limits]] = [
    ({}, FREE),
    ({"c2t_enabled": False}, Limits(beta=0.0)),
    ({"c2t_beta": 0.6}, Limits(beta=0.6)),
    ({"c2t_max_depth": 1}, Limits(most=1)),
    ({"c2t_max_depth": 0}, Limits(most=0)),
]
OWN_GROUPS = ((0, 0), (1, 2, 3, 0), (4, 0, 2, 3))
# For these: four requests are still drafted for, and not by one token alone.
OWN_CURVE = dataclasses.replace(CURVE, verify=((1, 1.0), (4, 1.2), (8, 1.5), (64, 16.0)))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Prompts, and of each group what a simulation says: of its requests, of its drafts and of its draft steps."""
    folder = tmp_path_factory.mktemp("planned")
    write_curve(CURVE, folder / "given.json")
    target = Target(pair_dir() / "target")
    target.run = cache_of(target.run)  # type: ignore[method-assign]
    oracle = Oracle(pair_dir(), target)
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    prompts = [ids[: 30 + 6 * i] for i, ids in enumerate(held_out_prompts(8, min_tokens=96, seed=21))]
    plain = [tuple(target.greedy(prompt, NEW_TOKENS)) for prompt in prompts]
    groups = groups_of(prompts, GROUPS)
    found = SimpleNamespace(**locals())
    found.plan, found.expected = foreseen(found, "eagle3", groups)
    return found


def groups_of(prompts: list[list[int]], sizes: Sequence[int]) -> list[Group]:
    found = []
    for place, size in enumerate(sizes):
        own = prompts[:size] if size > 1 else [prompts[place]]
        found.append(
            [(ids, NEW_TOKENS if row < STAYING or size < max(GROUPS) else SOON) for row, ids in enumerate(own)]
        )
    return found


# Of each group: of its requests, how many drafts, and how many draft steps.
Found = list[tuple[list[Steps], int, int]]


def foreseen(
    setting: SimpleNamespace,
    base: str,
    groups: list[Group],
    own: Sequence[Sequence[Limits]] = (),
    curve: CostCurve = CURVE,
) -> tuple[Plan, Found]:
    """What a simulation decides, and what comes of it. own: of each group, limits of its requests."""
    plan, found = Plan(packed=True, curve=curve, ends=True, skips=base != "draft_model"), []
    rule = Rule(setting.classifier, 0.0)
    for group, limits in zip(groups, own or [()] * len(groups), strict=True):
        before = len(plan.depths)
        ended = simulated(setting.target, setting.oracle.draft(base), rule, group, plan, own=limits)
        depths = plan.depths[before:]
        found.append(([each.counts() for each in ended], sum(depth > 0 for depth in depths), sum(depths)))
    assert plan.margin > UNDECIDED, "a decision is too near to call: choose other prompts"
    return plan, found


@pytest.fixture(scope="module")
def planned(request: pytest.FixtureRequest, setting: SimpleNamespace, engine: Engine, mimo: Path) -> Iterator[Any]:
    """Of EAGLE-3, if no other kind of draft is asked for."""
    base = getattr(request, "param", "eagle3")
    target = mimo if base == "mtp" else None
    options = {"c2t_planner": str(setting.folder / "given.json"), "c2t_learn": "off"}
    with engine(f"c2t:{base}", D_MAX, target=target, c2t_classifier=str(setting.classifier), **options) as llm:
        yield llm


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def served(
    llm: Any, groups: list[Group], own: Sequence[Sequence[dict[str, Any]]] = (), curve: CostCurve = CURVE
) -> Found:
    """As the simulation's, of one engine whose planner has seen nothing yet. own: of each group, what its requests ask
    for."""
    from vllm import SamplingParams

    plan_anew(llm, curve)
    found = []
    for group, asked in zip(groups, own or [[{}] * len(group) for group in groups], strict=True):
        (before,) = llm.collective_rpc("c2t_control")
        each = zip(group, asked, strict=True)
        sampling = [
            SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, extra_args=extra)
            for (_, most), extra in each
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in group], sampling, use_tqdm=False)
        (after,) = llm.collective_rpc("c2t_control")
        new = [after[name] - before[name] for name in ("drafts", "draft_steps")]
        found.append(([Steps.of_output(output) for output in outputs], *new))
    return found


def outputs_of(found: Found) -> list[list[tuple[int, ...]]]:
    return [[each.output_ids for each in counts] for counts, _, _ in found]


def plain_of(setting: SimpleNamespace, groups: list[Group]) -> list[list[tuple[int, ...]]]:
    return [[setting.plain[setting.prompts.index(ids)][:most] for ids, most in group] for group in groups]


def test_each_step_drafts_and_verifies_as_simulated(planned: Any, setting: SimpleNamespace):
    found = served(planned, setting.groups)
    assert outputs_of(found) == plain_of(setting, setting.groups)
    assert found == setting.expected
    # there was something to decide: plain decoding for many requests, and every depth for few
    assert set(setting.plan.depths) == set(range(D_MAX + 1))


@pytest.fixture(scope="module")
def own(setting: SimpleNamespace) -> SimpleNamespace:
    """Groups whose requests ask for something, and what a simulation says of them."""
    groups = groups_of(setting.prompts, [len(group) for group in OWN_GROUPS])
    asked = [[OWN[place][0] for place in group] for group in OWN_GROUPS]
    limits = [[OWN[place][1] for place in group] for group in OWN_GROUPS]
    plan, expected = foreseen(setting, "eagle3", groups, limits, OWN_CURVE)
    return SimpleNamespace(**locals())


def test_what_requests_ask_for_is_planned_around_as_simulated(planned: Any, setting: SimpleNamespace, own: Any):
    found = served(planned, own.groups, own.asked, OWN_CURVE)
    assert outputs_of(found) == plain_of(setting, own.groups)
    assert found == own.expected
    assert len(set(own.plan.depths)) > 2, "there was nothing to decide"


def unknown_to_the_worker(patch: Any, planned: Any) -> None:
    """Where its drafts end; it cuts by them all the same."""

    def plant(worker: Any) -> None:
        begin = worker.model_runner.drafter.ending.begin
        worker.model_runner.drafter.ending.begin = lambda names, own: begin(names, [None] * len(names))

    planned.collective_rpc(plant)


def unknown_to_the_depth(patch: Any, planned: Any) -> None:
    patch.setattr(scheduler_of(planned), "_own_limits", list)


def unknown_to_the_budget(patch: Any, planned: Any) -> None:
    """What the worker has cut stays cut."""
    stock = Planning.kept

    def kept(self: Any, drafted: Any, names: Any, lengths: Any, own: Any) -> list[int]:
        return stock(self, drafted, names, lengths, [False] * len(own))

    patch.setattr(Planning, "kept", kept)


@pytest.mark.parametrize("fault", [unknown_to_the_worker, unknown_to_the_depth, unknown_to_the_budget])
def test_a_planner_that_does_not_know_what_requests_ask_for_is_seen(
    planned: Any, own: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
):
    planned.collective_rpc(of_nothing_yet)
    fault(monkeypatch, planned)
    found = served(planned, own.groups, own.asked, OWN_CURVE)
    assert outputs_of(found) == outputs_of(own.expected)
    assert found != own.expected


def never(worker: Any) -> None:
    worker.model_runner.drafter.ending.goes_on = lambda scorer: True


def of_another_depth(worker: Any) -> None:
    ending = worker.model_runner.drafter.ending
    pays = ending._end.pays
    ending._end.pays = lambda prices, chances: pays(
        prices._replace(ratios=(*prices.ratios[1:], prices.ratios[0])), chances
    )


def of_other_requests(worker: Any) -> None:
    ending = worker.model_runner.drafter.ending
    pays = ending._end.pays

    def of_the_surest(prices: Any, chances: Any) -> bool:
        rows, chances.rows = chances.rows, [max(chances.rows)] * len(chances.rows)
        found = pays(prices, chances)
        chances.rows = rows
        return found

    ending._end.pays = of_the_surest


def of_the_step_before(worker: Any) -> None:
    ending = worker.model_runner.drafter.ending
    begin, sent = ending.begin, []

    def begins(names: Any, own: Any) -> None:
        sent.append(ending.sent)
        before = sent[-2] if len(sent) > 1 else None
        if ending.sent and before and before.prices.requests == ending.sent.prices.requests:
            ending.sent = before
        begin(names, own)

    ending.begin = begins


@pytest.mark.parametrize("fault", [never, of_another_depth, of_other_requests, of_the_step_before])
def test_a_worker_that_ends_drafts_elsewhere_is_seen(planned: Any, setting: SimpleNamespace, fault: Any):
    def plant(worker: Any) -> None:
        from c2t_plugin.engines.vllm.ending import Ending

        worker.model_runner.drafter.ending = Ending()
        fault(worker)

    planned.collective_rpc(plant)
    found = served(planned, setting.groups)
    assert outputs_of(found) == outputs_of(setting.expected)
    assert found != setting.expected


@dataclass
class Reading:
    """What a worker's draft reads, pass by pass: after how many plain steps, and of how many tokens."""

    kept: int = 0
    passes: list[int] = field(default_factory=list)


def watch(worker: Any) -> None:
    drafter = worker.model_runner.drafter
    behind, found = drafter.behind, Reading()
    keep, late = behind.keep, behind.late

    def keeps(*given: Any) -> Any:
        found.kept += 1
        return keep(*given)

    def lates(*given: Any) -> Any:
        missed = late(*given)
        found.passes += [] if missed is None else [sum(missed.lengths)]
        return missed

    behind.keep, behind.late, worker.reading = keeps, lates, found


def test_plain_steps_are_read_in_one_pass_before_the_next_draft(planned: Any, setting: SimpleNamespace):
    planned.collective_rpc(of_nothing_yet)
    planned.collective_rpc(watch)
    assert served(planned, setting.groups) == setting.expected
    ((kept, passes),) = planned.collective_rpc(lambda worker: (worker.reading.kept, worker.reading.passes))
    assert kept > 4 and 0 < len(passes) < kept / 2 and max(passes) > 2


def of_nothing_yet(worker: Any) -> None:
    from c2t_plugin.engines.vllm.behind import Behind
    from c2t_plugin.engines.vllm.ending import Ending

    drafter = worker.model_runner.drafter
    drafter.ending, drafter.behind = Ending(), Behind(drafter.block_size, 8, drafter.max_num_tokens)


def nothing_is_read(worker: Any) -> None:
    worker.model_runner.drafter.behind.late = lambda *_: None


def changed(worker: Any, what: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One part of what was missed is wrong."""
    behind = worker.model_runner.drafter.behind
    late = behind.late

    def lates(*given: Any) -> Any:
        found = late(*given)
        if found is None:
            return None
        return found._replace(missed=found.missed._replace(**{what: change(getattr(found.missed, what))}))

    behind.late = lates


def slots_of_other_tokens(worker: Any) -> None:
    changed(worker, "slots", lambda slots: slots.flip(0))


def ids_of_other_tokens(worker: Any) -> None:
    changed(worker, "tokens", lambda tokens: tokens.flip(0))


def hidden_states_of_the_last_step(worker: Any) -> None:
    changed(worker, "hidden", lambda hidden: hidden[-1:].expand_as(hidden))


@pytest.mark.parametrize(
    "fault",
    [nothing_is_read, slots_of_other_tokens, ids_of_other_tokens, hidden_states_of_the_last_step],
)
def test_a_worker_that_reads_plain_steps_wrongly_is_seen(planned: Any, setting: SimpleNamespace, fault: Any):
    planned.collective_rpc(of_nothing_yet)
    planned.collective_rpc(fault)
    found = served(planned, setting.groups)
    assert outputs_of(found) == outputs_of(setting.expected)
    assert found != setting.expected


@pytest.mark.parametrize(("planned", "base"), [(base, base) for base in OTHERS], indirect=["planned"])
def test_other_kinds_of_draft_are_planned_as_simulated(planned: Any, setting: SimpleNamespace, mimo: Path, base: str):
    """Behind the tests of EAGLE-3, whose engine ends where another is asked for."""
    setting.oracle.drafts["mtp"] = UnnormedMtpDraft(mimo, setting.target)
    groups = groups_of(setting.prompts, OTHERS[base])
    plan, expected = foreseen(setting, base, groups)
    found = served(planned, groups)
    assert outputs_of(found) == plain_of(setting, groups)
    assert found == expected
    assert set(plan.depths) == set(range(D_MAX + 1))
