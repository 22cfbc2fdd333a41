"""`make demo ENGINE=vllm`: the same servers as on SGLang, by vLLM on a CPU; a table and a picture.

A functional check: it shows that the servers work and what they count, not how fast C2T is on a GPU.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai

from benchmarks import demo
from benchmarks.serving import Client, Completion, Pass
from benchmarks.vllm_server import MODEL, serving
from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.errors import C2TError
from c2t_plugin.pair.vllm_layout import write_vllm_layout

METHODS = {"standalone": "draft_model", "eagle3": "eagle3"}


class VllmClient(Client):
    """Talks to vLLM, which counts over all requests: a pass's counts stand in its first completion."""

    def complete(self, prompt: Sequence[int], temperature: float = 0.0) -> Completion:
        start = time.perf_counter()
        try:
            answer = self._openai.completions.create(
                model=MODEL,
                prompt=list(prompt),
                max_tokens=self.max_tokens,
                temperature=temperature,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
        except openai.OpenAIError as error:
            raise C2TError(f"the server did not answer a completion request: {error}") from error
        seconds = time.perf_counter() - start
        # all tokens come at once
        ids = tuple(answer.choices[0].model_dump()["token_ids"])
        return Completion(ids, 0, 0, 0, sent_s=start, first_s=seconds, last_s=seconds)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        concurrency: int,
        advance: Callable[[], None],
        temperature: float = 0.0,
    ) -> Pass:
        before = self._counts()
        result = super().run(prompts, concurrency, advance, temperature)
        steps, accepted, candidates = (now - then for now, then in zip(self._counts(), before, strict=True))
        first, *rest = result.completions
        if candidates:
            first = replace(first, verify_steps=steps, accepted=accepted, candidates=candidates)
        return replace(result, completions=(first, *rest))

    def flush(self) -> None:
        self._request("POST", "/reset_prefix_cache")

    def control(self, beta: float, max_depth: int) -> None:
        state = self._control({"beta": beta, "max_depth": max_depth})
        if state["max_depth"] != max_depth:
            raise C2TError(f"the server has {state} after being asked for max_depth {max_depth}")

    def c2t_state(self) -> dict[str, float]:
        return self._control({})

    def _control(self, values: dict[str, float]) -> dict[str, Any]:
        answer = self._request("POST", "/collective_rpc", json={"method": "c2t_control", "kwargs": values})
        state: dict[str, Any] = answer.json()["results"][0]
        return state

    def _counts(self) -> tuple[int, int, int]:
        """Decoding steps of single requests, with a draft or without; draft tokens accepted and verified."""
        text = self._request("GET", "/metrics").text
        names = ("inter_token_latency_seconds_count", *(f"spec_decode_num_{kind}_tokens_total" for kind in _KINDS))
        steps, accepted, candidates = (int(_value(text, name)) for name in names)
        return steps, accepted, candidates


_KINDS = ("accepted", "draft")


def _value(metrics: str, name: str) -> float:
    """A metric over all its labels; 0 where the server has none of that name."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE))


class VllmDemo(demo.Demo):
    """The demo on vLLM."""

    title = "C2T on vLLM's CPU backend: a functional check, not a speed claim"

    @contextmanager
    def opened(self, server: demo.Server, pair: Path, log: Path) -> Iterator[Client]:
        with tempfile.TemporaryDirectory() as folder:
            layout = write_vllm_layout(pair, Path(folder))
            flags = speculative(server, pair, layout)
            with serving(layout / "target", log, flags) as url, VllmClient(url, demo.MAX_TOKENS) as client:
                yield client


def speculative(server: demo.Server, pair: Path, layout: Path) -> list[str]:
    """Flags of this server, target and those of small models aside."""
    if server.arm == "plain":
        return []
    draft, method = demo.DRAFTS[server.base], METHODS[server.base]
    values: dict[str, object] = {"model": str(layout / draft), "num_speculative_tokens": server.d_max}
    if server.arm == "c2t":
        values |= {"method": f"c2t:{method}", "c2t_classifier": str(pair / draft / FILE_NAME)}
    else:
        values |= {"method": method}
    return ["--speculative-config", json.dumps(values)]


if __name__ == "__main__":
    sys.exit(demo.main(sys.argv[1:], VllmDemo))
