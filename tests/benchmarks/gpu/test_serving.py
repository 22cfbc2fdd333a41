"""The GPU run's serving part with servers that answer by rule, and its server with a stub for SGLang.

Longer than most files, as the stubs for servers are in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.gpu import serving as gpu_serving
from benchmarks.gpu.contests import ARMS, COMPARISONS, GRAPH_SIZES, LONG_PREFIX, TREE_ARMS, TREE_SIZES, Entry, fitting
from benchmarks.gpu.environment import FLAGS, plugin_environment
from benchmarks.gpu.serving import main, prompts_of
from benchmarks.pairs.toy import pair_dir
from benchmarks.report.results_page import SERVED, pages
from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import server as serving_server
from benchmarks.serving.arms import ARMS as TABLE
from benchmarks.serving.client import Completion, Pass
from benchmarks.serving.decode_log import DECODING, decoding, largest_batch
from benchmarks.serving.engines import ENGINES, Device, Launch
from benchmarks.serving.engines.sglang import NativeClient
from benchmarks.serving.scenarios import CONCURRENCIES
from benchmarks.serving.server import Runner, Server
from c2t_plugin.errors import C2TError
from c2t_plugin.trees.shape import MAX_CHILDREN
from tests.support.core.ended import ended

OWN_BETA = 0.4
PREFILL = "[t] Prefill batch, #new-seq: 2, #running-req: 1, cuda graph: False, input throughput (token/s): 9.00\n"


def step(running: int, per_s: float, accepted: float | None = None, graph: bool = True) -> str:
    """A line of SGLang's log; accepted: tokens of a request, None without speculation."""
    draft = "" if accepted is None else f"accept len: {accepted:.2f}, accept rate: 0.25, cap len: 2.50, "
    usage = "#token: 249, token usage: 0.01"
    return (
        f"[t] Decode batch, #running-req: {running}, {usage}, {draft}cuda graph: {graph}, "
        f"gen throughput (token/s): {per_s:.2f}, #queue-req: 0\n"
    )


class FakeServer:
    """Remembers its flags and its log under its address."""

    flags: ClassVar[dict[str, tuple[str, ...]]] = {}
    logs: ClassVar[dict[str, Path]] = {}
    broken: ClassVar[str] = ""

    def __init__(self, launch: Launch, *, log: Path, start_timeout: float = 0.0) -> None:
        self.base_url, self.log = f"server {len(self.flags)}", log
        self.flags[self.base_url], self.logs[self.base_url] = launch.flags, log
        log.write_text("")

    def __enter__(self) -> FakeServer:
        if self.broken and self.broken in self.flags[self.base_url]:
            raise C2TError("the server ended\nbefore it was ready")
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class FakeClient:
    """Outputs depend on the prompt alone; a beta cuts chains of any length to 1 token. A decode step takes 10 ms."""

    wrong_at_beta: ClassVar[float | None] = None
    less_at_beta: ClassVar[float | None] = None

    def __init__(self, url: str, max_tokens: int) -> None:
        flags = FakeServer.flags[url]
        self.depth = int(flags[flags.index("--speculative-num-steps") + 1]) if "--speculative-num-steps" in flags else 0
        self.c2t = "C2T" in flags
        self.beta = 0.9
        self.log = FakeServer.logs[url]

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def control(self, beta: float, max_depth: int) -> None:
        assert self.c2t and max_depth == self.depth
        self.beta = beta

    def c2t_state(self) -> dict[str, float]:
        assert self.c2t
        return {"beta": self.beta}

    def run(
        self, prompts: Sequence[Sequence[int]], concurrency: int, advance: Callable[[], None], temperature: float = 0.0
    ) -> Pass:
        beta = self.beta if self.c2t else None
        tokens = self.depth if not beta else 1
        taken = tokens - (self.less_at_beta is not None and self.less_at_beta == beta)
        wrong = self.wrong_at_beta is not None and self.wrong_at_beta == beta
        steps = 2 if self.depth else 0
        each = 1 + tokens if self.depth else None
        with self.log.open("a") as log:
            log.write(PREFILL + 3 * step(concurrency, 100 * concurrency * (each or 1), each))
        done = Completion((sum(prompts[0]) + wrong, 7), steps, steps * taken, steps * tokens)
        return Pass((done,) * len(prompts), seconds=0.5)


