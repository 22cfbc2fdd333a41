"""SGLang 0.5.17, the oldest release that C2T supports: chains, trees and the planner through its own server on a CPU.

The release comes from its wheel, which nothing installs. `sglang_0_5_17_on_cpu.diff` is what it takes beyond the CPU
engine, which is made for 0.5.23: names and an operator's arguments that came later, a model of newer transformers, and
two lines of its CPU attention, by which a verified token does not see those drafted before it. Of C2T and of what
speculation does nothing is changed. On a CPU this release verifies greedily whatever it is asked for, so nothing is
sampled here.
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.slow]

from benchmarks.cpu_engine import cpu_engine_env  # noqa: E402
from benchmarks.cpu_engine.preloaded import preloaded_with  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.engines.contract import engine_version  # noqa: E402
from tests.engines.sglang.test_tree_counts import tree_server  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

RELEASE = "0.5.17"
DIFF = Path(__file__).with_name("sglang_0_5_17_on_cpu.diff")
PROMPTS, D_MAX, TOPK, NODES = 8, 4, 4, 11
# low enough for trees to have branches, and no confidence of theirs is near it
BETAS = {"chain": vc.BETA, "standalone": vc.BETA, "tree": 0.12}


@pytest.fixture(scope="module")
def release(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which Python finds 0.5.17; servers with it are forked from a process that has imported it."""
    if engine_version("sglang") == RELEASE:
        pytest.skip("it is the one that all other tests run")
    wheels = sorted((root / ".venv/wheels").glob(f"sglang-{RELEASE}-*.whl"))
    if not wheels:
        pytest.skip(f"there is no wheel of SGLang {RELEASE} in .venv/wheels; `make test` downloads it")
    folder = tmp_path_factory.mktemp("sglang-0.5.17")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    # outside of any repository, where git would look for the files
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder)}
    subprocess.run(["git", "apply", "-p1", str(DIFF)], cwd=folder, check=True, env=env)
    path = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH"), str(root), str(root / "kernels")])]
    )
    # what is packed is proved at start, at every depth that there is
    found = {**os.environ, "PYTHONPATH": path, "C2T_SELF_CHECK": "strict"}
    with preloaded_with(cpu_engine_env(found)):
        yield found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("oldest")
    lengths = [2, 3, 9, 17, 33, 48, 64, 64]
    prompts = [ids[:n] for ids, n in zip(held_out_prompts(PROMPTS, min_tokens=64, seed=7), lengths, strict=True)]
    target = Target(pair_dir() / "target")
    return SimpleNamespace(
        folder=folder,
        prompts=prompts,
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        oracle=vc.Oracle(pair_dir(), target),
        forest=ts.Forest(pair_dir(), target, vc.NEW_TOKENS),
    )


def start(mode: str, setting: SimpleNamespace, release: dict[str, str]) -> Any:
    log = setting.folder / f"{mode}.log"
    if mode == "tree":
        beta = ("--speculative-c2t-beta", str(BETAS[mode]))
        return tree_server("eagle3", TOPK, D_MAX, NODES, setting.classifier, log, *beta, env=release)
    # one of them over uniform windows
    more = {"auto": ("--speculative-c2t-planner", "on"), "standalone": ("--speculative-c2t-packing", "off")}
    base = "standalone" if mode == "standalone" else "eagle3"
    return vc.server(pair_dir(), base, D_MAX, setting.classifier, log, *more.get(mode, ()), env=release)


@pytest.fixture(scope="module", params=["chain", "standalone", "tree", "auto"])
def served(
    request: pytest.FixtureRequest, setting: SimpleNamespace, release: dict[str, str]
) -> Iterator[SimpleNamespace]:
    """Answers one at a time and all at once, and what the server counted, by concurrency."""
    found, counted = {}, {}
    with start(request.param, setting, release) as running:
        before = running.request("/get_server_info")["internal_states"][0]["c2t"]
        for concurrency in (1, PROMPTS):
            found[concurrency] = vc.answers(running, setting.prompts, concurrency)
            state = running.request("/get_server_info")["internal_states"][0]["c2t"]
            counted[concurrency] = [n - m for n, m in zip(state["verified"], before["verified"], strict=True)]
            before = state
        version = running.request("/get_server_info")["version"]
        params = {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True}
        asked = {"input_ids": setting.prompts, "sampling_params": params, "return_logprob": True}
        told = [answer["meta_info"]["output_token_logprobs"] for answer in running.request("/generate", asked)]
    yield SimpleNamespace(mode=request.param, answers=found, counted=counted, state=state, version=version, told=told)


def simulated(served: SimpleNamespace, setting: SimpleNamespace) -> list[vc.Counts | None]:
    if served.mode == "tree":
        shape = (BETAS["tree"], TOPK, D_MAX, NODES)
        return [setting.forest.counts("eagle3", prompt, setting.classifier, *shape) for prompt in setting.prompts]
    base = "standalone" if served.mode == "standalone" else "eagle3"
    return [setting.oracle.counts(base, prompt, D_MAX, setting.classifier) for prompt in setting.prompts]


def test_the_release_is_that_one(served: SimpleNamespace):
    assert served.version == RELEASE


def test_what_is_served_was_proved_at_start(served: SimpleNamespace):
    proved = served.state["configuration"]["self_check"]
    assert (proved["failures"], proved["kernels"]) == ([], [])
    # statistics are those of chains
    assert proved["draft"] == {"compared": proved["draft"]["compared"]}
    assert (proved["draft"]["compared"] > 1) == (served.mode != "tree")


def test_output_is_plain_decodings(served: SimpleNamespace, setting: SimpleNamespace):
    plain = [list(setting.forest.plain(prompt)) for prompt in setting.prompts]
    assert [[each["output_ids"] for each in answers] for answers in served.answers.values()] == [plain, plain]


def test_log_probabilities_are_the_targets(served: SimpleNamespace, setting: SimpleNamespace):
    """Of narrow windows too, which this release takes for as wide as the draft is deep."""
    for prompt, told in zip(setting.prompts, served.told, strict=True):
        text = [token for _, token, _ in told]
        assert text == list(setting.forest.plain(prompt))
        with torch.no_grad():
            logits = setting.oracle.target.model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])[:, 0].tolist()
        assert [value for value, *_ in told] == pytest.approx(expected, abs=1e-3)


def test_steps_and_verified_tokens_are_a_simulations(served: SimpleNamespace, setting: SimpleNamespace):
    """Of each request the steps; of all of them together, which is what this release tells, the sizes."""
    if served.mode == "auto":
        assert served.state["planner"]["active"] and len(served.state["depths"]) > 1
        return
    expected = simulated(served, setting)
    assert None not in expected, "a confidence lies at beta: choose another"
    sizes = sum((Counter(dict(each.draft_lengths)) for each in expected if each is not None), Counter[int]())
    assert len(sizes) > 2
    for concurrency, answers in served.answers.items():
        steps = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
        assert steps == [each.verify_count for each in expected if each is not None]
        counted = {size: steps for size, steps in enumerate(served.counted[concurrency]) if steps}
        # steps that ran behind a request's end count as well
        extra = Counter(counted) - sizes
        assert not sizes - Counter(counted) and extra.total() <= 2 * PROMPTS
