"""SGLang's overlap scheduler, as on a GPU: it prepares a step while the one before is computed.

On a CPU nothing runs at the same time, but the order of the calls, the relay of drafts between steps and the late
arrival of results are those of a GPU. SGLang's own kernels for it are Triton's and run in the interpreter, as are those
for pages of several tokens. Every other test of a server is without overlap.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.engines.sglang import test_lagged_server, test_planner_server, test_sampled  # noqa: E402
from tests.support.engines.distribution import ALPHA, SHORT, most_varied_prompt, p_value  # noqa: E402
from tests.support.sglang import faults, forced_plan, lagged_faults, overlap_on, step_log  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft  # noqa: E402

CONCURRENCIES = (1, 8)
LENGTHS = (2, 3, 9, 17, 33, 64, 81, 96)
TREE_BETA, TOPK, DEPTH = 0.15, 4, 3
LAGGED = ("--speculative-c2t-rows", "lagged")
# a simulation reads confidences as they are
AUTO = ("--skip-server-warmup", "--speculative-c2t-learn", "off", "--speculative-c2t-planner")
TREE = (
    *("--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(TOPK)),
    *("--speculative-c2t-beta", str(TREE_BETA)),
)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("overlap")
    target = Target(pair_dir() / "target")
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    prompts = [p[:n] for p, n in zip(held_out_prompts(len(LENGTHS), min_tokens=96, seed=7), LENGTHS, strict=True)]
    steps, nothing, curve = folder / "steps.log", folder / "nothing", folder / "curve.json"
    forced, drafts = folder / "forced", folder / "drafts.log"
    nothing.write_text("")
    forced.write_text("")
    write_curve(test_planner_server.CURVE, curve)
    sampled, probs = most_varied_prompt(SHORT)
    plain = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TRITON_INTERPRET": "1"}
    plain |= {"STEP_LOG": str(steps), "PLANTED_FAULT_FILE": str(nothing)}
    plain |= {"FORCED_PLAN": str(forced), "FORCED_LOG": str(drafts)}
    env = {**os.environ, **with_plugin(folder / "overlap", overlap_on, plain)}
    logging = {
        name: with_plugin(folder / name, module, env)
        for name, module in (("lagged", lagged_faults), ("auto", step_log))
    }
    logging["auto"] = with_plugin(folder / "forced-plan", forced_plan, logging["auto"])
    return SimpleNamespace(
        folder=folder,
        steps=steps,
        prompts=prompts,
        sampled=sampled,
        probs=probs,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=classifier,
        oracle=vc.Oracle(pair_dir(), target),
        forest=ts.Forest(pair_dir(), target),
        curve=curve,
        judge=forced_plan.Judge(target, load_draft(pair_dir(), vc.DRAFTS["eagle3"], target), vc.Rule(classifier, 0.0)),
        forced=forced,
        drafts=drafts,
        env=env,
        logging=logging,
    )


def with_plugin(folder: Path, module: ModuleType, env: Mapping[str, str]) -> dict[str, str]:
    """The environment with a module of this folder as one more plugin."""
    folder.mkdir()
    path = filter(None, [str(faults.install(folder, module.__file__)), env["PYTHONPATH"]])
    return {**env, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module", params=["standalone", "lagged", "auto", "tree", "pages"])
def served(request: pytest.FixtureRequest, setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The answers and steps of one server by concurrency, and its samples."""
    name = request.param
    base = "standalone" if name == "standalone" else "eagle3"
    depth = {"tree": DEPTH, "auto": test_planner_server.D_MAX}.get(name, test_sampled.D_MAX)
    # the CPU's trees need pages of one token
    options = {"tree": TREE, "lagged": LAGGED, "auto": (*AUTO, str(setting.curve)), "pages": ("--page-size", "16")}
    more = options.get(name, ())
    flags = (*more, "--max-running-requests", "48", "--random-seed", test_sampled.SEED)
    log, env = setting.folder / f"{name}.log", setting.logging.get(name, setting.env)
    counts, steps, answers = {}, {}, {}
    with vc.server(pair_dir(), base, depth, setting.classifier, log, *flags, env=env) as running:
        for n in CONCURRENCIES:
            setting.steps.write_text("")
            answers[n] = vc.answers(running, setting.prompts, n)
            counts[n] = [vc.Counts.of_answer(answer) for answer in answers[n]]
            steps[n] = [json.loads(line) for line in setting.steps.read_text().splitlines()]
        # of so short answers the lagged plan verifies nothing on this prompt
        at_once = () if name == "lagged" else test_sampled.COUNTS
        samples = {n: test_sampled.sample_at(running, setting.sampled, n) for n in at_once}
        state = running.request("/get_server_info")
        files = (setting.forced, setting.drafts)
        forced = forced_plan.answered(running, setting.prompts, *files) if name == "auto" else None
    yield SimpleNamespace(
        name=name,
        base=base,
        answers=answers,
        counts=counts,
        steps=steps,
        samples=samples,
        state=state,
        forced=forced,
    )


