"""Texts that chat prompts are about: Debian's documentation packages, unpacked, and the standard library.

A source is one document, one word of WordNet or one country. Every source belongs to one part: the packages in FROZEN
to the frozen part, of all others one in DEVELOPMENT_ONE_IN to development, by a hash of its name, the rest to training.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import html
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# versions as Debian 12 has them; `apt-get download` fetches the current ones
PACKAGES = {
    "dict-wn": "1:3.0",
    "python3.11-doc": "3.11.2",
    "postgresql-doc-15": "15",
    "manpages": "6.03",
    "manpages-dev": "6.03",
    "git-doc": "2.39",
    "perl-doc": "5.36",
    "debian-policy": "4.6",
    "developers-reference": "12",
    "sqlite3-doc": "3.40",
    "miscfiles": "1.5",
}
FROZEN = frozenset({"sqlite3-doc", "miscfiles", "stdlib-email", "stdlib-asyncio", "stdlib-xml"})
DEVELOPMENT_ONE_IN = 20
# whose licences let short extracts be shipped with a project under another licence
SHIPPABLE = frozenset({"dict-wn", "python3.11-doc", "postgresql-doc-15"}) | FROZEN

MIN_PASSAGE, MAX_PASSAGE = 90, 480
MIN_CODE, MAX_CODE = 80, 420
# how often WordNet must use a word for it to be a topic
COMMON_WORD = 20


@dataclass(frozen=True, order=True)
class Passage:
    """source: name of the document. kind: prose, code, topic or task. text: the passage. about: what it is about."""

    source: str
    kind: str
    text: str
    about: str = ""

    @property
    def part(self) -> str:
        """train, development or frozen."""
        if self.source.split(":")[0] in FROZEN:
            return "frozen"
        return "development" if digest(self.source) % DEVELOPMENT_ONE_IN == 0 else "train"

    @property
    def shippable(self) -> bool:
        """Whether prompts with this passage may lie in the repository."""
        package = self.source.split(":")[0]
        return package in SHIPPABLE or package.startswith("stdlib")


def digest(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def read_passages(root: Path) -> list[Passage]:
    """All passages of the packages unpacked under root/NAME and of the standard library, sorted, no text twice."""
    found = [passage for name in PACKAGES if (root / name).is_dir() for passage in READERS[name](name, root / name)]
    found += stdlib_passages(Path(sysconfig.get_paths()["stdlib"]))
    first = {passage.text: passage for passage in sorted(found, reverse=True)}
    return sorted(first.values())


def read_text(path: Path) -> str:
    """A document's text, unpacked if its name ends in .gz or .dz; undecodable bytes become U+FFFD."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    return data.decode("utf-8", "replace")


def documents(pattern: str, plain: Callable[[str], str]) -> Callable[[str, Path], Iterator[Passage]]:
    """A reader of prose: plain(text) leaves paragraphs between empty lines."""

    def read(name: str, root: Path) -> Iterator[Passage]:
        for path in sorted(root.rglob(pattern)):
            if path.is_file():
                for block in re.split(r"\n\s*\n", plain(read_text(path))):
                    text = " ".join(block.split())
                    if is_prose(text):
                        yield Passage(f"{name}:{path.relative_to(root).as_posix()}", "prose", text)

    return read


def is_prose(text: str) -> bool:
    """Whether a paragraph reads as sentences: of some length, ended, mostly letters."""
    letters = sum(c.isalpha() or c == " " for c in text)
    ended = text.endswith((".", "?", "!")) and text[0].isupper()
    return MIN_PASSAGE <= len(text) <= MAX_PASSAGE and ended and letters > 0.9 * len(text) and "\ufffd" not in text


