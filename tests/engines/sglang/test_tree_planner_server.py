"""`--speculative-c2t-planner` over trees: a given cost curve decides about nodes exactly as a simulation says.

See test_planner_server, whose curve this is: what is decided there about the tokens of a chain is decided here about
the nodes of a tree, from the surest on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.sglang import test_planner_server as chains  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

BASE, TOPK, DEPTH = "eagle3", 3, chains.D_MAX
MAX_NODES = TOPK * DEPTH
# requests that start together
GROUPS = (1, 1, 6)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("tree-planner")
    prompts = [ids[: 24 + 6 * i] for i, ids in enumerate(held_out_prompts(sum(GROUPS), min_tokens=96, seed=23))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    forest = ts.Forest(pair_dir(), Target(pair_dir() / "target"))
    return SimpleNamespace(folder=folder, prompts=prompts, classifier=classifier, forest=forest)


def in_step(forest: ts.Forest, classifier: Path, prompts: list[list[int]]) -> tuple[list[vc.Counts], int, float, bool]:
    """All requests decoded together, step by step; also the steps, how near the nearest decision about the budget was,
    and whether one about a tree was too near."""
    rule = ts.TreeRule(vc.Rule(classifier, 0.0), TOPK, DEPTH, MAX_NODES)
    committed = [len(prompt) + 1 for prompt in prompts]
    sizes: list[list[int]] = [[] for _ in prompts]
    plan = chains.Plan(packed=True)
    steps = 0
    while running := [i for i, prompt in enumerate(prompts) if committed[i] - len(prompt) < vc.NEW_TOKENS]:
        steps += 1
        grown = [rule.nodes(forest.draft(BASE, prompts[i], committed[i])) for i in running]
        counts = plan.spend([[least for least, _ in nodes] for nodes in grown], DEPTH)
        for i, nodes, count in zip(running, grown, counts, strict=True):
            tree = {path for _, path in nodes[:count]}
            committed[i] += forest.accepted(prompts[i], committed[i], tree) + 1
            sizes[i].append(count)
    found = [
        vc.Counts(forest.plain(prompt), len(own), tuple(sorted(Counter(own).items())))
        for prompt, own in zip(prompts, sizes, strict=True)
    ]
    return found, steps, plan.margin, rule.rule.undecided


@pytest.fixture(scope="module")
def planned(setting: SimpleNamespace) -> Iterator[CpuServer]:
    curve = setting.folder / "curve.json"
    chains.CURVE.save(curve)
    tree = ("--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(TOPK))
    with CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", BASE),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS[BASE])),
        *("--speculative-num-steps", str(DEPTH), "--speculative-c2t-classifier", str(setting.classifier), *tree),
        *("--speculative-c2t-planner", str(curve), "--disable-radix-cache"),
        log=setting.folder / "server.log",
    ) as running:
        yield running


def test_each_step_is_spent_as_simulated(setting: SimpleNamespace, planned: CpuServer):
    prompts = iter(setting.prompts)
    for size in GROUPS:
        group = [next(prompts) for _ in range(size)]
        before = chains.state(planned)["steps"]
        found = [vc.Counts.of_answer(answer) for answer in chains.together(planned, group)]
        after = chains.state(planned)["steps"]
        expected, steps, margin, undecided = in_step(setting.forest, setting.classifier, group)
        assert margin > chains.UNDECIDED and not undecided, "a decision is too near to call: choose other prompts"
        assert found == expected
        assert after - before == steps
        lengths = {length for each in found for length, _ in each.draft_lengths}
        assert len(lengths) >= 3
        assert size == 1 or 0 in lengths, "with so many requests some get nothing"


def test_the_log_asks_for_confidences_of_trees(planned: CpuServer, setting: SimpleNamespace):
    assert chains.state(planned)["planner"] == {
        **{"active": True, "curve": True, "depth": DEPTH},
        **{"learnt": None, "step_seconds": None, "came": {"tokens": None, "seconds": None}},
    }
    assert "`c2t calibrate --on tree` does that" in (setting.folder / "server.log").read_text(errors="replace")


def test_single_requests_keep_their_own_rules(setting: SimpleNamespace, planned: CpuServer):
    own = [{"enabled": False}, {"beta": 0.3}, {"max_depth": 0}]
    params = [
        {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True, "custom_params": {"c2t": each}}
        for each in own
    ]
    prompts = setting.prompts[: len(own)]
    answers = planned.request("/generate", {"input_ids": prompts, "sampling_params": params})
    found = [vc.Counts.of_answer(answer) for answer in answers]
    shape = (TOPK, DEPTH, MAX_NODES)
    expected = [
        setting.forest.counts(BASE, prompt, setting.classifier, beta, *shape)
        for prompt, beta in zip(prompts, (0.0, 0.3), strict=False)
    ]
    ts.assert_as_simulated(found[:2], expected, tolerated=0)
    assert found[2].draft_lengths == ((0, vc.NEW_TOKENS - 1),)
