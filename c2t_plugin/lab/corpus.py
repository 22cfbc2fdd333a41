"""Training text: the running interpreter's own standard library, split by whole files."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from c2t_plugin.errors import C2TError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# tables of code points, packages that are not CPython's, and caches
EXCLUDED_PARTS = frozenset({"encodings", "site-packages", "dist-packages", "__pycache__"})
# One file in so many is kept from training.
HELD_OUT_ONE_IN = 32
MIN_CHARS = 400
MAX_DIGIT_SHARE = 0.15
MAX_NON_ASCII_SHARE = 0.02


@dataclass(frozen=True)
class SourceFile:
    """path: relative to the standard library, with forward slashes. text: the decoded source."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Files for training and files held out, each sorted by path; no text is in both."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    def digest(self) -> str:
        """Hash of the paths and texts of both halves."""
        sha = hashlib.sha256()
        for half in (self.train, self.held_out):
            for source in half:
                sha.update(source.path.encode() + b"\0" + source.text.encode() + b"\0")
            sha.update(b"\1")
        return sha.hexdigest()


def standard_library() -> Path:
    """Directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path, one_in: int) -> Corpus:
    """Read every usable .py file under root and hold out one in `one_in` of them, chosen by a hash of the path.

    The choice does not depend on which other files exist, so a file is held out on every machine or on none.
    C2TError if nothing usable is left on either side.
    """
    kept = list(_distinct(_usable(root)))
    held = tuple(source for source in kept if is_held_out(source.path, one_in))
    train = tuple(source for source in kept if not is_held_out(source.path, one_in))
    if not train or not held:
        raise C2TError(f"{root} gave {len(train)} files for training and {len(held)} held out; both must be positive")
    return Corpus(train, held)


def is_held_out(path: str, one_in: int) -> bool:
    """Whether the file of this relative path (forward slashes) is kept from training."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % one_in == 0


def is_usable(text: str) -> bool:
    """Whether a text is worth learning: not very short, not a table of numbers, not mostly another script."""
    if len(text) < MIN_CHARS:
        return False
    digits = sum(c.isdigit() for c in text)
    foreign = sum(not c.isascii() for c in text)
    return digits <= MAX_DIGIT_SHARE * len(text) and foreign <= MAX_NON_ASCII_SHARE * len(text)


def _usable(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_PARTS.intersection(relative.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            # the library's own tests hold sources in other encodings and broken ones
            continue
        if is_usable(text):
            yield SourceFile(relative.as_posix(), text)


def _distinct(sources: Iterable[SourceFile]) -> Iterator[SourceFile]:
    seen: set[str] = set()
    for source in sources:
        if source.text not in seen:
            seen.add(source.text)
            yield source


def cut_prompts(
    tokenizer: Tokenizer, files: Iterable[SourceFile], count: int, min_tokens: int, max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """count prompts of min_tokens..max_tokens tokens that start at line starts of the files, spread over them evenly.

    Each is {"file", "text", "ids"}; text encodes to exactly ids.
    """
    rng = random.Random(seed)
    lines = {source.path: source.text.splitlines(keepends=True) for source in files}
    paths = [path for path, content in lines.items() if len(content) >= 20]
    prompts: list[dict[str, Any]] = []
    while len(prompts) < count:
        path = paths[len(prompts) % len(paths)]
        start = rng.randrange(len(lines[path]) - 10)
        head = tokenizer.encode("".join(lines[path][start : start + 40])).ids[: rng.randint(min_tokens, max_tokens)]
        text = tokenizer.decode(head)
        # a cut inside a word or a character may encode differently; such a cut is drawn again
        if len(head) >= min_tokens and tokenizer.encode(text).ids == head:
            prompts.append({"file": path, "text": text, "ids": head})
    return prompts
