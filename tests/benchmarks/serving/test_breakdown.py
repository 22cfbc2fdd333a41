"""Traces by hand: whose time a nested call is, whose a kernel's, and what is no trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import breakdown
from benchmarks.serving import server as serving_server
from benchmarks.serving.client import Completion, Pass
from benchmarks.serving.engines import Launch
from benchmarks.serving.spans import PHASES, gap_ms, load_trace, phases
from c2t_plugin.errors import C2TError

STEP = "sglang/srt/speculative/eagle_worker_v2.py(1416): forward_batch_generation"
DRAFT = "c2t_plugin/engines/sglang/worker.py(130): draft"
STOCK_DRAFT = "sglang/srt/speculative/eagle_worker_v2.py(660): draft"
VERIFY = "sglang/srt/speculative/eagle_worker_v2.py(1979): verify"
STATISTICS = "kernels/c2t_kernels/stats/__init__.py(14): draft_stats"
CLASSIFIER = "c2t_plugin/classifier/network.py(51): confidence"
RERANK = "sglang/srt/speculative/eagle_utils.py(100): organize_draft_results"


def call(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "python_function", "name": name, "ts": start, "dur": end - start, "tid": tid}


# 1000 us: draft 100 to 400 (statistics 150 to 200, classifier 200 to 230, rerank 380 to 400), verify 400 to 900
ONE_STEP = [
    call(STEP, 0, 1000),
    call(VERIFY, 400, 900),
    call(DRAFT, 100, 400),
    call(STOCK_DRAFT, 110, 400),
    call(STATISTICS, 150, 200),
    call(CLASSIFIER, 200, 230),
    call(RERANK, 380, 400),
    call("torch/nn/modules/module.py(1): forward", 450, 800),
    call(STATISTICS, 5000, 6000),
]


def test_a_call_counts_for_the_innermost_phase():
    assert phases(ONE_STEP) == pytest.approx(
        {
            "draft_ms": 0.2,
            "statistics_ms": 0.05,
            "classifier_ms": 0.03,
            "rerank_ms": 0.02,
            "verify_ms": 0.5,
            "other_ms": 0.2,
            "steps": 1.0,
        }
    )


def test_several_steps_are_averaged_and_threads_kept_apart():
    twice = [*ONE_STEP, call(STEP, 2000, 2200), call(VERIFY, 2000, 2100), call(VERIFY, 2000, 2100, tid=2)]
    found = phases(twice)
    assert found["steps"] == 2.0
    assert found["verify_ms"] == pytest.approx((0.5 + 0.1) / 2)
    assert sum(found[f"{phase}_ms"] for phase in PHASES) == pytest.approx((1.0 + 0.2) / 2)


def kernel(name: str, us: float, correlation: int, launched: float, start: float = 9e9) -> list[dict[str, Any]]:
    arguments = {"correlation": correlation}
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": launched, "dur": 1, "tid": 1, "args": arguments}
    return [{"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": us, "tid": 7, "args": arguments}, launch]


def test_with_device_times_a_kernel_counts_for_the_phase_that_launched_it():
    """A graph's kernels share the launch of the draft; C2T's own are known by their names."""
    graph = [*kernel("gemm", 70, 1, 300), *kernel("scan_kernel_0", 5, 1, 300), *kernel("score_chain_kernel", 3, 1, 300)]
    found = phases(
        [*ONE_STEP, *graph, *kernel("gemm", 400, 2, 500), *kernel("copy", 9, 3, 950), *kernel("x", 1, 4, 7e6)]
    )
    assert found == pytest.approx(
        {
            "draft_ms": 0.07,
            "statistics_ms": 0.005,
            "classifier_ms": 0.003,
            "rerank_ms": 0.0,
            "verify_ms": 0.4,
            "other_ms": 0.009,
            "steps": 1.0,
        }
    )


def test_the_gap_is_between_a_steps_draft_and_its_verification():
    """By calls 0 and 30 us. The extension after the verification is no draft of that step's, nor is a nested call."""
    extension = "sglang/srt/speculative/eagle_worker_v2.py(1200): _draft_extend_for_decode"
    later = [call(DRAFT, 1100, 1200), call(VERIFY, 1230, 1500), call(VERIFY, 1240, 1300), call(extension, 1510, 1520)]
    steps = [*ONE_STEP, call(extension, 910, 990), *later]
    assert gap_ms(steps) == pytest.approx((0.0 + 0.030) / 2)
    assert gap_ms([call(VERIFY, 0, 1), call(DRAFT, 2, 3)]) is None


