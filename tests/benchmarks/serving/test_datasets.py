"""Every data set in the format it is published in, from hand-made records, and what is said of files that are not."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import datasets
from c2t_plugin.errors import C2TError

# set: name of its published file, two records, the prompts that they make
PUBLISHED: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "gsm8k": (
        "test.jsonl",
        [{"question": "Two and two?", "answer": "#### 4"}, {"question": "Six by nine?", "answer": "#### 54"}],
        ["Two and two?", "Six by nine?"],
    ),
    "alpaca": (
        "alpaca_data.json",
        [
            {"instruction": "Name a bird.", "input": "", "output": "Wren"},
            {"instruction": "Translate.", "input": "ein Haus", "output": "a house"},
        ],
        ["Name a bird.", "Translate.\n\nein Haus"],
    ),
    "mt-bench": (
        "question.jsonl",
        [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}, {"turns": ["Count."]}],
        ["Write.", "Count."],
    ),
    "speed-bench": (
        "qualitative.jsonl",
        # as its prepare.py writes it, and as it is on the hub
        [
            {"question_id": "a", "category": "math", "messages": [{"role": "user", "content": "Add."}]},
            {"turns": ["Sum up.", "Shorter."]},
        ],
        ["Add.", "Sum up."],
    ),
    "humaneval": (
        "HumanEval.jsonl.gz",
        [{"task_id": "HumanEval/0", "prompt": "def f():\n"}, {"task_id": "HumanEval/1", "prompt": "def g():\n"}],
        ["def f():\n", "def g():\n"],
    ),
    "natural-questions": (
        "NQ-open.dev.jsonl",
        [{"question": "who wrote it", "answer": ["she"]}, {"question_text": "when was it", "document_text": "..."}],
        ["who wrote it", "when was it"],
    ),
    "c4": (
        "c4-validation.00000-of-00008.json.gz",
        [{"text": "x" * 900, "timestamp": "", "url": ""}, {"text": "short", "timestamp": "", "url": ""}],
        ["x" * datasets.PREFIX, "short"],
    ),
    "openwebtext": ("part.jsonl", [{"text": "a page"}, {"text": "another"}], ["a page", "another"]),
    "cnn-dailymail": (
        "validation.jsonl",
        [{"article": "It rained.", "highlights": "Rain", "id": "1"}, {"article": "It snowed.", "highlights": ""}],
        ["Summarize the following article.\n\nIt rained.", "Summarize the following article.\n\nIt snowed."],
    ),
}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    whole = path.name.endswith(".json")
    text = json.dumps(records, indent=1) if whole else "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", datasets.DATA_SETS)
def test_each_set_is_read_as_published(name: str, tmp_path: Path):
    file, records, prompts = PUBLISHED[name]
    assert datasets.load(name, write(tmp_path / file, records), 2) == prompts


@pytest.mark.parametrize(
    ("name", "suffix", "text", "prompt"),
    [
        (
            "cnn-dailymail",
            ".story",
            "It rained.\n\n@highlight\n\nRain",
            "Summarize the following article.\n\nIt rained.",
        ),
        ("openwebtext", ".txt", "a page", "a page"),
    ],
)
def test_sets_of_text_files_are_read_from_a_directory(name: str, suffix: str, text: str, prompt: str, tmp_path: Path):
    (tmp_path / f"1{suffix}").write_text(text, encoding="utf-8")
    assert datasets.load(name, tmp_path, 1) == [prompt]


def test_what_is_no_data_set_is_named(tmp_path: Path):
    short = write(tmp_path / "test.jsonl", [{"question": "one"}])
    other = write(tmp_path / "other.jsonl", [{"text": "one"}])
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{", encoding="utf-8")
    unzipped = tmp_path / "plain.jsonl.gz"
    unzipped.write_text("{}", encoding="utf-8")
    for name, path, complaint in (
        ("gsm8k", short, "holds 1 prompts of gsm8k, 2 are needed"),
        ("gsm8k", other, "record 1: no record of gsm8k"),
        ("gsm8k", broken, "no readable JSON"),
        ("gsm8k", unzipped, "no readable JSON"),
        ("gsm8k", tmp_path / "none.jsonl", "is none"),
        ("squad", short, "data set must be one of"),
    ):
        with pytest.raises(C2TError, match=complaint):
            datasets.load(name, path, 2)


@pytest.mark.parametrize(
    ("name", "record", "prompt"),
    [
        ("mt-bench", {"prompt": ["Write.", "Again."], "prompt_id": 1}, "Write."),
        ("natural-questions", {"question": {"text": "who wrote it", "tokens": ["who"]}}, "who wrote it"),
        ("gsm8k", {"question": "Two and two?", "answer": "4"}, "Two and two?"),
    ],
)
def test_a_set_by_its_hub_id_is_given_to_the_library(
    name: str, record: dict[str, Any], prompt: str, monkeypatch: pytest.MonkeyPatch
):
    """Only so many records are taken as prompts are wanted."""
    asked: list[tuple[str, str | None, str, bool]] = []

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        asked.append((path, config, split, streaming))
        return itertools.repeat(record)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert datasets.load(name, datasets.source_of("hub:some/set:main"), 2) == [prompt] * 2
    assert asked == [("some/set", "main", "test", True)]


def test_what_the_library_cannot_read_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*_: object, **__: object) -> None:
        raise FileNotFoundError("no such set\nlook elsewhere")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(C2TError, match=r"hub:some/set, split dev, cannot be read: no such set$"):
        datasets.load("gsm8k", datasets.source_of("hub:some/set::dev"), 1)


def test_a_hub_id_without_the_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(C2TError, match="hub:some/set: this takes the library `datasets`"):
        datasets.load("gsm8k", datasets.source_of("hub:some/set"), 1)


@pytest.mark.parametrize("text", ["hub:", "hub:a:b:c:d"])
def test_what_is_no_hub_id_is_refused(text: str):
    with pytest.raises(C2TError, match="expected"):
        datasets.source_of(text)


def test_all_else_is_a_path():
    assert datasets.source_of("some/set") == Path("some/set")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow_says_what_to_do(tmp_path: Path):
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    with pytest.raises(C2TError, match="takes pyarrow"):
        datasets.load("speed-bench", tmp_path / "test.parquet", 1)


def test_prompts_that_speed_bench_only_points_to_are_refused(tmp_path: Path):
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    path = write(tmp_path / "qualitative.jsonl", [{"turns": [text]}])
    with pytest.raises(C2TError, match=r"run its prepare\.py"):
        datasets.load("speed-bench", path, 1)


def test_a_set_that_is_made_by_a_script_is_one_line(monkeypatch: pytest.MonkeyPatch):
    class Library:
        @staticmethod
        def load_dataset(*_: object, **__: object) -> None:
            raise RuntimeError("Dataset scripts are no longer supported\nmore")

    monkeypatch.setitem(sys.modules, "datasets", Library)
    with pytest.raises(C2TError, match=r"cannot be read: Dataset scripts are no longer supported$"):
        datasets.load("gsm8k", datasets.source_of("hub:some/set"), 1)


def test_fewer_will_do_where_that_is_said(tmp_path: Path):
    path = write(tmp_path / "question.jsonl", [{"turns": ["a"]}, {"turns": ["b"]}])
    assert datasets.load("mt-bench", path, 5, least=2) == ["a", "b"]
    with pytest.raises(C2TError, match="holds 2 prompts of mt-bench, 3 are needed"):
        datasets.load("mt-bench", path, 5, least=3)
