"""The documentation points at things that exist, and lists every variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


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
