"""What a long command has finished, kept beside its output until that is whole: an interrupted run goes on from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

SETTINGS = "settings.json"
# Results of two of these may differ, so they are not mixed.
SAME_RUN = ("git_sha", "versions")


@dataclass(frozen=True)
class Unfinished:
    """folder: `NAME.unfinished` beside the output; files in it are written whole or not at all. run: record of the run
    that began, which the output keeps however often it was interrupted."""

    folder: Path
    run: Mapping[str, Any]

    @classmethod
    def begin(cls, out: Path, settings: Mapping[str, Any], seed: int) -> Unfinished:
        """Make the folder of an output, or go on with the one there is.

        settings: all that decides the result, as JSON has it. C2TError if the folder belongs to other settings, another
        commit or other versions.
        """
        folder = out.with_name(out.name + ".unfinished")
        run = RunRecord.capture(seed=seed).to_json()
        wanted = json.loads(json.dumps({"settings": settings, "run": run}))
        path = folder / SETTINGS
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
            return cls(folder, run)
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
        return cls(folder, found["run"])

    def finish(self) -> None:
        """The output is written: forget its parts."""
        shutil.rmtree(self.folder)
