"""Prompts of the toy pair that nothing was chosen on: files of pinned packages, which no model of the pair has read.

    python -m benchmarks.pairs.toy.frozen --out build/lab/frozen.jsonl
    c2t collect --draft eagle3 --prompts build/lab/frozen.jsonl --trees 2000 --out build/lab/eagle3-frozen.traces

Only final tables read them (docs/benchmarking.md). The pair knows the standard library alone, and its 39 held-out files
have been looked at; packages come pinned with the constraints, so that every machine has the same text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.pairs.toy import pair_dir
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.corpus import is_usable
from c2t_plugin.lab.pair_files import load_tokenizer
from c2t_plugin.lab.texts import PROMPT_TOKENS
from c2t_plugin.output import write_text

# Written by many people, in plain Python, permissive licences; nothing of them is in the repository.
PACKAGES = ("click", "fsspec", "httpx", "jinja2", "networkx", "requests", "rich", "starlette", "urllib3")
FILES = 64
# characters that hold a prompt
ENOUGH = 2_000
DIGEST = "75fd4f4feb896468"


def sources() -> list[tuple[str, Path]]:
    """Every file below the packages: its path below the package's parent, and where it is. C2TError for a package that
    is not installed."""
    files = []
    for package in PACKAGES:
        found = find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise C2TError(f"the package {package} is missing; install the environment of .constraints/sglang.txt")
        root = Path(found.submodule_search_locations[0])
        files += [(path.relative_to(root.parent).as_posix(), path) for path in root.rglob("*.py")]
    return files


def frozen_prompts() -> list[dict[str, str]]:
    """One prompt of each of FILES files, which a hash of their paths chooses, as `c2t collect --prompts` reads them."""
    tokenizer = load_tokenizer(pair_dir())
    prompts = []
    for name, path in sorted(sources(), key=lambda source: hashlib.sha256(source[0].encode()).digest()):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not is_usable(text):
            continue
        rng = random.Random(name)
        lines = text.splitlines(keepends=True)
        start, length = rng.randrange(len(lines)), rng.randint(*PROMPT_TOKENS)
        ids = tokenizer.encode("".join(lines[start:])[:ENOUGH]).ids
        if len(ids) >= length and lines[start].strip():
            prompts.append({"text": tokenizer.decode(ids[:length]), "source": name})
        if len(prompts) == FILES:
            return prompts
    raise C2TError(f"{FILES} files are needed, the packages give {len(prompts)}")


def digest_of(text: str) -> str:
    """The first 16 digits of the SHA-256 of the written file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main(argv: list[str]) -> int:
    """Write the frozen prompts; status 2 with one line if they are not those of the pinned packages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.toy.frozen", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    options = parser.parse_args(argv)
    try:
        text = "".join(json.dumps(prompt) + "\n" for prompt in frozen_prompts())
        if digest_of(text) != DIGEST:
            raise C2TError(
                f"the prompts have the hash {digest_of(text)}, published rows {DIGEST}: the packages are others than "
                "those of .constraints/sglang.txt"
            )
    except C2TError as error:
        print(f"frozen: {error}", file=sys.stderr)
        return 2
    write_text(options.out, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
