"""The documentation points at things that exist, lists every variable, and can be read."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
# the same with its anchor, and links within a page
TARGET = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")
LONGEST_PARAGRAPH = 90
LONGEST_README = 90
LONGEST_FILE = 300
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
NO_PROSE = ("#", "<!--", "![")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def paragraphs(text: str) -> list[str]:
    """A page's prose, a list's items and a table's cells apart; no headings, pictures or code."""
    found: list[list[str]] = [[]]
    fenced = False
    for line in map(str.strip, text.splitlines()):
        fence = line.startswith("```")
        fenced ^= fence
        if fence or fenced or not line or line.startswith(NO_PROSE):
            found.append([])
        elif line.startswith("|"):
            found += [*([cell] for cell in line.split("|")), []]
        elif ITEM.match(line):
            found.append([line])
        else:
            found[-1].append(line)
    return [" ".join(lines) for lines in found if any(lines)]


def too_long(text: str) -> list[str]:
    return [each for each in paragraphs(text) if len(each.split()) > LONGEST_PARAGRAPH]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_paragraph_is_too_long(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


LONG, SHORT = "word " * (LONGEST_PARAGRAPH + 1), "word " * LONGEST_PARAGRAPH


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (LONG, 1),
        (f"- {LONG}", 1),
        (f"1. short\n   {LONG}", 1),
        (SHORT, 0),
        (f"{SHORT}\n\n{SHORT}", 0),
        (f"- {SHORT[5:]}\n- {SHORT[5:]}", 0),
        (f"```\n{LONG}\n```\n{SHORT}", 0),
        (f"# {LONG}", 0),
        (f"| short | {LONG} |", 1),
        (f"| {SHORT} | {SHORT} |\n{SHORT}", 0),
    ],
    ids=[
        *("prose", "item", "item of two lines", "at the limit", "two paragraphs", "two items", "code", "heading"),
        *("cell", "three cells"),
    ],
)
def test_what_is_too_long_is_found(text: str, count: int) -> None:
    assert len(too_long(text)) == count


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_README


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    names = set()
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"#+ (.*)", line)
        if heading:
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            name = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
            found[name] = found.get(name, -1) + 1
            names.add(name if not found[name] else f"{name}-{found[name]}")
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_resolve(page: Path) -> None:
    """mkdocs looks at docs/ alone, and at the README never."""
    found = TARGET.findall(page.read_text(encoding="utf-8"))
    targets = [(page.parent / name if name else page, anchor) for name, anchor in found]
    assert [f"{path.name}#{anchor}" for path, anchor in targets if anchor not in anchors(path)] == []


def test_a_dead_anchor_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A `b`, c\n\n## A b c\n\n```\n# no heading\n```\n", encoding="utf-8")
    assert anchors(tmp_path / "page.md") == {"a-b-c", "a-b-c-1"}


