"""What learning takes of the host, whose arithmetic it is on every engine: milliseconds of a step by its requests.

    python -m benchmarks.serving.learning_time --out build/learning-time

A step of so many requests (--requests) hands over what became of drafts of six tokens, drawn at random, and the host
has a rest until the next. `calibrate` looks at each step, and in some has a thread fit, which takes `fit_ms` of another
core; `network` does that, and has another thread train: one minibatch of it is timed, after which it rests 99 times as
long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor

from benchmarks.command import run
from benchmarks.pairs.toy import SHIPPED
from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.report.tables import listing
from c2t_plugin.classifier import CALIBRATED_NAME, load_classifier
from c2t_plugin.config import CALIBRATE, NETWORK
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.network_learner import NetworkLearner
from c2t_plugin.provenance import RunRecord

SCENARIO = "learning-time"
REQUESTS, D_MAX = (1, 8, 32, 128), 6
# steps that fill the window, and steps that count
FIRST, STEPS = 1_100, 400
# between two steps, seconds
REST_S = 0.005
PIPE_WIDTH = 160

Taught = Callable[[Tensor, Tensor, Tensor, Sequence[int]], object]


def outcomes(requests: int, chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (requests, D_MAX, 3) float32 of a step's drafts, and how many tokens of each were verified and
    accepted."""
    log_prob, entropy, margin = (torch.rand((requests, D_MAX), generator=chance) for _ in range(3))
    lucky = torch.rand((requests, D_MAX), generator=chance) < (-log_prob).exp()
    accepted = lucky.long().cumprod(1).sum(1)
    return torch.stack([-log_prob, entropy, margin], dim=-1), torch.full((requests,), D_MAX), accepted


class Timed(ThreadPoolExecutor):
    """One thread, and how many seconds of it each fit took."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seconds: list[float] = []

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        def noted() -> Any:
            began = time.thread_time()
            done = work(*given, **named)
            self.seconds.append(time.thread_time() - began)
            return done

        return super().submit(noted)


def timed(learner: Calibration | NetworkLearner, teach: Taught, requests: int) -> list[float]:
    """Seconds of each of STEPS steps."""
    chance, found = torch.Generator().manual_seed(0), list[float]()
    for number in range(FIRST // requests + STEPS):
        step = outcomes(requests, chance)
        # ten steps of each request, then another takes its place
        owners = [number // 10 * requests + row for row in range(requests)]
        began = time.perf_counter()
        learner.settle()
        teach(*step, owners)
        found.append(time.perf_counter() - began)
        time.sleep(REST_S)
    return found[-STEPS:]


def calibrated(requests: int) -> dict[str, float | None]:
    """Of `calibrate`."""
    thread = Timed()
    calibration = Calibration(D_MAX, thread=thread)

    def teach(stats: Tensor, verified: Tensor, accepted: Tensor, owners: Sequence[int]) -> None:
        log_prob = stats[..., 0]
        calibration.observe(log_prob.cumsum(1).exp(), verified, accepted, owners, log_prob)

    return figures(timed(calibration, teach, requests), thread)


def trained(requests: int) -> dict[str, float | None]:
    """Of `network`, whose first round is run behind the steps."""
    thread, classifier = Timed(), load_classifier(SHIPPED / "eagle3" / CALIBRATED_NAME)
    learner = NetworkLearner(classifier, D_MAX, background=False, thread=thread)
    found = figures(timed(learner, learner.observe, requests), thread)
    began = time.thread_time()
    learner.train()
    return found | {"minibatch_ms": 1e3 * (time.thread_time() - began) / learner.batches}


def figures(seconds: Sequence[float], thread: Timed) -> dict[str, float | None]:
    """As metrics: the mean step, and one that few steps exceed; and the mean fit, when the thread has ended."""
    thread.shutdown()
    found = {"learning_ms": np.mean(seconds), "learning_p99_ms": np.percentile(seconds, 99)}
    return {name: 1e3 * float(value) for name, value in {**found, "fit_ms": np.mean(thread.seconds)}.items()}


def main(argv: list[str]) -> int:
    """Measure, append rows, print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.learning_time",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--out", type=Path, default=Path("build/learning-time"))
    options = parser.parse_args(argv)
    # as a scheduler's process computes
    torch.set_num_threads(1)
    record = RunRecord.capture(seed=0).to_json()
    rows = [
        BenchRow(SCENARIO, "functional", arm, {"d_max": D_MAX, "concurrency": requests}, of(requests), "", record)
        for arm, of in ((CALIBRATE, calibrated), (NETWORK, trained))
        for requests in options.requests
    ]
    append_rows(options.out / "rows.jsonl", rows)
    (Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)).print(Markdown(listing(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
