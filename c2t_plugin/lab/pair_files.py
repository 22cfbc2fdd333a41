"""Files of a pair directory: target/, one folder per draft, and the prompts that neither was trained on."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from c2t_plugin import envs, json_text
from c2t_plugin.errors import C2TError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPTS_FILE = "held_out_prompts.json"


def pair_dir() -> Path:
    """The pair directory that C2T_PAIR names. C2TError if it is not set or holds no target."""
    directory = envs.pair()
    if directory is None:
        raise C2TError("no pair named: expected --pair DIR or C2T_PAIR=DIR, a directory with target/ and draft folders")
    return check_pair(directory)


def check_pair(directory: Path) -> Path:
    """The directory itself. C2TError if it holds no target."""
    if not (directory / "target" / "config.json").is_file():
        raise C2TError(f"no pair in {directory}: expected a checkpoint in target/ and one folder per draft beside it")
    return directory


def load_prompts(directory: Path) -> list[dict]:
    """All held-out prompts of a pair directory, in file order.

    Each is {"file": relative path, "text": str, "ids": list[int]}; ids are the tokens of text.
    """
    path = directory / PROMPTS_FILE
    if not path.is_file():
        raise C2TError(f"{path} is missing: expected the pair's held-out prompts there; give --prompts a file instead")
    found = json_text.load(path)
    prompts = found.get("prompts") if isinstance(found, dict) else None
    if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
        raise C2TError(f"{path} has no list of prompts; give --prompts a file instead")
    return prompts


def _is_prompt(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("file"), str):
        return False
    ids = found.get("ids")
    return isinstance(ids, list) and bool(ids) and all(type(token) is int and 0 <= token < 2**31 for token in ids)


def load_tokenizer(directory: Path, checkpoint: str = "target") -> Tokenizer:
    """The pair's tokenizer, from its target or another checkpoint. C2TError if there is none that can be read."""
    from tokenizers import Tokenizer

    path = directory / checkpoint / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # which it raises none more special than
        said = " ".join(str(error).split())
        raise C2TError(f"{path} is no tokenizer that can be read ({said}); name a whole checkpoint") from error


def file_hash(path: Path) -> str:
    """The first 16 digits of a file's SHA-256, as traces name weights."""
    return sha256(path.read_bytes()).hexdigest()[:16]


def weights_path(directory: Path) -> Path:
    """The file that holds the weights of a checkpoint directory."""
    return directory / "model.safetensors"


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint directory of a pair, as shipped."""
    path = weights_path(directory)
    if not path.is_file():
        raise C2TError(f"{path} is missing; expected a checkpoint directory with it")
    try:
        return load_file(path)
    except Exception as error:
        # of many kinds, by what is wrong
        raise C2TError(f"{path} is not a readable safetensors file ({error}); name a whole checkpoint") from error
