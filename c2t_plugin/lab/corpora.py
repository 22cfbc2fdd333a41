"""Prompts by kind of text, for judging a classifier on texts unlike those it was fitted on.

Docstrings and tests come from files of the standard library that no model of the pair was trained on; arithmetic and
dialogue are written from a seed. So every machine has all of them, given the same Python.
"""

from __future__ import annotations

import ast
import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TypeVar

from tokenizers import Tokenizer

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.corpus import SourceFile, is_usable, standard_library
from c2t_plugin.lab.pair_files import load_tokenizer
from c2t_plugin.lab.texts import PROMPT_TOKENS, Prompt, distinct, held_out_paths, held_out_prompts, training_prompts

Turn = TypeVar("Turn")
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})

NAMES = ("Ada", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "eggs", "letters", "pencils", "stamps", "tickets")
TASKS = (
    "bake a loaf of bread", "clean a bicycle chain", "grow tomatoes on a balcony", "learn the names of the stars",
    "mend a torn sleeve", "pack for a week in the hills", "plan a birthday dinner", "remember a long list of words",
    "repair a dripping tap", "start a small library",
)  # fmt: skip
FIRST = ("make a list of what you need", "look at what you have", "ask somebody who has done it", "set aside an hour")
THEN = ("begin with the easiest part", "take your time", "check each step before the next", "put everything in order")
WORRIES = ("it rains", "I have no tools", "there is very little time", "it goes wrong the first time", "I work alone")
ADVICE = ("start again on another day", "borrow what is missing", "do only half of it", "keep it as simple as you can")
THANKS = (
    "Thank you, that helps.",
    "I see. That sounds possible.",
    "Good, I will try that.",
    "That is more than I asked.",
)


def docstring_prompts(pair: Path, count: int, seed: int) -> list[Prompt]:
    """Prompts from the docstrings of the held-out files, without code; at least count of them, else C2TError."""
    files = [SourceFile(source.path, "\n\n".join(_docstrings(source.text))) for source in _held_out_files(pair)]
    return _from_files(pair, files, count, seed, "docstrings")


def test_prompts(pair: Path, count: int, seed: int) -> list[Prompt]:
    """Prompts from the held-out files in the standard library's test folders; at least count of them, else C2TError."""
    files = [source for source in _held_out_files(pair) if TEST_FOLDERS.intersection(PurePosixPath(source.path).parts)]
    if not any(source.path.startswith("test/") for source in files):
        raise C2TError("this Python has no test package (some systems ship it apart); install it or take other prompts")
    return _from_files(pair, files, count, seed, "tests")


# pytest would take the function for a test wherever it is imported
test_prompts.__test__ = False  # type: ignore[attr-defined]


def arithmetic_prompts(pair: Path, count: int, seed: int) -> list[Prompt]:
    """Prompts of questions with right answers, at least count of them."""
    return _written(load_tokenizer(pair), count, f"arithmetic {seed}", arithmetic, "".join)


def dialogue_prompts(pair: Path, count: int, seed: int) -> list[Prompt]:
    """Prompts of a user's and an assistant's turns through the target's chat template, at least count of them.

    C2TError if the target has no chat template.
    """
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(pair / "target")
    if template.chat_template is None:
        raise C2TError(f"the tokenizer of {pair / 'target'} has no chat template; take other prompts than dialogue")

    def render(turns: Sequence[Mapping[str, str]]) -> str:
        return str(template.apply_chat_template([dict(turn) for turn in turns], tokenize=False))

    return _written(load_tokenizer(pair), count, f"dialogue {seed}", dialogue, render)


