"""`python -m benchmarks.cpu_engine -- CMD...`: run a command with SGLang's CPU engine on the stub kernels."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import NoReturn

from benchmarks.command import run
from benchmarks.cpu_engine import cpu_engine_env
from c2t_plugin.errors import C2TError

USAGE = (
    "python -m benchmarks.cpu_engine -- CMD [ARG...], "
    "for example: python -m benchmarks.cpu_engine -- python -m sglang.launch_server --device cpu ..."
)


def main(argv: Sequence[str]) -> NoReturn:
    """Replace this process by the command in `argv` (a leading `--` is dropped), in the CPU engine's environment.

    --help prints the usage and exits with 0. Raises C2TError if there is no command, or none of that name.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        raise SystemExit(0)
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    if not command:
        raise C2TError(f"no command given: {USAGE}")
    if shutil.which(command[0]) is None:
        raise C2TError(f"command {command[0]!r} was not found: {USAGE}")
    os.execvpe(command[0], command, cpu_engine_env(os.environ))


if __name__ == "__main__":
    run(main)
