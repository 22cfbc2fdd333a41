"""What a long command has finished, kept beside its output until that is whole: an interrupted run goes on from it."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from c2t_plugin import json_text
from c2t_plugin.errors import C2TError
from c2t_plugin.output import write_text, write_whole
from c2t_plugin.provenance import RunRecord

SETTINGS = "settings.json"
# Results of two of these may differ, so they are not mixed.
SAME_RUN = ("git_sha", "versions")


@dataclass(frozen=True)
class Unfinished:
    """folder: `NAME.unfinished` beside the output; files in it are written whole or not at all. settings: all that
    decides the result, as JSON has it. run: record of the run that began, which the output keeps however often it was
    interrupted. files: names of the parts that are in the folder."""

    folder: Path
    settings: Mapping[str, Any]
    run: Mapping[str, Any]
    files: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, out: Path, settings: Mapping[str, Any], seed: int) -> Unfinished:
        """What there is for an output. Nothing is written before there is something to keep.

        C2TError if the folder belongs to other settings, another commit or other versions, or is none of ours.
        """
        folder = out.with_name(out.name + ".unfinished")
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            raise C2TError(f"{folder} is no folder, where parts of {out.name} are to be kept; remove it")
        run = RunRecord.capture(seed=seed).to_json()
        wanted = json.loads(json.dumps({"settings": settings, "run": run}))
        path = folder / SETTINGS
        if not path.is_file():
            return cls(folder, wanted["settings"], run)
        found = _settings(path)
        odd = [name for name in wanted["settings"] if found["settings"].get(name) != wanted["settings"][name]]
        odd += [name for name in SAME_RUN if found["run"].get(name) != wanted["run"][name]]
        if odd:
            raise C2TError(
                f"{folder} holds an interrupted run with another {', '.join(odd)}; run that command again, or remove it"
            )
        return cls(folder, found["settings"], found["run"], found["files"])

    def file(self, name: str) -> Path:
        """Where a part is, if it is there."""
        return self.folder / name

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        """Write a part, whole or not at all."""
        if name not in self.files:
            self.files.append(name)
        text = json.dumps({"settings": self.settings, "run": self.run, "files": self.files}, indent=1)
        write_text(self.file(SETTINGS), text)
        write_whole(self.file(name), write)

    def finish(self) -> None:
        """The output is written: forget its parts, whole or half written. What others have put there stays."""
        for name in (*self.files, SETTINGS):
            halves = self.folder.glob(f"{glob.escape(name)}*.part")
            for path in (self.file(name), *halves):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _settings(path: Path) -> dict[str, Any]:
    """What is known of an interrupted run. C2TError if it isn't that."""
    try:
        found = json_text.load(path)
    except C2TError as error:
        raise C2TError(f"{error}; remove {path.parent}") from error
    kinds = {"settings": dict, "run": dict, "files": list}
    if not isinstance(found, dict) or any(not isinstance(found.get(name), kind) for name, kind in kinds.items()):
        raise C2TError(f"{path} is not readable: it needs {', '.join(kinds)}; remove {path.parent}")
    if any(not isinstance(name, str) or Path(name).name != name for name in found["files"]):
        raise C2TError(f"{path} is not readable: it names files outside of its folder; remove {path.parent}")
    return found


def checksum(path: Path) -> int:
    """Of an input, a file or all trace files of a directory: a setting that says whether it is still the same."""
    from c2t_plugin.traces.file import SUFFIX

    found = 0
    for file in sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]:
        found = zlib.crc32(file.read_bytes(), found)
    return found
