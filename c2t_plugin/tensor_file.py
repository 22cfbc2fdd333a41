"""Reading the project's own safetensors files: a format and a version in the metadata, one clear error for the rest."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from c2t_plugin.errors import C2TError


def read_tensors(
    path: Path, kind: str, versions: Collection[str], remedy: str, error: type[C2TError] = C2TError
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors by name, on the CPU, and the metadata.

    kind: wanted `format` entry of the metadata. versions: `version` entries that the caller reads. remedy: what to do
    about a file that is no good. Raises `error` if the file cannot be read or is of another format or version.
    """
    try:
        metadata, tensors = _of_one_file(path, kind, versions)
    except Exception as cause:
        # which of them safetensors raises depends on what is wrong: on its own errors, types, names, which it quotes
        said = " ".join(str(cause).split())
        raise error(f"{path} is not a readable safetensors file ({said}); {remedy}") from cause
    if tensors is None:
        found = f"format {metadata.get('format')!r} version {metadata.get('version')!r}"
        wanted = " or ".join(repr(version) for version in sorted(versions))
        raise error(f"{path} has {found}, this build reads {kind!r} version {wanted}; {remedy}")
    return tensors, metadata


def _of_one_file(path: Path, kind: str, versions: Collection[str]) -> tuple[dict[str, str], dict[str, Tensor] | None]:
    """The metadata, and the tensors unless it is another's file: of that nothing is read, which may be a model.

    safetensors opens a file twice by its name, for the header and for the tensors. A server that records or learns puts
    a new file in its place every so often, and the two would be of different files: then all is read again.
    """
    is_one = False
    while not is_one:
        failed: Exception | None = None
        # held open, so that no other file gets its number
        with path.open("rb") as first:
            try:
                with safe_open(path, framework="pt") as handle:
                    metadata = handle.metadata() or {}
                    ours = metadata.get("format") == kind and metadata.get("version") in versions
                    tensors = {name: handle.get_tensor(name) for name in (handle.keys() if ours else ())}
            except Exception as error:
                failed = error
            is_one = os.path.samestat(os.fstat(first.fileno()), path.stat())
    if failed is not None:
        raise failed
    return metadata, tensors if ours else None
