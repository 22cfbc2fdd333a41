"""SGLang's own API as a client of benchmarks/serving/client.py."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import httpx

from benchmarks.serving.client import REQUEST_TIMEOUT_S, Client, Completion, Prompts, counts
from c2t_plugin.errors import C2TError


class NativeClient(Client):
    """Sends prompts to /generate, whose answers hold the counts on every supported SGLang, and as many at a time."""

    # its users read what ran off the server's log
    watched_every_s: ClassVar[float] = 0.0

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
