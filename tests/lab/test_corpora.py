"""Prompts by kind of text: equal on every run, of the right length, and from nothing that a model was trained on."""

from __future__ import annotations

import json
import random
import re
from itertools import islice

import pytest

from c2t_plugin.errors import C2TError
from c2t_plugin.lab import corpora as module
from c2t_plugin.lab.collect import collect
from c2t_plugin.lab.corpora import SOURCES, arithmetic, dialogue
from c2t_plugin.lab.pair_files import load_tokenizer
from c2t_plugin.lab.plans import PROMPT_SOURCES, CollectPlan, TreeShape

KINDS = ("docstrings", "tests", "arithmetic", "dialogue")

MODULE = '''"""{word} module, line one.

{word} module, line three.
"""

class Example:
    """{word} class, told at some length, because a prompt is long."""

    def method(self):
        """{word} method.

        Indented, and told at some length as well.
        """
        return "{word} code"


def function():
    "{word} function, in single quotes, with a few more words."


def silent():
    return "{word} code"
'''


@pytest.fixture
def library(tiny_pair, tmp_path, monkeypatch):
    """A small standard library beside the pair: three held-out files, two others, and one that is no Python."""
    held_out = json.loads((tiny_pair / "held_out_files.json").read_text(encoding="utf-8"))
    listed = [*held_out, "test/test_one.py", "deep/tests/two.py", "test/broken.py", "not_there.py"]
    monkeypatch.setattr(module, "held_out_paths", lambda pair: frozenset(listed))
    monkeypatch.setattr(module, "standard_library", lambda: tmp_path)
    for name in (*listed[:-1], "trained.py", "test/trained.py"):
        word = "broken" if "broken" in name else "trained" if "trained" in name else "test" if "/" in name else "plain"
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(MODULE.format(word=f"{word} {name} {i}") for i in range(3))
        path.write_text("def (\n" + text if word == "broken" else text, encoding="utf-8")
    return tiny_pair


def texts_of(pair, kind: str, count: int = 4, seed: int = 0) -> list[str]:
    return [load_tokenizer(pair).decode(each.token_ids) for each in SOURCES[kind](pair, count, seed)]


def test_every_source_of_the_plan_is_there() -> None:
    assert tuple(SOURCES) == PROMPT_SOURCES and set(KINDS) < set(SOURCES)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_distinct_long_enough_and_the_same_again(library, kind) -> None:
    prompts = SOURCES[kind](library, 4, 3)
    assert len(prompts) >= 4
    assert len({tuple(each.token_ids) for each in prompts}) == len(prompts)
    assert all(64 <= len(each.token_ids) <= 128 for each in prompts)
    assert len({len(each.token_ids) for each in prompts}) > 1
    assert prompts == SOURCES[kind](library, 4, 3) != SOURCES[kind](library, 4, 4)


def test_docstrings_are_taken_without_their_code(library) -> None:
    texts = texts_of(library, "docstrings")
    together = "".join(texts)
    assert not any(word in together for word in ("trained", "code", "def ", '"', "broken"))
    assert all(word in together for word in ("module", "class", "method", "function", "plain", "test"))
    assert not any(text.startswith("\n") for text in texts)


def test_tests_are_held_out_files_of_test_folders(library) -> None:
    texts = texts_of(library, "tests")
    together = "".join(texts)
    assert "trained" not in together and "plain" not in together
    assert "test_one.py" in together and "tests/two.py" in together
    assert "broken" in together, "what no parser takes is still text"


def test_files_take_turns(library) -> None:
    firsts = [re.search(r"(test_one|two|broken)\.py", text) for text in texts_of(library, "tests")[:3]]
    assert {found.group(1) for found in firsts if found} == {"test_one", "two", "broken"}


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_prompt_names_the_file_it_is_from(library, kind) -> None:
    tokenizer, prompts = load_tokenizer(library), SOURCES[kind](library, 4, 0)
    # every line of the files says which file it is in
    assert all(each.source in tokenizer.decode(each.token_ids) for each in prompts)
    assert len({each.source for each in prompts}) < len(prompts)


