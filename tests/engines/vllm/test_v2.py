"""Model runner V2, interpreted on the CPU: the same cuts as the simulation, and adaptive verification by C2T."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from c2t_plugin.traces.file import load_traces  # noqa: E402
from tests.engines.vllm.conftest import DRAFTS  # noqa: E402
from tests.support.engines.distribution import ALPHA, rank_p_value  # noqa: E402
from tests.support.sglang.planned_rule import CURVE, Plan  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.sglang.verify_counts import Rule, save_hand_made_classifier  # noqa: E402
from tests.support.vllm.planned_counts import UNDECIDED, simulated  # noqa: E402
from tests.support.vllm.recorded import Models, assert_states_are_the_models  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, UnnormedMtpDraft, gamma_and_tau  # noqa: E402

# The interpreter takes about a millisecond for every block of every kernel.
NEW_TOKENS = 12
LENGTHS = [3, 17, 40, 64]
BETA = 0.45
D_MAX = 4
BASES = (*DRAFTS, "mtp")
# Requests are recorded on one of the engines; it drafts to the end, the others as far as a chain is alive.
RECORDED = "eagle"
# These sample too, so many tokens of each prompt; limited means by top-k and top-p, with drafts that are drawn.
SAMPLED = "eagle3"
SAMPLES = 32
LIMITS = {"top_k": 6, "top_p": 0.9}
# Of this one requests set something for themselves, each of them something else: classifier or none, beta, d_max.
OWN = "draft_model"
SETTINGS: list[dict[str, Any]] = [{"c2t_beta": 0.9}, {"c2t_enabled": False}, {"c2t_max_depth": 1}, {}]
MEANS = [(True, 0.9, D_MAX), (False, 0.0, D_MAX), (True, BETA, 1), (True, BETA, D_MAX)]
# A planner decides for this one, whose drafts vLLM would make whole.
PLANNED = "draft_model"
# By how much a network is multiplied that is put in force.
SWAP = 0.5
# Whether this release spares a draft that nobody would take: 0.33 does.
SPARES = hasattr(SchedulerOutput, "skip_drafts")
TIMEOUT_S = 900


@pytest.fixture(scope="module")
def run(layout: Path, mimo: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """All engines of this file, one after the other in one process."""
    folder = tmp_path_factory.mktemp("v2")
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    drawn = held_out_prompts(len(LENGTHS), min_tokens=96, seed=7)
    prompts = [ids[:n] for ids, n in zip(drawn, LENGTHS, strict=True)]

    def spec(base: str, **options: object) -> dict[str, object]:
        own = {"target": str(mimo)} if base == "mtp" else {"model": str(layout / DRAFTS[base])}
        draft = {"method": f"c2t:{base}", "num_speculative_tokens": D_MAX, **own}
        return {**draft, "c2t_classifier": str(classifier), "c2t_beta": BETA, **options}

    engines = {base: spec(base) for base in BASES}
    engines[RECORDED] |= {"c2t_trace_dir": str(folder / "served"), "c2t_trace_share": 1.0}
    engines[RECORDED]["c2t_trace_precision"] = "exact"
    engines[OWN]["own"] = SETTINGS
    engines["adaptive"] = spec("eagle3", enable_adaptive_verification=True, c2t_learn="off")
    engines["learning"] = spec("eagle3", enable_adaptive_verification=True, fits_every=4)
    engines["learning"]["sampled"] = {"max_tokens": SAMPLES}
    del engines["learning"]["c2t_beta"]
    engines[SAMPLED]["sampled"] = {"max_tokens": SAMPLES}
    engines["limited"] = spec("draft_model", draft_sample_method="probabilistic")
    engines["limited"]["sampled"] = {"max_tokens": SAMPLES, **LIMITS}
    write_curve(CURVE, folder / "curve.json")
    engines["planned"] = spec(PLANNED, c2t_planner=str(folder / "curve.json"), c2t_learn="off")
    engines["network"] = engines["planned"] | {"c2t_learn": "network", "swap": SWAP}
    for name in ("planned", "network"):
        del engines[name]["c2t_beta"]
    job = {"target": str(layout / "target"), "prompts": prompts, "new_tokens": NEW_TOKENS, "max_num_seqs": 4}
    (folder / "job.json").write_text(json.dumps({**job, "speculative": list(engines.values())}))
    command = [sys.executable, "-m", "tests.support.vllm.run_v2", str(folder / "job.json"), str(folder / "out.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "out.json").read_text())
    target = Target(pair_dir() / "target")
    oracle = Oracle(pair_dir(), target)
    oracle.drafts["mtp"] = UnnormedMtpDraft(mimo, target)
    return SimpleNamespace(
        found=dict(zip(engines, found, strict=True)),
        prompts=prompts,
        target=target,
        plain=[target.greedy(prompt, NEW_TOKENS) for prompt in prompts],
        classifier=classifier,
        oracle=oracle,
        served=folder / "served",
    )


@pytest.mark.parametrize("engine", [*BASES, "adaptive", "learning", "limited", "planned", "network"])
def test_output_is_plain_decodings(run: SimpleNamespace, engine: str):
    assert run.found[engine]["outputs"] == run.plain


@pytest.mark.parametrize("base", BASES)
def test_each_request_is_cut_where_the_classifier_says(run: SimpleNamespace, base: str):
    expected = [run.oracle.steps(base, prompt, NEW_TOKENS, D_MAX, run.classifier, BETA) for prompt in run.prompts]
    mine = [tuple(tuple(pair) for pair in steps) for steps in run.found[base]["steps"]]
    decided = [(found, theirs.steps) for found, theirs in zip(mine, expected, strict=True) if theirs is not None]
    assert len(decided) >= len(LENGTHS) - 1, "too many confidences lie at beta: choose another"
    assert [found for found, _ in decided] == [theirs for _, theirs in decided]
    assert len({drafted for found, _ in decided for drafted, _ in found}) >= 2


@pytest.mark.parametrize("base", BASES)
def test_the_runners_own_counts_agree(run: SimpleNamespace, base: str):
    found = run.found[base]
    steps = [pair for steps in found["steps"] for pair in steps]
    lengths = [drafted for drafted, _ in steps]
    assert found["state"]["verified"] == [0, *(lengths.count(length) for length in range(1, D_MAX + 1))]
    assert found["state"]["accepted"] == sum(accepted for _, accepted in steps)


@pytest.mark.parametrize("base", BASES)
def test_gamma_and_tau_of_the_metrics_are_the_simulations(run: SimpleNamespace, base: str):
    runs = [run.oracle.run(base, prompt, NEW_TOKENS, D_MAX, run.classifier, BETA) for prompt in run.prompts]
    assert None not in runs, "a confidence lies at beta: choose another"
    lengths = [length for each in runs for length in each.draft_lengths]
    counted = run.found[base]["counted"]
    found = gamma_and_tau(dict(counted["steps"]), counted["accepted"])
    assert found == (sum(lengths) / len(lengths), sum(sum(each.accept_lengths) for each in runs) / len(lengths))


@pytest.mark.parametrize("base", [base for base in BASES if base != RECORDED])
def test_drafting_ends_when_no_request_is_alive(run: SimpleNamespace, base: str):
    """One request alone: a chain of n kept tokens took n + 1 draft steps, or all of them if none was cut."""
    found = run.found[base]
    taken, drafts = (found["state_alone"][name] - found["state"][name] for name in ("draft_steps", "drafts"))
    lengths = [drafted for drafted, _ in found["alone"]]
    # Drafts without a step: those cut at their first token, and the one behind the request's end, of any length.
    seen, unseen = sum(min(length + 1, D_MAX) for length in lengths), drafts - len(lengths)
    assert 0 <= taken - seen - unseen <= D_MAX - 1
    assert taken < D_MAX * drafts


@pytest.mark.parametrize("engine", [RECORDED, "adaptive"])
def test_drafting_never_ends_early_where_all_of_it_is_wanted(run: SimpleNamespace, engine: str):
    state = run.found[engine]["state"]
    assert state["draft_steps"] == D_MAX * state["drafts"] > 0


def test_a_planner_decides_as_simulated(run: SimpleNamespace):
    """All prompts together, then the first one alone."""
    found, plan = run.found["planned"], Plan(packed=True)
    draft, rule = run.oracle.draft(PLANNED), Rule(run.classifier, 0.0)
    for steps, state, prompts in (("steps", "state", run.prompts), ("alone", "state_alone", run.prompts[:1])):
        group = [(prompt, NEW_TOKENS) for prompt in prompts]
        ended = simulated(run.target, draft, rule, group, plan, spares=SPARES)
        expected = [list(each.counts().steps) for each in ended]
        own = found[steps] if steps == "steps" else [found[steps]]
        assert [[tuple(pair) for pair in each] for each in own] == expected
        assert (found[state]["drafts"], found[state]["draft_steps"]) == (
            sum(depth > 0 for depth in plan.depths),
            sum(plan.depths),
        )
    assert plan.margin > UNDECIDED, "a decision is too near to call: choose other prompts"
    assert len(set(plan.depths)) > 1, "there was nothing to decide"


def test_drafts_are_scored_by_the_network_that_the_scheduler_has_learnt(run: SimpleNamespace):
    before, after = run.found["network"]["networks"]
    assert before["worker"] == before["learner"] and after["worker"] == after["learner"]
    assert after["worker"] == [SWAP * each for each in before["worker"]]
    # statistics came with the drafts
    assert after["drafts"] > before["drafts"] > 0


def test_requests_are_cut_as_they_have_set_it_for_themselves(run: SimpleNamespace):
    """All of one batch, and one that has set nothing in its place behind them."""
    *together, after = run.found[OWN]["own"]
    assert [output for output, _ in together] == run.plain
    decided = 0
    for row, (_, steps) in enumerate([*together, after]):
        scored, beta, longest = (*MEANS, MEANS[-1])[row]
        prompt = run.prompts[row % len(run.prompts)]
        expected = run.oracle.steps(OWN, prompt, NEW_TOKENS, longest, run.classifier if scored else None, beta)
        if expected is not None:
            assert tuple(tuple(pair) for pair in steps) == expected.steps
            decided += 1
    assert decided >= len(together), "too many confidences lie at beta: choose another"
    # each is another's than the server's
    assert [steps for _, steps in together[:3]] != run.found[OWN]["steps"][:3]
    assert max(drafted for drafted, _ in together[2][1]) == 1 < max(drafted for drafted, _ in together[1][1])


def test_recorded_states_are_the_models(run: SimpleNamespace):
    models = Models(RECORDED, run.classifier, D_MAX)
    prompts, outputs = [[*each, each[0]] for each in (run.prompts, run.plain)]
    assert_states_are_the_models(load_traces(run.served), models, prompts, outputs)


def test_scheduling_is_asynchronous_under_adaptive_verification_alone(run: SimpleNamespace):
    assert [engine for engine, found in run.found.items() if found["asynchronous"]] == [
        "adaptive",
        "learning",
    ]


def test_adaptive_verification_verifies_less_than_it_schedules(run: SimpleNamespace):
    """Per request, and on /metrics, what vLLM's manager had verified; it schedules all of a draft."""
    found = run.found["adaptive"]
    mine = [[drafted for drafted, _ in steps] for steps in found["steps"]]
    # each request's first, then the first prompt's alone; a step that ran ahead of a request's end has no output
    given = found["given"][: len(LENGTHS)]
    assert [lengths[: len(own)] for lengths, own in zip(given, mine, strict=True)] == mine
    lengths = [length for own in mine for length in own]
    assert len(set(lengths)) >= 3 and 0 < sum(lengths) < D_MAX * len(lengths)
    accepted = sum(accepted for steps in found["steps"] for _, accepted in steps)
    counted = dict(found["counted"]["steps"])
    assert [counted[length] for length in range(1, D_MAX + 1)] == [lengths.count(n) for n in range(1, D_MAX + 1)]
    assert counted[0] >= lengths.count(0) > 0
    assert found["counted"]["accepted"] == accepted > 0


