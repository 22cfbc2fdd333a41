"""Trees whose planner waits for nothing, through a real server: plain output, and every step as a simulation has it."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.engines.sglang import test_planner_server as chains  # noqa: E402
from tests.engines.sglang import test_tree_planner_server as whole  # noqa: E402
from tests.engines.sglang.test_sampled import outcomes, sample  # noqa: E402
from tests.engines.sglang.test_tree_planner_server import DEPTH, MAX_NODES, TOPK, in_step, server  # noqa: E402
from tests.support.engines.distribution import ALPHA, SAMPLES, SHORT, most_varied_prompt, p_value  # noqa: E402
from tests.support.sglang import shaped_rule as shaped  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.planned_rule import MEMORY, at  # noqa: E402

GROUPS = (1, 6, 2, 8)
setting = whole.setting


@dataclass
class LaggedTrees(shaped.ShapedPlan):
    """Whole trees are drafted, and as many rows verified as would have paid best in the last known steps. rows: of all
    steps. unread, known: of a step its requests and the sums of its surest 0, 1, 2, ... nodes."""

    rows: list[int] = field(default_factory=list)
    unread: list[tuple[int, list[float]]] = field(default_factory=list)
    known: deque[tuple[int, list[float]]] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def shape(self, requests: int) -> shaped.Shape:
        if len(self.unread) == 2:
            self.known.append(self.unread.pop(0))
        self.width = TOPK
        self.rows.append(self._rows(requests))
        return TOPK, DEPTH

    def _rows(self, requests: int) -> int:
        if not self.known:
            return requests * (MAX_NODES + 1)
        rates = []
        for count in range(requests * MAX_NODES + 1):
            gains = [requests / then * at(sums, count * then / requests) for then, sums in self.known]
            rates.append((requests + sum(gains) / len(gains)) / self.seconds(requests, count, DEPTH))
        return requests + self.best(rates)

    def spend(self, falling: Sequence[Sequence[float]], depth: int) -> list[int]:
        """The surest nodes of all trees."""
        order = sorted((-least, row, place) for row, each in enumerate(falling) for place, least in enumerate(each))
        gains = [-least for least, *_ in order] + [0.0] * (len(falling) * MAX_NODES - len(order))
        self.unread.append((len(falling), [math.fsum(gains[:n]) for n in range(len(gains) + 1)]))
        room = self.rows[-1] - len(falling)
        if 0 < room < len(order) and order[room - 1][1] != order[room][1]:
            self.margin = min(self.margin, order[room][0] - order[room - 1][0])
        taken = Counter(row for _, row, _ in order[:room])
        return [taken[row] for row in range(len(falling))]

    def learn(self, *_: object) -> None:
        """Nothing but what `spend` has noted."""


@pytest.fixture(scope="module")
def served(setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    curve, plan = setting.folder / "lagged-curve.json", LaggedTrees(most=MAX_NODES, d_max=DEPTH)
    write_curve(shaped.CURVE, curve)
    prompts, cut = iter(setting.prompts), []
    with server(setting, "eagle3", curve, "lagged", "--speculative-c2t-rows", "lagged") as running:
        for size in GROUPS:
            group = [next(prompts) for _ in range(size)]
            answers = chains.together(running, group, [vc.NEW_TOKENS] * size)
            expected = in_step(setting, "eagle3", group, [vc.NEW_TOKENS] * size, plan)
            assert [vc.Counts.of_answer(answer) for answer in answers] == [each.counts for each in expected]
            state = chains.state(running)
            assert state["steps"] == len(plan.rows) and state["rows_computed"] == sum(plan.rows)
            cut.append([each.counts.draft_lengths for each in expected])
        assert plan.margin > chains.UNDECIDED, "a decision is too near to call: choose other prompts"
        yield SimpleNamespace(running=running, plan=plan, cut=cut, state=state)


def test_steps_are_as_simulated(served: SimpleNamespace):
    """That they are is asserted where they are served; here, that there was something to decide."""
    assert served.state["configuration"]["rows"] == "lagged"
    assert len(set(served.plan.rows)) > 4
    # of one step some trees are cut more than others
    assert len({lengths for group in served.cut for lengths in group}) > len(GROUPS)


def test_requests_with_options_of_their_own_are_answered(served: SimpleNamespace, setting: SimpleNamespace):
    own = [{}, {"c2t": {"beta": 0.3}}, {"c2t": {"max_depth": 1}}, {"c2t": {"enabled": False}}]
    params = [{"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True, "custom_params": each} for each in own]
    answers = served.running.request("/generate", {"input_ids": setting.prompts[:4], "sampling_params": params})
    plain = [tuple(setting.forest.plain(prompt)[:12]) for prompt in setting.prompts[:4]]
    assert [tuple(each["output_ids"]) for each in answers] == plain


def test_samples_have_the_targets_distribution(served: SimpleNamespace):
    """That a bias would be seen: test_tree_sampled."""
    prompt, probs = most_varied_prompt(SHORT)
    found = sample(served.running, prompt)
    metas = [answer["meta_info"] for answer in found]
    sizes = [size - 1 for meta in metas for size, n in enumerate(meta["spec_cap_lens_histogram"]) for _ in range(n)]
    assert len(found) == SAMPLES and 0 < sum(sizes) < MAX_NODES * len(sizes), "nothing is verified, or nothing is cut"
    assert p_value(outcomes(found), probs) >= ALPHA
