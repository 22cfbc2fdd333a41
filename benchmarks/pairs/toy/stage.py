"""The loop that every stage runs in: steps, progress lines, state on disk, continuation after an interrupt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.pairs.toy.optimisers import Optimisers
from benchmarks.pairs.toy.recipe import Stage
from c2t_plugin.errors import C2TError

SAVE_SECONDS = 120.0
REPORT_STEPS = 25
# A step's loss and further figures for its progress line
StepLoss = Callable[[int], tuple[torch.Tensor, dict[str, float]]]


def is_reported(step: int, stage: Stage) -> bool:
    """Whether the figures of `step` (0-based) appear in a progress line."""
    return (step + 1) % REPORT_STEPS == 0 or step + 1 == stage.steps


@dataclass
class Progress:
    """What a stage has done so far: wall seconds and tokens over all of its runs, figures at every report."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class StageRun:
    """One stage on its way.

    work: directory for state and records. digest: of the recipe. resume: continue saved state; without it, saved
    state is an error, because it would be overwritten. stop_after: leave after so many steps of this run (for tests
    and for time slices). threads and device appear in the record only.
    """

    name: str
    stage: Stage
    module: nn.Module
    work: Path
    digest: str
    tokens_per_step: int
    resume: bool = False
    stop_after: int | None = None
    save_seconds: float = SAVE_SECONDS

    def __post_init__(self) -> None:
        self.optimisers = Optimisers(self.module.named_parameters(), self.stage)
        self.progress = Progress()

    @property
    def state_path(self) -> Path:
        """Where the state lies between runs."""
        return self.work / f"state-{self.name}.pt"

    def run(self, loss_of: StepLoss) -> bool:
        """Take the remaining steps; whether the stage is complete."""
        self._restore()
        saved = reported = time.monotonic()
        first = self.progress.step
        while self.progress.step < self.stage.steps:
            if self.stop_after is not None and self.progress.step - first >= self.stop_after:
                self._save()
                return False
            began = time.monotonic()
            loss, figures = loss_of(self.progress.step)
            loss.backward()
            self.optimisers.step(self.progress.step)
            self.progress.step += 1
            self.progress.tokens += self.tokens_per_step
            now = time.monotonic()
            self.progress.seconds += now - began
            if is_reported(self.progress.step - 1, self.stage):
                steps = (self.progress.step - 1) % REPORT_STEPS + 1
                self._report(float(loss.detach()), figures, steps * self.tokens_per_step / (now - reported))
                reported = now
            if now - saved > self.save_seconds:
                self._save()
                saved = now
        self._save()
        return True

    def record(self, **more: Any) -> None:
        """Write the stage's record, for the pair's provenance."""
        record = {"stage": asdict(self.stage), **asdict(self.progress), **more}
        (self.work / f"record-{self.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _report(self, loss: float, figures: dict[str, float], rate: float) -> None:
        rounded = {"step": self.progress.step, "loss": round(loss, 4), **{k: round(v, 4) for k, v in figures.items()}}
        self.progress.history.append(rounded)
        left = (self.stage.steps - self.progress.step) * self.tokens_per_step / max(rate, 1e-9)
        extra = "".join(f"  {name} {value:.3f}" for name, value in figures.items())
        print(
            f"{self.name} {self.progress.step}/{self.stage.steps}  loss {loss:.3f}{extra}"
            f"  {rate:.0f} tok/s  {left / 60:.1f} min left",
            flush=True,
        )

    def _save(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        temporary = self.state_path.with_suffix(".part")
        torch.save(
            {
                "digest": self.digest,
                "module": self.module.state_dict(),
                "optimisers": self.optimisers.state_dict(),
                "progress": asdict(self.progress),
            },
            temporary,
        )
        temporary.replace(self.state_path)

    def _restore(self) -> None:
        if not self.state_path.is_file():
            return
        if not self.resume:
            raise C2TError(f"{self.state_path} holds an earlier run; pass --resume to continue it, or remove it")
        state = torch.load(self.state_path, map_location="cpu", weights_only=True)
        if state["digest"] != self.digest:
            raise C2TError(f"{self.state_path} belongs to another recipe; remove it or train with that recipe")
        self.module.load_state_dict(state["module"])
        self.optimisers.load_state_dict(state["optimisers"])
        self.progress = Progress(**state["progress"])