def test_adaptive_verification_learns_what_confidences_mean(run: SimpleNamespace):
    """By vLLM's own estimator, from the classifier's word on, which no threshold cuts."""
    assert run.found["adaptive"]["state"]["learnt"] is None
    found = run.found["learning"]
    learnt, later = found["state"]["learnt"], found["state_alone"]["learnt"]
    assert found["state"]["beta"] == 0.0
    assert learnt["slope"] != 1.0 and all(learnt["offsets"]) and later != learnt
    assert all(abs(each) < 5 for each in (learnt["slope"], *learnt["offsets"]))


@pytest.mark.parametrize(("engine", "limits"), [(SAMPLED, {}), ("limited", LIMITS), ("learning", {})])
def test_what_is_sampled_has_the_targets_distribution(run: SimpleNamespace, engine: str, limits: dict[str, Any]):
    """Temperature 1; with the fault, drafts that were not cut are taken without a look at the target."""
    found = run.found[engine]["samples"]
    assert run.found[engine]["drafts_are_drawn"] == (engine == "limited")
    steps = [pair for steps in found["right"]["steps"] for pair in steps]
    assert len({drafted for drafted, _ in steps}) >= 2, "chains of one length only"
    drafted, accepted = (sum(each) for each in zip(*steps, strict=True))
    assert SAMPLES / 2 < accepted < drafted - SAMPLES / 2, "too few drafts are kept, or too few are refused"
    p_values = [rank_p_value(run.target.model, run.prompts, each["outputs"], **limits) for each in found.values()]
    assert p_values[0] >= ALPHA > p_values[1], p_values
