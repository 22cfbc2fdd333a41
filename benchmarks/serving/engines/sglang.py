"""SGLang: its servers on a GPU and on the CPU engine, and clients of both of its APIs."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx

from benchmarks.cpu_engine import cpu_engine_env
from benchmarks.cpu_engine.preloaded import preloaded_for
from benchmarks.cpu_engine.server import SMALL_MODEL_FLAGS
from benchmarks.serving.arms import Options
from benchmarks.serving.client import FLUSH_TIMEOUT_S, REQUEST_TIMEOUT_S, Client, Completion, Prompts
from benchmarks.serving.engines.engine import NICENESS, Device, Launch
from c2t_plugin.errors import C2TError

# how often it tells what it runs, in decode steps: its own 15 are a whole short answer
LOADS = ("--load-snapshot-publish-interval", "4")
# its adaptive mode makes a graph runner for each depth, which a CPU has not
CPU_FLAGS = (*SMALL_MODEL_FLAGS, "--disable-cuda-graph")
# a published head names the length that it was trained with, and SGLang runs it at the target's; no import reads this
ANY_LENGTH = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def counts(details: Mapping[str, Any] | None) -> tuple[int, int, int]:
    """(verify_steps, accepted, candidates) from SGLang's per-request statistics; zeros without speculation.

    The histogram counts steps by verified length, root included; only algorithms with chains of unequal length send it.
    """
    if not details:
        return 0, 0, 0
    steps = details["spec_verify_ct"]
    histogram = details["spec_cap_lens_histogram"]
    if histogram:
        if sum(histogram) != steps:
            raise C2TError(f"the server counted {steps} verify steps, its histogram of lengths {sum(histogram)}")
        candidates = sum((length - 1) * number for length, number in enumerate(histogram) if number)
    else:
        candidates = details["spec_num_proposed_drafts"]
    return steps, details["spec_num_correct_drafts"], candidates


class SglangClient(Client):
    """Talks to SGLang, whose answers hold the counts of their request since 0.5.23."""

    counting: ClassVar[Mapping[str, object]] = {"return_spec_tokens_details": True}

    def counted(self, answer: Mapping[str, Any]) -> tuple[int, int, int] | None:
        details = (answer.get("sglext") or {}).get("spec_tokens_details")
        return counts(details) if details else None

    def running(self) -> int:
        loads = self._request("GET", "/v1/loads", params={"include": "core"}).json()["loads"]
        return sum(int(load["num_running_reqs"]) for load in loads)

    def profile(self, out: Path, steps: int, activities: Sequence[str]) -> None:
        """Have the server write a torch profiler trace with call stacks of the next `steps` steps of each stage."""
        options = {"output_dir": str(out.resolve()), "num_steps": steps, "activities": list(activities)}
        self._request("POST", "/start_profile", json={**options, "with_stack": True, "profile_by_stage": True})

    def flush(self) -> None:
        self._request("POST", "/flush_cache", params={"timeout": FLUSH_TIMEOUT_S})

    def control(self, beta: float, max_depth: int) -> None:
        values = {"speculative_c2t_beta": beta, "speculative_c2t_max_depth": max_depth}
        answer = self._request("POST", "/set_internal_state", json={"server_args": values})
        if answer.json() != [True]:
            raise C2TError(f"the server refused {values}: {answer.text}")

    def c2t_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._request("GET", "/server_info").json()["internal_states"][0]["c2t"]
        return state


class NativeClient(SglangClient):
    """Sends prompts to /generate, whose answers hold the counts on every supported SGLang, and as many at a time.

    All have max_tokens: it has no `lengths`.
    """

    # its users read what ran off the server's log
    watched_every_s: float = 0.0

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(url, max_tokens)
        self._http.close()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False)

    def complete(self, prompt: Sequence[int], temperature: float = 0.0) -> Completion:
        """One completion of a prompt given as token ids. Raises C2TError if the server fails."""
        sampling = {"temperature": temperature, "max_new_tokens": self.max_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        answer = self._request("POST", "/generate", json=body).json()
        meta = answer["meta_info"]
        details = {"spec_cap_lens_histogram": [], **meta} if meta.get("spec_verify_ct") else None
        return Completion(tuple(answer["output_ids"]), *counts(details))

    def answers(
        self, prompts: Prompts, concurrency: int, advance: Callable[[], None], temperature: float
    ) -> tuple[Completion, ...]:
        """Completions of all prompts, in their order. Raises C2TError if the server fails."""

        def one(prompt: Sequence[int]) -> Completion:
            completion = self.complete(prompt, temperature)
            advance()
            return completion

        with ThreadPoolExecutor(concurrency) as pool:
            return tuple(pool.map(one, prompts))

    def stop_midway(self, prompt: Sequence[int]) -> bool:
        """Abort a request once its first tokens have come; whether it had not ended by then."""
        rid = uuid.uuid4().hex
        sampling = {"temperature": 0.0, "max_new_tokens": self.max_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "rid": rid, "sampling_params": sampling, "stream": True}
        try:
            with self._http.stream("POST", "/generate", json=body) as answer:
                events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
                reasons = [next(events)["meta_info"]["finish_reason"]]
                self._request("POST", "/abort_request", json={"rid": rid})
                reasons += [event["meta_info"]["finish_reason"] for event in events]
        except (httpx.HTTPError, StopIteration) as error:
            raise C2TError(f"the server did not stream an answer: {error}") from error
        reason = reasons[-1]
        return reason is not None and reason["type"] == "abort"


class Sglang:
    """The engine; a server on a CPU runs on the CPU engine."""

    name = "sglang"
    client: type[Client] = SglangClient
    layout_has_classifiers = True

    def flags(self, options: Options) -> list[str]:
        found = []
        for name, value in options.items():
            found.append(f"--speculative-{name.replace('_', '-')}")
            found += [] if value is True else [str(value)]
        return found

    def room(self, requests: int) -> list[str]:
        # without it SGLang speculates for 48 requests at once
        return ["--max-running-requests", str(requests)]

    def no_prefixes(self) -> list[str]:
        return ["--disable-radix-cache"]

    def layout(self, pair: Path, out: Path) -> Path:
        return pair

    def launch(
        self, target: Path, flags: Sequence[str], device: Device, environment: Mapping[str, str] | None = None
    ) -> Launch:
        start = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target)]
        given = os.environ if environment is None else environment
        if device is Device.GPU:
            return Launch((*start, *LOADS), tuple(flags), {**given, **ANY_LENGTH})
        imports = cpu_engine_env(given)
        own = {**imports, **ANY_LENGTH}
        return Launch(
            (*start, *CPU_FLAGS, *LOADS), tuple(flags), own, NICENESS, preloaded=partial(preloaded_for, imports)
        )
