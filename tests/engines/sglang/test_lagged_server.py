"""The lagged plan through a real server: plain output, and every step's rows and lengths as the rule has them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.engines.sglang.metrics import RequestCounts  # noqa: E402
from tests.support.sglang import faults, lagged_faults, lagged_rule  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft, simulate  # noqa: E402

BASE = "standalone"
D_MAX = 6
WIDTH = D_MAX + 1
PROMPTS = lagged_faults.FULL
CONCURRENCIES = (1, 8)
# As the server has it, whose threshold is a float32.
BETA = float(torch.tensor(vc.BETA))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Answers and steps by concurrency, and by fault those of all prompts at once."""
    folder = tmp_path_factory.mktemp("lagged")
    target = Target(pair_dir() / "target")
    prompts = held_out_prompts(PROMPTS, min_tokens=48, seed=17)
    prompts = [ids[: 6 * row + 4] for row, ids in enumerate(prompts)]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    planted, log = folder / "planted", folder / "steps"
    planted.write_text("")
    (folder / "plugins").mkdir()
    plugins = str(faults.install(folder / "plugins", lagged_faults.__file__))
    env = {**os.environ, "PYTHONPATH": plugins, "STEP_LOG": str(log), "PLANTED_FAULT_FILE": str(planted)}
    answers: dict[Any, list[dict[str, Any]]] = {}
    steps: dict[Any, list[dict[str, Any]]] = {}
    text = folder / "server.log"
    with vc.server(pair_dir(), BASE, D_MAX, classifier, text, "--speculative-c2t-rows", "lagged", env=env) as running:
        for what in (*CONCURRENCIES, *lagged_faults.FAULTS):
            planted.write_text("" if what == 1 else f"quiet {what}")
            log.write_text("")
            before = told(running)
            answers[what] = vc.answers(running, prompts, what if isinstance(what, int) else PROMPTS)
            steps[what] = [json.loads(line) for line in log.read_text().splitlines()]
            if what == PROMPTS:
                state = before, told(running)
    yield SimpleNamespace(
        answers=answers,
        steps=steps,
        state=state,
        target=target,
        prompts=prompts,
        classifier=classifier,
        text=text.read_text(errors="replace"),
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
    )


def told(running: Any) -> dict[str, Any]:
    return running.request("/get_server_info")["internal_states"][0]["c2t"]


def by_the_rule(steps: list[dict[str, Any]]) -> list[tuple[int, list[int], list[int]]]:
    """Rows, and the draft tokens of each request that are above beta and that are left, of each step."""
    rule, found = lagged_rule.Rule(WIDTH), []
    for step in steps:
        rows = rule.rows(step["rids"])
        wanted = [min(lagged_rule.above(each, BETA), step["max_depth"]) for each in step["confidence"]]
        rule.wanted(step["rids"], sum(wanted))
        found.append((rows, wanted, lagged_rule.clip(step["confidence"], wanted, rows - len(wanted))))
    return found


