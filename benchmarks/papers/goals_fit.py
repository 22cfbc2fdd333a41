"""The project's own goal for fitting: time and memory of `c2t fit`, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from benchmarks.papers.goals import MILLION, STAND_ALONE, TITLES
from c2t_plugin.errors import C2TError
from c2t_plugin.traces.file import save_traces

DRAFTS = ("eagle3", STAND_ALONE)
RECIPES = ("default", "extended")
# For 10 million nodes, on 2 cores.
MINUTES, GIGABYTES = 10.0, 4.0


def fit_apart(traces: Path, recipe: str, seed: int) -> tuple[float, float]:
    """Seconds and largest memory, GB, of `c2t fit` in a process of its own. C2TError if it fails."""
    command = [sys.executable, "-m", "c2t_plugin.cli", "fit", str(traces), "--recipe", recipe, "--seed", str(seed)]
    started = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*command, "--out", f"{traces}.{recipe}"], stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        if process.returncode:
            said.seek(0)
            raise C2TError(f"c2t fit ended with {process.returncode}: {said.read().decode()[-500:]}")
    # Linux counts in KiB
    return seconds, usage.ru_maxrss * 1024 / 1e9


def fit_cost(bench: Bench) -> Findings:
    rows: list[Row] = []
    for draft in DRAFTS:
        traces = bench.traces(draft, "train")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "known.traces"
            save_traces(traces, path)
            for recipe in RECIPES:
                seconds, memory = fit_apart(path, recipe, bench.seed)
                kept = seconds <= 60 * MINUTES and memory <= GIGABYTES
                rows.append(
                    {
                        "draft": TITLES[draft],
                        "recipe": recipe,
                        "M nodes": traces.tree.accepted.numel() / MILLION,
                        "seconds": seconds,
                        "GB": memory,
                        "goal": f"at most {60 * MINUTES:g} s and {GIGABYTES:g} GB",
                        "reached": "yes" if kept else "no",
                    }
                )
    return Findings(
        rows,
        "`c2t fit` as a process of its own on all training traces, reading them, ten epochs and its report included: "
        "seconds by the clock and its largest memory. The nodes are those of the whole trees.",
    )


EXPERIMENTS = (
    Experiment(
        "goals-fit",
        "Goal: time and memory of a fit",
        "This project's goals, in no paper",
        ("draft", "recipe", "M nodes", "seconds", "GB", "goal", "reached"),
        fit_cost,
    ),
)
