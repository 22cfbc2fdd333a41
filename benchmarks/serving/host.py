"""The processor behind rows of kind measured-cpu: its memory's speed, and what the target costs by tokens of a pass.

Both say where a processor changes from waiting for memory to computing, which decides how many tokens verify for free.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cpu_engine import SITE
from benchmarks.report.rows import CURVE, MEMORY
from c2t_plugin.errors import C2TError
from c2t_plugin.machine import cpu_model

# an array of the triad: three of them fit in no cache
TRIAD_BYTES = 2**27
TRIADS = 12
REPEATS = 5


@dataclass(frozen=True)
class Host:
    """processor: its model. cores: that this process may use. threads: of a server's arithmetic, and of what was
    measured here. memory_gb_per_s: of a triad, 10^9 bytes read and written. target_ms: milliseconds of a forward pass
    of the target by its tokens, every one with its logits."""

    processor: str
    cores: int
    threads: int
    memory_gb_per_s: float
    target_ms: Mapping[int, float]

    def __post_init__(self) -> None:
        if set(self.target_ms) != set(CURVE):
            raise C2TError(f"a cost curve is of {CURVE} tokens, got {tuple(self.target_ms)}")

    @property
    def setting(self) -> dict[str, Any]:
        """Of a row: what is the same at every run."""
        return {"processor": self.processor, "cores": self.cores, "threads": self.threads}

    @property
    def metrics(self) -> dict[str, float]:
        """Of a row: what this run measured."""
        return {MEMORY: self.memory_gb_per_s, **{f"target_ms_{n}": ms for n, ms in self.target_ms.items()}}


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def add_threads(parser: argparse.ArgumentParser) -> None:
    """The option of commands that serve on either engine; see `threads_of`."""
    parser.add_argument("--threads", type=int, help="of each server's arithmetic (default: cores; on vLLM all but one)")


def threads_of(options: argparse.Namespace) -> int:
    """As `--threads` says, else as many as cores. vLLM leaves one core free, as it does by itself. options: with
    engine.

    Its scheduler polls while it waits for the worker. With no core of its own it takes one from the worker's threads:
    single steps then took 200 ms more than others, and the same arm 1.7 times as long in one pass as in the next.
    """
    return options.threads or max(1, cores() - (options.engine == "vllm"))


def measure_host(target: Path, threads: int) -> Host:
    """Measure this machine, on which nothing else may run. target: its directory, loaded in float32.

    Changes this process's number of threads while it lasts.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return Host(cpu_model(), cores(), threads, triad_gb_per_s(), target_curve(target))
    finally:
        torch.set_num_threads(before)


def triad_gb_per_s(size: int = TRIAD_BYTES) -> float:
    """10^9 bytes a second of a = b + 3 c, the best of several; the two arrays that are read and the one written."""
    a, b, c = (torch.ones(size // 4) for _ in range(3))
    seconds = [_seconds(lambda: torch.add(b, c, alpha=3.0, out=a)) for _ in range(TRIADS)]
    return 3 * size / min(seconds) / 1e9


def target_curve(target: Path) -> dict[int, float]:
    """Milliseconds of a forward pass of CURVE tokens, the median of several after one that does not count. Wide weights
    are packed, as the CPU engine's are."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # its bar would stand in the middle of the caller's own
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    _pack(model)
    found = {}
    with torch.inference_mode():
        for tokens in CURVE:
            forward = partial(model, torch.arange(tokens)[None] % model.config.vocab_size, use_cache=False)
            forward()
            found[tokens] = 1e3 * median(_seconds(forward) for _ in range(REPEATS))
    return found


def _pack(model: torch.nn.Module) -> None:
    """As the CPU engine does, whose kernels no other process has on its path."""
    spec = importlib.util.spec_from_file_location("packed_products", SITE / "sgl_kernel" / "linear.py")
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    kernels.pack(model)


def _seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start
