"""What a claim of a paper is, and a trial of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.papers.catalogue import REGISTRY
from benchmarks.papers.verdicts import Book, Found

TOY, REAL = "toy", "real"


@dataclass(frozen=True)
class Trial:
    """One way in which a claim was tried. pair: TOY or REAL. what: was run. page: where the rows are shown, with an
    anchor. find: reads them. experiment: whose rows they are, if one's."""

    pair: str
    what: str
    page: str
    find: Callable[[Book], Found]
    experiment: str = ""


@dataclass(frozen=True)
class Claim:
    """paper, place: where it stands. says: in our words, with its figure."""

    paper: str
    place: str
    says: str
    trials: Sequence[Trial]


def section(experiment: str) -> str:
    """Where docs/reproduction.md shows an experiment."""
    title = REGISTRY.experiments[experiment].title.lower()
    return "reproduction.md#" + re.sub(r"[^\w\- ]", "", title).replace(" ", "-")


def toy(what: str, experiment: str, find: Callable[[Book], Found]) -> Trial:
    """On the toy pair."""
    return Trial(TOY, what, section(experiment), find, experiment)


def both(what: str, experiment: str, find: Callable[[str], Callable[[Book], Found]]) -> Sequence[Trial]:
    """The same on both pairs. find: by pair."""
    return tuple(Trial(pair, what, section(experiment), find(pair), experiment) for pair in (TOY, REAL))
