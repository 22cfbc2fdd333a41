"""A planner that waits for nothing, through a real server: plain output, and every step as the rule has it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.support.sglang import faults, forced_plan, lagged_rule, planned_log, planned_rule  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft  # noqa: E402

FULL = 8
CONCURRENCIES = (1, FULL)
# Tokens cost enough that whole chains do not pay, and little enough that plain decoding does not either.
CURVE = CostCurve(
    verify=((1, 1.0), (4, 1.1), (5, 1.4), (64, 4.4)), draft=((1, 0.02), (64, 0.04)), fixed=0.1, draft_extend=0.1
)
# Requests at once under a fault: as many as make rows change from step to step.
FEW = 5
FORCED = ("", *forced_plan.FAULTS)
# The rule reads the confidences that the server had, so that sums of float64 in another order are all that differs.
UNDECIDED = 1e-9


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Answers and steps in the order in which they were asked for: by concurrency, then by fault."""
    folder = tmp_path_factory.mktemp("lagged-planner")
    target = Target(pair_dir() / "target")
    prompts = [ids[: 30 + 6 * row] for row, ids in enumerate(held_out_prompts(FULL, min_tokens=96, seed=21))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    write_curve(CURVE, folder / "curve.json")
    planted, log = folder / "planted", folder / "steps"
    planted.write_text("")
    (folder / "plugins").mkdir()
    plugins = str(faults.install(folder / "plugins", planned_log.__file__))
    faults.install(folder / "plugins", forced_plan.__file__)
    forced, drafts = folder / "forced", folder / "drafts"
    forced.write_text("")
    running = CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", "eagle3"),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS["eagle3"])),
        *("--speculative-num-steps", str(planned_rule.D_MAX), "--speculative-c2t-classifier", str(classifier)),
        *("--speculative-c2t-planner", str(folder / "curve.json"), "--speculative-c2t-rows", "lagged"),
        # the rule reads confidences as they are
        *("--speculative-c2t-learn", "off"),
        "--skip-server-warmup",
        log=folder / "server.log",
        env={
            **os.environ,
            **{"PYTHONPATH": plugins, "STEP_LOG": str(log), "PLANTED_FAULT_FILE": str(planted)},
            **{"FORCED_PLAN": str(forced), "FORCED_LOG": str(drafts)},
        },
    )
    answers: dict[Any, list[dict[str, Any]]] = {}
    steps: dict[Any, list[dict[str, Any]]] = {}
    with running:
        for what in (*CONCURRENCIES, *planned_log.FAULTS):
            planted.write_text(str(what))
            log.write_text("")
            running.flush_cache()
            answers[what] = vc.answers(running, prompts, what if isinstance(what, int) else FEW)
            steps[what] = [json.loads(line) for line in log.read_text().splitlines()]
        planted.write_text("")
        plain_steps = {}
        for fault in FORCED:
            running.flush_cache()
            plain_steps[fault] = forced_plan.answered(running, prompts, forced, drafts, fault)
        continued = {
            fault: forced_plan.continued(running, prompts, forced, drafts, fault) for fault in ("", forced_plan.HOLES)
        }
    plain = [tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts]
    judge = forced_plan.Judge(target, load_draft(pair_dir(), "eagle3", target), vc.Rule(classifier, 0.0))
    yield SimpleNamespace(
        answers=answers,
        steps=steps,
        plain=plain,
        plain_steps=plain_steps,
        continued=continued,
        judge=judge,
        sizes=[len(prompt) for prompt in prompts],
    )


def expected(served: SimpleNamespace, last: Any) -> list[tuple[int, int, list[int]]]:
    """(depth, rows, draft tokens kept of each request) of the steps of `last`, after those before it."""
    plan = planned_rule.LaggedPlan(curve=CURVE, skips=True)
    found: list[tuple[int, int, list[int]]] = []
    for what, steps in served.steps.items():
        found = []
        for step in steps:
            requests = len(step["rids"])
            depth, rows = plan.begin(requests)
            kept = [0] * requests
            if step["depth"]:
                plan.note(step["confidence"])
                kept = lagged_rule.clip(step["confidence"], [step["depth"]] * requests, rows - requests)
            found.append((depth, rows, kept))
        if what == last:
            break
    assert plan.margin > UNDECIDED, "choose prompts whose steps are clearer"
    return found


def seen(served: SimpleNamespace, what: Any) -> list[tuple[int, int, list[int]]]:
    return [(step["depth"], step["rows"], [length - 1 for length in step["lengths"]]) for step in served.steps[what]]


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_output_is_plain(served: SimpleNamespace, concurrency: int):
    assert [tuple(answer["output_ids"]) for answer in served.answers[concurrency]] == served.plain


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_every_step_has_the_depth_rows_and_lengths_of_the_rule(served: SimpleNamespace, concurrency: int):
    found = seen(served, concurrency)
    assert found == expected(served, concurrency)
    assert max(len(kept) for *_, kept in found) == concurrency
    assert any(depth and sum(kept) < depth * len(kept) for depth, _, kept in found), "nothing was ever left out"
    assert any(len(set(kept)) > 1 for *_, kept in found) or concurrency == 1, "requests were never treated differently"


def test_the_planner_is_told_how_long_contexts_are(served: SimpleNamespace):
    by_request: dict[str, list[int]] = {}
    for step in served.steps[1]:
        by_request.setdefault(step["rids"][0], []).append(step["context"])
    for size, found in zip(served.sizes, by_request.values(), strict=True):
        # with the overlap scheduler what the step before gave is not there yet
        assert size <= found[0] <= size + 1 and found == sorted(found) and found[-1] > size + vc.NEW_TOKENS // 2
    assert sum(served.sizes) < max(step["context"] for step in served.steps[FULL]) < 2 * sum(served.sizes)


@pytest.mark.parametrize("fault", planned_log.FAULTS)
def test_fault_is_caught(served: SimpleNamespace, fault: str):
    assert seen(served, fault) != expected(served, fault)


@pytest.mark.parametrize("fault", FORCED)
def test_drafts_behind_plain_steps_are_those_of_a_draft_that_has_read_each(served: SimpleNamespace, fault: str):
    """Of requests that come and go; and where one pass does not read what it should, they are not."""
    found = served.plain_steps[fault]
    assert found.gives(served.plain)
    served.judge.judge(found, fault)


@pytest.mark.parametrize("fault", ["", forced_plan.HOLES])
def test_drafts_behind_texts_of_plain_steps_that_the_cache_has_kept(served: SimpleNamespace, fault: str):
    found = served.continued[fault]
    cached = [answer["meta_info"]["cached_tokens"] for answer in found.answers]
    assert all(cached) and all(tokens < len(text) for tokens, text in zip(cached, found.prompts, strict=True))
    differing, seen = served.judge.wrong(found)
    assert seen > 20 and (differing > 0) == bool(fault)