NO_LAUNCH = Launch((), (), {})


def gpu_servers(entries: Sequence[Entry], models: Path) -> dict[str, str]:
    """Flags of the servers of a GPU run, by the names of their arms."""
    runner = Runner(ENGINES["sglang"], Device.GPU, models / "target", models, FLAGS, {})
    made: list[Any] = [entry.server(runner, models) for entry in entries]
    assert len({server.log for server in made}) == len(entries)
    lines = [" ".join(FakeServer.flags[server.base_url]) for server in made]
    assert all(line.startswith(" ".join(FLAGS)) for line in lines)
    return dict(zip((entry.name for entry in entries), lines, strict=True))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_server, "Server", FakeServer)
    monkeypatch.setattr(gpu_serving, "NativeClient", FakeClient)
    monkeypatch.setattr(gpu_serving, "build", lambda *arguments: None)
    monkeypatch.setattr(gpu_serving.Measurements, "own_beta", lambda self, client: OWN_BETA)
    monkeypatch.setattr(FakeServer, "flags", {})


def run(out: Path, *arguments: str) -> tuple[int, list[BenchRow]]:
    status = main(["--out", str(out), "--dry-run", *arguments])
    return status, read_rows(out / gpu_serving.ROWS, BenchRow)


def test_every_arm_is_compared_and_then_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, rows = run(tmp_path)
    assert status == 0 and "FAULT" not in capsys.readouterr().out
    shown = [(row.arm, row.setting["check"], row.setting.get("concurrency")) for row in rows]
    uncut, own = "c2t, at most 4, beta 0", f"c2t, at most 4, beta {OWN_BETA:g}"
    arms = ["plain", "static 4", own, uncut]
    passes = [(arm, check, load) for arm in arms for check, load in (("outputs", None), ("throughput", 2))]
    assert shown == [*passes, *((arm, "best static", 2) for arm in arms)]
    assert all(row.kind == "functional" and row.scenario == "gpu-serving" for row in rows)
    outputs = {row.arm: row.metrics for row in rows if row.setting["check"] == "outputs"}
    assert outputs[uncut]["tau"] == outputs["static 4"]["tau"] == 4
    assert outputs[own]["tau"] == 1 and outputs["plain"]["tau"] is None
    assert all(metrics["identical_share"] == 1 for metrics in outputs.values())
    speed = {row.arm: row.metrics for row in rows if row.setting["check"] == "throughput"}
    assert speed["plain"]["output_tokens_per_s"] == 16 and speed[own]["ratio_to_plain"] == 1.0
    assert speed[own]["decode_tokens_per_s"] == pytest.approx(400) and speed[own]["decode_ratio_to_plain"] == 2
    assert all(metrics["decode_step_ms"] == pytest.approx(10) for metrics in speed.values())


def test_what_a_c2t_server_checked_at_start_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def rows_of(state: Any, arm: str, kind: str, setting: Any, record: Any) -> list[BenchRow]:
        assert "beta" in state and setting["target"] == "tiny"
        return [BenchRow("gpu-self-check", kind, arm, setting, {}, "draft_stats off by 0.5", record)]

    monkeypatch.setattr(gpu_serving.self_checks, "rows_of", rows_of)
    status, _ = run(tmp_path)
    rows = read_rows(tmp_path / "self-check.jsonl", BenchRow)
    assert [(row.arm, row.kind) for row in rows] == [("c2t, at most 4", "functional")]
    assert status == 1 and "FAULT: c2t, at most 4: draft_stats off by 0.5" in capsys.readouterr().out


def test_the_best_static_chain_is_that_of_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arms = (
        *(Entry("plain"), Entry("static 1", steps=1)),
        *(Entry("c2t", "C2T", steps=4, betas=(0.0,)), Entry("static 3", steps=3)),
    )
    monkeypatch.setattr(gpu_serving, "COMPARISONS", {"chains": ((), arms)})
    status, rows = run(tmp_path)
    found = {row.arm: row.metrics for row in rows if row.setting["check"] == "best static"}
    assert status == 0 and all(metrics["static_chains"] == 2 for metrics in found.values())
    decoded = {arm: metrics["decode_ratio_to_best_static"] for arm, metrics in found.items()}
    assert decoded == pytest.approx({"plain": 1 / 4, "static 1": 2 / 4, "c2t, beta 0": 5 / 4, "static 3": 1.0})
    assert all(metrics["ratio_to_best_static"] == 1 for metrics in found.values())


