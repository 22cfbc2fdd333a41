"""A stock SGLang server on the CPU engine, for tests and demonstrations with small models."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.cpu_engine import cpu_engine_env
from benchmarks.cpu_engine.preloaded import preloaded_for
from benchmarks.serving.process import HOST, Launched, ServerError, ServerProcess

# float32: in bfloat16 two tokens often share the highest logit, and which one wins depends on the batch.
SMALL_MODEL_FLAGS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--max-total-tokens", "20000", "--max-running-requests", "16"),
    "--sleep-on-idle",
)
_IDLE_TIMEOUT_S = 60

Prompt = str | Sequence[int]


class CpuServer(ServerProcess):
    """A server on the CPU engine, and what it is asked.

    `flags` are added to SMALL_MODEL_FLAGS and win over them. `env` (this process's by default) is what the CPU engine's
    environment is made from. It is forked from a process that has imported SGLang (preloaded.py), where that can be.
    """

    common_flags: tuple[str, ...] = SMALL_MODEL_FLAGS

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        log: str | Path,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 600.0,
        grace: float = 0.0,
    ) -> None:
        super().__init__(log=log, start_timeout=start_timeout, grace=grace)
        self.model = str(model)
        self.flags = flags
        self.env = dict(os.environ if env is None else env)

    def command(self, port: int) -> list[str]:
        start = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, *self.common_flags]
        return [*start, "--host", HOST, "--port", str(port), *self.flags]

    def environment(self) -> Mapping[str, str]:
        return cpu_engine_env(self.env)

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> Launched:
        preloaded = preloaded_for(environment)
        if preloaded is None:
            return super().launch(command, environment)
        return preloaded.start(command, environment, self.log, self.niceness)

    def generate(self, prompt: Prompt, **sampling_params: Any) -> dict[str, Any]:
        """SGLang's answer to one prompt (text or token ids): `text`, `output_ids` and `meta_info`.

        Greedy unless `temperature` is given. `meta_info` has completion_tokens, and under speculation spec_verify_ct
        (verify steps), spec_accept_length (tokens per verify, the bonus counted) and more.
        """
        return self.generate_all([prompt], **sampling_params)[0]

    def generate_all(self, prompts: Sequence[Prompt], **sampling_params: Any) -> list[dict[str, Any]]:
        """SGLang's answers to several prompts, all text or all token ids, that run concurrently; see `generate`."""
        if not prompts:
            return []
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        values = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        params = {"temperature": 0.0, **sampling_params}
        answers: list[dict[str, Any]] = self.request("/generate", {key: values, "sampling_params": params})
        return answers

    def flush_cache(self) -> None:
        """Empty the radix cache, once the server is idle."""
        self.request(f"/flush_cache?timeout={_IDLE_TIMEOUT_S}", {})

    def request(self, path: str, payload: Mapping[str, Any] | None = None, timeout: float = 600.0) -> Any:
        """The JSON (or else the text) that the server answers to a POST of `payload`, or to a GET without one.

        Raises ServerError with the answer, or with the end of the log if the server is gone.
        """
        body = None if payload is None else json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.base_url + path, body, headers), timeout=timeout
            ) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} was answered with {error.code}: {error.read().decode()[:2000]}") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{path} was not answered ({error}); {self.end_of_log()}") from error
        return json.loads(text) if text[:1] in ("{", "[") else text
