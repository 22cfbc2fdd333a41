"""The measuring client for vLLM, whose counts are those of the whole server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from benchmarks.serving import Client, Pass, Prompts
from c2t_plugin.errors import C2TError


class VllmClient(Client):
    """Talks to vLLM, which counts over all requests: a pass's counts stand in its first completion.

    The server needs VLLM_SERVER_DEV_MODE=1: without it there is no route to empty the prefix cache or to control C2T.
    """

    counting: ClassVar[Mapping[str, object]] = {}

    def __init__(self, url: str, max_tokens: int, whole: bool = True) -> None:
        super().__init__(url, max_tokens, whole)
        self.model = self._request("GET", "/v1/models").json()["data"][0]["id"]

    def run(self, prompts: Prompts, concurrency: int, advance: Callable[[], None], temperature: float = 0.0) -> Pass:
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
        steps, accepted, candidates = (int(value_of(text, name)) for name in names)
        return steps, accepted, candidates


_KINDS = ("accepted", "draft")


def value_of(metrics: str, name: str) -> float:
    """A metric over all its labels; 0 where the server has none of that name."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE))
