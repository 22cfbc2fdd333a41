"""Files that are replaced while they are read, as those of servers that record and learn."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from c2t_plugin.errors import C2TError
from c2t_plugin.output import write_whole
from c2t_plugin.tensor_file import read_tensors

KIND = "c2t-test"


def save(path: Path, size: int) -> None:
    metadata = {"format": KIND, "version": "1", "size": str(size)}
    write_whole(path, partial(save_file, {"values": torch.full((size,), size)}, metadata=metadata))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 5 values. One of 3, then one of 8 take its place between the two times that safetensors opens it."""
    path, opened, sizes = tmp_path / "values.safetensors", torch.UntypedStorage.from_file, [8, 3]

    def replace_first(*args: Any, **kwargs: Any) -> Any:
        if sizes:
            save(path, sizes.pop())
        return opened(*args, **kwargs)

    save(path, 5)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_first)
    return path


def test_tensors_and_metadata_are_of_one_file(file: Path):
    tensors, metadata = read_tensors(file, KIND, ["1"], "write it again")
    assert metadata["size"] == "8"
    assert tensors["values"].tolist() == [8] * 8


def test_a_damaged_file_that_takes_its_place_is_said(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *_: write_whole(file, lambda part: part.touch()))
    with pytest.raises(C2TError, match="is not a readable safetensors file"):
        read_tensors(file, KIND, ["1"], "write it again")


def test_a_file_that_is_removed_is_said(file: Path, monkeypatch: pytest.MonkeyPatch):
    opened = torch.UntypedStorage.from_file

    def remove(*args: Any, **kwargs: Any) -> Any:
        found = opened(*args, **kwargs)
        file.unlink()
        return found

    monkeypatch.setattr(torch.UntypedStorage, "from_file", remove)
    with pytest.raises(C2TError, match="No such file"):
        read_tensors(file, KIND, ["1"], "write it again")
