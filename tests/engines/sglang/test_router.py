"""SGLang's own router before two C2T servers: requests spread, metrics add up, a killed server loses no request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytest.importorskip("sglang_router", reason="SGLang's router is not installed in this environment")
pytestmark = [pytest.mark.sglang]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.serving.process import HOST, ServerProcess, free_port  # noqa: E402

NEW_TOKENS = 24
START_S = 120.0
# docs/distributed.md shows these
ROUTER_FLAGS = (
    *("--policy", "round_robin"),
    *("--retry-max-retries", "5", "--retry-initial-backoff-ms", "1000"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "1"),
)
# A busy machine's server may be slow to say that it is well; a killed one refuses at once.
PATIENT = ("--health-check-timeout-secs", "60")


# Speaks as much of a server's language as the router asks for; an answer repeats its prompt and takes .3 s.
STUB = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ABOUT = {"model_path": "m", "served_model_name": "m", "tokenizer_path": "m", "is_generation": True, "version": "0"}
answered = []

class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        metrics = f'sglang:generation_tokens_total{{model_name="m"}} {len(answered)}\\n'
        self.answer(metrics if self.path == "/metrics" else json.dumps(ABOUT))

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.3)
        answered.append(request)
        self.answer(json.dumps({"output_ids": request["input_ids"], "text": "", "meta_info": {}}))

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
GENERATED = "sglang:generation_tokens_total"


class Router(ServerProcess):
    """SGLang's router before `workers`, the addresses of servers."""

    health = "/readiness"

    def __init__(self, workers: list[str], log: Path) -> None:
        super().__init__(log=log, start_timeout=START_S)
        self.workers = workers

    def command(self, port: int) -> list[str]:
        address = ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
        start = [sys.executable, "-m", "sglang_router.launch_router", *address, *ROUTER_FLAGS, *PATIENT]
        return [*start, "--worker-urls", *self.workers]

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def complete(self, prompt: list[int]) -> list[int]:
        """Greedy token ids of one request. Raises httpx.HTTPStatusError if the router gives up."""
        answer = httpx.post(
            f"{self.base_url}/generate",
            json={"input_ids": prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}},
            timeout=START_S,
            trust_env=False,
        )
        return list(answer.raise_for_status().json()["output_ids"])


def counter(text: str, name: str) -> float:
    """Sum of a Prometheus counter over all of its label sets."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Router, list[CpuServer], ExitStack]]:
    """The router in front of two servers; the second server can be closed by itself."""
    pair = pair_dir()
    flags = [
        *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(pair / "eagle3")),
        *("--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"),
        "--enable-metrics",
    ]
    workers = [CpuServer(pair / "target", *flags, log=tmp_path / f"worker-{i}.log") for i in range(2)]
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(workers[0])
        second.enter_context(workers[1])
        router = first.enter_context(Router([worker.base_url for worker in workers], tmp_path / "router.log"))
        yield router, workers, second


def generated(url: str) -> float:
    """Tokens that a server says it has generated."""
    return counter(httpx.get(f"{url}/metrics", trust_env=False).text, GENERATED)


def merged(router: Router) -> float:
    """The same of all servers, as the router has it: it writes an underscore for the colon."""
    return counter(httpx.get(f"{router.base_url}/engine_metrics", trust_env=False).text, GENERATED.replace(":", "_"))


@pytest.mark.slow
def test_the_router_loses_no_request_of_a_killed_server(tmp_path: Path):
    """The router's own part, with stubs for the servers."""
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    prompts = [[number] for number in range(12)]
    workers = [subprocess.Popen([sys.executable, "-c", STUB, str(port)]) for port in ports]
    try:
        with Router(urls, tmp_path / "router.log") as router, ThreadPoolExecutor(6) as pool:
            assert list(pool.map(router.complete, prompts)) == prompts
            assert [generated(url) for url in urls] == [6.0, 6.0]
            assert merged(router) == 12.0
            answers = [pool.submit(router.complete, prompt) for prompt in prompts]
            # all six that were sent first are being answered
            time.sleep(0.1)
            workers[1].kill()
            assert [answer.result() for answer in answers] == prompts
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.mark.server
def test_two_servers_behind_the_router(served: tuple[Router, list[CpuServer], ExitStack]):
    router, workers, second = served
    prompts = held_out_prompts(12, seed=11)
    alone = [answer["output_ids"] for answer in workers[0].generate_all(prompts, max_new_tokens=NEW_TOKENS)]

    # a server's own warm-up counts as well
    before = [generated(worker.base_url) for worker in workers]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(router.complete, prompts)) == alone
    after = [generated(worker.base_url) for worker in workers]
    assert [new - old for old, new in zip(before, after, strict=True)] == [NEW_TOKENS * 6] * 2
    assert merged(router) == sum(after)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(router.complete, prompt) for prompt in prompts]
        # while it has work
        deadline = time.monotonic() + START_S
        while not busy(workers[1]) and time.monotonic() < deadline and not all(each.done() for each in answers):
            time.sleep(0.01)
        second.close()
        assert [answer.result() for answer in answers] == alone
    assert router.complete(prompts[0]) == alone[0]


def busy(worker: CpuServer) -> bool:
    loads = worker.request("/v1/loads")["loads"]
    return sum(load["num_running_reqs"] for load in loads) > 0
