"""`--speculative-c2t-planner` over trees: a given cost curve decides about nodes exactly as a simulation says.

What is decided in test_planner_server about the tokens of a chain is decided here about the nodes of a tree, from the
surest on; and before each draft, whether it is a chain, and how deep. That follows from all steps before it, so the
simulation lives as long as the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner.curve_file import read_curve, write_curve  # noqa: E402
from tests.engines.sglang import test_planner_server as chains  # noqa: E402
from tests.support.sglang import shaped_rule as shaped  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.planned_rule import WHOLE_FIRST  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

TOPK, DEPTH = 3, chains.D_MAX
MAX_NODES = TOPK * DEPTH
# requests that start together
GROUPS = (1, 2, 6, 1, 8)
# Of the last ones all but one end early.
EARLY = 10


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("tree-planner")
    prompts = [ids[: 24 + 4 * i] for i, ids in enumerate(held_out_prompts(sum(GROUPS), min_tokens=96, seed=23))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    forest = ts.Forest(pair_dir(), Target(pair_dir() / "target"))
    return SimpleNamespace(folder=folder, prompts=prompts, classifier=classifier, forest=forest)


def in_step(
    setting: SimpleNamespace, base: str, prompts: list[list[int]], new: list[int], plan: shaped.ShapedPlan
) -> list[SimpleNamespace]:
    """All requests decoded together, step by step: of each its counts and its steps by depth. new: tokens of each."""
    rules: dict[shaped.Shape, ts.TreeRule] = {}

    def nodes(shape: shaped.Shape) -> list[shaped.Nodes]:
        rule = rules.setdefault(shape, ts.TreeRule(vc.Rule(setting.classifier, 0.0), *shape, MAX_NODES))
        return [rule.nodes(setting.forest.draft(base, prompts[i], committed[i])) for i in running]

    committed = [len(prompt) + 1 for prompt in prompts]
    sizes: list[list[int]] = [[] for _ in prompts]
    depths: list[Counter[int]] = [Counter() for _ in prompts]
    while running := [i for i, prompt in enumerate(prompts) if committed[i] - len(prompt) < new[i]]:
        shape = plan.shape(len(running))
        grown = nodes(shape)
        counts = plan.spend([[least for least, _ in each] for each in grown], shape[1])
        plan.learn(shape, grown, nodes((1, shape[1])))
        for i, each, count in zip(running, grown, counts, strict=True):
            tree = {path for _, path in each[:count]}
            committed[i] += setting.forest.accepted(prompts[i], committed[i], tree) + 1
            sizes[i].append(count)
            depths[i][shape[1]] += 1
    assert not any(rule.undecided for rule in rules.values()), "a tree is too near to call: choose other prompts"
    return [
        SimpleNamespace(
            counts=vc.Counts(setting.forest.plain(prompt)[:own], len(mine), tuple(sorted(Counter(mine).items()))),
            depths={str(depth): steps for depth, steps in sorted(deep.items())},
        )
        for prompt, own, mine, deep in zip(prompts, new, sizes, depths, strict=True)
    ]


def server(setting: SimpleNamespace, base: str, curve: Path, name: str, *more: str) -> CpuServer:
    tree = ("--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(TOPK))
    return CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", base),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS[base])),
        *("--speculative-num-steps", str(DEPTH), "--speculative-c2t-classifier", str(setting.classifier), *tree),
        *("--speculative-c2t-planner", str(curve), "--disable-radix-cache", "--skip-server-warmup", *more),
        log=setting.folder / f"{name}.log",
    )


@pytest.fixture(scope="module", params=["eagle3", "standalone"])
def planned(request: pytest.FixtureRequest, setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Every group is served as simulated: texts, verify steps, tree sizes, steps by depth and by width."""
    base, curve = request.param, setting.folder / "curve.json"
    write_curve(shaped.CURVE, curve)
    plan = shaped.ShapedPlan(widths=(1, TOPK), d_max=DEPTH, most=MAX_NODES)
    prompts, chosen = iter(setting.prompts), []
    with server(setting, base, curve, base) as running:
        for at, size in enumerate(GROUPS):
            group = [next(prompts) for _ in range(size)]
            new = [vc.NEW_TOKENS] * size
            if at == len(GROUPS) - 1:
                new[:-1] = [EARLY] * (size - 1)
            before = len(plan.shapes)
            answers = chains.together(running, group, new)
            expected = in_step(setting, base, group, new, plan)
            assert [vc.Counts.of_answer(answer) for answer in answers] == [each.counts for each in expected]
            assert [answer["meta_info"]["c2t"][0]["depths"] for answer in answers] == [each.depths for each in expected]
            state = chains.state(running)
            assert state["steps"] == len(plan.shapes)
            widths = Counter(width for width, _ in plan.shapes)
            assert state["planner"]["widths"] == {str(width): widths[width] for width in (1, TOPK)}
            chosen.append(plan.shapes[before:])
        assert plan.margin > chains.UNDECIDED, "a decision is too near to call: choose other prompts"
        yield SimpleNamespace(server=running, base=base, plan=plan, chosen=chosen)


