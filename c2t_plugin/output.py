"""Files that commands write: refused before the work starts where they cannot be written, and written whole."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

from c2t_plugin.errors import C2TError


def check_file(path: Path) -> None:
    """C2TError unless a file can be written there; folders above it that do not exist can be made."""
    _check_kind(path)
    check_folder(path.parent)


def _check_kind(path: Path) -> None:
    if os.path.isdir(path):
        raise C2TError(f"cannot write {path}: it is a directory; name a file")
    # a file that takes its place would end a device, a pipe or a link for everybody
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise C2TError(f"cannot write {path}: it is no regular file but a link, a device or the like; name another")


def check_folder(path: Path) -> None:
    """C2TError unless files can be written into this folder, which need not exist yet."""
    there = path  # os.path, since Path raises where a folder above may not be searched
    while not os.path.lexists(there):
        there = there.parent
    if not os.path.isdir(there):
        raise C2TError(f"cannot write into {path}: {there} is no directory; name another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise C2TError(f"cannot write into {path}: {there} is read-only; name another place")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside this one, which then takes its place: a reader never sees half of it, and what a
    reader sees outlives the machine. C2TError where something else than a file would be replaced."""
    _check_kind(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # of its own, since another process may write the same file
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        write(temporary)
        with temporary.open("rb") as part:
            os.fsync(part.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """UTF-8, whole or not at all."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