def outputs(served: SimpleNamespace, what: Any) -> list[tuple[int, ...]]:
    return [tuple(answer["output_ids"]) for answer in served.answers[what]]


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_output_is_plain(served: SimpleNamespace, concurrency: int):
    assert outputs(served, concurrency) == served.plain


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_every_step_has_the_rows_and_lengths_of_the_rule(served: SimpleNamespace, concurrency: int):
    steps = served.steps[concurrency]
    expected = by_the_rule(steps)
    assert [(step["rows"], [length - 1 for length in step["lengths"]]) for step in steps] == [
        (rows, kept) for rows, _, kept in expected
    ]
    assert [step["links"] for step in steps] == [kept for *_, kept in expected]
    for step in steps:
        # spare rows are somebody's next draft tokens
        assert sum(step["given"]) == step["rows"]
        assert all(least <= given <= WIDTH for least, given in zip(step["lengths"], step["given"], strict=True))
    assert any(step["rows"] > sum(step["lengths"]) for step in steps), "no row was ever spare"
    assert max(len(step["rids"]) for step in steps) == concurrency
    clipped = [sum(wanted) - sum(kept) for _, wanted, kept in expected]
    assert sum(clipped) > 0, "no step was clipped: choose prompts whose drafts differ more"
    assert any(step["rows"] < len(step["rids"]) * WIDTH for step in steps)


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_each_request_reports_its_clipped_lengths_and_the_rows_it_shared(served: SimpleNamespace, concurrency: int):
    lengths: dict[str, Counter[int]] = {}
    counts: dict[str, RequestCounts] = {}
    steps = served.steps[concurrency]
    for step, (rows, wanted, kept) in zip(steps, by_the_rule(steps), strict=True):
        for rid, asked, length in zip(step["rids"], wanted, kept, strict=True):
            lengths.setdefault(rid, Counter())[length] += 1
            counts.setdefault(rid, RequestCounts()).add(length, rows, D_MAX, asked, None, 0)
    assert sum(each.over_budget for each in counts.values()) > 0
    for answer in served.answers[concurrency]:
        rid = answer["meta_info"]["id"]
        assert vc.Counts.of_answer(answer).draft_lengths == tuple(sorted(lengths[rid].items()))
        (told,) = answer["meta_info"]["c2t"]
        assert told.pop("classifier_s") > 0
        # each step gives one token more than it accepts, and the prompt's pass one; the last step may go beyond the end
        fewest = vc.NEW_TOKENS - 1 - vc.Counts.of_answer(answer).verify_count
        assert fewest <= told["num_accepted_draft_tokens"] < fewest + WIDTH
        own = counts[rid].state() | {"num_accepted_draft_tokens": told["num_accepted_draft_tokens"]}
        assert told | {"classifier_s": None} == own


def test_alone_a_request_is_verified_as_a_simulation_without_a_server_has_it(served: SimpleNamespace):
    draft, decided = load_draft(pair_dir(), vc.DRAFTS[BASE], served.target), 0
    for prompt, answer in zip(served.prompts, served.answers[1], strict=True):
        cut, plan = vc.Rule(served.classifier, vc.BETA), lagged_rule.Rule(WIDTH)

        def keep_length(logits: torch.Tensor, cut: vc.Rule = cut, plan: lagged_rule.Rule = plan) -> int:
            wanted, rows = cut.keep_length(logits), plan.rows("r")
            plan.wanted("r", wanted)
            return min(wanted, rows - 1)

        simulation = simulate(served.target, draft, prompt, vc.NEW_TOKENS, D_MAX, keep_length)
        if not cut.undecided:
            assert vc.Counts.of_answer(answer) == vc.Counts.of_simulation(simulation)
            decided += 1
    assert decided >= PROMPTS - 2, "too many confidences lie at beta: choose another"


def test_the_server_says_what_runs_and_counts_it(served: SimpleNamespace):
    before, after = served.state
    assert after["configuration"]["rows"] == "lagged"
    steps = served.steps[PROMPTS]
    expected = by_the_rule(steps)
    drafted = sum(len(step["rids"]) for step in steps) * D_MAX
    verified = sum(sum(kept) for *_, kept in expected)
    assert after["clipped"] - before["clipped"] == drafted - verified
    assert after["rows_computed"] - before["rows_computed"] == sum(rows for rows, *_ in expected)
    clipped = sum(sum(wanted) - sum(kept) for _, wanted, kept in expected)
    assert after["over_budget"] - before["over_budget"] == clipped


@pytest.mark.parametrize("fault", lagged_faults.FAULTS)
def test_fault_is_caught(served: SimpleNamespace, fault: str):
    steps = served.steps[fault]
    found = [[length - 1 for length in step["lengths"]] for step in steps]
    as_the_rule = found == [kept for *_, kept in by_the_rule(steps)]
    links_as_lengths = found == [step["links"] for step in steps]
    # lengths of another request are lossless; an acceptance that passes the clip is not
    assert (as_the_rule, links_as_lengths) == {
        "clip_of_the_wrong_request": (False, True),
        "links_not_cut_to_the_clipped_length": (True, False),
    }[fault]
    assert (outputs(served, fault) == served.plain) == (fault == "clip_of_the_wrong_request")
