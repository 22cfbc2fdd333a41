"""vLLM: its own OpenAI server on a GPU and on a CPU, and a client whose counts are those of the whole server."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.pairs.toy.vllm_layout import write_vllm_layout
from benchmarks.serving.answers import Completion, Pass
from benchmarks.serving.arms import Options
from benchmarks.serving.client import FLUSH_TIMEOUT_S, Client
from benchmarks.serving.engines.engine import NICENESS, Device, Launch
from c2t_plugin.engines.figures import BY
from c2t_plugin.errors import C2TError

# what a server calls its model
MODEL = "pair"
SMALL_MODEL_FLAGS = (
    *("--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**28)),
)
# with the routes that control C2T and empty the prefix cache
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
STOP_TIMEOUT_S = 60.0
FLUSH_AGAIN_S = 0.1


class VllmClient(Client):
    """Talks to vLLM, which counts over all requests: a pass's counts stand in its first completion.

    How many requests ran together follows from its counters too, since a client on processors that the engine keeps
    busy asks too late and too seldom: with more than n - 1 on average, n ran at once.

    The server needs VLLM_SERVER_DEV_MODE=1: without it there is no route to empty the prefix cache or to control C2T.
    """

    # its answer holds all metrics, which takes the process that answers requests a few milliseconds
    watched_every_s: float = 0.2

    def __init__(self, url: str, max_tokens: int, whole: bool = True) -> None:
        super().__init__(url, max_tokens, whole)
        self.model = self._request("GET", "/v1/models").json()["data"][0]["id"]

    def _pass(self, answers: Callable[[], tuple[Completion, ...]]) -> Pass:
        before = self._counts()
        result = super()._pass(answers)
        after = self._counts()
        steps, accepted, candidates, firsts, iterations = (after[name] - before[name] for name in _COUNTERS)
        first, *rest = result.completions
        if candidates:
            first = replace(first, verify_steps=steps, accepted=accepted, candidates=candidates)
        if not iterations:
            raise C2TError("the server counts no steps of its engine in /metrics; start it without --disable-log-stats")
        mean = (steps + firsts) / iterations
        most = max(result.most_at_once, math.ceil(mean))
        return replace(result, completions=(first, *rest), most_at_once=most, mean_at_once=mean)

    def flush(self) -> None:
        """Empty the prefix cache; vLLM refuses while it still holds blocks of requests that have just ended."""
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while True:
            answer = self._request("POST", "/reset_prefix_cache")
            if answer.json()["success"]:
                return
            if time.monotonic() > deadline:
                raise C2TError(f"the server did not empty its prefix cache: {answer.text}")
            time.sleep(FLUSH_AGAIN_S)

    def running(self) -> int:
        return int(value_of(self._request("GET", "/metrics").text, "num_requests_running"))

    def control(self, beta: float, max_depth: int) -> None:
        state = self._control({"beta": beta, "max_depth": max_depth})
        if state["max_depth"] != max_depth:
            raise C2TError(f"the server has {state} after being asked for max_depth {max_depth}")

    def c2t_state(self) -> dict[str, Any]:
        return self._control({})

    def learnt(self) -> dict[str, Any]:
        """Of its gauges: no route asks the scheduler, where the planner is."""
        text = self._request("GET", "/metrics").text

        def gauge(name: str, label: str = "") -> float:
            return value_of(text, f"c2t_{name}", label)

        both = {name: [gauge(f"expected_{name}", f'by="{by}"') for by in BY] for name in ("nll", "auc")}
        network = {"network": {"swaps": int(gauge("learnt_networks"))}} if "c2t_learnt_networks{" in text else {}
        return {
            "seen": int(gauge("learnt_tokens")),
            "discarded": int(gauge("learnt_discarded")),
            # there are none before anything was verified
            **{name: found if any(found) else None for name, found in both.items()},
            **network,
        }

    def _control(self, values: dict[str, float]) -> dict[str, Any]:
        answer = self._request("POST", "/collective_rpc", json={"method": "c2t_control", "kwargs": values})
        state: dict[str, Any] = answer.json()["results"][0]
        return state

    def _counts(self) -> dict[str, int]:
        text = self._request("GET", "/metrics").text
        return {name: int(value_of(text, name)) for name in _COUNTERS}


# Decoding steps of single requests, with a draft or without; draft tokens accepted and verified; first tokens; steps of
# the engine.
_COUNTERS = (
    "inter_token_latency_seconds_count",
    *(f"spec_decode_num_{kind}_tokens_total" for kind in ("accepted", "draft")),
    "time_to_first_token_seconds_count",
    "iteration_tokens_total_count",
)


def value_of(metrics: str, name: str, label: str = "") -> float:
    """A metric over all its labels, or of those with this one; 0 where the server has none of that name."""
    own = rf"^vllm:{name}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$"
    return sum(float(value) for value in re.findall(own, metrics, re.MULTILINE))


class Vllm:
    """The engine. Its servers are asked to end as an operator would."""

    name = "vllm"
    client: type[Client] = VllmClient
    # it loads every file of a checkpoint, and so would stumble over a classifier there
    layout_has_classifiers = False

    def flags(self, options: Options) -> list[str]:
        # one flag a key: in a JSON object a path would need quoting
        return [word for name, value in options.items() for word in (f"--speculative-config.{name}", str(value))]

    def room(self, requests: int) -> list[str]:
        return ["--max-num-seqs", str(requests)]

    def no_prefixes(self) -> list[str]:
        return ["--no-enable-prefix-caching"]

    def layout(self, pair: Path, out: Path) -> Path:
        return write_vllm_layout(pair, out / "pair")

    def launch(
        self, target: Path, flags: Sequence[str], device: Device, environment: Mapping[str, str] | None = None
    ) -> Launch:
        # The `vllm` command of the CPU wheel ends with PackageNotFoundError; the module that it would start does not.
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
        start += ["--served-model-name", MODEL, *(SMALL_MODEL_FLAGS if device is Device.CPU else ())]
        own = {**(os.environ if environment is None else environment), **ENVIRONMENT}
        niceness = NICENESS if device is Device.CPU else 0
        return Launch(tuple(start), tuple(flags), own, niceness, STOP_TIMEOUT_S)
