"""Corpus, tokenizer and the prompts cut from held-out files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.pairs.toy.tokenizer import END, END_ID, encode_files, save_tokenizer, train_tokenizer
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.corpus import SourceFile, cut_prompts, is_held_out, is_usable, read_corpus

FUNCTION = "def area_{0}(width, height):\n    '''Area of rectangle {0}.'''\n    return width * height\n\n\n"


def source(number: int, lines: int = 12) -> str:
    return "".join(FUNCTION.format(chr(97 + (number + i) % 26) * (1 + number % 5)) for i in range(lines))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(60):
        package = tmp_path / f"package{number % 4}"
        package.mkdir(exist_ok=True)
        (package / f"module{number}.py").write_text(source(number), encoding="utf-8")
    return tmp_path


def test_split_is_by_whole_files_and_disjoint(library: Path) -> None:
    corpus = read_corpus(library, one_in=4)
    train, held = ({s.path for s in half} for half in (corpus.train, corpus.held_out))
    assert train and held and not train & held
    assert not {s.text for s in corpus.train} & {s.text for s in corpus.held_out}
    assert all(is_held_out(path, 4) for path in held) and not any(is_held_out(path, 4) for path in train)


def test_split_of_a_file_does_not_depend_on_the_others(library: Path) -> None:
    before = {s.path for s in read_corpus(library, one_in=4).held_out}
    gone = sorted((library / "package0").glob("*.py"))
    for path in gone:
        path.unlink()
    after = {s.path for s in read_corpus(library, one_in=4).held_out}
    assert after == {path for path in before if not path.startswith("package0/")}


@pytest.mark.parametrize("folder", ["encodings", "site-packages", "package1/__pycache__"])
def test_excluded_folders_are_not_read(library: Path, folder: str) -> None:
    (library / folder).mkdir(parents=True, exist_ok=True)
    (library / folder / "other.py").write_text(source(99), encoding="utf-8")
    corpus = read_corpus(library, one_in=4)
    assert not [s.path for s in (*corpus.train, *corpus.held_out) if "other.py" in s.path]


def test_a_duplicate_is_read_once(library: Path) -> None:
    (library / "package1" / "copy.py").write_text((library / "package1" / "module1.py").read_text(), encoding="utf-8")
    corpus = read_corpus(library, one_in=4)
    texts = [s.text for s in (*corpus.train, *corpus.held_out)]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize(
    ("text", "usable"),
    [("x = 1\n", False), (source(1), True), ("0x1234, 0x5678,\n" * 100, False), (source(1) + "é" * 100, False)],
    ids=["short", "code", "digits", "other script"],
)
def test_usable_texts(text: str, usable: bool) -> None:
    assert is_usable(text) is usable


def test_a_changed_file_changes_the_digest(library: Path) -> None:
    before = read_corpus(library, one_in=4).digest()
    path = library / "package2" / "module2.py"
    path.write_text(path.read_text() + "# more\n", encoding="utf-8")
    assert read_corpus(library, one_in=4).digest() != before


def test_an_empty_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(C2TError, match="0 files for training"):
        read_corpus(tmp_path, one_in=4)


@pytest.mark.parametrize("text", [source(3), "\ttabs\r\n  é € 🐍\x00", "", END, " leading and trailing "])
def test_tokenizer_gives_the_text_back(text: str) -> None:
    tokenizer = train_tokenizer([source(i) for i in range(5)], 300)
    assert tokenizer.token_to_id(END) == END_ID
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_files_are_separated_by_the_end_token() -> None:
    tokenizer = train_tokenizer([source(i) for i in range(5)], 300)
    stream = encode_files(tokenizer, [SourceFile("a.py", "def a():"), SourceFile("b.py", "def b():")])
    assert stream.dtype == np.int16
    assert (stream == END_ID).sum() == 2 and stream[-1] == END_ID


def test_prompts_encode_to_their_ids() -> None:
    files = [SourceFile(f"{i}.py", source(i)) for i in range(6)]
    tokenizer = train_tokenizer([s.text for s in files], 400)
    prompts = cut_prompts(tokenizer, files, 12, 16, 32, seed=1)
    assert len(prompts) == 12
    assert all(16 <= len(p["ids"]) <= 32 and tokenizer.encode(p["text"]).ids == p["ids"] for p in prompts)
    assert {p["file"] for p in prompts} == {s.path for s in files}
    assert prompts == cut_prompts(tokenizer, files, 12, 16, 32, seed=1)


def test_saved_tokenizer_serves_chat(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([source(i) for i in range(5)], 300)
    save_tokenizer(tokenizer, tmp_path)
    served = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (served.bos_token_id, served.eos_token_id, served.pad_token_id) == (END_ID, END_ID, END_ID)
    messages = [{"role": "system", "content": "# squares"}, {"role": "user", "content": "def square(x):"}]
    text = served.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# squares\ndef square(x):\n"
    assert served(text)["input_ids"] == tokenizer.encode(text).ids
