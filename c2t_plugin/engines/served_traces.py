"""Recording of served requests, as far as it is the same in every adapter: the directory, and a file's header."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.checkpoints import SHIPPED_DRAFTS, read_config
from c2t_plugin.errors import ConfigError

if TYPE_CHECKING:
    from c2t_plugin.traces.recorder import TraceRecorder


def check_directory(config: C2TConfig) -> None:
    """Make the directory of the traces. Raises ConfigError if they could not be written there."""
    if config.trace_dir is None:
        return
    path = Path(config.trace_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trace_dir {config.trace_dir!r} cannot be made: {error}") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"trace_dir {config.trace_dir!r} is not writable; name another directory")


def start_recorder(
    directory: str,
    share: float,
    limit_mb: float,
    precision: str,
    *,
    command: str,
    base: str,
    target: str,
    draft: str,
    revision: str | None,
    top_m: int,
    d_max: int,
) -> TraceRecorder:
    """A recorder for this process, closed when it ends.

    command: name of what serves, for the header; a command line may hold keys. base: eagle, eagle3, standalone or mtp.
    revision: of the draft, see checkpoints.fetch.
    """
    # by servers that record alone
    from c2t_plugin.provenance import RunRecord
    from c2t_plugin.traces.recorder import TraceRecorder

    shape = read_config(draft, revision)
    header = {
        "pair": {
            "target": _name(target),
            "draft": _name(draft),
            "kind": SHIPPED_DRAFTS.get(base, base),
            "draft_vocab_size": shape.get("draft_vocab_size") or shape.get("vocab_size"),
        },
        "top_m": top_m,
        "prompts": "served",
        "new_tokens": None,
        "run": RunRecord.capture(argv=(command,)).to_json(),
    }
    recorder = TraceRecorder(Path(directory), share, d_max, header, limit_mb, exact=precision == "exact")
    atexit.register(recorder.close)
    return recorder


def _name(checkpoint: str) -> str:
    """A hub id, or a directory's last part: files that are passed on should not tell where they were made."""
    path = Path(checkpoint)
    return path.resolve().name if path.exists() else checkpoint
