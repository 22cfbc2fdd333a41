"""What a long command has finished, kept beside its output until that is whole: an interrupted run goes on from it."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    interrupted."""

    folder: Path
    settings: Mapping[str, Any]
    run: Mapping[str, Any]

    @classmethod
    def of(cls, out: Path, settings: Mapping[str, Any], seed: int) -> Unfinished:
        """What there is for an output. Nothing is written before there is something to keep.

        C2TError if the folder belongs to other settings, another commit or other versions.
        """
        folder = out.with_name(out.name + ".unfinished")
        run = RunRecord.capture(seed=seed).to_json()
        wanted = json.loads(json.dumps({"settings": settings, "run": run}))
        path = folder / SETTINGS
        if not path.is_file():
            return cls(folder, wanted["settings"], run)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise C2TError(f"{path} is not readable ({error}); remove {folder}") from error
        odd = [name for name in wanted["settings"] if found["settings"].get(name) != wanted["settings"][name]]
        odd += [name for name in SAME_RUN if found["run"][name] != wanted["run"][name]]
        if odd:
            raise C2TError(
                f"{folder} holds an interrupted run with another {', '.join(odd)}; run that command again, or remove it"
            )
        return cls(folder, found["settings"], found["run"])

    def file(self, name: str) -> Path:
        """Where a part is, if it is there."""
        return self.folder / name

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        """Write a part, whole or not at all."""
        text = json.dumps({"settings": self.settings, "run": self.run}, indent=1)
        write_text(self.file(SETTINGS), text)
        write_whole(self.file(name), write)

    def finish(self) -> None:
        """The output is written: forget its parts."""
        shutil.rmtree(self.folder, ignore_errors=True)


def checksum(path: Path) -> int:
    """Of an input, a file or all trace files of a directory: a setting that says whether it is still the same."""
    from c2t_plugin.traces.file import SUFFIX

    found = 0
    for file in sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]:
        found = zlib.crc32(file.read_bytes(), found)
    return found
