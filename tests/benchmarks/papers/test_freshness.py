"""No published row is of other classifiers or weights than those that ship, as far as rows name them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.pairs.smollm2.ship import WEIGHTS
from benchmarks.pairs.toy import pair_dir
from benchmarks.papers import freshness
from benchmarks.papers.catalogue import REGISTRY
from benchmarks.papers.verdicts import FILES
from benchmarks.report.command import RESULTS, read_published
from benchmarks.report.tables import latest_blocks
from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.lab.experiment_rows import latest
from c2t_plugin.lab.pair_files import file_hash
from c2t_plugin.lab.pairs import describe_pair

# Experiments whose newest rows do not name the files that they are of. The list may only grow shorter.
UNNAMED = 33
# The same of runs of the simulation.
UNNAMED_RUNS = 14


def records(pair: str) -> dict[str, Any]:
    return dict(latest(RESULTS / FILES[pair]))


@pytest.mark.parametrize("pair", FILES)
def test_rows_of_experiments_are_of_what_ships(pair: str) -> None:
    found = {name: record["files"] for name, record in records(pair).items() if "files" in record}
    odd = {name: freshness.older(files, real=pair == "real") for name, files in found.items()}
    assert {name: files for name, files in odd.items() if files} == {}


def test_experiments_that_do_not_name_their_files_are_few() -> None:
    unnamed = {name for name, record in records("toy").items() if freshness.remark(record) == freshness.UNNAMED}
    assert len(unnamed) <= UNNAMED, "rows that newly do not name their files"
    assert set(REGISTRY.experiments) >= freshness.WITHOUT_PAIR


def test_simulated_rows_are_of_what_ships() -> None:
    _, bench = read_published(RESULTS)
    shown = [row for found in latest_blocks(row for row in bench if row.kind == "simulated").values() for row in found]
    for row in shown:
        real = str(row.setting.get("draft", row.setting.get("stream", ""))).lower().startswith("smollm2")
        assert freshness.older(row.run.get("files", {}), real) == []
    unnamed = {row.run["utc"] for row in shown if "files" not in row.run}
    assert len(unnamed) <= UNNAMED_RUNS, "simulated rows that newly do not name their files"


@pytest.mark.parametrize("path", sorted((RESULTS / "evaluations").glob("*.json")), ids=lambda path: path.stem)
def test_evaluations_are_of_what_ships(path: Any) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    head = record["traces"]["header"]["pair"]
    real = freshness.shipped(real=True)
    shipped = real if head["target"].endswith(real["target"]) else freshness.shipped()
    assert shipped[head["kind"]] == head["draft"].rpartition(":")[2]
    extended = record.get("classifiers", {}).get("extended")
    assert extended in (None, shipped[f"{head['kind']}/{FILE_NAME}"])


def test_hashes_are_those_of_the_files() -> None:
    pair = pair_dir()
    shipped = freshness.shipped()
    assert shipped[f"eagle3/{FILE_NAME}"] == file_hash(pair / "eagle3" / FILE_NAME)
    described = describe_pair(pair, "eagle3")
    assert [shipped[name] for name in ("eagle3", "target")] == [
        described[part].rpartition(":")[2] for part in ("draft", "target")
    ]
    assert freshness.shipped(real=True)[f"eagle3/{FILE_NAME}"] == file_hash(WEIGHTS / FILE_NAME)


def test_another_classifier_is_named() -> None:
    name = f"eagle3/{FILE_NAME}"
    files = {name: "0" * 16, "target": freshness.shipped()["target"], "small-target": "1" * 16}
    assert freshness.older(files) == [name]
    assert freshness.remark({"experiment": "some", "files": files}) == f"Older than what ships now: {name}."
    assert freshness.remark({"experiment": "some"}) == freshness.UNNAMED
    assert freshness.remark({"experiment": "c2t-v2-lemmas"}) == ""
    assert freshness.remark({"experiment": "some", "files": {}}) == ""


def test_the_last_bits_of_the_real_heads_product_are_no_sign_of_age() -> None:
    files = {**freshness.shipped(real=True), freshness.REAL_DRAFT: "0" * 16}
    assert freshness.older(files, real=True) == []
    assert freshness.older({**files, "target": "1" * 16}, real=True) == ["target"]
    assert freshness.older({**freshness.shipped(), "eagle3": "0" * 16}) == ["eagle3"]