def file_prompts(pair: Path, path: Path) -> list[Prompt]:
    """Prompts of a file of JSON lines, in its order: {"text": ..., "source": ...}, whole texts in the target's tokens.

    source: what the text was cut from, a document for example; without it each line is its own. C2TError for a line
    that is none of these, and for a text of less than two tokens.
    """
    if not path.is_file():
        raise C2TError(f"prompt file not found: {path}; it holds a JSON object with a `text` per line")
    tokenizer, prompts = load_tokenizer(pair), []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise C2TError(f"{path} is no text in UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            ids = tokenizer.encode(entry["text"]).ids
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise C2TError(f"{path}, line {number}: a JSON object with a `text` is expected ({error})") from error
        if len(ids) < 2:
            raise C2TError(f"{path}, line {number}: the text has {len(ids)} tokens, at least 2 are needed")
        prompts.append(Prompt(ids, str(entry.get("source", f"line {number}"))))
    return distinct(prompts)


SOURCES: Mapping[str, Callable[[Path, int, int], list[Prompt]]] = MappingProxyType(
    {
        "train": training_prompts,
        "held-out": held_out_prompts,
        "docstrings": docstring_prompts,
        "tests": test_prompts,
        "arithmetic": arithmetic_prompts,
        "dialogue": dialogue_prompts,
    }
)


def arithmetic(rng: random.Random) -> Iterator[str]:
    """Questions and their answers, two lines each, without end."""
    while True:
        a, b = sorted((rng.randint(2, 10 ** rng.randint(1, 3)) for _ in range(2)), reverse=True)
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        question, answer = rng.choice(
            (
                (f"What is {a} + {b}?", a + b),
                (f"What is {a} - {b}?", a - b),
                (f"What is {a} * {b}?", a * b),
                (f"{name} has {a} {thing} and gets {b} more. How many {thing} are there now?", a + b),
                (f"{name} has {a} {thing} and gives {b} away. How many {thing} are left?", a - b),
                (f"Each of {b} boxes holds {a} {thing}. How many {thing} are there?", a * b),
            )
        )
        yield f"Q: {question}\nA: {answer}\n"


def dialogue(rng: random.Random) -> Iterator[Mapping[str, str]]:
    """Messages of a chat, user and assistant in turn, without end."""
    while True:
        name, task = rng.choice(NAMES), rng.choice(TASKS)
        turns = (
            f"{name} wants to {task}. How would you begin?",
            f"To {task}, first {rng.choice(FIRST)}, and then {rng.choice(THEN)}.",
            f"And what if {rng.choice(WORRIES)}?",
            f"Then {rng.choice(ADVICE)}. {name} can still {task} later.",
            rng.choice(THANKS),
            f"You are welcome. Tell {name} to {rng.choice(THEN)}.",
        )
        for place, content in enumerate(turns):
            yield {"role": ("user", "assistant")[place % 2], "content": content}


def _written(
    tokenizer: Tokenizer,
    count: int,
    seed: str,
    write: Callable[[random.Random], Iterator[Turn]],
    render: Callable[[Sequence[Turn]], str],
) -> list[Prompt]:
    """Prompt i depends on the seed and i only. Twice as many as asked for: some texts may end early."""
    prompts = []
    for number in range(2 * count + 4):
        rng = random.Random(f"{seed} {number}")
        length, turns = rng.randint(*PROMPT_TOKENS), write(rng)
        so_far: list[Turn] = []
        ids: list[int] = []
        while len(ids) < length:
            so_far.append(next(turns))
            ids = tokenizer.encode(render(so_far)).ids
        prompts.append(Prompt(ids[:length], f"{seed} {number}"))
    return distinct(prompts)


def _held_out_files(pair: Path) -> Iterator[SourceFile]:
    for path in sorted(held_out_paths(pair)):
        file = standard_library() / path
        # another Python may lack some
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if is_usable(text):
            yield SourceFile(path, text)


def _docstrings(text: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError):
        # the library's own tests hold broken sources
        return
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from filter(None, [ast.get_docstring(node)])


def _from_files(pair: Path, files: Sequence[SourceFile], count: int, seed: int, kind: str) -> list[Prompt]:
    """All prompts that the files give, in random order, but each file's next one before any file's one after that."""
    tokenizer, rng = load_tokenizer(pair), random.Random(f"{kind} {seed}")
    per_file = [[Prompt(ids, source.path) for ids in _cut(tokenizer, source.text, rng)] for source in files]
    for prompts in per_file:
        rng.shuffle(prompts)
    rng.shuffle(per_file)
    found = distinct(filter(None, chain.from_iterable(zip_longest(*per_file))))
    if len(found) < count:
        raise C2TError(f"{count} prompts are needed, the held-out {kind} give {len(found)}; ask for fewer trees")
    return found


def _cut(tokenizer: Tokenizer, text: str, rng: random.Random) -> Iterator[list[int]]:
    """Prompts one after the other, each from a line start, without overlap."""
    length, head = rng.randint(*PROMPT_TOKENS), ""
    for line in text.splitlines(keepends=True):
        # no prompt starts with an empty line
        head += line if head or line.strip() else ""
        ids = tokenizer.encode(head).ids
        if len(ids) >= length:
            yield ids[:length]
            length, head = rng.randint(*PROMPT_TOKENS), ""
