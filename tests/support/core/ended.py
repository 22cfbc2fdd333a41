"""Whether a process has ended."""

from __future__ import annotations

import psutil


def ended(pid: int) -> bool:
    """An orphan that nobody has waited for yet has ended too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
