"""What a planned engine drafts and verifies in each step is what a simulation says, with drafts that end on their way.

The planner is in this process and the drafts are made in another, which is told with every step what they cost. How
deep a step drafts follows from all steps before it, so the simulation lives as long as the planner, and one engine
serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.engines.vllm.conftest import Engine, plan_anew  # noqa: E402
from tests.support.sglang.planned_rule import CURVE, D_MAX, Plan  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft  # noqa: E402
from tests.support.sglang.verify_counts import Rule, save_hand_made_classifier  # noqa: E402
from tests.support.vllm.planned_counts import UNDECIDED, Group, cache_of, simulated  # noqa: E402
from tests.support.vllm.verify_counts import Steps  # noqa: E402

NEW_TOKENS = 24
# Numbers of requests that start in one step.
GROUPS = (1, 3, 2, 4, 8, 2)
# Most of the largest group end soon, after which drafts of those that are left pay again.
SOON, STAYING = 9, 2


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Prompts, and of each group what a simulation says: of its requests, of its drafts and of its draft steps."""
    folder = tmp_path_factory.mktemp("planned")
    write_curve(CURVE, folder / "given.json")
    target = Target(pair_dir() / "target")
    target.run = cache_of(target.run)  # type: ignore[method-assign]
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    prompts = [ids[: 30 + 6 * i] for i, ids in enumerate(held_out_prompts(8, min_tokens=96, seed=21))]
    groups = []
    for place, size in enumerate(GROUPS):
        own = prompts[:size] if size > 1 else [prompts[place]]
        groups.append(
            [(ids, NEW_TOKENS if row < STAYING or size < max(GROUPS) else SOON) for row, ids in enumerate(own)]
        )
    plan, expected = Plan(packed=True, ends=True, skips=True), []
    draft, rule = load_draft(pair_dir(), "eagle3", target), Rule(classifier, 0.0)
    for group in groups:
        before = len(plan.depths)
        counts = [request.counts() for request in simulated(target, draft, rule, group, plan)]
        depths = plan.depths[before:]
        expected.append((counts, sum(depth > 0 for depth in depths), sum(depths)))
    assert plan.margin > UNDECIDED, "a decision is too near to call: choose other prompts"
    plain = [tuple(target.greedy(prompt, NEW_TOKENS)) for prompt in prompts]
    return SimpleNamespace(**locals())


@pytest.fixture(scope="module")
def planned(setting: SimpleNamespace, engine: Engine) -> Iterator[Any]:
    options = {"c2t_planner": str(setting.folder / "given.json"), "c2t_learn": "off"}
    with engine("c2t:eagle3", D_MAX, c2t_classifier=str(setting.classifier), **options) as llm:
        yield llm


def served(llm: Any, groups: list[Group]) -> list[tuple[list[Steps], int, int]]:
    """As the simulation's, of one engine whose planner has seen nothing yet."""
    from vllm import SamplingParams

    plan_anew(llm)
    found = []
    for group in groups:
        (before,) = llm.collective_rpc("c2t_control")
        sampling = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for _, most in group]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in group], sampling, use_tqdm=False)
        (after,) = llm.collective_rpc("c2t_control")
        new = [after[name] - before[name] for name in ("drafts", "draft_steps")]
        found.append(([Steps.of_output(output) for output in outputs], *new))
    return found


def test_each_step_drafts_and_verifies_as_simulated(planned: Any, setting: SimpleNamespace):
    found = served(planned, setting.groups)
    for (counts, _, _), group in zip(found, setting.groups, strict=True):
        plain = [setting.plain[setting.prompts.index(ids)][:most] for ids, most in group]
        assert [each.output_ids for each in counts] == plain
    assert found == setting.expected
    # there was something to decide: plain decoding for many requests, and every depth for few
    assert set(setting.plan.depths) == set(range(D_MAX + 1))


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
    assert [[each.output_ids for each in counts] for counts, _, _ in found] == [
        [each.output_ids for each in counts] for counts, _, _ in setting.expected
    ]
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
    assert [[each.output_ids for each in counts] for counts, _, _ in found] == [
        [each.output_ids for each in counts] for counts, _, _ in setting.expected
    ]
    assert found != setting.expected
