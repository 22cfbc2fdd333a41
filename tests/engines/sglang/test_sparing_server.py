"""Steps without scores through a real server: plain output, drafts verified whole, and what an independent simulation
accepts of them; scored steps between them have the confidences that they would have had. And what each step teaches."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.sglang.test_planner_server import Request, in_step  # noqa: E402
from tests.support.sglang import faults, spared_log  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.logged_plan import LoggedPlan  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft  # noqa: E402

D_MAX, PROMPTS, TOGETHER = 4, 4, 4
# float32 on both sides, of a network of one layer
NEAR = 1e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("sparing")
    target = Target(pair_dir() / "target")
    prompts = [ids[: 30 + 6 * row] for row, ids in enumerate(held_out_prompts(PROMPTS, min_tokens=96, seed=21))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    planted, log = folder / "planted", folder / "steps"
    (folder / "plugins").mkdir()
    plugins = str(faults.install(folder / "plugins", spared_log.__file__))
    running = CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", "eagle3"),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS["eagle3"])),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-classifier", str(classifier)),
        # watched, and not applied within so few steps
        *("--speculative-c2t-planner", "on", "--speculative-c2t-learn", "auto", "--skip-server-warmup"),
        log=folder / "server.log",
        env={
            **os.environ,
            **{"PYTHONPATH": plugins, "SPARED_LOG": str(log), "PLANTED_FAULT_FILE": str(planted)},
            "C2T_CACHE_DIR": "off",
        },
    )
    answers: dict[Any, list[dict[str, Any]]] = {}
    steps: dict[Any, list[dict[str, Any]]] = {}
    learnt: dict[Any, list[Any]] = {}
    planted.write_text("")
    with running:
        # until costs of both sizes are measured and no draft has to be scored any more
        for at_once in (1, TOGETHER) * 2:
            vc.answers(running, prompts, at_once)
        for what in (1, TOGETHER, spared_log.CUT, *spared_log.FAULTS):
            planted.write_text(str(what))
            log.write_text("")
            log.with_suffix(".learnt").write_text("")
            running.flush_cache()
            answers[what] = vc.answers(running, prompts, what if isinstance(what, int) else 1)
            steps[what] = [json.loads(line) for line in log.read_text().splitlines()]
            learnt[what] = [json.loads(line) for line in log.with_suffix(".learnt").read_text().splitlines()]
        planner = running.request("/get_server_info")["internal_states"][0]["c2t"]["planner"]
    yield SimpleNamespace(
        answers=answers,
        steps=steps,
        learnt=learnt,
        planner=planner,
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        target=target,
        draft=load_draft(pair_dir(), vc.DRAFTS["eagle3"], target),
        rule=vc.Rule(classifier, 0.0),
    )


def simulated(served: SimpleNamespace, row: int, what: Any) -> tuple[Request, LoggedPlan]:
    """What a request that is alone is counted for if each step does what was logged."""
    rid = served.answers[what][row]["meta_info"]["id"]
    plan = LoggedPlan([step for step in served.steps[what] if step["rids"] == [rid]])
    alone = [served.prompts[row]], [vc.NEW_TOKENS]
    (request,), _ = in_step(served.target, served.draft, served.rule, *alone, plan)
    return request, plan


@pytest.mark.parametrize("at_once", [1, TOGETHER])
def test_output_is_plain_with_and_without_scores(served: SimpleNamespace, at_once: int):
    assert [tuple(answer["output_ids"]) for answer in served.answers[at_once]] == served.plain
    # how many steps do without follows from costs that this machine measured
    assert any(not step["scores"] for step in served.steps[at_once])
    assert 0.0 < served.planner["unscored"] < 1.0


@pytest.mark.parametrize("at_once", [1, TOGETHER])
def test_what_is_not_scored_is_verified_whole(served: SimpleNamespace, at_once: int):
    for step in served.steps[at_once]:
        if not step["scores"]:
            assert step["kept"] == [step["depth"]] * len(step["rids"])
            assert all(math.isnan(one) for row in step["confidence"] for one in row)


def test_counts_and_confidences_are_those_of_a_simulation(served: SimpleNamespace):
    for row, answer in enumerate(served.answers[1]):
        expected, plan = simulated(served, row, 1)
        assert vc.Counts.of_answer(answer) == expected.counts()
        assert plan.off < NEAR
    scored = [step for step in served.steps[1] if step["scores"] and step["depth"]]
    # the first token of a draft has its seed, written by the step before, spared or not
    assert scored and not any(math.isnan(step["confidence"][0][0]) for step in scored)


def test_a_draft_without_scores_that_is_cut_all_the_same_is_noticed(served: SimpleNamespace):
    what = "one_token_less"
    assert [tuple(answer["output_ids"]) for answer in served.answers[what]] == served.plain
    # the log has what was decided, the server's counts what was done
    for row, answer in enumerate(served.answers[what]):
        assert vc.Counts.of_answer(answer) != simulated(served, row, what)[0].counts()


def test_so_are_seeds_of_another_step(served: SimpleNamespace):
    what = "seeds_of_a_step_before"
    assert [tuple(answer["output_ids"]) for answer in served.answers[what]] == served.plain
    assert max(simulated(served, row, what)[1].off for row in range(PROMPTS)) > NEAR


def test_a_draft_teaches_all_that_the_text_says_of_it(served: SimpleNamespace):
    """Though nothing of it was verified, and though later steps say most of it."""
    what, behind = spared_log.CUT, 0
    for row, answer in enumerate(served.answers[what]):
        assert tuple(answer["output_ids"]) == served.plain[row]
        request, _ = simulated(served, row, what)
        assert vc.Counts.of_answer(answer) == request.counts()
        assert not any(kept for (_, drafted), kept in zip(request.drafts, request.lengths, strict=True) if drafted)
        rid = answer["meta_info"]["id"]
        found = Counter((v, a) for rids, drafted, (v,), (a,) in served.learnt[what] if rids == [rid] and drafted)
        expected = Counter(taught(request, *draft) for draft in request.drafts if draft[1])
        if row < PROMPTS - 1:
            assert found == expected
        # the last request's last step may be learnt from after its answer
        assert found <= expected and found.total() >= expected.total() - D_MAX - 1 > 5
        behind += sum(count for (_, hits), count in found.items() if hits > 1)
    assert behind > 0


def taught(request: Request, begins: int, drafted: list[int]) -> tuple[int, int]:
    """By the text alone: tokens of a draft that are known, and how many of them it goes on with."""
    text = request.text[begins:]
    agree = [one == other for one, other in zip(drafted, text, strict=False)]
    hits = agree.index(False) if False in agree else len(agree)
    return (len(drafted) if False in agree else hits), hits
