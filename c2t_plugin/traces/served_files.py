"""The trace files of one serving process: they grow, are ended, and make room for others."""

from __future__ import annotations

import logging
import uuid
from datetime import UTC, datetime
from pathlib import Path

from c2t_plugin.traces.file import SUFFIX, Traces, merge_traces, save_traces

logger = logging.getLogger(__name__)

STATES_PER_FILE = 20_000
# Of the limit; so a quarter of what may be kept is lost at a time.
LARGEST_FILE = 0.25
PREFIX = "served-"


class ServedFiles:
    """Each file is written whole or not at all, again and again until it is full.

    Names are unlike those of any other process, on any machine. Together the served files of the directory, of other
    processes too, take at most a given size: the oldest are removed for new ones.
    """

    def __init__(self, directory: Path, limit_mb: float, *, exact: bool = False) -> None:
        """limit_mb: of the directory's served files together, in millions of bytes. exact: statistics as they
        are, not coarse."""
        self.recorded = self.dropped = 0
        self._directory, self._limit, self._coarsely = directory, limit_mb * 1e6, not exact
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self._name = f"{PREFIX}{started}-{uuid.uuid4().hex}"
        self._number = 0
        # the states of the file that still grows, and those that are not in it yet
        self._file: list[Traces] = []
        self._new: list[Traces] = []

    def take(self, traces: Traces) -> None:
        """States of one request, for the next `write`; done at once if they fill a file."""
        if len(traces):
            self._new.append(traces)
        if sum(map(len, self._new)) >= STATES_PER_FILE:
            self.write()

    def write(self) -> None:
        """Write what was taken. States that cannot be written are dropped, counted, and said in the log."""
        new, self._new = self._new, []
        if not new:
            return
        path = self._directory / f"{self._name}-{self._number:05d}{SUFFIX}"
        states = sum(map(len, new))
        try:
            whole = merge_traces([*self._file, *new])
            save_traces(whole, path, coarsely=self._coarsely)
            size = path.stat().st_size
        except Exception as error:
            self.dropped += states
            logger.error("C2T: %d recorded states are lost, %s cannot be written: %s", states, path, error)
            return
        self.recorded += states
        self._file = [whole]
        if len(whole) >= STATES_PER_FILE or size >= LARGEST_FILE * self._limit:
            self._file, self._number = [], self._number + 1
        self._make_room(path)

    def _make_room(self, newest: Path) -> None:
        try:
            found = [(path.stat(), path) for path in self._directory.glob(f"{PREFIX}*{SUFFIX}*")]
            total = sum(stat.st_size for stat, _ in found)
            for stat, path in sorted(found, key=lambda each: each[0].st_mtime):
                if total <= self._limit:
                    return
                if path != newest:
                    path.unlink(missing_ok=True)
                    total -= stat.st_size
                    logger.info("C2T: %s is removed, served traces take more than %.0f MB", path, self._limit / 1e6)
        except OSError as error:
            # another process makes room at the same time, or may not
            logger.warning("C2T: no room is made in %s: %s", self._directory, error)
