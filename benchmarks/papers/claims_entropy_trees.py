"""The claims of entropy trees, and what rows here say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from benchmarks.papers.claim import Claim, both, toy
from benchmarks.papers.verdicts import Book, Figure, Found, Row, counted, effect, shown, unknown

# tokens of a bin, so that one can say which outcome is likelier there
LEAST_TOKENS = 20


def _by_entropy(book: Book, pair: str) -> list[list[Row]]:
    """Bins of the two drafts that hold enough tokens."""
    by_draft: dict[str, list[Row]] = {}
    for row in book.rows("entropy-figure-1", pair):
        if row["matched"] + row["mismatched"] >= LEAST_TOKENS:
            by_draft.setdefault(row["draft"], []).append(row)
    return list(by_draft.values())


def _mismatches_rise(pair: str) -> Callable[[Book], Found]:
    def find(book: Book) -> Found:
        drafts = _by_entropy(book, pair)
        rising = (b["mismatch share"] > a["mismatch share"] for each in drafts for a, b in pairwise(each))
        return counted(rising, "steps from bin to bin")

    return find


def _mismatches_from_1(pair: str) -> Callable[[Book], Found]:
    def find(book: Book) -> Found:
        bins = [row for each in _by_entropy(book, pair) for row in each if row["entropy from"] >= 1.0]
        return counted((row["mismatched"] > row["matched"] for row in bins), "bins above 1 nat")

    return find


def _lower_entropy(pair: str) -> Callable[[Book], Found]:
    def find(book: Book) -> Found:
        medians: dict[str, dict[str, float]] = {}
        for row in book.rows("entropy-figure-3", pair):
            medians.setdefault(row["draft"], {})[row["generation"]] = row["median"]
        return counted((each["correct"] < each["incorrect"] for each in medians.values()), "drafts")

    return find


# Candidates of a step beyond which a model of time that charges nothing for them says nothing.
MOST_CANDIDATES = 64


def _time_saved(method: str) -> Callable[[Book], Found]:
    def find(book: Book) -> Found:
        rows = [row for row in book.rows("entropy-figure-2") if row["method"] == method]
        figures = [Figure(row["time saved, modelled"], of=row["draft"]) for row in rows]
        most = max(row["candidates per step"] for row in rows)
        if most > MOST_CANDIDATES:
            return unknown(f"{shown(figures)}, with {most:,.0f} candidates a step")
        return effect(figures, rows[0]["paper time saved"], 0.0)

    return find


def _correlated(book: Book) -> Found:
    known = [row["correlation"] for row in book.rows("entropy-figures-5-6") if row["correlation"] is not None]
    return counted((value > 0.5 for value in known), "panels above .5")


ENTROPY_TREES: Sequence[Claim] = (
    Claim(
        "Entropy trees",
        "figure 1",
        "mismatches grow likelier with entropy",
        both("chains of 4", "entropy-figure-1", _mismatches_rise),
    ),
    Claim(
        "Entropy trees",
        "figure 1",
        "and likelier than matches above 1 nat",
        both("chains of 4", "entropy-figure-1", _mismatches_from_1),
    ),
    Claim(
        "Entropy trees",
        "figure 3",
        "correct generations have less entropy",
        both("chains of 4", "entropy-figure-3", _lower_entropy),
    ),
    *(
        Claim(
            "Entropy trees",
            "figure 2",
            f"{method} saves {saved} of the time",
            (toy("modelled time, candidates free", "entropy-figure-2", _time_saved(method)),),
        )
        for method, saved in (
            ("static, 2 wide", "2.3%"),
            ("early stop, H > 1", "4.4%"),
            ("dynamic width", "7.2%"),
            ("dynamic width and depth", "6.7%"),
        )
    ),
    Claim(
        "Entropy trees",
        "figures 5 and 6",
        "time saved and wasted passes saved go together",
        (toy("correlation over prompts", "entropy-figures-5-6", _correlated),),
    ),
)
