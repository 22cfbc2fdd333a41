"""`vllm serve` with two API servers, through the openai client: exact counts, behind aborts and of `vllm bench serve`
too; streaming, settings of single requests, /metrics; 400 on every route."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

import openai  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.serving.engines import ENGINES, Device  # noqa: E402
from benchmarks.serving.engines.vllm import MODEL, value_of  # noqa: E402
from benchmarks.serving.server import Server  # noqa: E402
from tests.support.sglang.simulate import Simulation, Target, simulate  # noqa: E402
from tests.support.sglang.verify_counts import Rule, save_hand_made_classifier  # noqa: E402
from tests.support.vllm.command import vllm_command  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps, gamma_and_tau  # noqa: E402

NEW_TOKENS, D_MAX, BETA, PROMPTS, SERVERS = 24, 6, 0.45, 6, 2
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
BAD = {"vllm_xargs": {"c2t_beta": 7}}
# of each route, at the same time
ASKED = 8
# Seconds until both servers have got a request, each over a connection of its own.
PATIENCE_S = 120
KeepLength = Callable[..., int]
# What a request asks for, and what that makes of the rule by which its drafts are cut.
OWN: dict[str, tuple[dict[str, object], Callable[[KeepLength], KeepLength]]] = {
    "at most 2": ({"c2t_max_depth": 2}, lambda rule: lambda logits: min(rule(logits), 2)),
    "none": ({"c2t_max_depth": 0}, lambda rule: lambda logits: 0),
    "not cut": ({"c2t_enabled": False}, lambda rule: len),
    "all below its beta": ({"c2t_beta": 1.0}, lambda rule: lambda logits: 0),
}


class Served:
    """A running server, and texts of which the simulation says how they are cut.

    expected: of each text. own: of the first one under the settings of OWN. before: the metrics before any request.
    """

    def __init__(
        self,
        running: Server,
        texts: list[str],
        ids: list[list[int]],
        expected: list[Simulation],
        own: dict[str, Simulation],
    ) -> None:
        self.url, self.log = running.base_url, running.log
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.texts, self.ids, self.runs, self.own = texts, ids, expected, own
        self.expected = [Steps.of_simulation(run) for run in expected]
        self.before = self.metrics()

    def steps(self, row: int, **xargs: Any) -> Steps:
        """Of one request over HTTP, by what its own answer says."""
        body = {"ignore_eos": True, "return_token_ids": True, **({"vllm_xargs": xargs} if xargs else {})}
        answer = self.client.completions.create(
            model=MODEL, prompt=self.ids[row], max_tokens=NEW_TOKENS, temperature=0, extra_body=body
        ).model_dump()
        # nothing of a request without drafts
        own = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        pairs = zip(own.get("per_step_drafted") or (), own.get("per_step_accepted") or (), strict=True)
        return Steps(tuple(answer["choices"][0]["token_ids"]), tuple(pairs))

    def metrics(self) -> str:
        return urllib.request.urlopen(f"{self.url}/metrics").read().decode()

    def metric(self, name: str) -> float:
        return value_of(self.metrics(), name)

    def lengths(self) -> Counter[int]:
        """Verify steps so far by draft tokens."""
        return lengths_of(self.metrics())


def lengths_of(metrics: str) -> Counter[int]:
    found = re.findall(r"^vllm:c2t_verify_steps_total\{[^}]*length=\"(\d+)\"[^}]*\} (\S+)$", metrics, re.MULTILINE)
    return Counter({int(length): int(float(steps)) for length, steps in found})


@pytest.fixture(scope="module")
def command(layout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    launch = ENGINES["vllm"].launch(layout / "target", [], Device.CPU)
    return vllm_command(tmp_path_factory.mktemp("command"), launch.environment)


@pytest.fixture(scope="module")
def served(
    layout: Path, command: tuple[list[str], dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    (folder / "template.jinja").write_text(TEMPLATE)
    draft = {"method": "c2t:eagle3", "model": str(layout / "eagle3"), "num_speculative_tokens": D_MAX}
    options = {**draft, "c2t_classifier": str(classifier), "c2t_beta": BETA}
    flags = ["--speculative-config", json.dumps(options), "--api-server-count", str(SERVERS)]
    flags += ["--per-request-spec-decode-metrics", "detailed", "--chat-template", str(folder / "template.jinja")]
    # for /inference/v1/generate
    flags += ["--enable-scale-out"]
    stock = ENGINES["vllm"].launch(layout / "target", flags, Device.CPU)
    # behind the module's own name and its --model
    start = [*command[0], "serve", str(layout / "target"), *stock.start[stock.start.index("--served-model-name") :]]
    tokenizer = AutoTokenizer.from_pretrained(layout / "target")
    target = Target(pair_dir() / "target")
    oracle = Oracle(pair_dir(), target)
    texts = [tokenizer.decode(ids) for ids in held_out_prompts(PROMPTS + 3, seed=5)]
    known = []
    for text in texts:
        ids = tokenizer(text).input_ids
        expected = oracle.run("eagle3", ids, NEW_TOKENS, D_MAX, classifier, BETA)
        known += [] if expected is None else [(text, ids, expected)]
    columns = [list(each) for each in zip(*known[:PROMPTS], strict=True)]
    draft = oracle.draft("eagle3")
    own = {
        name: simulate(target, draft, columns[1][0], NEW_TOKENS, D_MAX, rule(Rule(classifier, BETA).keep_length))
        for name, (_, rule) in OWN.items()
    }
    with Server(replace(stock, start=tuple(start), environment=command[1]), log=folder / "server.log") as running:
        yield Served(running, *columns, own)


def test_counters_start_at_zero(served: Served):
    assert "vllm:c2t_verify_steps_total" in served.before
    assert value_of(served.before, "c2t_verify_steps_total") == 0


def test_each_request_is_cut_where_the_classifier_says_and_counted(served: Served):
    before = served.metrics()
    with ThreadPoolExecutor(PROMPTS) as pool:
        assert list(pool.map(served.steps, range(PROMPTS))) == served.expected
    lengths = Counter(length for run in served.runs for length in run.draft_lengths)
    accepted = sum(sum(run.accept_lengths) for run in served.runs)
    after = served.metrics()
    counted = lengths_of(after) - lengths_of(before)
    assert counted == lengths

    def more(name: str) -> float:
        return value_of(after, name) - value_of(before, name)

    assert more("c2t_accepted_tokens_total") == accepted
    gamma = sum(sum(run.draft_lengths) for run in served.runs) / lengths.total()
    assert gamma_and_tau(counted, accepted) == (gamma, accepted / lengths.total())
    # vLLM's own agree, without the steps that had no draft
    assert more("spec_decode_num_drafts_total") == lengths.total() - lengths[0]
    assert more("spec_decode_num_accepted_tokens_total") == accepted


@pytest.mark.parametrize("name", OWN)
def test_a_request_has_settings_of_its_own(served: Served, name: str):
    before = served.lengths()
    found = served.steps(0, **OWN[name][0])
    assert found.output_ids == tuple(served.own[name].output_ids)
    assert served.lengths() - before == Counter(served.own[name].draft_lengths)


def test_streaming_gives_the_same_text(served: Served):
    asked: dict[str, Any] = {"model": MODEL, "prompt": served.ids[0], "max_tokens": NEW_TOKENS, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    chunks = served.client.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    assert streamed == served.client.completions.create(**asked).choices[0].text != ""


def test_the_log_says_what_runs(served: Served):
    log = served.log.read_text(errors="replace")
    assert f"C2T: base eagle3, chains of at most {D_MAX}, beta {BETA}, classifier " in log
    assert "model runner V1" in log


def test_what_follows_an_aborted_request_is_cut_as_ever(served: Served):
    for row in range(3):
        stream = served.client.completions.create(
            model=MODEL, prompt=served.ids[row], max_tokens=300, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for _ in range(2):
            next(stream)
        stream.close()
        assert served.steps(row + 1) == served.expected[row + 1]
    deadline = time.monotonic() + 30
    while served.metric("num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert served.metric("num_requests_running") == 0
    assert [served.steps(row) for row in range(2)] == served.expected[:2]


def test_a_request_that_is_not_learnt_from_is_served_the_same(served: Served):
    assert served.steps(0, c2t_learn=False) == served.expected[0]


def test_vllms_own_benchmark_counts_the_simulations_drafts(
    served: Served, command: tuple[list[str], dict[str, str]], layout: Path, tmp_path: Path
):
    talks = [{"conversations": [{"value": text}, {"value": "an answer"}]} for text in served.texts]
    (tmp_path / "texts.json").write_text(json.dumps(talks))
    bench = [*command[0], "bench", "serve", "--backend", "openai", "--base-url", served.url, "--model", MODEL]
    bench += ["--tokenizer", str(layout / "target"), "--dataset-name", "sharegpt", "--disable-shuffle"]
    bench += ["--dataset-path", str(tmp_path / "texts.json"), "--sharegpt-output-len", str(NEW_TOKENS)]
    bench += ["--num-prompts", str(PROMPTS), "--max-concurrency", "3", "--temperature", "0", "--ignore-eos"]
    bench += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "found.json"]
    before = served.metric("c2t_accepted_tokens_total")
    done = subprocess.run(bench, env=command[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    steps = [pair for each in served.expected for pair in each.steps]
    assert found["completed"] == PROMPTS
    assert found["spec_decode_num_drafts"] == len(steps)
    assert found["spec_decode_draft_tokens"] == sum(drafted for drafted, _ in steps)
    assert served.metric("c2t_accepted_tokens_total") - before == sum(accepted for _, accepted in steps)


def routes(served: Served) -> dict[str, Callable[[bool], Any]]:
    """Each sends a request with a bad setting. Their argument: whether it is to be streamed."""
    client, text = served.client, [{"role": "user", "content": "def"}]

    def sent(route: str, **body: Any) -> Any:
        return client.post(f"{served.url}{route}", cast_to=object, body=body)

    return {
        "completions": lambda stream: client.completions.create(
            model=MODEL, prompt=[5], max_tokens=2, stream=stream, extra_body=BAD
        ),
        "chat": lambda stream: client.chat.completions.create(
            model=MODEL, messages=text, max_tokens=2, stream=stream, extra_body=BAD
        ),
        # it has no streams
        "batch": lambda _: sent("/v1/chat/completions/batch", model=MODEL, messages=[text], max_tokens=2, **BAD),
        "responses": lambda stream: client.responses.create(
            model=MODEL, input="def", max_output_tokens=2, stream=stream, extra_body=BAD
        ),
        "messages": lambda stream: sent("/v1/messages", model=MODEL, messages=text, max_tokens=2, stream=stream, **BAD),
        "generate": lambda stream: sent(
            "/inference/v1/generate", token_ids=[5], sampling_params={"extra_args": BAD["vllm_xargs"]}, stream=stream
        ),
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ["completions", "chat", "batch", "responses", "messages", "generate"])
def test_a_bad_setting_is_status_400_on_every_route(served: Served, route: str, stream: bool):
    def refused(_: int) -> str:
        with pytest.raises(openai.BadRequestError) as answer:
            routes(served)[route](stream)
        return str(answer.value)

    with ThreadPoolExecutor(ASKED) as pool:
        said = list(pool.map(refused, range(ASKED)))
    assert all("c2t_beta must be a number in [0, 1], got 7" in each for each in said)


def refusing(log: Path) -> set[str]:
    """API servers of whose refusals vLLM has logged that an exception was caught."""
    line = r"^\(ApiServer_(\d+) pid=\d+\) ERROR .* Exception caught\."
    return set(re.findall(line, log.read_text(errors="replace"), re.MULTILINE))


def test_each_api_server_refuses(served: Served):
    """Which one gets a connection is up to the kernel, so there are new ones until both have had one."""
    both = {str(number) for number in range(SERVERS)}
    deadline = time.monotonic() + PATIENCE_S
    while (missing := both - refusing(served.log)) and time.monotonic() < deadline:
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.BadRequestError),
        ):
            client.completions.create(model=MODEL, prompt=[5], max_tokens=2, extra_body=BAD)
    assert not missing