def test_without_lines_of_decoding_only_the_wall_clock_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_serving, "logged", lambda *_: "")
    _, rows = run(tmp_path)
    (passed,) = (row.metrics for row in rows if (row.arm, row.setting["check"]) == ("static 4", "throughput"))
    (ratios,) = (row.metrics for row in rows if (row.arm, row.setting["check"]) == ("static 4", "best static"))
    assert passed["ratio_to_plain"] == ratios["ratio_to_best_static"] == 1
    names = (*DECODING, "decode_ratio_to_plain")
    assert [passed[name] for name in names] == [None] * len(names) and ratios["decode_ratio_to_best_static"] is None


def test_its_rows_are_published_as_they_are(tmp_path: Path):
    _, rows = run(tmp_path, "--seconds", "-1")
    _, ran = run(tmp_path)
    text = pages("", [*rows, *ran])[SERVED]
    assert "not run: out of time" in text
    assert "| c2t, at most 4, beta 0 |" in text


@pytest.mark.parametrize(("most", "error"), [(1, "only 1 of 2 requests ever ran at once"), (2, ""), (None, "")])
def test_a_batch_that_was_never_reached_is_no_measurement(
    most: int | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_serving, "largest_batch", lambda *_: most)
    monkeypatch.setattr(gpu_serving, "CONCURRENCIES", (2,))
    log = tmp_path / "log"
    log.touch()
    bench = gpu_serving.Measurements(tmp_path, tmp_path, "tiny", 0, dry_run=False)
    # the rows of this process cannot be measured ones
    bench.record = {**bench.record, "machine": "1 x GPU"}
    with FakeServer(NO_LAUNCH, log=log) as server:
        bench.throughput(Entry("plain"), FakeClient(server.base_url, 1), None, 2, log)
    (row,) = read_rows(tmp_path / gpu_serving.ROWS, BenchRow)
    assert row.error == error


def test_servers_get_the_draft_and_the_length_of_their_chains(tmp_path: Path):
    run(tmp_path, "--models", "models")
    plain, static, c2t = (" ".join(flags) for flags in FakeServer.flags.values())
    assert "speculative" not in plain
    chain = "--speculative-draft-model-path models/eagle3 --speculative-num-steps 4"
    assert f"--speculative-algorithm EAGLE3 {chain}" in static and f"--speculative-algorithm C2T {chain}" in c2t


@pytest.mark.parametrize(
    ("fault", "beta", "says"),
    [
        ("wrong_at_beta", OWN_BETA, "0 of 4 outputs are plain decoding's"),
        ("less_at_beta", 0.0, "beta 0 accepts 3.0 tokens a step, the static chain 4.0, over 4 equal outputs"),
    ],
)
def test_what_must_agree_and_does_not_fails_the_run(
    fault: str,
    beta: float,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(FakeClient, fault, beta)
    status, rows = run(tmp_path)
    assert status == 1 and f"FAULT: c2t, at most 4: {says}" in capsys.readouterr().out
    assert len(rows) == 12


@pytest.mark.parametrize(
    ("dry_run", "same", "other", "faults"),
    [(True, 20, 5, 0), (True, 19, 20, 1), (False, 18, 5, 0), (False, 17, 20, 1), (False, None, 20, 1)],
)
def test_beta_0_has_to_accept_as_many_where_outputs_are_the_same(
    dry_run: bool, same: int | None, other: int, faults: int, tmp_path: Path
):
    """The static chain accepts 20 of both prompts; same: of equal outputs, None for none; other: of other ones."""
    bench = gpu_serving.Measurements(tmp_path, tmp_path, "tiny", 0, dry_run)
    static = Pass((Completion((1, 2), 10, 20, 40), Completion((3, 4), 10, 20, 40)), 1.0)
    first = Completion((9, 9), 10, 20, 40) if same is None else Completion((1, 2), 10, same, 40)
    bench.agree(Entry("c2t", "C2T", steps=4), Pass((first, Completion((3, 5), 10, other, 40)), 1.0), static)
    assert len(bench.faults) == faults


def test_a_server_that_does_not_start_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeServer, "broken", "EAGLE3")
    status, rows = run(tmp_path)
    assert status == 1
    errors = {row.arm: row.error for row in rows if row.error}
    assert errors == {"static 4": "C2TError: the server ended before it was ready"}
    assert {row.arm for row in rows} == {"plain", "static 4", "c2t, at most 4, beta 0", "c2t, at most 4, beta 0.4"}