@pytest.mark.parametrize("kind", KINDS[2:])
def test_a_written_prompt_is_a_source_of_its_own(library, kind) -> None:
    prompts = SOURCES[kind](library, 4, 0)
    assert len({each.source for each in prompts}) == len(prompts)


def test_prompts_of_a_file_do_not_overlap(tiny_pair) -> None:
    tokenizer, at, found = load_tokenizer(tiny_pair), 0, 0
    text = "\n\n".join(f"line {number} of many, all of them different" for number in range(60))
    for ids in module._cut(tokenizer, text, random.Random(0)):
        prompt = tokenizer.decode(ids)
        at, found = text.index(prompt, at), found + 1
        assert at == 0 or text[at - 1] == "\n"
        assert prompt[0] != "\n"
        at += len(prompt)
    assert found > 5


@pytest.mark.parametrize(("kind", "message"), [("docstrings", "held-out docstrings"), ("tests", "held-out tests")])
def test_more_prompts_than_there_are_is_refused(library, kind, message) -> None:
    with pytest.raises(C2TError, match=f"1000 prompts are needed, the {message} give [0-9]+; ask for fewer trees"):
        SOURCES[kind](library, 1000, 0)


def test_a_python_without_tests_says_so(library, monkeypatch) -> None:
    monkeypatch.setattr(module, "held_out_paths", lambda pair: frozenset(["listed.py", "deep/tests/two.py"]))
    with pytest.raises(C2TError, match="no test package") as error:
        SOURCES["tests"](library, 1, 0)
    assert "\n" not in str(error.value)
    assert SOURCES["docstrings"](library, 1, 0)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_without_the_list_of_held_out_files_nothing_is_taken(tmp_path, kind) -> None:
    with pytest.raises(C2TError, match="held_out_files"):
        SOURCES[kind](tmp_path, 1, 0)


@pytest.mark.parametrize("kind", KINDS[2:])
def test_what_is_written_does_not_depend_on_how_much(library, kind) -> None:
    few, many = SOURCES[kind](library, 2, 5), SOURCES[kind](library, 9, 5)
    assert many[: len(few)] == few and len(many) > len(few)


def test_answers_are_right() -> None:
    signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "more": int.__add__, "away": int.__sub__}
    seen = set()
    for line in islice(arithmetic(random.Random(1)), 200):
        question, answer = line.removesuffix("\n").split("\n")
        a, b = (int(number) for number in re.findall(r"\d+", question))
        sign = next((sign for sign in signs if f" {sign}" in question), "*")
        seen.add(sign)
        assert answer == f"A: {signs[sign](a, b)}" and question.startswith("Q: ")
    assert seen == set(signs)


def test_the_generated_texts_stay_what_they_are() -> None:
    assert list(islice(arithmetic(random.Random(0)), 2)) == [
        "Q: Emma has 99 tickets and gets 7 more. How many tickets are there now?\nA: 106\n",
        "Q: What is 76 * 63?\nA: 4788\n",
    ]
    assert [turn["content"] for turn in islice(dialogue(random.Random(0)), 2)] == [
        "Grace wants to plan a birthday dinner. How would you begin?",
        "To plan a birthday dinner, first make a list of what you need, and then check each step before the next.",
    ]


def test_turns_alternate_and_go_through_the_chat_template(library, tmp_path) -> None:
    assert [turn["role"] for turn in islice(dialogue(random.Random(0)), 12)] == ["user", "assistant"] * 6
    plain = texts_of(library, "dialogue")[0]
    (tmp_path / "target").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (library / "target" / name).read_text(encoding="utf-8")
        (tmp_path / "target" / name).write_text(text, encoding="utf-8")
    path = tmp_path / "target" / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["chat_template"] = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    path.write_text(json.dumps(config), encoding="utf-8")
    marked = texts_of(tmp_path, "dialogue")[0]
    assert marked.startswith("<user>") and marked.removeprefix("<user>")[:20] == plain[:20]
    del config["chat_template"]
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(C2TError, match="no chat template"):
        texts_of(tmp_path, "dialogue")


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_names_its_kind(library, kind) -> None:
    plan = CollectPlan("draft", TreeShape(k=2, layers=2, top_m=20), trees=2, prompts=kind, new_tokens=2)
    assert collect(library, plan).header["prompts"] == kind
