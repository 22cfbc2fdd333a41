"""Reading the project's own safetensors files: a format and a version in the metadata, one clear error for the rest."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from c2t_plugin.errors import C2TError


def read_tensors(
    path: Path, kind: str, versions: Collection[str], remedy: str, error: type[C2TError] = C2TError
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors by name, on the CPU, and the metadata.

    kind: wanted `format` entry of the metadata. versions: `version` entries that the caller reads. remedy: what to do
    about a file that is no good. Raises `error` if the file cannot be read or is of another format or version.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            for name in handle.keys():  # noqa: SIM118 -- safe_open is no mapping
                tensors[name] = handle.get_tensor(name)
    except (SafetensorError, OSError) as cause:
        raise error(f"{path} is not a readable safetensors file ({cause}); {remedy}") from cause
    if metadata.get("format") != kind or metadata.get("version") not in versions:
        found = f"format {metadata.get('format')!r} version {metadata.get('version')!r}"
        wanted = " or ".join(repr(version) for version in sorted(versions))
        raise error(f"{path} has {found}, this build reads {kind!r} version {wanted}; {remedy}")
    return tensors, metadata
