"""SGLang's overlap scheduler, as on a GPU: it prepares a step while the one before is computed.

On a CPU nothing runs at the same time, but the order of the calls, the relay of drafts between steps and the late
arrival of results are those of a GPU. SGLang's own kernels for it are Triton's and run in the interpreter, as are those
for pages of several tokens. Every other test of a server is without overlap.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.distribution import ALPHA, most_varied_prompt, p_value  # noqa: E402
from tests.engines.sglang import (  # noqa: E402
    faults,
    lagged_faults,
    overlap_on,
    test_lagged_server,
    test_sampled,
)
from tests.engines.sglang import tree_simulate as ts  # noqa: E402
from tests.engines.sglang import verify_counts as vc  # noqa: E402
from tests.engines.sglang.simulate import Target  # noqa: E402

CONCURRENCIES = (1, 8)
LENGTHS = (2, 3, 9, 17, 33, 64, 81, 96)
TREE_BETA, TOPK, DEPTH = 0.15, 4, 3
LAGGED = ("--speculative-c2t-plan", "lagged")
TREE = (
    *("--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(TOPK)),
    *("--speculative-c2t-beta", str(TREE_BETA)),
)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("overlap")
    target = Target(pair_dir() / "target")
    prompts = [p[:n] for p, n in zip(held_out_prompts(len(LENGTHS), min_tokens=96, seed=7), LENGTHS, strict=True)]
    plugins = [folder / name for name in ("overlap", "steps")]
    for plugin, module in zip(plugins, (overlap_on, lagged_faults), strict=True):
        plugin.mkdir()
        faults.install(plugin, module.__file__)
    stock = os.environ.get("PYTHONPATH")
    path, logging_too = (os.pathsep.join(filter(None, [*map(str, found), stock])) for found in (plugins[:1], plugins))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    steps, nothing = folder / "steps.log", folder / "nothing"
    nothing.write_text("")
    steps.write_text("")
    return SimpleNamespace(
        folder=folder,
        steps=steps,
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        oracle=vc.Oracle(pair_dir(), target),
        forest=ts.Forest(pair_dir(), target),
        env=env,
        logging={**env, "PYTHONPATH": logging_too, "STEP_LOG": str(steps), "PLANTED_FAULT_FILE": str(nothing)},
    )


@pytest.fixture(scope="module", params=["standalone", "lagged", "tree", "pages"])
def served(request: pytest.FixtureRequest, setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The answers of one server by concurrency, with the lagged plan its steps, and elsewhere its samples."""
    name = request.param
    base = "standalone" if name == "standalone" else "eagle3"
    depth = DEPTH if name == "tree" else test_sampled.D_MAX
    # the CPU's trees need pages of one token
    more = {"tree": TREE, "lagged": LAGGED, "pages": ("--page-size", "16")}.get(name, ())
    flags = (*more, "--max-running-requests", "48", "--random-seed", test_sampled.SEED)
    log, env = setting.folder / f"{name}.log", setting.logging if name == "lagged" else setting.env
    counts, steps = {}, {}
    with vc.server(pair_dir(), base, depth, setting.classifier, log, *flags, env=env) as running:
        for n in CONCURRENCIES:
            setting.steps.write_text("")
            counts[n] = [vc.Counts.of_answer(answer) for answer in vc.answers(running, setting.prompts, n)]
            steps[n] = [json.loads(line) for line in setting.steps.read_text().splitlines()]
        prompt, probs = most_varied_prompt()
        # of so short answers the lagged plan verifies nothing on this prompt
        samples = None if name == "lagged" else test_sampled.sample(running, prompt)
        state = running.request("/get_server_info")
    yield SimpleNamespace(name=name, base=base, counts=counts, steps=steps, samples=samples, probs=probs, state=state)


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
    if served.name == "tree":
        shape = (setting.classifier, TREE_BETA, TOPK, DEPTH, TOPK * DEPTH)
        expected = [setting.forest.counts(served.base, prompt, *shape) for prompt in setting.prompts]
    else:
        shape = (test_sampled.D_MAX, setting.classifier)
        expected = [setting.oracle.counts(served.base, prompt, *shape) for prompt in setting.prompts]
    ts.assert_as_simulated(served.counts[concurrency], expected)


def test_samples_have_the_targets_distribution(served: SimpleNamespace):
    if served.samples is None:
        pytest.skip("nothing of a draft is verified in so short answers")
    if served.name != "tree":
        test_sampled.assert_drafts_were_tried_and_cut(served.samples)
    assert p_value(test_sampled.outcomes(served.samples), served.probs) >= ALPHA