def test_it_is_on(served: SimpleNamespace):
    assert served.state["disable_overlap_schedule"] is False


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_output_is_plain_decodings(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    assert [found.output_ids for found in served.counts[concurrency]] == setting.plain


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_each_draft_is_what_the_classifier_says(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    if served.name == "lagged":
        steps = served.steps[concurrency]
        expected = test_lagged_server.by_the_rule(steps)
        assert [(step["rows"], [n - 1 for n in step["lengths"]]) for step in steps] == [
            (rows, kept) for rows, _, kept in expected
        ]
        assert max(len(step["rids"]) for step in steps) >= concurrency
        assert any(wanted != kept for _, wanted, kept in expected), "no step was clipped"
        return
    if served.name == "auto":
        check_plan(served, concurrency)
        return
    if served.name == "tree":
        shape = (setting.classifier, TREE_BETA, TOPK, DEPTH, TOPK * DEPTH)
        expected = [setting.forest.counts(served.base, prompt, *shape) for prompt in setting.prompts]
    else:
        shape = (test_sampled.D_MAX, setting.classifier)
        expected = [setting.oracle.counts(served.base, prompt, *shape) for prompt in setting.prompts]
    ts.assert_as_simulated(served.counts[concurrency], expected)


def check_plan(served: SimpleNamespace, concurrency: int) -> None:
    """Each step is as deep, and has as many tokens of each request verified, as the simulated planner says of the
    confidences in the steps so far; and requests report so. With overlap one runs a step more than it counts."""
    plan = test_planner_server.Plan(packed=True, ends=True, skips=True)
    verified: dict[str, list[int]] = {}
    for n in CONCURRENCIES[: CONCURRENCIES.index(concurrency) + 1]:
        for step in served.steps[n]:
            assert plan.depth(len(step["rids"])) == step["depth"]
            kept = [0] * len(step["rids"])
            if step["depth"]:
                assert plan.drafted(step["confidence"]) == len(step["confidence"][0])
                kept = plan.keep(step["confidence"])
                assert kept == step["kept"]
            for rid, length in zip(step["rids"], kept, strict=True):
                verified.setdefault(rid, []).append(length)
    assert plan.margin > test_planner_server.UNDECIDED, "a decision is too near to call: choose other prompts"
    for answer, found in zip(served.answers[concurrency], served.counts[concurrency], strict=True):
        lengths = verified[answer["meta_info"]["id"]]
        assert len(lengths) - found.verify_count in (0, 1)
        assert found.draft_lengths == tuple(sorted(Counter(lengths[: found.verify_count]).items()))
    assert len(set(plan.depths)) > 1, "the planner had nothing to decide"


def test_drafts_behind_plain_steps_are_those_of_a_draft_that_has_read_each(
    served: SimpleNamespace, setting: SimpleNamespace
):
    if served.forced is None:
        pytest.skip("no plain steps")
    assert served.forced.gives(setting.plain)
    setting.judge.judge(served.forced)


def test_samples_have_the_targets_distribution(served: SimpleNamespace, setting: SimpleNamespace):
    if not served.samples:
        pytest.skip("nothing of a draft is verified in so short answers")
    for found in served.samples.values():
        if served.name not in ("tree", "auto"):
            test_sampled.assert_drafts_were_tried_and_cut(found)
    values = {n: p_value(test_sampled.outcomes(found), setting.probs) for n, found in served.samples.items()}
    assert min(values.values()) >= ALPHA, values