def test_an_answer_that_lacks_something_stops_no_other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeClient, "c2t_state", lambda self: {})
    status, rows = run(tmp_path)
    assert status == 1 and [(row.arm, row.error) for row in rows if row.error] == [
        ("c2t, at most 4", "KeyError: 'beta'")
    ]


def test_what_there_is_no_time_for_is_named(tmp_path: Path):
    status, rows = run(tmp_path, "--seconds", "-1")
    assert status == 1 and [row.error for row in rows] == ["not run: out of time"] * 3


def test_a_gpu_run_has_every_arm_of_the_comparison(tmp_path: Path):
    served = gpu_servers(ARMS, tmp_path)
    first = ["plain", "static 4", "c2t, at most 4", "c2t auto", "static 2", "static 1"]
    assert [arm.name for arm in ARMS][: len(first)] == first
    names = {"plain", *(f"static {n}" for n in (1, 2, 4, 6)), "SGLang adaptive", "EAGLE-2 tree", "threshold on P"}
    assert {arm.name for arm in ARMS} == {
        *names,
        "c2t, at most 4",
        "c2t, at most 6",
        "c2t auto",
        "c2t, stock attention",
    }
    assert f"--speculative-c2t-classifier {tmp_path}/threshold-on-p.safetensors" in served["threshold on P"]
    assert served["c2t auto"].index("--speculative-c2t-planner on") > 0
    assert "--speculative-eagle-topk 10 --speculative-num-draft-tokens 60" in served["EAGLE-2 tree"]
    alone, all_sizes = (
        "--max-running-requests 1 --cuda-graph-bs-decode 1",
        f"256 --cuda-graph-bs-decode {' '.join(map(str, GRAPH_SIZES))}",
    )
    assert all(line.endswith(alone if name == "EAGLE-2 tree" else all_sizes) for name, line in served.items())
    # so that every batch that is measured has a graph of its own size
    assert set(CONCURRENCIES) <= set(GRAPH_SIZES)
    # the two kernels that verify differ in nothing else
    chosen, stock = served["c2t, at most 4"], served["c2t, stock attention"]
    assert stock.replace("--speculative-c2t-attention stock ", "") == chosen != stock


def test_every_arm_is_of_the_table_and_drafts_as_deep_as_it_says(tmp_path: Path):
    entries = [entry for pair in COMPARISONS.values() for entries in pair for entry in entries]
    assert {entry.in_table.name for entry in entries} <= set(TABLE)
    for entry in entries:
        found = entry.in_table.options("sglang", entry.speculation(tmp_path))
        assert found.get("num_steps", 0) == entry.steps
        # a server is given a beta that is measured as its own; others are asked for while it runs
        assert found.get("c2t_beta") in (None, "auto", *(entry.betas if entry.arm == "" else ()))


def test_trees_have_arms_of_every_size_and_batch(tmp_path: Path):
    served = gpu_servers(TREE_ARMS, tmp_path)
    assert len(served) == len(TREE_ARMS)
    for tokens, (steps, topk) in TREE_SIZES.items():
        # what the server would refuse
        assert tokens <= topk * steps + 1 and topk + (steps - 1) * topk**2 <= MAX_CHILDREN
        ours, theirs = served[f"C2T tree of {tokens}"], served[f"EAGLE-2 tree of {tokens}"]
        assert all(f"--speculative-num-draft-tokens {tokens}" in line for line in (ours, theirs))
        assert f"--speculative-eagle-topk {topk}" in ours and "--speculative-c2t-mode tree" in ours
        assert ours.endswith("--max-running-requests 1 --cuda-graph-bs-decode 1") and "C2T" not in theirs
    batches = "--max-running-requests 32 --cuda-graph-bs-decode 1 2 4 8 12 16 24 32"
    assert served["C2T tree of 64, batches"].endswith(batches) and served["c2t, at most 6"].endswith(batches)
    assert served["EAGLE-2 tree of 64"].endswith(batches)


