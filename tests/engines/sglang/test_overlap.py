"""SGLang's overlap scheduler, as on a GPU: it prepares a step while the one before is computed.

On a CPU nothing runs at the same time, but the order of the calls, the relay of drafts between steps and the late
arrival of results are those of a GPU. SGLang's own kernels for it are Triton's and run in the interpreter, as are those
for pages of several tokens. Every other test of a server is without overlap.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.distribution import ALPHA, most_varied_prompt, p_value  # noqa: E402
from tests.engines.sglang import faults, overlap_on, test_sampled  # noqa: E402
from tests.engines.sglang import tree_simulate as ts  # noqa: E402
from tests.engines.sglang import verify_counts as vc  # noqa: E402
from tests.engines.sglang.simulate import Target  # noqa: E402

CONCURRENCIES = (1, 8)
LENGTHS = (2, 3, 9, 17, 33, 64, 81, 96)
TREE_BETA, TOPK, DEPTH = 0.15, 4, 3
TREE = (
    *("--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(TOPK)),
    *("--speculative-c2t-beta", str(TREE_BETA)),
)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("overlap")
    target = Target(pair_dir() / "target")
    prompts = [p[:n] for p, n in zip(held_out_prompts(len(LENGTHS), min_tokens=96, seed=7), LENGTHS, strict=True)]
    plugin = faults.install(folder, overlap_on.__file__)
    path = os.pathsep.join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")]))
    return SimpleNamespace(
        folder=folder,
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        oracle=vc.Oracle(pair_dir(), target),
        forest=ts.Forest(pair_dir(), target),
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )


@pytest.fixture(scope="module", params=["standalone", "eagle3", "tree", "pages"])
def served(request: pytest.FixtureRequest, setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The answers of one server by concurrency, and its samples."""
    tree = request.param == "tree"
    base = "standalone" if request.param == "standalone" else "eagle3"
    depth = DEPTH if tree else test_sampled.D_MAX
    # the CPU's trees need pages of one token
    more = {"tree": TREE, "pages": ("--page-size", "16")}.get(request.param, ())
    flags = (*more, "--max-running-requests", "48", "--random-seed", test_sampled.SEED)
    log = setting.folder / f"{request.param}.log"
    with vc.server(pair_dir(), base, depth, setting.classifier, log, *flags, env=setting.env) as running:
        greedy = {n: vc.answers(running, setting.prompts, n) for n in CONCURRENCIES}
        prompt, probs = most_varied_prompt()
        samples = test_sampled.sample(running, prompt)
        state = running.request("/get_server_info")
    counts = {n: [vc.Counts.of_answer(answer) for answer in answers] for n, answers in greedy.items()}
    yield SimpleNamespace(tree=tree, base=base, counts=counts, samples=samples, probs=probs, state=state)


def test_it_is_on(served: SimpleNamespace):
    assert served.state["disable_overlap_schedule"] is False


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_output_is_plain_decodings(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    assert [found.output_ids for found in served.counts[concurrency]] == setting.plain


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_each_draft_is_what_the_classifier_says(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    if served.tree:
        shape = (setting.classifier, TREE_BETA, TOPK, DEPTH, TOPK * DEPTH)
        expected = [setting.forest.counts(served.base, prompt, *shape) for prompt in setting.prompts]
    else:
        shape = (test_sampled.D_MAX, setting.classifier)
        expected = [setting.oracle.counts(served.base, prompt, *shape) for prompt in setting.prompts]
    ts.assert_as_simulated(served.counts[concurrency], expected)


def test_samples_have_the_targets_distribution(served: SimpleNamespace):
    if not served.tree:
        test_sampled.assert_drafts_were_tried_and_cut(served.samples)
    assert p_value(test_sampled.outcomes(served.samples), served.probs) >= ALPHA
