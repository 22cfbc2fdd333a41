"""vLLM's OpenAI server with C2T, through the openai client: output, streaming, /metrics, and errors at start."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

import openai  # noqa: E402

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.serving.engines import ENGINES, Device, Launch  # noqa: E402
from benchmarks.serving.process import free_port  # noqa: E402
from benchmarks.serving.server import Server  # noqa: E402
from tests.support.sglang.simulate import Target, simulate  # noqa: E402
from tests.support.sglang.verify_counts import Rule, save_hand_made_classifier  # noqa: E402
from tests.support.vllm.command import vllm_command  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, gamma_and_tau  # noqa: E402

NEW_TOKENS = 24
BETA = 0.45
KeepLength = Callable[..., int]
D_MAX = 6
PROMPTS = 8


def speculative(layout: Path, **options: object) -> list[str]:
    values = {"method": "c2t:eagle3", "model": str(layout / "eagle3"), "num_speculative_tokens": D_MAX, **options}
    return ["--speculative-config", json.dumps(values)]


def launch(layout: Path, *options: str) -> Launch:
    return ENGINES["vllm"].launch(layout / "target", options, Device.CPU)


@pytest.fixture(scope="module")
def served(layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("server")
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    target = Target(pair_dir() / "target")
    draft = Oracle(pair_dir(), target).draft("eagle3")
    prompts, runs = [], []
    for prompt in held_out_prompts(PROMPTS + 3, seed=5):
        rule = Rule(classifier, BETA)
        run = simulate(target, draft, prompt, NEW_TOKENS, D_MAX, rule.keep_length)
        if not rule.undecided and len(prompts) < PROMPTS:
            prompts.append(prompt)
            runs.append(run)
    options = speculative(layout, c2t_classifier=str(classifier), c2t_beta=BETA)
    log = folder / "server.log"
    with Server(launch(layout, *options), log=log) as running:
        url = running.base_url
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        before = urllib.request.urlopen(f"{url}/metrics").read().decode()
        with ThreadPoolExecutor(PROMPTS) as pool:
            found = list(pool.map(lambda prompt: complete(client, prompt), prompts))
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
        streamed = "".join(
            chunk.choices[0].text
            for chunk in client.completions.create(
                model="pair", prompt=prompts[0], max_tokens=NEW_TOKENS, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )
        )  # fmt: skip
        own = {name: own_lengths(client, url, prompts[0], xargs) for name, (xargs, _) in OWN.items()}
        refused = refusals(client, prompts[0])
    kept = {
        name: simulate(target, draft, prompts[0], NEW_TOKENS, D_MAX, rule(Rule(classifier, BETA).keep_length))
        for name, (_, rule) in OWN.items()
    }
    yield SimpleNamespace(
        own=own,
        kept=kept,
        refused=refused,
        found=found,
        runs=runs,
        before=before,
        metrics=metrics,
        streamed=streamed,
        log=log.read_text(errors="replace"),
    )


# What a request asks for, and what that makes of the rule by which its drafts are cut.
OWN: dict[str, tuple[dict[str, object], Callable[[KeepLength], KeepLength]]] = {
    "at most 2": ({"c2t_max_depth": 2}, lambda rule: lambda logits: min(rule(logits), 2)),
    "none": ({"c2t_max_depth": 0}, lambda rule: lambda logits: 0),
    "not cut": ({"c2t_enabled": False}, lambda rule: len),
    "all below its beta": ({"c2t_beta": 1.0}, lambda rule: lambda logits: 0),
}


def lengths_of(metrics: str) -> dict[int, float]:
    return {
        length: value(metrics, rf"c2t_verify_steps_total(?=\{{[^}}]*length=\"{length}\")")
        for length in range(D_MAX + 1)
    }


def own_lengths(
    client: openai.OpenAI, url: str, prompt: list[int], xargs: dict[str, object]
) -> tuple[list[int], dict[int, float]]:
    """Token ids of one request with settings of its own, and its steps by drafts verified."""
    before = lengths_of(urllib.request.urlopen(f"{url}/metrics").read().decode())
    _, ids = complete(client, prompt, vllm_xargs=xargs)
    after = lengths_of(urllib.request.urlopen(f"{url}/metrics").read().decode())
    return ids, {length: after[length] - before[length] for length in after}


def refusals(client: openai.OpenAI, prompt: list[int]) -> list[str]:
    """What the routes say to a bad value, each with status 400, a stream too."""
    said = []
    bad = {"vllm_xargs": {"c2t_beta": 7}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as answer:
            client.completions.create(model="pair", prompt=prompt, max_tokens=2, stream=stream, extra_body=bad)
        said.append(str(answer.value))
    return said


def complete(client: openai.OpenAI, prompt: list[int], **body: object) -> tuple[str, list[int]]:
    """Text and token ids."""
    answer = client.completions.create(
        model="pair",
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, **body},
    )
    choice = answer.choices[0]
    return choice.text, choice.model_dump()["token_ids"]


def value(metrics: str, name: str) -> float:
    """A counter's value, over all its labels."""
    return sum(float(number) for number in re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE))


