"""The standing GPU run without a GPU: every part's cases are right on the CPU's references, and a wrong one is seen.

Longer than 300 lines because it follows one script from its cases to its rows.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import command as gpu
from benchmarks.gpu import part as gpu_part
from benchmarks.gpu.cases import Case, Provider, largest_error
from benchmarks.gpu.part import PARTS, measure_case
from benchmarks.gpu.stats import TOP_K, TOP_M, leading_error, stats_error
from benchmarks.gpu.timing import (
    CALLS_PER_GRAPH,
    FEWEST_REPLAYS,
    MOST_COPIES,
    REPLAYS,
    WARM_UP,
    copies_to_outgrow_cache,
    replays_within,
    rounds_of_graph,
    times_of,
)
from benchmarks.report.kernel_rows import kernel_row
from c2t_kernels.stats import reference
from tests.support.core.ended import ended

# a dry run compiles nothing
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")

CPU = torch.device("cpu")
# What each part has to name, whether the machine has it or not
PROVIDERS = {
    "chain": {"fused", "torch"},
    "growth": {"fused"},
    "table5": {
        *("fused", "manual", "sdpa with a mask", "sdpa, memory-efficient"),
        *("FlexAttention", "FlexAttention, blocks of 32", "xFormers"),
    },
    "stats": {"fused", "torch", "torch.topk alone", "torch.compile", "flashinfer", "flashinfer.top_k alone"},
    "attention": {"fused", "sdpa, contiguous", "sglang extend", "flashinfer", "FlashInferTree"},
}


@pytest.fixture
def stats_case() -> Case:
    return next(iter(PARTS["stats"](CPU, True)))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / gpu.ROWS).read_text().splitlines()]


@pytest.mark.slow
def test_it_needs_nothing_of_what_a_carried_sglang_brings():
    """It sources that environment itself, and kernels are timed without one."""
    absent = ["openai", "httpx", "pydantic", "sglang", "sgl_kernel", "flashinfer"]
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); import benchmarks.gpu.command"
    found = subprocess.run(python(code), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("part", PARTS)
def test_the_dry_run_checks_every_provider_or_says_what_is_missing(part: str):
    rows = list(gpu_part.measure(part, dry_run=True, deadline=math.inf))
    assert {row.provider for row in rows} == PROVIDERS[part]
    assert all(row.us is None and row.first_s is None and row.fault == "" for row in rows), rows
    assert all(bool(row.absent) == (row.error is None) for row in rows)
    assert {"command", "git_sha", "machine", "versions"} <= set(rows[0].run)


@pytest.mark.slow
def test_the_whole_script_runs_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--parts", "chain", "growth"]) == 0
    assert {row["part"] for row in rows_in(tmp_path)} == {"chain", "growth"}
    assert "3 rows, 0 with a fault; absent: nothing" in capsys.readouterr().out


@pytest.mark.parametrize("part", PARTS)
def test_real_shapes_can_be_listed(part: str):
    """Cases are lazy: listing the shapes of a GPU run allocates nothing."""
    shapes = [tuple(case.shape.items()) for case in PARTS[part](CPU, False)]
    assert len(shapes) == len(set(shapes)) > 0


def test_what_a_machine_lacks_is_printed_as_absent(capsys: pytest.CaptureFixture[str]):
    rows = [row for row in gpu_part.measure("attention", True, math.inf) if row.provider == "sglang extend"]
    gpu.print_table(rows)
    assert "absent: needs a GPU" in capsys.readouterr().out
    assert gpu.report(rows, []) == 0
    assert "absent: sglang extend" in capsys.readouterr().out


def test_the_table_has_a_line_for_each_shape_and_each_reason(capsys: pytest.CaptureFixture[str]):
    run: dict[str, Any] = {}
    rows = [gpu.GpuRow("stats", "copy", {"bytes": 8}, run, gb_per_s=4000.0, of_copy=1.0)]
    for batch in (1, 8):
        shape = {"bs": batch, "V": 32000}
        rows += [
            gpu.GpuRow("stats", "fused", shape, run, us=12.345, gb_per_s=1000.0, of_copy=0.25, cached=batch == 1),
            gpu.GpuRow("stats", "torch", shape, run, us=99.5, gb_per_s=1.0, of_copy=0.01),
            gpu.GpuRow("stats", "flashinfer", shape, run, absent="flashinfer is not installed"),
        ]
    gpu.print_table([*rows, gpu.GpuRow("growth", "fused", {"bs": 4}, run, fault="error 3, allowed 1")])
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "stats bytes=8 copy (4000 GB/s, 100%)",
        "stats bs=1 V=32000 fused 12.35 us (1000 GB/s, 25%) from cache, torch 99.50 us",
        "stats bs=8 V=32000 fused 12.35 us (1000 GB/s, 25%), torch 99.50 us",
        "stats flashinfer: absent: flashinfer is not installed (2 shapes, first bs=1 V=32000)",
        "growth fused: error 3, allowed 1 (1 shapes, first bs=4)",
    ]


def test_a_wrong_result_gets_a_fault_and_no_time(stats_case: Case, capsys: pytest.CaptureFixture[str]):
    def wrong(*inputs: object) -> object:
        found = stats_case.reference(*inputs)
        return found._replace(entropy=found.entropy + 0.01)

    broken = replace(stats_case, providers=(*stats_case.providers, Provider("wrong", wrong)))
    rows = list(measure_case("stats", broken, {}, None))
    assert [bool(row.fault) for row in rows] == [False] * len(stats_case.providers) + [True]
    assert "error 0.01" in rows[-1].fault and rows[-1].us is None
    assert gpu.report(rows, []) == 1
    gpu.print_table(rows)
    assert "error 0.01, allowed 0.0002" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["run", "prepare"])
def test_a_provider_that_raises_gets_a_fault_and_the_others_go_on(stats_case: Case, step: str):
    def broken(*inputs: object) -> Any:
        raise RuntimeError("no kernel image\nis available")

    first = replace(stats_case.providers[0], name="broken", **{step: broken})
    rows = list(measure_case("stats", replace(stats_case, providers=(first, *stats_case.providers)), {}, None))
    assert rows[0].fault == "RuntimeError: no kernel image"
    assert len(rows) == 1 + len(stats_case.providers) and not any(row.fault for row in rows[1:])


def test_a_reference_that_raises_is_every_providers_fault(stats_case: Case):
    def broken(*inputs: object) -> Any:
        raise RuntimeError("CUDA out of memory")

    rows = list(measure_case("stats", replace(stats_case, reference=broken), {}, None))
    assert {row.fault for row in rows if not row.absent} == {"RuntimeError: CUDA out of memory"}


def test_nan_is_an_error(stats_case: Case):
    case = replace(stats_case, error=lambda expected, found: math.nan)
    assert "error nan" in next(measure_case("stats", case, {}, None)).fault


@pytest.mark.parametrize("field", ["log_probs", "entropy", "margin"])
def test_a_nan_in_one_statistic_alone_is_an_error(stats_case: Case, field: str):
    expected = stats_case.reference(*stats_case.inputs(torch.Generator().manual_seed(0)))
    assert stats_error(expected, expected) == 0.0
    assert stats_error(expected, expected._replace(**{field: getattr(expected, field) * math.nan})) == math.inf


def test_an_id_may_differ_only_where_logits_are_equal():
    logits = torch.arange(TOP_M + 50).float().flip(0)[None].clone()
    logits[0, 3] = logits[0, 4]
    expected = reference.draft_stats(logits, TOP_M, TOP_K)

    def with_ids(*places: int) -> float:
        ids = expected.token_ids.clone()
        ids[0, list(places)] = ids[0, list(reversed(places))]
        return stats_error(expected, expected._replace(token_ids=ids))

    assert with_ids(3, 4) == 0.0
    assert with_ids(1, 2) == with_ids(2, 3) == math.inf


def test_a_top_k_alone_is_judged_by_the_distance_to_the_largest():
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0))
    expected = reference.draft_stats(logits, TOP_M, TOP_K)
    values = logits.topk(TOP_M).values
    assert leading_error(expected, values) < 1e-5
    assert leading_error(expected, values.roll(1, dims=1)) > 0.01


def test_what_there_is_no_time_for_is_named():
    rows = list(gpu_part.measure("stats", dry_run=True, deadline=-math.inf))
    assert rows and all(row.fault == "not run: out of time" for row in rows if not row.absent)


@pytest.mark.slow
def test_a_part_that_dies_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def command(part: str, options: object, seconds: float) -> list[str]:
        dies, hangs = "import os; print('last words', flush=True); os.abort()", "import time; time.sleep(600)"
        return python({"chain": dies, "growth": hangs, "table5": "print('well')"}[part])

    monkeypatch.setattr(gpu, "part_command", command)
    monkeypatch.setattr(gpu, "GRACE_S", 5.0)
    arguments = ["--dry-run", "--out", str(tmp_path), "--seconds", "6", "--parts", "chain", "growth", "table5"]
    assert gpu.main(arguments) == 1
    faults = {row["part"]: row["fault"] for row in rows_in(tmp_path)}
    assert faults["chain"] == "ended with -6; chain.log ends with: last words"
    assert faults["growth"].startswith("not done after") and set(faults) == {"chain", "growth"}
    printed = capsys.readouterr().out
    assert "FAILED: chain: ended with -6" in printed and "FAILED: growth: not done" in printed


def test_nothing_that_a_part_started_outlives_it(tmp_path: Path):
    started = tmp_path / "pid"
    code = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(started)!r}, 'w').write(str(child.pid)); sys.exit(3)"
    )
    assert gpu.child("part", python(code), tmp_path, 30.0).fault.startswith("ended with 3")
    pid = int(started.read_text())
    for _ in range(100):
        if ended(pid):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is left")


def test_failed_kernel_tests_fail_the_run_and_name_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outcome = gpu.child("tests", python("print('1 failed'); raise SystemExit(1)"), tmp_path, 30.0)
    assert gpu.report([], [outcome]) == 1
    assert "FAILED: tests: ended with 1; tests.log ends with: 1 failed" in capsys.readouterr().out


def test_the_kernel_tests_are_run_with_what_needs_no_gpu_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands = {}

    def child(name: str, command: list[str], out: Path, seconds: float) -> gpu.Outcome:
        commands[name] = command
        return gpu.Outcome(name, "broken" * (name == "tests"))

    monkeypatch.setattr(gpu, "child", child)
    assert [outcome.fault for outcome in gpu.kernel_tests(tmp_path)] == ["broken", ""]
    tests, ahead_of_time = commands["tests"], commands["ahead_of_time"]
    assert "tests/kernels" in tests and tests[tests.index("--ignore") + 1] == ahead_of_time[-1]
    assert Path(ahead_of_time[-1]).is_file()


def test_rows_of_kernels_stay_where_none_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / gpu.ROWS).write_text("of an earlier call\n")
    monkeypatch.setattr(gpu, "part_command", lambda *_: python("print('served')"))
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--parts", "serving"]) == 0
    assert (tmp_path / gpu.ROWS).read_text() == "of an earlier call\n"
    printed = capsys.readouterr().out
    assert "served" in printed and "0 rows" in printed
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--parts", "serving", "chain"]) == 0
    assert not (tmp_path / gpu.ROWS).exists()


def test_what_flashinfers_build_says_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = "import sys; print('nvcc is', flush=True); print('missing', file=sys.stderr, flush=True)"
    monkeypatch.setattr(gpu, "BUILD", said)
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    log = tmp_path / "flashinfer-build.log"
    with gpu.flashinfer_build(True, tmp_path):
        deadline = time.monotonic() + 30.0
        while log.read_text() != "nvcc is\nmissing\n":
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


def test_a_carried_sglang_lends_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "env.sh").write_text("export CARRIED='two words'\n")
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$CARRIED: $*"; exit 7\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert gpu.main(["--out", "OUT", "--sglang", str(tmp_path), "--parts", "stats", "chain"]) == 7
    assert capfd.readouterr().out == "two words: -m benchmarks.gpu --out OUT --parts stats chain\n"


def test_a_carried_sglang_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gpu.main(["--out", "OUT", "--sglang", str(tmp_path)]) == 2
    assert "has no env.sh" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err


def test_inputs_rotate_until_the_cache_is_outgrown():
    assert copies_to_outgrow_cache(input_bytes=10, cache_bytes=10) == 2
    assert copies_to_outgrow_cache(input_bytes=1000, cache_bytes=10) == 1
    assert copies_to_outgrow_cache(input_bytes=1, cache_bytes=10**9) == MOST_COPIES


@pytest.mark.parametrize("part", PARTS)
def test_what_an_h200_times_from_cache_is_known(part: str):
    """docs/benchmarking.md names the shapes whose inputs are too small."""
    cache = 50 * 2**20
    sizes = [(case.shape.get("bs"), case.input_bytes) for case in PARTS[part](CPU, False)]
    cached = {batch for batch, size in sizes if copies_to_outgrow_cache(size, cache) * size <= cache}
    assert cached == {"chain": {1, 8, 32, 64, 128, 256}, "growth": {1}}.get(part, set())


def test_slow_work_is_repeated_less_often():
    assert times_of([1.0, 2.0, 3.0, 4.0, 5.0, 11.0]) == (3.5, 2.0, 5.0, 6)
    assert replays_within(us=10.0) == REPLAYS
    assert replays_within(us=1e7) == FEWEST_REPLAYS
    assert FEWEST_REPLAYS < replays_within(us=2e4) < REPLAYS
    assert rounds_of_graph(calls=3, us=1.0) == 7
    assert rounds_of_graph(calls=1, us=1e5) == 1
    assert rounds_of_graph(calls=CALLS_PER_GRAPH, us=1e5) == 1


def test_errors_are_of_floats_and_anything_else_must_be_equal():
    nan, inf = math.nan, math.inf
    a = torch.tensor([1.0, nan, -inf, 2.0])
    assert largest_error(a, torch.tensor([1.0, nan, -inf, 2.5])) == 0.5
    for other in ([nan, nan, -inf, 2.0], [1.0, 0.0, -inf, 2.0], [1.0, nan, inf, 2.0]):
        assert largest_error(a, torch.tensor(other)) == inf
    assert largest_error(a, a[:3]) == inf
    assert largest_error((a, torch.tensor([1])), (a, torch.tensor([2]))) == inf
    assert largest_error((a, torch.tensor([1])), (a, torch.tensor([1], dtype=torch.int32))) == 0.0


def test_a_timed_row_says_how_it_was_timed(stats_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_part, "cache_bytes", lambda: 1 << 12)
    monkeypatch.setattr(gpu_part, "first_call_s", lambda call: (call(), 0.5))
    for name, scale in (("graph_times", 1.0), ("eager_times", 10.0)):
        monkeypatch.setattr(gpu_part, name, lambda calls, scale=scale: times_of([scale, 2 * scale, 3 * scale]))
    run = {**gpu_part.RunRecord.capture(seed=0).to_json(), "machine": "a CPU, 1 x a GPU"}
    rows = [row for row in measure_case("stats", stats_case, run, copy=100.0) if row.us is not None]
    assert 2.0 in {row.us for row in rows}
    for row in rows:
        scale = 1.0 if row.captured else 10.0
        metrics = kernel_row(asdict(row)).metrics
        times = [metrics[name] for name in ("us_p20", "us", "us_p80", "replays", "warm_up")]
        assert times == [pytest.approx(1.4 * scale), 2 * scale, pytest.approx(2.6 * scale), 3, WARM_UP]
