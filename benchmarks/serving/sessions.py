"""A process session: its place behind other processes, and its end for good, with the shared memory that it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_URGENT = 19
# Linux takes one change of an autogroup in that time from who is not root.
_CHANGE_AGAIN_S = 0.15


class Leader(Protocol):
    """The process that leads a session."""

    pid: int

    def wait(self) -> int: ...


def kill_session(leader: Leader, timeout: float = 10.0) -> list[int]:
    """Kill the session that `leader` leads, and unlink the shared memory that its processes have mapped.

    A server asked to end takes 6 s over it and leaves shared memory behind just the same. Returns the pids that are
    still alive after `timeout` seconds.
    """
    mapped: set[Path] = set()
    deadline = time.monotonic() + timeout
    while (left := alive(leader.pid)) and time.monotonic() < deadline:
        for pid in left:
            mapped |= _mapped(pid)
            _kill(pid)
        time.sleep(0.02)
    leader.wait()
    for path in mapped:
        path.unlink(missing_ok=True)
    return left


def give_way(leader: int, niceness: int) -> None:
    """Let everything else on the machine run before a session, by so many steps of niceness, up to 19 in all.

    leader: of a session that has no other process yet; those that it starts inherit it. Linux weighs sessions by the
    niceness of their autogroup, where it keeps autogroups, and processes of one group by their own.
    """
    own = min(_LEAST_URGENT, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
    group = Path(f"/proc/{leader}/autogroup")
    # one that has ended has no place, and its starter finds out
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.setpriority(os.PRIO_PROCESS, leader, own)
        while True:
            try:
                group.write_text(str(niceness))
                return
            except BlockingIOError:
                time.sleep(_CHANGE_AGAIN_S)


def alive(session: int) -> list[int]:
    """Pids of a session's processes that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # the name in parentheses may hold spaces; after it come state, parent, group, session
        state, _parent, _group, own_session = stat.rpartition(")")[2].split()[:4]
        if int(own_session) == session and state not in "ZX":
            found.append(int(entry.name))
    return found


def signal_session(session: int, number: int, spared: Collection[int] = ()) -> None:
    """Send a signal to every process of a session but the spared ones, those that they start meanwhile too."""
    told: set[int] = set(spared)
    while new := set(alive(session)) - told:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= new


def _mapped(pid: int) -> set[Path]:
    """Shared-memory files that a process has mapped, by the names that they have now.

    Found by inode: sem_open() maps a semaphore under a name that it then changes, so the map's own name is gone.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    inodes = {int(line.split(maxsplit=5)[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}
    return {path for path in _SHARED_MEMORY.iterdir() if _inode(path) in inodes} if inodes else set()


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def _kill(pid: int) -> None:
    # the pid may be gone since it was listed
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
