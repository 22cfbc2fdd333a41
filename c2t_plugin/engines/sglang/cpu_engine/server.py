"""A stock SGLang server on the CPU engine as a context manager, for tests and demonstrations with small models."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from c2t_plugin.engines.sglang.cpu_engine import cpu_engine_env, processes
from c2t_plugin.errors import C2TError

# float32: in bfloat16 two tokens often share the highest logit, and which one wins depends on the batch.
SMALL_MODEL_FLAGS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--max-total-tokens", "20000", "--max-running-requests", "16"),
    "--sleep-on-idle",
)
_LOG_TAIL = 30
_LOG_WIDTH = 500
_HOST = "127.0.0.1"

Prompt = str | Sequence[int]


class ServerError(C2TError):
    """The server did not start, died, or refused a request."""


class CpuServer:
    """Starts the server on entry, in its own process group, and kills that group on exit.

    `flags` are added to SMALL_MODEL_FLAGS and win over them. Standard output and error go to `log`. The group is also
    killed when this process dies without leaving the block (SIGTERM, SIGKILL), see `supervise`; Linux ties that to the
    thread that entered, so enter from a thread that lives as long as the server is wanted.
    """

    common_flags: tuple[str, ...] = SMALL_MODEL_FLAGS

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        log: str | Path,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 600.0,
    ) -> None:
        self.model = str(model)
        self.flags = flags
        self.log = Path(log)
        self.env = dict(os.environ if env is None else env)
        self.start_timeout = start_timeout
        self.base_url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: str | None = None

    def __enter__(self) -> Self:
        port = _free_port()
        self.base_url = f"http://{_HOST}:{port}"
        # SGLang leaves its sockets behind when killed
        self._scratch = tempfile.mkdtemp(prefix="c2t-")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model]
        command += [*self.common_flags, "--host", _HOST, "--port", str(port), *self.flags]
        supervise = [sys.executable, "-m", "c2t_plugin.engines.sglang.cpu_engine.supervise", str(os.getpid())]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                supervise + command,
                env=self.environment({**self.env, "TMPDIR": self._scratch}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """What the server's process gets as its environment, made from `env`."""
        return cpu_engine_env(env)

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
        """Empty the radix cache; the server must be idle."""
        self.request("/flush_cache", {})

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
            raise ServerError(f"{path} was not answered ({error}); {self._end_of_log()}") from error
        return json.loads(text) if text[:1] in ("{", "[") else text

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout
        while True:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"the server ended with {code} before it was ready; {self._end_of_log()}")
            if _answers(self.base_url + "/health"):
                return
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not ready after {self.start_timeout:.0f} s; {self._end_of_log()}")
            time.sleep(0.5)

    def _end_of_log(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:]
        return "\n".join([f"the log {self.log} ends with:", *(line[:_LOG_WIDTH] for line in lines)])

    def _stop(self) -> None:
        """Kill the process group and check that the whole session is gone."""
        process, self._process = self._process, None
        left = [] if process is None else processes.kill_session(process)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if left:
            raise ServerError(f"processes {left} of the server did not end: kill them by hand")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
