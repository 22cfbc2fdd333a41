"""What is measured of a processor: a cost curve of a real, tiny model, and the rows that it fits."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.cpu_engine import cpu_engine_env
from benchmarks.pairs.toy import SHIPPED
from benchmarks.report.rows import CURVE, PROCESSOR, PROCESSOR_METRICS
from benchmarks.serving import host
from c2t_plugin.errors import C2TError


@pytest.mark.parametrize("before", [None, "AVX2"])
def test_a_host_says_what_rows_ask_for(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """Measured by a process that multiplies as the CPU engine's servers do."""
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if before is not None:
        monkeypatch.setenv("MKL_CBWR", before)
    ran: list[tuple[list[str], str]] = []

    def run(command: list[str], env: dict[str, str], **how: object) -> subprocess.CompletedProcess[str]:
        ran.append((command[1:], env["MKL_CBWR"]))
        out = json.dumps([12.5, dict.fromkeys(CURVE, 1.5)])
        return subprocess.CompletedProcess(command, 0, f"a line\n{out}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    found = host.measure_host(Path("target"), threads=3)
    assert ran == [(["-m", "benchmarks.serving.host", "target", "3"], cpu_engine_env(os.environ)["MKL_CBWR"])]
    assert found.threads == 3 and found.cores == host.cores()
    assert set(found.setting) == set(PROCESSOR) and set(found.metrics) == set(PROCESSOR_METRICS)
    assert (found.memory_gb_per_s, found.target_ms[CURVE[0]]) == (12.5, 1.5)


def test_a_target_that_cannot_be_loaded_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(C2TError, match=r"this processor could not be measured: .*Error"):
        host.measure_host(tmp_path, threads=1)


@pytest.mark.slow
def test_a_real_target_is_measured() -> None:
    found = host.measure_host(SHIPPED / "target", threads=1)
    assert all(value > 0 for value in found.metrics.values())


def test_the_triad_counts_three_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_seconds", lambda do: do() is None or 0.5)
    assert host.triad_gb_per_s(4_000_000) == pytest.approx(3 * 4e6 / 0.5 / 1e9)


def test_a_curve_with_gaps_is_refused() -> None:
    with pytest.raises(C2TError, match="cost curve"):
        host.Host("a CPU", 2, 2, 10.0, dict.fromkeys(CURVE[:-1], 1.0))


def test_the_curve_is_of_passes_of_that_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Model:
        config = type("Config", (), {"vocab_size": 100})

        def eval(self) -> Model:
            return self

        def __call__(self, ids: torch.Tensor, use_cache: bool) -> None:
            assert ids.max() < 100 and not use_cache
            seen.append(ids.shape[-1])

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda path, dtype: Model())
    assert tuple(host.target_curve(Path("target"))) == CURVE
    assert seen == [tokens for tokens in CURVE for _ in range(host.REPEATS + 1)]


@pytest.mark.parametrize(("there", "sglang", "vllm"), [(1, 1, 1), (2, 2, 1), (16, 16, 15)])
def test_vllm_leaves_a_core_to_its_scheduler(
    monkeypatch: pytest.MonkeyPatch, there: int, sglang: int, vllm: int
) -> None:
    monkeypatch.setattr(host, "cores", lambda: there)
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine")
    host.add_threads(parser)
    assert [host.threads_of(parser.parse_args(["--engine", name])) for name in ("sglang", "vllm")] == [sglang, vllm]
    assert host.threads_of(parser.parse_args(["--engine", "vllm", "--threads", "3"])) == 3
