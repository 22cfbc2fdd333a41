"""The standing GPU run without a GPU: every part's cases are right on the CPU's references, and a wrong one is seen."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import PARTS
from benchmarks.gpu_cases import Provider, largest_error
from benchmarks.timing import CALLS_PER_GRAPH, copies_to_outgrow_cache

CPU = torch.device("cpu")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", *arguments])
    return gpu.main()


def test_the_dry_run_checks_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert run(monkeypatch, "--dry-run", "--out", str(tmp_path)) == 0
    rows = [json.loads(line) for line in (tmp_path / gpu.ROWS).read_text().splitlines()]
    assert {row["part"] for row in rows} == set(PARTS)
    assert all(row["us"] is None and row["fault"] == "" and row["error"] >= 0 for row in rows)
    assert {"command", "git_sha", "machine", "versions"} <= set(rows[0]["run"])


@pytest.mark.parametrize("part", PARTS)
def test_real_shapes_can_be_listed(part: str):
    """Cases are lazy: listing the shapes of a GPU run allocates nothing."""
    shapes = [tuple(case.shape.items()) for case in PARTS[part](CPU, False)]
    assert len(shapes) == len(set(shapes)) > 0


def test_a_wrong_result_gets_a_fault_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = next(iter(PARTS["stats"](CPU, True)))

    def wrong(*inputs: object) -> object:
        found = case.reference(*inputs)
        return found._replace(entropy=found.entropy + 0.01)

    broken = replace(case, providers=(*case.providers, Provider("wrong", wrong)))
    monkeypatch.setitem(gpu.PARTS, "stats", lambda device, dry_run: iter([broken]))
    assert run(monkeypatch, "--dry-run", "--out", str(tmp_path), "--parts", "stats") == 1
    rows = [json.loads(line) for line in (tmp_path / gpu.ROWS).read_text().splitlines()]
    assert [bool(row["fault"]) for row in rows] == [False] * len(case.providers) + [True]
    assert "error 0.01" in rows[-1]["fault"]


def test_nan_is_an_error(monkeypatch: pytest.MonkeyPatch):
    case = replace(next(iter(PARTS["stats"](CPU, True))), error=lambda expected, found: math.nan)
    assert "error nan" in gpu.measure_one("stats", case, case.providers[0], {}, None).fault


def test_what_there_is_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch):
    rows = list(gpu.measure(["stats"], dry_run=True, deadline=-math.inf))
    assert rows and all(row.fault == "not run: out of time" for row in rows)


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "--out", str(tmp_path)) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err


def test_inputs_rotate_until_the_cache_is_outgrown():
    assert copies_to_outgrow_cache(input_bytes=10, cache_bytes=10) == 2
    assert copies_to_outgrow_cache(input_bytes=1000, cache_bytes=10) == 1
    assert copies_to_outgrow_cache(input_bytes=1, cache_bytes=10**9) == CALLS_PER_GRAPH


def test_errors_are_of_floats_and_anything_else_must_be_equal():
    nan, inf = math.nan, math.inf
    a = torch.tensor([1.0, nan, -inf, 2.0])
    assert largest_error(a, torch.tensor([1.0, nan, -inf, 2.5])) == 0.5
    for other in ([nan, nan, -inf, 2.0], [1.0, 0.0, -inf, 2.0], [1.0, nan, inf, 2.0]):
        assert largest_error(a, torch.tensor(other)) == inf
    assert largest_error(a, a[:3]) == inf
    assert largest_error((a, torch.tensor([1])), (a, torch.tensor([2]))) == inf
    assert largest_error((a, torch.tensor([1])), (a, torch.tensor([1], dtype=torch.int32))) == 0.0
