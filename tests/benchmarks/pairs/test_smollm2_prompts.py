"""Sources, the split between parts, and prompts made from them."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks.pairs.smollm2 import sources
from benchmarks.pairs.smollm2.commands import PROMPTS
from benchmarks.pairs.smollm2.prompts import KINDS, build_prompts, content_hash, read_split, write_split
from benchmarks.pairs.smollm2.sources import FROZEN, Passage
from c2t_plugin.errors import C2TError


def passages():
    found = []
    for i in range(60):
        for name in ("dict-wn", "python3.11-doc", "sqlite3-doc"):
            found += [Passage(f"{name}:{i}", kind, f"{name} {kind} {i}", "a thing") for kind in ("prose", "topic")]
        for name in ("stdlib", "stdlib-email"):
            found += [Passage(f"{name}:{i}", kind, f"{name} {kind} {i}", "name") for kind in ("code", "task")]
    return found


def test_every_source_belongs_to_one_part():
    parts = {}
    for passage in passages():
        parts.setdefault(passage.source, set()).add(passage.part)
    assert all(len(found) == 1 for found in parts.values())
    assert {part for found in parts.values() for part in found} == {"train", "development", "frozen"}
    assert {source.split(":")[0] for source, part in parts.items() if part == {"frozen"}} == {
        "sqlite3-doc",
        "stdlib-email",
    }


def test_prompts_are_equal_for_equal_input_and_cover_all_kinds():
    first, again = (build_prompts(passages(), "train", 40) for _ in range(2))
    assert first == again != build_prompts(passages(), "train", 40, seed=1)
    assert [prompt["kind"] for prompt in first[:8]] == list(KINDS)
    assert all(prompt["messages"][-1]["role"] == "user" for prompt in first)
    assert {len(prompt["messages"]) for prompt in first if prompt["kind"] == "dialogue"} <= {3, 5}


def test_prompts_of_a_part_come_from_its_sources():
    for part in ("train", "development", "frozen"):
        chosen = build_prompts(passages(), part, 80)
        assert {prompt["source"].split(":")[0] in FROZEN for prompt in chosen} == {part == "frozen"}
        own = {passage.source for passage in passages() if passage.part == part}
        assert {prompt["source"] for prompt in chosen} <= own


def test_a_part_without_passages_is_refused():
    with pytest.raises(C2TError, match="code"):
        build_prompts([p for p in passages() if p.kind != "code"], "train", 8)


def test_a_changed_file_is_refused(tmp_path):
    path = tmp_path / "prompts.json"
    prompts = build_prompts(passages(), "development", 16)
    assert write_split(path, prompts) == content_hash(prompts)
    assert read_split(path) == prompts
    path.write_text(path.read_text().replace('"role": "user"', '"role": "system"', 1))
    with pytest.raises(C2TError, match="hash"):
        read_split(path)


@pytest.mark.parametrize("part", ["development", "frozen"])
def test_shipped_prompts_are_whole_and_of_their_part(part):
    prompts = read_split(PROMPTS / f"{part}.json")
    assert len(prompts) == 240
    assert {prompt["part"] for prompt in prompts} == {part}
    assert {prompt["source"].split(":")[0] in FROZEN for prompt in prompts} == {part == "frozen"}
    assert all(Passage(prompt["source"], "prose", "").part == part for prompt in prompts)
    assert all(Passage(prompt["source"], "prose", "").shippable for prompt in prompts)


def test_shipped_parts_share_no_prompt():
    ids = [{prompt["id"] for prompt in read_split(PROMPTS / f"{part}.json")} for part in ("development", "frozen")]
    assert not ids[0] & ids[1]


def test_rst_loses_roles_and_directives():
    text = sources.plain_rst(
        "Use :func:`json.dumps <x>` and ``None``.\n\n.. note::\n   inside\n\n    >>> code\n\nSee `it`_ now."
    )
    assert [" ".join(block.split()) for block in text.split("\n\n") if block.strip()] == [
        "Use json.dumps and None.",
        "See it now.",
    ]


def test_a_manual_page_loses_macros():
    page = '.\\" note\n.SH NAME\nThe\n.BR accept ()\ncall\\-like \\fIargument\\fP.\n.PP\nNext.\n'
    assert [" ".join(b.split()) for b in sources.plain_man(page).split("\n\n") if b.strip()] == [
        "The accept () call-like argument.",
        "Next.",
    ]


def test_html_keeps_paragraphs():
    assert sources.plain_html("<h1>No</h1><p>One <b>two</b> &amp; three.<pre>code</pre><p>Four.</p>") == (
        "One two & three.\n\nFour."
    )


def test_wordnet_gives_common_nouns_with_their_gloss(tmp_path):
    common = "cat " * sources.COMMON_WORD
    entries = (
        'cat\n    n 1: feline mammal; "she has a cat" [syn: {cat}]\n    2: a spiteful woman\n'
        "rarity\n    n 1: something rare\n"
    )
    (tmp_path / "wn.dict.dz").write_bytes(gzip.compress(f"{entries}zzz\n    v 1: {common}\n".encode()))
    assert list(sources.wordnet("dict-wn", tmp_path)) == []
    renamed = entries.replace("cat\n", "cats\n") + "zzz\n    v 1: " + "cats " * sources.COMMON_WORD + "\n"
    (tmp_path / "wn.dict.dz").write_bytes(gzip.compress(renamed.encode()))
    assert list(sources.wordnet("dict-wn", tmp_path)) == [Passage("dict-wn:cats", "topic", "cats", "feline mammal")]


def test_the_standard_library_gives_short_functions_and_tasks(tmp_path):
    (tmp_path / "email").mkdir()
    body = 'def add(left, right):\n    """Return the sum of both of its arguments."""\n    return left + right\n'
    for name in ("one.py", "email/two.py"):
        (tmp_path / name).write_text(body + "\ndef long():\n" + "    x = 1\n" * 200)
    found = list(sources.stdlib_passages(tmp_path))
    assert [(p.source, p.kind, p.part == "frozen") for p in found] == [
        ("stdlib-email:email/two.py", "code", True),
        ("stdlib-email:email/two.py", "task", True),
        ("stdlib:one.py", "code", False),
        ("stdlib:one.py", "task", False),
    ]
    assert found[3].text == "Return the sum of both of its arguments."


def test_frozen_packages_are_known():
    assert {name for name in FROZEN if not name.startswith("stdlib-")} <= set(sources.PACKAGES)
    assert json.loads((PROMPTS / "frozen.json").read_text())["sha256"]
