"""What happens to the folder of a server's traces: it vanishes, a file takes its place, its disk fills and empties.

`register` is a plugin for tests only, in the server: while the file that FULL_DISK names is there, a trace file ends
halfway with ENOSPC, for root too, as on a full disk. Files are small there, and are written twice a second. A file
beside that one, IDLE, is touched whenever nothing is left to write. `Trouble` is the rest, in the test's process.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

FULL_DISK, IDLE = "FULL_DISK", "idle"
WRITE_EVERY_S = 0.5
STATES_PER_FILE = 500
# Longer than it takes until the next write.
LASTS_S = 0.8
PATIENCE_S = 120


def register() -> None:
    from c2t_plugin.traces import file, recorder, served_files

    # Fail where a name is gone.
    assert recorder.WRITE_EVERY_S and served_files.STATES_PER_FILE
    recorder.WRITE_EVERY_S, served_files.STATES_PER_FILE = WRITE_EVERY_S, STATES_PER_FILE
    save, full = file.save_file, Path(os.environ[FULL_DISK])

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        save(tensors, path, metadata=metadata)
        if full.exists():
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    began, write, recorders = recorder.TraceRecorder.__init__, served_files.ServedFiles.write, list[Any]()

    def begin(self: Any, *positional: Any, **keyword: Any) -> None:
        recorders.append(self)
        began(self, *positional, **keyword)

    def written(self: Any) -> None:
        write(self)
        # those that wait for their labels, and those at hand where this is called in the middle of them
        if not recorders[-1]._states:
            full.with_name(IDLE).touch()

    file.save_file, recorder.TraceRecorder.__init__, served_files.ServedFiles.write = save_file, begin, written


class Trouble(threading.Thread):
    """One kind after the other until `end`, which leaves all as it should be. happened: how often each did."""

    def __init__(self, folder: Path, full: Path, away: Path) -> None:
        """full: the file that FULL_DISK names. away: a folder for what vanishes."""
        super().__init__(daemon=True)
        self.happened: Counter[str] = Counter()
        self._folder, self._full, self._away = folder, full, away
        self._ends = threading.Event()
        away.mkdir()

    def run(self) -> None:
        for kind in itertools.cycle(("vanishes", "is a file", "is full")):
            if self._ends.wait(LASTS_S):
                return
            self._begin(kind)
            self._ends.wait(LASTS_S)
            self._full.unlink(missing_ok=True)
            if self._folder.is_file():
                self._folder.unlink()

    def end(self) -> None:
        self._ends.set()
        self.join()

    def wait_until_written(self) -> None:
        """Until an idle server's recorder has nothing left. Raises TimeoutError."""
        idle, deadline = self._full.with_name(IDLE), time.monotonic() + PATIENCE_S
        idle.unlink(missing_ok=True)
        while not idle.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the recorder has something left to write after {PATIENCE_S} s")
            time.sleep(WRITE_EVERY_S / 5)

    def files(self, suffix: str) -> list[Path]:
        """The newest copy of each file, of those that have vanished too."""
        folders = [*sorted(self._away.iterdir()), self._folder]
        return list({path.name: path for folder in folders for path in folder.glob(f"*{suffix}")}.values())

    def _begin(self, kind: str) -> None:
        if kind == "is full":
            self._full.touch()
        elif self._folder.is_dir():
            # Nothing of a file that was ended may be lost to the test. The server makes the folder again.
            self._folder.rename(self._away / f"{self.happened.total():06d}")
            if kind == "is a file":
                try:
                    self._folder.open("x").close()
                except FileExistsError:
                    # the server was faster
                    return
        self.happened[kind] += 1
