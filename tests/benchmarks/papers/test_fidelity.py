"""docs/fidelity.md: every line names code and tests that exist; and the lines that no other test pins."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest

from benchmarks.papers import printed
from c2t_plugin.traces.forest import node_count

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CODE = re.compile(r"`((?:c2t_plugin|c2t_kernels|benchmarks)\.[\w.]+)`")
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
    assert len(line.split(" | ")) == 5
    named = NAMED.findall(line.split(" | ")[-1])
    assert named
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)]
    assert missing == []


@pytest.mark.parametrize("name", sorted(set(CODE.findall(PAGE))))
def test_code_that_is_named_exists(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip())
def test_a_line_names_code_or_none(line: str) -> None:
    cell = line.split(" | ")[-2]
    assert CODE.findall(cell) or cell == "none"


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


def test_table_1_rounds_gamma_down() -> None:
    """C2T v1 tables 1, 5 and 6: LLaMA-2 7B on MT-bench, tau 3.92, in candidate tokens."""
    table_1, table_5, table_6, eagle2 = 0.7e6, 781_806, 781_613, 1.0e6
    assert round(table_5, -5) == round(table_6, -5) == 0.8e6 > table_1
    # the abstract: 75 to 80% of the tokens
    assert 0.75 < table_6 / eagle2 < 0.8


def test_seconds_and_percentages_of_figure_2_have_two_baselines() -> None:
    """S4: time saved, static tree, simple cutoff, dynamic width and depth, dynamic width; tokens per second."""
    saved = (0.023, 0.0443, 0.0665, 0.0716)
    rates = (10.351, 10.556, 10.83, 10.88)
    assert [abs(1 - 10.078 / rate - share) < 0.005 for rate, share in zip(rates, saved, strict=True)] == [True] * 4
    assert 1.07 / saved[0] > 1.5 * 2.07 / saved[-1]


def test_table_3_gains_over_eagle() -> None:
    """C2T v2, batches of 64, 128, 256: seconds of plain decoding, EAGLE, C2T; then printed speed-ups, in percent."""
    table = {
        "8B": ((38.05, 34.90, 32.17), (33.41, 34.47, 32.82), (31.79, 31.12, 29.24), (113, 101, 98), (119, 112, 110)),
        "70B": ((126.22, 99.93, 98.84), (90.37, 81.24, 80.77), (84.44, 71.68, 71.82), (140, 123, 122), (149, 139, 137)),
    }
    gains, cut_off = {}, 0
    for size, (plain, eagle, c2t, *speedups) in table.items():
        for seconds, shown in zip((eagle, c2t), speedups, strict=True):
            found = [100 * p / s for p, s in zip(plain, seconds, strict=True)]
            assert max(abs(ours - paper) for ours, paper in zip(found, shown, strict=True)) < 1
            cut_off += sum(round(ours) > paper for ours, paper in zip(found, shown, strict=True))
        gains[size] = [round(100 * (e / c - 1)) for e, c in zip(eagle, c2t, strict=True)]
    assert gains == {"8B": [5, 11, 12], "70B": [7, 13, 12]}
    assert cut_off == 3