def test_output_is_plain_decodings(served: SimpleNamespace):
    assert [ids for _, ids in served.found] == [run.output_ids for run in served.runs]


def test_streaming_gives_the_same_text(served: SimpleNamespace):
    assert served.streamed == served.found[0][0]


def test_metrics_are_the_simulations_counts(served: SimpleNamespace):
    lengths = Counter(length for run in served.runs for length in run.draft_lengths)
    found = lengths_of(served.metrics)
    assert found == {length: lengths[length] for length in range(D_MAX + 1)}
    accepted = sum(sum(run.accept_lengths) for run in served.runs)
    assert value(served.metrics, "c2t_accepted_tokens_total") == accepted
    gamma, tau = gamma_and_tau(found, value(served.metrics, "c2t_accepted_tokens_total"))
    steps = sum(len(run.draft_lengths) for run in served.runs)
    assert (gamma, tau) == (sum(sum(run.draft_lengths) for run in served.runs) / steps, accepted / steps)
    # vLLM's own agree, without the steps that had no draft
    assert value(served.metrics, "spec_decode_num_drafts_total") == sum(lengths.values()) - lengths[0]
    assert value(served.metrics, "spec_decode_num_accepted_tokens_total") == accepted


@pytest.mark.parametrize("name", OWN)
def test_a_request_has_settings_of_its_own(served: SimpleNamespace, name: str):
    ids, lengths = served.own[name]
    assert ids == served.kept[name].output_ids
    wanted = Counter(served.kept[name].draft_lengths)
    assert lengths == {length: wanted[length] for length in range(D_MAX + 1)}


def test_a_bad_setting_is_status_400_of_streams_too(served: SimpleNamespace):
    assert len(served.refused) == 2
    assert all("c2t_beta must be a number in [0, 1], got 7" in each for each in served.refused)


def test_counters_start_at_zero(served: SimpleNamespace):
    assert "vllm:c2t_verify_steps_total" in served.before
    assert value(served.before, "c2t_verify_steps_total") == 0


def test_the_log_says_what_runs(served: SimpleNamespace):
    assert f"C2T: base eagle3, chains of at most {D_MAX}, beta {BETA}, classifier " in served.log
    assert "model runner V1" in served.log


@pytest.fixture
def own_command(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    command, values = vllm_command(tmp_path, launch(tmp_path).environment)
    return [*command, "serve"], values


@pytest.mark.parametrize("entry", ["module", "vllm serve"])
def test_a_bad_option_ends_the_start_with_one_line(
    layout: Path, entry: str, own_command: tuple[list[str], dict[str, str]], tmp_path: Path
):
    options = speculative(layout, c2t_mode="tree")
    module = Server(launch(layout, *options), log=tmp_path / "log")
    line, values = module.command(free_port()), module.environment()
    if entry == "vllm serve":
        serve, values = own_command
        line = [*serve, str(layout / "target"), *options]
    done = subprocess.run(line, capture_output=True, text=True, env=values, timeout=300)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("C2T: c2t_mode is 'tree': vLLM has no tree attention")
    assert "Traceback" not in done.stderr