def test_on_a_device_the_gap_is_what_it_idles():
    """Launched long before, draft kernels run until 1070, verification's from 1100 on."""
    drafted = [*kernel("gemm", 20, 1, 150, start=1000), *kernel("score_chain_kernel", 10, 2, 390, start=1060)]
    verified = [*kernel("gemm", 50, 3, 460, start=1200), *kernel("gather", 5, 4, 410, start=1100)]
    assert gap_ms([*ONE_STEP, *drafted, *verified]) == pytest.approx(0.030)
    assert gap_ms([*ONE_STEP, *drafted]) is None


def test_a_trace_without_steps_is_refused():
    with pytest.raises(C2TError, match="no decoding step"):
        phases([call(VERIFY, 0, 1)])


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", gzip.compress(b"{", mtime=0)], ids=str)
def test_what_is_no_trace_is_named(content: bytes, tmp_path: Path):
    for name in ("a.trace.json", "a.trace.json.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(C2TError, match="no readable trace"):
            load_trace(tmp_path / name)


def test_a_trace_is_read_gzipped_or_not(tmp_path: Path):
    text = json.dumps({"traceEvents": ONE_STEP}).encode()
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text))
    assert load_trace(tmp_path / "a.json") == load_trace(tmp_path / "a.json.gz") == ONE_STEP


class NoServer:
    base_url = ""

    def __init__(self, launch: Launch, **_: object) -> None:
        self.waits_for = launch.environment[breakdown.AT_LEAST]

    def __enter__(self) -> NoServer:
        raise C2TError("the server did not start: out of memory")

    def __exit__(self, *exception: object) -> None:
        return None


def test_an_arm_that_does_not_start_is_a_row_per_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_server, "Server", NoServer)
    out = ["--cpu", "--out", str(tmp_path), "--concurrency", "1", "2"]
    assert breakdown.main(["--arms", "C2T", *out]) == 1
    rows = read_rows(tmp_path / "rows.jsonl", BenchRow)
    assert [(row.arm, row.error) for row in rows] == [("C2T", "the server did not start: out of memory")] * 2


