"""Runs many server command lines for test_bad_input.py, with SGLang's imports paid for once.

Each case is a fork of one process that has imported SGLang's argument handling but has loaded no plugin yet. The fork
becomes `python -m sglang.launch_server ARG...` and ends as the interpreter ends it.

Usage: python command_lines.py CASES.json FOLDER
CASES.json: {name: {"argv": [...], "env": {...}, "port": int}}. Writes FOLDER/NAME.txt (standard output and error) and
FOLDER/results.json: {name: [exit code or null if it was killed, whether its port opened]}.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 90.0


def is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def become_server(case: dict[str, Any], output: Path) -> None:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(case["env"])
    sys.argv = ["sglang.launch_server", *case["argv"]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def wait(pid: int, port: int) -> tuple[int | None, bool]:
    """Exit code and whether the port opened; a case that runs on is killed with all its children."""
    deadline = time.monotonic() + TIMEOUT_S
    opened = False
    while not opened and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), False
        opened = is_open(port)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, opened


def main(cases: Path, folder: Path) -> None:
    import sglang.launch_server
    import sglang.srt.speculative.eagle_utils  # noqa: F401

    results = {}
    for name, case in json.loads(cases.read_text()).items():
        pid = os.fork()
        if pid == 0:
            become_server(case, folder / f"{name}.txt")
            return
        results[name] = wait(pid, case["port"])
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