def test_every_page_is_in_the_index() -> None:
    listed = set(LINK.findall((ROOT / "docs/index.md").read_text(encoding="utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} == listed


def test_every_variable_is_documented() -> None:
    """envs.py spells out each name that it reads, in code or in the docstring of option()."""
    pattern = re.compile(r"\bC2T_[A-Z]+(?:_[A-Z]+)*\b")
    read = set(pattern.findall((ROOT / "c2t_plugin/envs.py").read_text(encoding="utf-8")))
    documented = set(pattern.findall((ROOT / "docs/environment.md").read_text(encoding="utf-8")))
    assert read
    assert read == documented


@pytest.mark.parametrize("target", ["demo", "test", "check", "report", "clean"])
def test_documented_commands_are_make_targets(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert f"make {target}" in makefile


def walks() -> dict[str, str]:
    """The first sentence under each question of docs/internals.md."""
    page = (ROOT / "docs/internals.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\*\*(.*\?)\*\*\n(.*?\.)(?=\s)", page, re.MULTILINE | re.DOTALL))


def source_of(name: str) -> Path:
    """A file of a walk; those of the SGLang adapter are named without their folders."""
    places = [ROOT / "c2t_plugin" / folder / name for folder in ("engines/sglang", ".")]
    return next((place for place in places if place.is_file()), places[0])


@pytest.mark.parametrize("question", ["classifier applied", "packed verification", "planner pick the depth"])
def test_a_walk_goes_through_three_files_that_have_what_it_names(question: str) -> None:
    (walk,) = [text for asked, text in walks().items() if question in asked]
    # in brackets: others that may stand in the same place
    named = re.findall(r"`([\w./]+)`", re.sub(r"\(.*?\)", "", walk))
    files = [name for name in named if name.endswith(".py")]
    assert 2 <= len(files) <= 3 and walk.count("→") == len(files) - 1
    sources = "\n".join(source_of(name).read_text(encoding="utf-8") for name in files)
    gone = [name for name in named if name not in files and not re.search(rf"\b{name.split('.')[-1]}\b", sources)]
    assert gone == []


# Folders whose files are named one by one.
BY_FILE = ("engines", "sglang", "vllm", "drafters", "verify")


def rooms() -> dict[str, set[str]]:
    """What each table of docs/internals.md names, by the folder below c2t_plugin/ that it is about."""
    page = (ROOT / "docs/internals.md").read_text(encoding="utf-8")
    tables = re.findall(r"^(?:## Rooms|Inside `([\w/]+)/`:)\n\n((?:\|.*\n)+)", page, re.MULTILINE)
    return {folder: set(re.findall(r"`([\w./]+)`", table)) for folder, table in tables}


def unnamed(path: PurePosixPath, tables: Mapping[str, set[str]]) -> bool:
    """Whether the table of a module's folder names neither the module nor a room within it that is named as a whole."""
    folder = next(each for each in map(str, path.parents) if each in tables or each == ".")
    named = tables["" if folder == "." else folder]
    whole = {f"{part}/" for part in path.parent.parts if part not in BY_FILE}
    return path.name != "__init__.py" and not ({path.name} | whole) & named


def test_every_module_has_its_room() -> None:
    package = ROOT / "c2t_plugin"
    modules = [PurePosixPath(path.relative_to(package)) for path in sorted(package.rglob("*.py"))]
    assert set(rooms()) == {"", "engines", "engines/sglang", "engines/vllm"}
    assert [str(path) for path in modules if unnamed(path, rooms())] == []


@pytest.mark.parametrize("path", ["new.py", "engines/new.py", "engines/vllm/ranks.py", "engines/sglang/verify/new.py"])
def test_a_module_without_a_room_is_seen(path: str) -> None:
    assert unnamed(PurePosixPath(path), rooms())


def test_the_recipe_of_a_feature_names_the_files_that_know_one() -> None:
    page = (ROOT / "docs/adding.md").read_text(encoding="utf-8")
    recipe = page.partition("## A feature")[2].partition("\n## ")[0]
    newest = re.findall(r'Feature\("(\w+)"', (ROOT / "kernels/c2t_kernels/network/features.py").read_text())[-1]
    sources = [path for folder in ("kernels", "c2t_plugin", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    know = {str(path.relative_to(ROOT)) for path in sources if f'"{newest}"' in path.read_text(encoding="utf-8")}
    named = {name for name in re.findall(r"`([\w/]+\.py)`", recipe) if not name.startswith("tests/") and "/" in name}
    assert len(know) > 1 and know - named == set()
    assert len(named) <= 6


def test_a_long_file_says_why_it_is_one() -> None:
    sources = [path for folder in ("kernels", "c2t_plugin", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sources}
    long = [name for name, text in texts.items() if len(text.splitlines()) > LONGEST_FILE]
    docstrings = {name: ast.get_docstring(ast.parse(texts[name])) or "" for name in long}
    assert [name for name, says in docstrings.items() if "one file" not in says.lower()] == []
