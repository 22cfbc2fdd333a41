"""What a trace file has to be like before its tables are made of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from c2t_plugin import json_text
from c2t_plugin.errors import C2TError
from c2t_plugin.traces import coarse, forest
from c2t_plugin.traces.forest import TABLES, Forest

FORMAT = "c2t-traces"
VERSION = "3"
# Version 1 knew no groups; before 3 the metadata were under no checksum, and nothing was coarse.
READABLE = ("1", "2", VERSION)
REMEDY = "collect it again"
DTYPES = {**forest.DTYPES, "accepted": torch.bool}
STATES = {"prompt": torch.int32, "step": torch.int16, "novel": torch.bool}
OPTIONAL = {"group": torch.int32}
PARTS = ("tree", "chain")
COARSE = "coarse"
# parent_ids are int16
LARGEST = 2**15 - 1

Shapes = dict[str, tuple[int, int]]


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """CRC-32 over all tensors in order of their names: safetensors itself does not notice a changed byte.

    metadata: the file's, which are under the checksum too, with the tensors' names, types and shapes; None before
    version 3."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, crc)
    if metadata is not None:
        described = {name: [str(value.dtype), *value.shape] for name, value in tensors.items()}
        said = {name: text for name, text in metadata.items() if name != "checksum"}
        crc = zlib.crc32(json.dumps([described, said], sort_keys=True).encode(), crc)
    return f"{crc:08x}"


def check(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[Shapes, dict[str, Any]]:
    """(k, layers) of each part, and the header. C2TError unless everything is there, undamaged and of its type."""
    current = metadata["version"] == VERSION
    if checksum(tensors, metadata if current else None) != metadata.get("checksum"):
        raise C2TError(f"{path} is damaged: its contents do not match its checksum; {REMEDY}")
    shapes = _shapes(path, metadata, PARTS[1:] if current else PARTS)
    is_coarse = current and metadata.get("statistics") == COARSE
    expected = {f"{part}.{name}": dtype for part in shapes for name, dtype in _types(is_coarse).items()} | STATES
    expected |= {name: dtype for name, dtype in OPTIONAL.items() if name in tensors and metadata["version"] != "1"}
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    if found != expected:
        odd = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise C2TError(f"{path} lacks, or has in another type, {', '.join(odd)}; {REMEDY}")
    header = json_text.parse(metadata.get("header", ""), f"the header of {path}")
    known = isinstance(header, dict) and isinstance(header.get("pair"), dict)
    if not known or type(header.get("top_m")) is not int or header["top_m"] < 1:
        raise C2TError(f"{path} does not say of which pair it is, and of which top_m; {REMEDY}")
    return shapes, header


def forest_of(path: Path, part: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Forest:
    """One part's tables. C2TError if they do not fit together."""
    tables = {name: tensors[f"{part}.{name}"] for name in TABLES if f"{part}.{name}" in tensors}
    if "joint_log_prob" not in tables:
        if shape[0] != 1 or tables["log_prob"].dim() != 2:
            raise C2TError(f"{path} has coarse statistics that are not of chains; {REMEDY}")
        tables = coarse.unpacked(tables)
    found = Forest(shape[0], shape[1], **tables)
    # the node that a distribution follows is in a layer before it, the root's is -1
    k, above = found.k, found.parent_ids.long()
    layer = (torch.arange(above.shape[1]) + k - 1) // k
    first = torch.where(layer > 1, k + (layer - 2) * k * k, 0)
    end = torch.where(layer > 1, first + k * k, k)
    if not ((above[:, :1] == -1).all() and ((above >= first) & (above < end))[:, 1:].all()):
        raise C2TError(f"{path} has parents that are no nodes of the layer above; {REMEDY}")
    return found


def _types(is_coarse: bool) -> dict[str, torch.dtype]:
    types = {name: DTYPES.get(name, torch.float32) for name in TABLES}
    if is_coarse:
        del types["joint_log_prob"]
        types |= dict.fromkeys(coarse.TOP, torch.uint8)
    return types


def _shapes(path: Path, metadata: Mapping[str, str], required: tuple[str, ...]) -> Shapes:
    found = json_text.parse(metadata.get("shape", ""), f"the shape of {path}")
    names = set(found) if isinstance(found, dict) else set()
    if not set(required) <= names <= set(PARTS) or not all(map(_is_shape, found.values())):
        raise C2TError(f"{path} has no shapes of {' and '.join(required)}, k and layers from 1 on each; {REMEDY}")
    return {part: (found[part]["k"], found[part]["layers"]) for part in PARTS if part in found}


def _is_shape(found: Any) -> bool:
    sizes = [found.get(name) for name in ("k", "layers")] if isinstance(found, dict) else [None]
    return all(type(size) is int and 1 <= size <= LARGEST for size in sizes)