def test_behind_a_long_prefix_only_what_fits_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert fitting(ARMS, LONG_PREFIX) == list(ARMS)
    loads = {arm.name: arm.concurrencies for arm in fitting((*ARMS, *TREE_ARMS), LONG_PREFIX + 1)}
    assert loads["static 4"] == (1, 8, 32, 64) and loads["EAGLE-2 tree"] == (1,)
    assert loads["C2T tree of 64, batches"] == (8, 32)
    monkeypatch.setattr(gpu_serving, "prompts_of", lambda n, prefix: [[7]] * n)
    sent: list[int] = []
    monkeypatch.setattr(
        FakeClient,
        "run",
        lambda self, prompts, *_: sent.append(len(prompts)) or Pass((Completion((1,), 0, 0, 0),), 1.0),
    )
    for prefix in (LONG_PREFIX, LONG_PREFIX + 1):
        bench = gpu_serving.Measurements(tmp_path, tmp_path, "tiny", prefix, dry_run=False)
        bench.record = {**bench.record, "machine": "1 x GPU"}
        with FakeServer(NO_LAUNCH, log=tmp_path / "log") as server:
            bench.throughput(Entry("plain"), FakeClient(server.base_url, 1), None, 64, tmp_path / "log")
    assert sent == [64, 128, 64, 64]
    arms: list[Entry] = []
    monkeypatch.setattr(gpu_serving, "run", lambda bench, found, *_: arms.extend(found))
    run(tmp_path, "--prefix", str(LONG_PREFIX + 1))
    assert arms and all(arm.concurrencies == (1, 8, 32, 64) for arm in arms)


def test_a_dry_run_of_trees_judges_no_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, rows = run(tmp_path, "--compare", "trees")
    assert status == 0
    arms = ["plain", "EAGLE-2 tree of 12", "C2T tree of 12, beta 0", "C2T tree of 12, beta 0.1"]
    assert [row.arm for row in rows if row.setting["check"] == "throughput"] == arms
    out = capsys.readouterr().out
    assert "goal:" not in out
    # 2 steps of 4 tokens, 8 requests twice at a time in 0.5 s
    assert "| C2T tree of 12, beta 0 | 2 | 4.00 | 4.0 | 10.00 | 1000 | 16 |" in out
    assert "| plain | 2 |  |  | 10.00 | 200 | 16 |" in out


def test_some_arms_alone(tmp_path: Path):
    status, rows = run(tmp_path, "--arms", "plain", "c2t, at most 4")
    assert status == 0 and {row.arm.partition(", beta")[0] for row in rows} == {"plain", "c2t, at most 4"}


