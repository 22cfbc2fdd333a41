"""Prompts from the data sets of the papers, in the formats that they are published in: from a local path, or by hub id.

A path is a .json, .jsonl or .parquet file, either of the first two gzipped too, or for CNN/DailyMail and OpenWebText a
directory of .story or .txt files; of a path nothing is downloaded. An id is given to the `datasets` library, if that is
installed, which takes what its cache has and downloads the rest.
"""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2t_plugin.errors import C2TError

Record = Mapping[str, Any]
# Characters of a web text that a prompt begins with: about the 128 tokens that DySpec takes of C4 and OpenWebText.
PREFIX = 512
# What SPEED-Bench has on the hub in place of prompts whose licence asks for their own source.
UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class DataSet:
    """prompt: one record -> the text of a prompt. continues: the text is to be continued, no question to a chat."""

    prompt: Callable[[Record], str]
    continues: bool = False


def _alpaca(record: Record) -> str:
    return "\n\n".join(part for part in (record["instruction"], record["input"]) if part)


def _cnn_dailymail(record: Record) -> str:
    # the original .story files have the highlights behind the article
    article = str(record["article"]).partition("@highlight")[0].strip()
    return f"Summarize the following article.\n\n{article}"


def _natural_questions(record: Record) -> str:
    question = record["question_text"] if "question_text" in record else record["question"]
    # a record with its document has the question's tokens too
    return str(question["text"] if isinstance(question, Mapping) else question)


def _first_turn(record: Record) -> str:
    # a copy of MT-bench on the hub has its turns as `prompt`
    return str(record["turns" if "turns" in record else "prompt"][0])


def _speed_bench(record: Record) -> str:
    # prepared sets hold messages, those on the hub turns
    text = str(record["messages"][0]["content"]) if "messages" in record else _first_turn(record)
    if text.startswith(UNFETCHED):
        raise C2TError("a part of SPEED-Bench that has to be fetched: run its prepare.py and name what that writes")
    return text


def _prefix(record: Record) -> str:
    return str(record["text"])[:PREFIX]


DATA_SETS: Mapping[str, DataSet] = {
    "gsm8k": DataSet(lambda record: str(record["question"])),
    "alpaca": DataSet(_alpaca),
    "cnn-dailymail": DataSet(_cnn_dailymail),
    "mt-bench": DataSet(_first_turn),
    "humaneval": DataSet(lambda record: str(record["prompt"]), continues=True),
    "speed-bench": DataSet(_speed_bench),
    "natural-questions": DataSet(_natural_questions),
    "c4": DataSet(_prefix, continues=True),
    "openwebtext": DataSet(_prefix, continues=True),
}
TEXT_FILES = {"cnn-dailymail": (".story", "article"), "openwebtext": (".txt", "text")}


@dataclass(frozen=True)
class Hub:
    """A data set by its id on the hub, e.g. `openai/gsm8k:main:test`: id, configuration if it has several, split."""

    name: str
    config: str | None = None
    split: str = "test"

    def __str__(self) -> str:
        return f"{HUB}{self.name}"


HUB = "hub:"


def source_of(text: str) -> Path | Hub:
    """`hub:ID[:CONFIG[:SPLIT]]`, anything else is a path. C2TError for an empty id or more parts."""
    if not text.startswith(HUB):
        return Path(text)
    name, *rest = text.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise C2TError(f"hub:ID[:CONFIG[:SPLIT]] expected, got {text!r}")
    config, split = [*rest, "", ""][:2]
    return Hub(name, config or None, split or Hub.split)


def load(name: str, path: Path | Hub, count: int, least: int | None = None) -> list[str]:
    """The first `count` prompts of a data set, or as many as it has if `least` will do.

    C2TError if it is missing, of another format, or too short.
    """
    if name not in DATA_SETS:
        raise C2TError(f"data set must be one of {', '.join(DATA_SETS)}, got {name!r}")
    prompts: list[str] = []
    records = _downloaded(path) if isinstance(path, Hub) else _records(name, path)
    for number, record in enumerate(records, start=1):
        try:
            prompts.append(DATA_SETS[name].prompt(record))
        except (KeyError, TypeError, IndexError) as error:
            raise C2TError(f"{path}, record {number}: no record of {name} ({type(error).__name__}: {error})") from error
        if len(prompts) == count:
            return prompts
    least = count if least is None else least
    if len(prompts) < least:
        raise C2TError(f"{path} holds {len(prompts)} prompts of {name}, {least} are needed")
    return prompts


def _records(name: str, path: Path) -> Iterator[Record]:
    if path.is_dir() and name in TEXT_FILES:
        suffix, key = TEXT_FILES[name]
        for file in sorted(path.glob(f"*{suffix}")):
            yield {key: file.read_text(encoding="utf-8")}
        return
    if not path.is_file():
        raise C2TError(f"{name} is read from a file, and {path} is none")
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as handle:
            # a .json file is one list in some sets and lines in others
            is_list = handle.read(1) == "["
            handle.seek(0)
            yield from json.load(handle) if is_list else map(json.loads, handle)
    except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise C2TError(f"{path} is no readable JSON: {error}") from error


def _parquet(path: Path) -> Iterator[Record]:
    try:
        pyarrow = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise C2TError(f"{path}: parquet takes pyarrow; install it, or convert the file to JSON lines") from error
    yield from pyarrow.read_table(path).to_pylist()


def _downloaded(source: Hub) -> Iterator[Record]:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise C2TError(f"{source}: this takes the library `datasets`; install it, or name a local file") from error
    try:
        # as a stream, since some sets are far larger than what is taken of them
        yield from library.load_dataset(source.name, source.config, split=source.split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise C2TError(f"{source}, split {source.split}, cannot be read: {reason}") from error
