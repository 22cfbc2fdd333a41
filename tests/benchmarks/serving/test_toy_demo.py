"""The toy demo on both engines, with servers that answer by rule: which rows it writes, and when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.report.rows import ServingRow, read_rows
from benchmarks.serving import demo as entry
from benchmarks.serving import options
from benchmarks.serving import server as serving_server
from benchmarks.serving import toy_demo as demo
from benchmarks.serving.client import Completion, Pass
from benchmarks.serving.engines import ENGINES, Device, Launch
from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.errors import C2TError

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
SUGGESTED_BETA = 0.4
STEPS = ("--speculative-num-steps", "--speculative-config.num_speculative_tokens")


class FakeServer:
    """Remembers how it was started; a client finds its flags by its address."""

    flags: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, launch: Launch, *, log: Path, start_timeout: float) -> None:
        self.base_url = f"server {len(self.flags)}"
        self.flags[self.base_url] = launch.flags

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class FakeClient:
    """Outputs depend on the prompt alone; drafts are as long as the server's settings allow."""

    wrong_at_beta: float | None = None

    def __init__(self, url: str, max_tokens: int) -> None:
        flags = FakeServer.flags[url]
        told = dict(zip(flags[::2], flags[1::2], strict=True))
        self.depth = int(next((told[name] for name in STEPS if name in told), 0))
        self.beta = SUGGESTED_BETA

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def c2t_state(self) -> dict[str, float]:
        return {"beta": self.beta}

    def control(self, beta: float, max_depth: int) -> None:
        self.beta, self.depth = beta, max_depth

    def complete(self, prompt: Sequence[int]) -> Completion:
        token = prompt[0] + (self.wrong_at_beta == self.beta and prompt == PROMPTS[0])
        steps = 2 if self.depth else 0
        return Completion((token, token), steps, steps, steps * self.depth)

    def run(self, prompts: Sequence[Sequence[int]], concurrency: int, advance: Callable[[], None]) -> Pass:
        advance()
        return Pass(tuple(self.complete(prompt) for prompt in prompts), seconds=0.5)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeClient]:
    monkeypatch.setattr(serving_server, "Server", FakeServer)
    for engine in ENGINES.values():
        monkeypatch.setattr(type(engine), "client", FakeClient)
    monkeypatch.setattr(options, "pair_dir", lambda: tmp_path / "pair")
    monkeypatch.setattr(demo, "held_out_prompts", lambda n, seed: PROMPTS[:n])
    monkeypatch.setattr(FakeServer, "flags", {})
    return FakeClient


def run(out: Path, engine: str = "sglang") -> tuple[int, list[ServingRow]]:
    status = entry.main(["--pair", "toy", "--engine", engine, "--prompts", "3", "--out", str(out)])
    return status, read_rows(out / "rows.jsonl", ServingRow)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_has_every_arm_at_both_concurrencies(engine: str, client: type[FakeClient], tmp_path: Path) -> None:
    status, rows = run(tmp_path, engine)
    table = [(row.arm, row.base, row.d_max, row.beta, row.concurrency) for row in rows if row.scenario == "demo"]
    assert status == 0
    assert table == [
        *(("plain", "none", 0, None, c) for c in (1, 8)),
        *(("static", base, 4, None, c) for base in ("standalone", "eagle3") for c in (1, 8)),
        *(("c2t", base, 6, SUGGESTED_BETA, c) for base in ("standalone", "eagle3") for c in (1, 8)),
    ]


@pytest.mark.parametrize("base", ["standalone", "eagle3"])
def test_the_picture_has_static_chains_and_a_sweep_of_beta(base: str, client: type[FakeClient], tmp_path: Path) -> None:
    _, rows = run(tmp_path)
    sweep = [row for row in rows if row.scenario == "sweep" and row.base == base]
    static = [row for row in sweep if row.arm == "static"]
    assert [(row.d_max, row.gamma_per_token) for row in static] == [(depth, float(depth)) for depth in range(1, 7)]
    assert [(row.beta, row.d_max) for row in sweep if row.arm == "c2t"] == [(beta, 6) for beta in demo.SWEEP_BETAS]
    assert (tmp_path / "tau_gamma.png").is_file()


@pytest.mark.parametrize(
    ("engine", "algorithms"),
    [
        ("sglang", ["STANDALONE", "EAGLE3", "C2T", "C2T"]),
        ("vllm", ["draft_model", "eagle3", "c2t:draft_model", "c2t:eagle3"]),
    ],
)
def test_each_server_starts_once(engine: str, algorithms: list[str], client: type[FakeClient], tmp_path: Path) -> None:
    run(tmp_path, engine)
    started = [flags[1] if flags else "plain" for flags in FakeServer.flags.values()]
    assert started == ["plain", *algorithms]


@pytest.mark.parametrize(
    ("contestant", "method"),
    [
        (demo.Contestant("static", "standalone", 4), "draft_model"),
        (demo.Contestant("static", "eagle3", 4), "eagle3"),
        (demo.Contestant("c2t", "eagle3", 6), "c2t:eagle3"),
    ],
    ids=str,
)
def test_what_a_server_of_vllm_is_told(
    contestant: demo.Contestant, method: str, client: type[FakeClient], tmp_path: Path
) -> None:
    runner, on = contestant.runner(ENGINES["vllm"], tmp_path / "out")
    found = contestant.in_table.options("vllm", on)
    draft = options.PAIR_DRAFTS[contestant.base]
    assert (found["method"], found["num_speculative_tokens"]) == (method, contestant.d_max)
    assert (runner.target, found["model"]) == (tmp_path / "out/pair/target", tmp_path / "out/pair" / draft)
    # the layout has no classifier, and the generic one would be of another pair where C2T_PAIR is set
    own = tmp_path / "pair" / draft / FILE_NAME
    assert found.get("c2t_classifier") == (own if contestant.arm == "c2t" else None)
    assert runner.device is Device.CPU and "c2t_beta" not in found


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_decoding_has_no_flags(engine: str, client: type[FakeClient], tmp_path: Path) -> None:
    plain = demo.CONTESTANTS[0]
    _, on = plain.runner(ENGINES[engine], tmp_path)
    assert plain.in_table.options(engine, on) == {}


@pytest.mark.slow
def test_a_second_run_replaces_the_rows(client: type[FakeClient], tmp_path: Path) -> None:
    _, first = run(tmp_path)
    _, second = run(tmp_path)
    assert len(second) == len(first)


def test_a_different_output_fails_the_demo(
    client: type[FakeClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "wrong_at_beta", demo.SWEEP_BETAS[2])
    status, rows = run(tmp_path)
    assert status == 1
    assert [row.n_identical for row in rows if row.n_identical != 3] == [2, 2]
    assert "2 of 3" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_one_message(
    client: type[FakeClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: FakeServer) -> FakeServer:
        raise C2TError("the server ended with 1 before it was ready")

    monkeypatch.setattr(FakeServer, "__enter__", fail)
    assert run(tmp_path) == (2, [])
    assert "ended with 1" in capsys.readouterr().out