def test_an_unknown_arm_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert breakdown.main(["--arms", "fast", "--cpu", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_in_trees_the_choice_of_nodes_counts_as_the_rerank():
    grow, best = "kernels/c2t_kernels/growth/reference.py(37): grow_layer", "c2t_plugin/trees/nodes.py(216): best"
    score = "kernels/c2t_kernels/network/reference.py(59): confidence_of"
    draft = "c2t_plugin/engines/sglang/worker.py(117): draft"
    found = phases(
        [call(STEP, 0, 900), call(draft, 0, 800), call(grow, 100, 300), call(score, 150, 250), call(best, 400, 450)]
    )
    assert (found["draft_ms"], found["rerank_ms"], found["classifier_ms"]) == pytest.approx((0.55, 0.15, 0.1))


class Answering(NoServer):
    """A server and its client in one."""

    made: ClassVar[list[Answering]] = []
    steps = 4

    def __init__(self, launch: Launch, **_: object) -> None:
        super().__init__(launch)
        self.asked: list[str] = []
        self.made.append(self)

    def __enter__(self) -> Answering:
        return self

    def run(self, prompts: Sequence[Sequence[int]], *_: object) -> Pass:
        self.asked.append(f"run {len(prompts)}")
        answers = [Completion((1, 2), 1, 0, 1) for _ in prompts]
        return Pass(tuple(answers), float(len(prompts)))

    def profile(self, out: Path, *_: object) -> None:
        self.asked.append("profile")
        out.mkdir(parents=True)
        events = [event for n in range(self.steps) for event in one_step(1000 * n)]
        (out / "1-DECODE.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


LAUNCH = Launch((), (), {breakdown.AT_LEAST: "1"})


def one_step(at: float) -> list[dict[str, Any]]:
    return [call(STEP, at, at + 900), call(VERIFY, at + 300, at + 800)]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> type[Answering]:
    monkeypatch.setattr(Answering, "made", [])
    monkeypatch.setattr(serving_server, "Server", Answering)
    monkeypatch.setattr(breakdown, "SglangClient", lambda *_: Answering.made[-1])
    return Answering


def test_the_server_waits_for_all_requests_and_is_asked_before_them(answering: type[Answering], tmp_path: Path):
    """A server for each number of requests, whose environment names it."""
    options = ["--arms", "C2T", "--cpu", "--steps", "4", "--concurrency", "1", "3", "--out", str(tmp_path)]
    assert breakdown.main(options) == 0
    assert [server.waits_for for server in answering.made] == ["1", "3"]
    assert [server.asked for server in answering.made] == [["run 1", "profile", f"run {n}"] for n in (1, 3)]
    rows = read_rows(tmp_path / "rows.jsonl", BenchRow)
    assert [(row.setting["concurrency"], row.metrics["steps"], row.error) for row in rows] == [(1, 4, ""), (3, 4, "")]
    assert rows[0].setting["cuda_graphs"] == "off"


def test_a_trace_of_fewer_steps_is_refused(answering: type[Answering], tmp_path: Path):
    options = ["--arms", "C2T", "--cpu", "--steps", "8", "--concurrency", "2", "--out", str(tmp_path)]
    assert breakdown.main(options) == 1
    (row,) = read_rows(tmp_path / "rows.jsonl", BenchRow)
    assert row.error == "the trace holds 4 decoding steps, not 8; ask for fewer --steps" and not row.metrics


def test_a_missing_trace_names_an_option_that_there_is(
    answering: type[Answering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Answering, "profile", lambda *_: None)
    with pytest.raises(C2TError, match=r"1 requests were answered before 9 steps .* ask for fewer --steps"):
        breakdown.profiled(answering(LAUNCH), [[1]], 9, tmp_path / "trace", cpu=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "cpu", "graphs"),
    [
        (["--tp", "2"], False, "on"),
        (["--tp", "2"], True, "off"),
        (["--disable-cuda-graph", "--tp", "2"], False, "off"),
        (["--disable-cuda-graph-padding"], False, "on"),
        (["--cuda-graph-backend-decode=disabled"], False, "off"),
        (["--cuda-graph-backend-decode", "disabled"], False, "off"),
    ],
)
def test_rows_say_whether_the_server_had_graphs(flags: list[str], cpu: bool, graphs: str):
    assert breakdown.graphs_of(flags, cpu) == graphs


def test_a_step_that_reads_prompts_is_no_decoding_step():
    """Neither on the host nor on the device."""
    prefill = "sglang/srt/speculative/eagle_worker_v2.py(1548): _forward_prefill_batch"
    reading = [call(STEP, 2000, 9000), call(prefill, 2100, 8000), call(DRAFT, 2200, 3000), call(VERIFY, 3000, 4000)]
    assert phases([*ONE_STEP, *reading]) == phases(ONE_STEP)
    kernels = [*kernel("gemm", 400, 1, 500), *kernel("gemm", 7000, 2, 2500)]
    assert phases([*ONE_STEP, *reading, *kernels]) == phases([*ONE_STEP, *kernels])
    assert phases([*ONE_STEP, *kernels])["verify_ms"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    "name",
    [
        "sglang/srt/speculative/spec_utils.py(474): select_top_k_tokens",
        "sglang/srt/speculative/eagle_utils.py(100): organize_draft_results",
        "kernels/c2t_kernels/growth/kernel.py(90): grow_layer",
        "kernels/c2t_kernels/tree_layout/kernel.py(90): build_tree",
        "kernels/c2t_kernels/masks/kernel.py(60): full_mask",
        "c2t_plugin/trees/nodes.py(216): best",
    ],
)
def test_what_chooses_among_drafted_tokens_is_the_rerank(name: str):
    found = phases([call(STEP, 0, 1000), call(DRAFT, 100, 400), call(name, 200, 250)])
    assert (found["rerank_ms"], found["draft_ms"]) == pytest.approx((0.05, 0.25))


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("scan_kernel", "statistics"),
        ("select_kernel", "statistics"),
        ("score_chain_kernel", "classifier"),
        ("early_stop_kernel", "classifier"),
        ("grow_layer_kernel", "rerank"),
    ],
)
def test_a_graphs_kernels_are_known_by_name(name: str, phase: str):
    found = phases([*ONE_STEP, *kernel("gemm", 70, 1, 300), *kernel(name, 5, 1, 300)])
    assert (found[f"{phase}_ms"], found["draft_ms"]) == pytest.approx((0.005, 0.07))
