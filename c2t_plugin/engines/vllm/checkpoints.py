"""vLLM loads every safetensors file of a checkpoint; a classifier beside the draft is not part of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vllm.model_executor.model_loader import default_loader

from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.engines.vllm.standing_in import standing_in


@contextlib.contextmanager
def without_classifier_files() -> Iterator[None]:
    """While target and draft are loaded: leave out the files whose names begin as a classifier's does."""
    stock = default_loader.filter_duplicate_safetensors_files

    def needed(files: list[str], *rest: str) -> list[str]:
        return [file for file in stock(files, *rest) if not Path(file).name.startswith(Path(FILE_NAME).stem)]

    with standing_in([(default_loader.__name__, stock.__name__, needed)]):
        yield
