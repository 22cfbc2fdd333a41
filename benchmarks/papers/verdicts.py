"""From rows to verdicts on what a paper claims: by a rule, so that no verdict is anybody's opinion.

A claim of size has the paper's figure and the one that would mean no effect, such as 1 for a ratio. The effect found is
in its size from NEAR of the printed one on, in its direction below that, both if its interval leaves no effect out;
where there is no interval, from LEAST of the printed effect on. Of several drafts the least favourable counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.report.rows import FILE_OF, BenchRow, read_rows
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.experiment_rows import latest

NEAR, LEAST = 0.75, 0.25
# How far two things may differ that a paper calls the same.
SAME = 0.05


class Verdict(IntEnum):
    """Least favourable first."""

    CONTRADICTED = 0
    NOT = 1
    DIRECTION = 2
    SIZE = 3
    UNKNOWN = 4

    @property
    def text(self) -> str:
        return TEXTS[self]


TEXTS = {
    Verdict.SIZE: "reproduced in size",
    Verdict.DIRECTION: "reproduced in direction",
    Verdict.NOT: "not reproduced",
    Verdict.CONTRADICTED: "contradicted",
    Verdict.UNKNOWN: "cannot be judged here",
}


@dataclass(frozen=True)
class Figure:
    """What a row says. low, high: of its 95% interval, where it has one. of: draft, or what else tells it apart."""

    value: float
    low: float | None = None
    high: float | None = None
    of: str = ""

    @property
    def text(self) -> str:
        around = "" if self.low is None or self.high is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.of} {self.value:.2f}{around}".strip()


@dataclass(frozen=True)
class Found:
    """A verdict, and the figures that it follows from."""

    verdict: Verdict
    shown: str


# So many figures are shown one by one.
LISTED = 4


def shown(figures: Sequence[Figure]) -> str:
    """All figures, or their range."""
    if len(figures) <= LISTED:
        return ", ".join(figure.text for figure in figures)
    values = [figure.value for figure in figures]
    return f"{min(values):.2f} to {max(values):.2f}"


def effect(figures: Sequence[Figure], paper: float | Sequence[float], none: float = 1.0) -> Found:
    """Against what is printed, one figure for all or one each, and what would be no effect."""
    papers = [paper] * len(figures) if isinstance(paper, float) else list(paper)
    verdicts = [_effect(figure, wanted, none) for figure, wanted in zip(figures, papers, strict=True)]
    if not verdicts:
        raise C2TError("a verdict needs a figure")
    return Found(min(verdicts), shown(figures))


def _effect(figure: Figure, paper: float, none: float) -> Verdict:
    share = (figure.value - none) / (paper - none)
    if figure.low is None or figure.high is None:
        sure, reached = abs(share) >= LEAST, share >= NEAR
    else:
        ends = sorted((end - none) / (paper - none) for end in (figure.low, figure.high))
        sure, reached = ends[0] > 0.0 or ends[1] < 0.0, share >= NEAR
    if not sure:
        return Verdict.NOT
    if share < 0.0:
        return Verdict.CONTRADICTED
    return Verdict.SIZE if reached else Verdict.DIRECTION


def same(figures: Sequence[Figure], at_most: bool = False) -> Found:
    """Ratios that the paper has at 1. at_most: less is as good."""
    far = max((figure.value - 1.0) * (1 if at_most or figure.value > 1.0 else -1) for figure in figures)
    return Found(Verdict.SIZE if far <= SAME else Verdict.NOT, shown(figures))


def counted(hits: Iterable[bool], what: str) -> Found:
    """In how many cases it is as the paper says: all, more than half, fewer, none. what: the cases."""
    each = list(hits)
    if not each:
        raise C2TError(f"no {what} to count")
    share = sum(each) / len(each)
    rest = Verdict.CONTRADICTED if not share else Verdict.NOT
    verdict = Verdict.SIZE if share == 1.0 else Verdict.DIRECTION if share > 0.5 else rest
    return Found(verdict, f"in {sum(each)} of {len(each)} {what}")


def unknown(why: str) -> Found:
    """Nothing here could show it."""
    return Found(Verdict.UNKNOWN, why)


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Book:
    """All published rows. folder: benchmarks/results."""

    folder: Path

    @cached_property
    def _experiments(self) -> dict[str, dict[str, Row]]:
        return {pair: latest(self.folder / name) for pair, name in FILES.items() if (self.folder / name).is_file()}

    def record(self, experiment: str, pair: str = "toy") -> Row:
        """Of the newest run of an experiment. C2TError without one."""
        try:
            return self._experiments[pair][experiment]
        except KeyError as error:
            raise C2TError(f"no rows of {experiment} on the {pair} pair in {self.folder.name}") from error

    def rows(self, experiment: str, pair: str = "toy") -> list[Row]:
        """Of that run."""
        return list(self.record(experiment, pair)["rows"])

    def evaluated(self, name: str, part: str, rule: str, against: str, of: str = "") -> Figure:
        """Mean gamma over another rule's at equal tau. name: of the evaluation. part: chains or trees."""
        path = self.folder / "evaluations" / f"{name}.json"
        rules = json.loads(path.read_text(encoding="utf-8"))[part]["rules"]
        found = next((each for each in rules if each["name"] == rule), None)
        if found is None or against not in found["compared"]:
            raise C2TError(f"{path.name} does not compare {rule} with {against} on {part}")
        compared = found["compared"][against]
        low, high = compared["mean_interval"]
        return Figure(compared["mean"], low, high, of)

    @cached_property
    def simulated(self) -> list[BenchRow]:
        return read_rows(self.folder / FILE_OF["simulated"], BenchRow)


FILES = {"toy": "reproduce.jsonl", "real": "reproduce-real.jsonl"}
