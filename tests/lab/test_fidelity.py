"""docs/fidelity.md: every line names tests that exist, and the lines that no other test pins."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from c2t_plugin.lab import printed
from c2t_plugin.lab.trees import node_count

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# lines of a table with a `test` column
LINES = [
    line
    for section in PAGE.split("\n## ")[1:]
    for line in section.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| what |", "| where |"))
]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip())
def test_a_line_names_tests_that_exist(line: str) -> None:
    assert len(line.split(" | ")) == 4
    named = NAMED.findall(line.split(" | ")[-1])
    assert named
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)]
    assert missing == []


def test_the_page_was_read() -> None:
    assert len(LINES) > 30
    assert PAGE.count("tests/") == len(NAMED.findall(PAGE))


def test_an_invented_test_is_seen() -> None:
    assert "test_that_nobody_wrote" not in names_in(Path(__file__))
    assert "test_an_invented_test_is_seen" in names_in(Path(__file__))
    assert "names_in" not in names_in(Path(__file__))


def test_two_columns_of_table_2_are_copies() -> None:
    """MT-bench and Alpaca, of the 70B target."""
    mt_bench, alpaca = 0, 3
    copies = [
        entry.name for entry in printed.V2_TABLE_2 if all(column[mt_bench] == column[alpaca] for column in entry[1:5])
    ]
    assert copies == ["L33 70B E2", "L33 70B E3"]


def test_the_papers_rows_include_the_roots() -> None:
    trees, rows = 8880, 8_977_680
    assert rows == trees * (node_count(10, 11) + 1)
    assert rows - trees == trees * node_count(10, 11) == 8_968_800