def test_the_largest_batch_is_read_from_the_decode_lines(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text(step(99, 1.0))
    start = log.stat().st_size
    assert largest_batch(gpu_serving.logged(log, start)) is None
    with log.open("a") as handle:
        handle.write("Prefill batch, #running-req: 50\n[t] Decode batch [3], #running-req: 7, y\n")
        handle.write(step(12, 3.0) + step(4, 3.0))
    assert largest_batch(gpu_serving.logged(log, start)) == 12


def test_decoding_is_of_full_batches_alone_and_not_of_the_prefill_before_a_step():
    # 10 ms each, but the steps after a prefill; the last one but one stalls, and the last was over before it was read
    log = (
        *(step(4, 400.0), PREFILL, step(4, 1.0), step(4, 400.0), step(4, 400.0, graph=False), step(3, 9000.0)),
        *(PREFILL, step(4, 2.0), step(4, 400.0), step(4, 4.0), step(4, 4000.0)),
    )
    found = decoding("".join(log))
    assert found == pytest.approx(
        {"decode_tokens_per_s": 400, "decode_step_ms": 10, "decode_steps": 3, "graph_share": 4 / 5}
    )


def test_steps_of_many_and_of_few_tokens_count_by_their_time():
    # 1, 1 and 4 tokens, 10 ms each: the median of the lines' speeds would be 100
    found = decoding(PREFILL + step(1, 1.0, 1) + step(1, 100.0, 1) + step(1, 100.0, 1) + step(1, 400.0, 4))
    assert found["decode_tokens_per_s"] == pytest.approx(200) and found["decode_step_ms"] == pytest.approx(10)


def test_steps_of_a_cpu_are_read_too_and_those_behind_a_prefill_alone_are_none():
    lines = PREFILL + step(2, 200.0, 2.5) + step(2, 250.0, 2.5)
    found = decoding(lines.replace("cuda graph: True", "cpu graph: False"))
    assert found["decode_step_ms"] == pytest.approx(20) and found["graph_share"] == 0
    assert set(decoding(PREFILL + step(2, 200.0)).values()) == {None}


def test_prompts_repeat_and_get_the_tokens_asked_for_in_front():
    short, long = prompts_of(450, 0), prompts_of(3, 512)
    assert len(short) == 450 and short[0] == short[200] != short[1]
    assert [len(mine) - len(own) for mine, own in zip(long, short[:3], strict=True)] == [512] * 3
    assert all(mine[512:] == own for mine, own in zip(long, short[:3], strict=True))
    assert long[0][:512] != long[1][:512]


def test_answers_of_the_native_route_are_counted(monkeypatch: pytest.MonkeyPatch):
    meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 8}

    class Answer:
        def __init__(self, meta_info: dict[str, Any]) -> None:
            self.meta_info = meta_info

        def json(self) -> dict[str, Any]:
            return {"output_ids": [5, 6], "meta_info": self.meta_info}

    with NativeClient("http://127.0.0.1:9", 2) as client:
        for meta_info, expected in (
            (meta, (2, 3, 8)),
            ({**meta, "spec_cap_lens_histogram": [0, 1, 1]}, (2, 3, 1)),
            ({}, (0, 0, 0)),
        ):
            monkeypatch.setattr(client, "_request", lambda *_, meta_info=meta_info, **__: Answer(meta_info))
            done = client.complete([1])
            assert (done.verify_steps, done.accepted, done.candidates) == expected and done.token_ids == (5, 6)


def test_a_servers_environment_has_our_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/carried")
    environment = plugin_environment(tmp_path / "scratch")
    path = environment["PYTHONPATH"].split(os.pathsep)
    assert path.index(str(tmp_path / "scratch")) < path.index("/carried")
    code = "from importlib.metadata import distribution as d; print([p.value for p in d('c2t-plugin').entry_points])"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "c2t_plugin.engines.sglang.plugin:register" in found.stdout


LAUNCH = """
import http.server, json, os, subprocess, sys
HOW = {how!r}
if HOW == "ends":
    print("no kernel image is available"); sys.exit(3)
open({record!r}, "w").write(json.dumps([os.getpid(), sys.argv]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if HOW == "hangs" else 200); self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def stand_in(tmp_path: Path, how: str) -> Server:
    """A server whose SGLang answers, ends at once or never gets ready."""
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(LAUNCH.format(how=how, record=str(tmp_path / "record")))
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", ""), str(pair_dir().parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    # only the one that hangs waits so long, and on a busy machine the others need more than a moment to start
    patience = 15.0 if how == "hangs" else 120.0
    launch = ENGINES["sglang"].launch(tmp_path / "model", [*FLAGS, "--extra", "1"], Device.GPU, environment)
    return Server(launch, log=tmp_path / "log", start_timeout=patience)


def test_a_server_is_started_with_its_flags_and_stopped(tmp_path: Path):
    with stand_in(tmp_path, "answers"):
        pid, argv = json.loads((tmp_path / "record").read_text())
        assert not ended(pid)
        line = " ".join(argv)
        assert f"--model-path {tmp_path / 'model'} " in line and " --attention-backend triton " in line
        assert line.endswith("--extra 1")
    assert ended(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("ends", "ended with 3 before it was ready; log ends with: no kernel image is available"),
        ("hangs", "was not ready after 15 s"),
    ],
)
def test_a_server_that_never_gets_ready_is_stopped_and_its_log_shown(how: str, says: str, tmp_path: Path):
    with pytest.raises(C2TError, match=says), stand_in(tmp_path, how):
        pytest.fail("it was not ready")
    record = tmp_path / "record"
    assert how == "ends" or ended(json.loads(record.read_text())[0])
