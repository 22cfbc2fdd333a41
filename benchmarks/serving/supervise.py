"""Runs a server so that nothing of it outlives the process that asked for it.

`python supervise.py PARENT_PID CMD...` has to be started as the leader of a process group.
It waits for the command; on SIGTERM, or when the parent dies in whatever way, the group is killed; on SIGINT the
command is asked to end, by SIGTERM. SGLang's own children ask for the like, but only after several seconds of imports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1


def _kill_group(_signal: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


def main(argv: Sequence[str]) -> int:
    """Run `argv[1:]` for the process `argv[0]`; returns the command's exit code, negative for a signal."""
    parent, command = int(argv[0]), list(argv[1:])
    signal.signal(signal.SIGTERM, _kill_group)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # it died before prctl took effect
        return 1
    child = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda _signal, _frame: child.terminate())
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
