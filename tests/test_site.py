"""The documentation builds as a site, strictly: no dead link or anchor, no page outside the navigation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFIG, PAGES = ".mkdocs.yml", "docs"


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_site_builds(root: Path, tmp_path: Path) -> None:
    done = build(root / CONFIG, tmp_path)
    assert done.returncode == 0, done.stderr
    built = {path.parent.name for path in tmp_path.rglob("index.html")}
    assert {page.stem for page in (root / PAGES).glob("*.md")} - {"index"} <= built


@pytest.mark.parametrize(
    ("page", "text", "complaint"),
    [
        ("glossary.md", "\n[gone](nowhere.md)\n", "nowhere.md"),
        ("glossary.md", "\n[gone](method.md#no-such-heading)\n", "no-such-heading"),
        ("orphan.md", "# nobody links here\n", "orphan.md"),
    ],
    ids=["dead link", "dead anchor", "page outside the navigation"],
)
def test_a_planted_fault_stops_the_build(root: Path, tmp_path: Path, page: str, text: str, complaint: str) -> None:
    shutil.copytree(root / PAGES, tmp_path / PAGES)
    shutil.copy(root / CONFIG, tmp_path / CONFIG)
    with (tmp_path / PAGES / page).open("a", encoding="utf-8") as handle:
        handle.write(text)
    done = build(tmp_path / CONFIG, tmp_path / "out")
    assert done.returncode != 0
    assert complaint in done.stderr
