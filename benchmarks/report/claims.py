"""The first table of docs/results.md: what the papers claim, and what their rows say here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from benchmarks.papers import freshness
from benchmarks.papers.all_claims import CLAIMS
from benchmarks.papers.claim import REAL, TOY, Claim, Trial
from benchmarks.papers.verdicts import LEAST, NEAR, SAME, Book, Found, Verdict
from benchmarks.report.tables import table

HEAD = f"""## What the papers claim, and what came out here

A verdict follows from rows by a rule (`benchmarks/papers/verdicts.py`): *in size* is at least {NEAR:.0%} of the printed
effect, *in direction* less, both with an interval that leaves no effect out, or {LEAST:.0%} of the printed effect where
there is no interval. What a paper calls the same may differ by {SAME:.0%}. Of several drafts the least favourable
counts.

The toy pair is [ours](pair.md): its heads are less sure than they are right. The real one is
[SmolLM2-135M](smollm2.md) with an EAGLE-3 head, on development prompts. Ratios are of candidates at equal accept length
unless a line says otherwise. *Older rows* were made before rows named the classifiers that they are of.
"""
PAIRS = {TOY: "toy", REAL: "real"}
ORDER = (Verdict.SIZE, Verdict.DIRECTION, Verdict.NOT, Verdict.CONTRADICTED, Verdict.UNKNOWN)

Judged = Sequence[tuple[Claim, Trial, Found]]


def judged(book: Book) -> Judged:
    """Every trial of every claim. C2TError for one without its row."""
    return [(claim, trial, trial.find(book)) for claim in CLAIMS for trial in claim.trials]


def claims_section(book: Book) -> str:
    """The section as Markdown."""
    every = judged(book)
    lines = []
    for claim, mine in groupby(every, key=lambda each: each[0]):
        names = (claim.paper, f"{claim.says} ({claim.place})")
        for _, trial, found in mine:
            row = f"[{_age(book, trial)}]({trial.page})"
            lines.append([*names, PAIRS[trial.pair], trial.what, found.shown, found.verdict.text, row])
            names = ("", "")
    head = ["paper", "claim", "pair", "what was run", "found", "verdict", ""]
    return f"{HEAD}\n{table(head, lines)}\n\n{totals(every)}\n\n{changes(every)}\n"


def _age(book: Book, trial: Trial) -> str:
    """How a link to rows says whether they are of the classifiers that ship now."""
    if not trial.experiment:
        return "rows"
    old = freshness.remark(book.record(trial.experiment, trial.pair), real=trial.pair == REAL)
    return "older rows" if old else "rows"


def totals(every: Judged) -> str:
    """How many trials there are of each verdict."""
    verdicts = [found.verdict for _, _, found in every]
    parts = [f"{verdicts.count(verdict)} {verdict.text}" for verdict in ORDER if verdict in verdicts]
    return f"Of {len(verdicts)} trials: {', '.join(parts)}."


def changes(every: Judged) -> str:
    """Which conclusions are others on the real pair: claims that were tried on both by the same run."""
    by_run = {(claim.says, trial.what, trial.pair): found.verdict for claim, trial, found in every}
    lines = []
    for (says, what, pair), verdict in by_run.items():
        toy = by_run.get((says, what, TOY))
        if pair == REAL and toy is not None and toy != verdict:
            lines.append(f"- {says}: {toy.text} on the toy pair, {verdict.text} on the real one ({what}).")
    if not lines:
        return "No verdict is another one on the real pair."
    return "\n".join(["Verdicts that are others on the real pair:", "", *lines])
