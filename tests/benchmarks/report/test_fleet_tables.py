"""The tables of docs/distributed.md are those of the rows, and what the page says of them is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import fleet_tables
from benchmarks.report.command import RESULTS
from benchmarks.report.fleet_tables import PAGE, TABLES, main, render, rows_of
from benchmarks.report.rows import FILE_OF, BenchRow, read_rows
from benchmarks.report.tables import AUTO
from c2t_plugin.errors import C2TError


@pytest.fixture(scope="module")
def rows() -> list[BenchRow]:
    return read_rows(RESULTS / FILE_OF["simulated"], BenchRow)


def test_the_page_shows_the_committed_rows(rows: list[BenchRow]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render(text, rows) == text


@pytest.mark.parametrize("name", TABLES)
def test_a_page_without_a_place_for_a_table_is_refused(name: str, rows: list[BenchRow]) -> None:
    text = PAGE.read_text(encoding="utf-8").replace(f"<!-- table:{name} -->", "")
    with pytest.raises(C2TError, match=f"table:{name}"):
        render(text, rows)


def test_the_command_writes_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "distributed.md"
    places = [f"<!-- table:{name} -->\nold\n<!-- /table:{name} -->\n" for name in TABLES]
    page.write_text("\n".join(places), encoding="utf-8")
    monkeypatch.setattr(fleet_tables, "PAGE", page)
    assert main([]) == 0
    assert "old" not in page.read_text(encoding="utf-8") and "| cache aware |" in page.read_text(encoding="utf-8")
    page.write_text("", encoding="utf-8")
    assert main([]) == 2


def by(rows: list[BenchRow], part: str, *names: str) -> dict[tuple[Any, ...], BenchRow]:
    return {(row.arm, *(row.setting[name] for name in names)): row for row in rows_of(rows, part)}


def test_prefixes_are_lost_to_routers_that_do_not_look_at_them(rows: list[BenchRow]) -> None:
    """The page says: the more replicas, the less; and that no setting of a draft makes up for it."""
    found = by(rows, "routers", "router", "replicas")
    sizes = sorted({key[2] for key in found})
    for router in ("round robin", "least load", "power of two"):
        hits = [found[AUTO, router, size].metrics["prefix_hits"] or 0.0 for size in sizes]
        assert hits == sorted(hits, reverse=True) and hits[-1] < 0.1
        aware, blind = (found[AUTO, each, sizes[-1]].metrics for each in ("cache aware", router))
        assert (aware["tpot_p50_ms"] or 0.0) < (blind["tpot_p50_ms"] or 0.0)
        plain = found["plain", router, sizes[-1]].metrics["good_share"] or 0.0
        assert plain < (found[AUTO, router, sizes[-1]].metrics["good_share"] or 0.0)


def test_no_arm_has_room_for_more_than_the_planned_one(rows: list[BenchRow]) -> None:
    found = by(rows, "planning", "arrivals")
    best = {}
    for (arm, arrivals), row in found.items():
        assert (row.metrics["room_per_s"] or 0.0) <= (found[AUTO, arrivals].metrics["room_per_s"] or 0.0)
        if arm.startswith("static"):
            best.setdefault(arrivals, []).append((row.metrics["room_per_s"], arm))
    # one length for the whole fleet is another one for each pattern of arrivals
    assert len({max(each)[1] for each in best.values()}) > 1


def test_where_too_few_read_a_draft_costs_room_and_where_all_do_both_it_gives_most(rows: list[BenchRow]) -> None:
    found = {key: row.metrics["room_per_s"] or 0.0 for key, row in by(rows, "apart", "readers").items()}
    few = min(key[1] for key in found if key[1])
    assert found[AUTO, few] < found["plain", few]
    assert max(found.values()) == found[AUTO, 0]


def test_alone_a_replica_learns_within_a_minute(rows: list[BenchRow]) -> None:
    found = rows_of(rows, "fleet-learning")
    assert found and max(row.metrics["seconds"] or 0.0 for row in found) < 60.0