def plain_rst(text: str) -> str:
    """reStructuredText and AsciiDoc without roles and quotes; blocks that are indented or directives become short."""
    text = re.sub(r":[\w:]+:`~?([^`<]+?)(?:\s*<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"linkgit:([\w-]+)\[\d\]", r"\1", text)
    text = re.sub(r"(?m)^([ \t]+\S|\.\. |:).*$", "", text)
    return re.sub(r"[`*]+|__?(?=\s)", "", text)


def plain_man(text: str) -> str:
    """A manual page without macros."""
    text = re.sub(r"(?m)^\.(?:B|I|BR|IR|RB|RI|BI|IB) (.*)$", lambda m: re.sub(r'[" ]', " ", m[1]), text)
    text = re.sub(r"(?m)^[.'].*$", "\n", text)
    text = re.sub(r"\\f[BIRP]|\\&|\\,|\\/|\\\^", "", text).replace("\\-", "-")
    return re.sub(r" ([.,;)])", r"\1", re.sub(r"\\\(\w\w|\\\[\w+\]|\\.", "", text))


def plain_pod(text: str) -> str:
    """Perl's documentation without commands, verbatim blocks and formatting codes."""
    text = re.sub(r"(?m)^[= \t].*$", "", text)
    return re.sub(r"[BCIFLSEX]<+\s*([^<>|]*?\|)?([^<>]*?)\s*>+", r"\2", text)


def plain_html(text: str) -> str:
    """Paragraphs of an HTML page."""
    text = re.sub(r"(?is)<(script|style|pre|head|blockquote|table|ul|svg|div id)\b.*?</\1>", "", text)
    paragraphs = re.findall(r"(?is)<p>(.*?)(?=</?p\b|<h\d|</?div)", text)
    return "\n\n".join(html.unescape(re.sub(r"<[^>]*>", "", p)).strip() for p in paragraphs)


def wordnet(name: str, root: Path) -> Iterator[Passage]:
    """Common nouns of WordNet with the gloss of their first sense."""
    text = read_text(next(root.rglob("wn.dict.dz")))
    entries = re.findall(r"(?m)^([a-z]+(?: [a-z]+)?)\n    n 1: ((?:.*\n)(?: {6,}.*\n)*)", text)
    used = Counter(re.findall(r"[a-z]+", text.lower()))
    for word, gloss in entries:
        meaning = " ".join(re.sub(r"\[syn:.*", "", gloss, flags=re.S).split()).split(";")[0].strip()
        if all(used[part] >= COMMON_WORD for part in word.split()) and len(word) > 3 and len(meaning) < 200:
            yield Passage(f"{name}:{word}", "topic", word, meaning)


def facts(name: str, root: Path) -> Iterator[Passage]:
    """Countries with their capitals, languages and months' stones from miscfiles."""
    lists = {path.name: read_text(path).splitlines() for path in sorted(root.rglob("*.gz")) if "misc" in str(path)}
    for line in lists["countries.gz"]:
        if not line.startswith("#") and line.count(":") == 4 and line.split(":")[4]:
            country, capital = line.split(":")[3:]
            yield Passage(f"{name}:{country}", "topic", country, f"a country whose capital is {capital}")
    for line in lists["languages.gz"]:
        if re.fullmatch(r"[a-z]{2}:\w+", line):
            yield Passage(f"{name}:{line}", "topic", f"the {line[3:]} language", "a language with its own history")
    for line in lists["birthtoken.gz"]:
        if re.fullmatch(r"\w+:\w+:[\w ]+", line):
            month, stone, flower = line.split(":")
            yield Passage(f"{name}:{month}", "topic", stone.lower(), f"the birthstone of {month}")
            yield Passage(f"{name}:{month}", "topic", f"the {flower.lower()}", f"the birth flower of {month}")


READERS: dict[str, Callable[[str, Path], Iterator[Passage]]] = {
    "dict-wn": wordnet,
    "python3.11-doc": documents("*.rst.txt", plain_rst),
    "postgresql-doc-15": documents("*.html", plain_html),
    "manpages": documents("man[1-8]/*.gz", plain_man),
    "manpages-dev": documents("man[1-8]/*.gz", plain_man),
    "git-doc": documents("*.txt", plain_rst),
    "perl-doc": documents("*.pod", plain_pod),
    "debian-policy": documents("*.rst.txt", plain_rst),
    "developers-reference": documents("*.rst.txt", plain_rst),
    "sqlite3-doc": documents("*.html", plain_html),
    "miscfiles": facts,
}


def stdlib_passages(root: Path) -> Iterator[Passage]:
    """Short functions (code) and what their docstrings say they do (task); a package of its own has its own name."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "test", "tests", "__pycache__", "encodings", "idlelib"} & set(relative.parts):
            continue
        group = f"stdlib-{relative.parts[0]}" if len(relative.parts) > 1 else "stdlib"
        yield from functions(f"{group}:{relative.as_posix()}", path)


def functions(source: str, path: Path) -> Iterator[Passage]:
    """The functions of one file."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            code = ast.unparse(node)
            if MIN_CODE <= len(code) <= MAX_CODE:
                yield Passage(source, "code", code, node.name)
            said = (ast.get_docstring(node) or "").split("\n\n")[0]
            task = " ".join(said.split())
            if 25 <= len(task) <= 200 and task[0].isupper() and task.endswith("."):
                yield Passage(source, "task", task, node.name)