def test_each_step_is_drafted_and_spent_as_simulated(planned: SimpleNamespace):
    """That it is is asserted where it is served; here, that there was something to decide."""
    first, _, many, again, last = planned.chosen
    assert first[:WHOLE_FIRST] == [(TOPK, DEPTH)] * WHOLE_FIRST, "what is not known is tried"
    # trees for one request, chains for several, in one server
    assert TOPK in {width for width, _ in again}
    assert Counter(width for width, _ in many).most_common(1)[0][0] == 1
    # while others of the same batch end
    assert {1, TOPK} == {width for width, _ in last}
    assert len({depth for _, depth in planned.plan.shapes}) >= 3
    assert planned.plan.probes


def test_the_log_asks_for_confidences_of_trees(planned: SimpleNamespace, setting: SimpleNamespace):
    told = chains.state(planned.server)["planner"]
    assert told.pop("widths") and told.pop("depth") in range(1, DEPTH + 1)
    assert told == {
        **{"active": True, "curve": True},
        **{"learnt": None, "step_seconds": None, "came": {"tokens": None, "seconds": None}},
    }
    log = (setting.folder / f"{planned.base}.log").read_text(errors="replace")
    assert "`c2t calibrate --on tree` does that" in log
    assert f"C2T: each step drafts chains, or trees {TOPK} wide, up to {DEPTH} deep, as the planner says" in log


def test_single_requests_keep_their_own_rules(setting: SimpleNamespace, planned: SimpleNamespace):
    """Those with a threshold of their own among themselves, which draft whole trees; then beside others."""
    own = [{"enabled": False}, {"beta": 0.3}]
    prompts, shape = setting.prompts[: len(own)], (TOPK, DEPTH, MAX_NODES)
    expected = [
        setting.forest.counts(planned.base, prompt, setting.classifier, beta, *shape)
        for prompt, beta in zip(prompts, (0.0, 0.3), strict=True)
    ]
    ts.assert_as_simulated(asked_for(planned, setting, own), expected, tolerated=0)
    found = asked_for(planned, setting, [*own, {"max_depth": 0}])
    assert [each.output_ids for each in found] == [setting.forest.plain(prompt) for prompt in setting.prompts[:3]]
    assert found[2].draft_lengths == ((0, vc.NEW_TOKENS - 1),)


def asked_for(planned: SimpleNamespace, setting: SimpleNamespace, own: list[dict[str, Any]]) -> list[vc.Counts]:
    params = [
        {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True, "custom_params": {"c2t": each}}
        for each in own
    ]
    body = {"input_ids": setting.prompts[: len(own)], "sampling_params": params}
    return [vc.Counts.of_answer(answer) for answer in planned.server.request("/generate", body)]


def test_without_a_curve_both_widths_are_measured(setting: SimpleNamespace):
    curve = setting.folder / "measured.json"
    with server(setting, "eagle3", curve, "measured") as running:
        for _ in range(2):
            found = vc.answers(running, setting.prompts[:4], concurrency=1)
            assert [tuple(answer["output_ids"]) for answer in found] == [
                setting.forest.plain(prompt) for prompt in setting.prompts[:4]
            ]
        told = chains.state(running)["planner"]
    assert told["curve"] and all(told["widths"].values())
    # of one request, rows of a chain's pass and of a tree's
    assert [rows for rows, _ in read_curve(curve).draft] == [1, TOPK]
