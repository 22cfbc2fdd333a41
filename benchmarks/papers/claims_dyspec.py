"""The claims of DySpec, and what rows here say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from benchmarks.papers.claim import Claim, toy
from benchmarks.papers.verdicts import Book, Figure, Found, Row, counted, effect


def _rising(book: Book) -> Found:
    shares = [row["acceptance"] for row in book.rows("dyspec-figure-2") if row["acceptance"] is not None]
    return counted((other > one for one, other in pairwise(shares)), "steps from bin to bin")


def _dyspec(experiment: str, rule: str, temperature: float, papers: Sequence[str]) -> Callable[[Book], Found]:
    """DySpec's tokens per step over Sequoia's, with the widest interval that the two allow."""

    def find(book: Book) -> Found:
        rows = {row["rule"]: row for row in book.rows(experiment) if row["target temperature"] == temperature}
        ours, other = rows[rule], rows["Sequoia"]
        ratios = [
            rows[_PRINTED.get(rule, rule)][name] / other[name]
            for name in papers
            if rows[_PRINTED.get(rule, rule)][name] is not None
        ]
        key = "tokens per step"
        found = Figure(ours[key] / other[key], ours["low"] / other["high"], ours["high"] / other["low"])
        return effect([found], fmean(ratios))

    return find


# rows beside that with the paper's figures: the same rule at another threshold
_PRINTED = {"DySpec threshold 0.01": "DySpec threshold 1/n"}


def _tokens_per_step(book: Book) -> Found:
    wanted = {"rule": "DySpec greedy", "target temperature": 0.0}
    (row,) = (r for r in book.rows("dyspec-tables-1-3") if all(r[name] == value for name, value in wanted.items()))
    return effect([Figure(row["tokens per step"], row["low"], row["high"])], 9.1)


def _blocks(book: Book) -> Found:
    by_tree: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in book.rows("dyspec-figure-9"):
        by_tree.setdefault((row["drafted"], row["nodes"]), {})[row["order"]] = row
    ours = [
        Figure(each["depth-first"]["ours"] / each["insertion"]["ours"], of=f"{drafted}, {nodes:.0f} nodes")
        for (drafted, nodes), each in by_tree.items()
    ]
    papers = [each["depth-first"]["paper"] / each["insertion"]["paper"] for each in by_tree.values()]
    return effect(ours, papers)


DYSPEC: Sequence[Claim] = (
    Claim(
        "DySpec",
        "figure 2",
        "acceptance grows with the draft's probability",
        (toy("both models at temperature .6", "dyspec-figure-2", _rising),),
    ),
    Claim(
        "DySpec",
        "abstract",
        "9.1 tokens a step at 64 nodes and temperature 0",
        (toy("greedy construction", "dyspec-tables-1-3", _tokens_per_step),),
    ),
    *(
        Claim(
            "DySpec",
            "tables 1 to 3",
            f"more tokens a step than Sequoia at 64 nodes, temperature {temperature:g}",
            (
                toy(
                    "greedy construction",
                    "dyspec-tables-1-3",
                    _dyspec(
                        "dyspec-tables-1-3",
                        "DySpec greedy",
                        temperature,
                        ("paper table 1", "paper table 2", "paper table 3"),
                    ),
                ),
            ),
        )
        for temperature in (0.0, 0.6)
    ),
    Claim(
        "DySpec",
        "table 4",
        "more tokens a step than Sequoia at 768 nodes, temperature 0",
        (
            toy(
                "threshold 1/n, as printed",
                "dyspec-table-4",
                _dyspec("dyspec-table-4", "DySpec threshold 1/n", 0.0, ("paper C4", "paper OWT", "paper CNN")),
            ),
        ),
    ),
    Claim(
        "DySpec",
        "table 5, figure 9",
        "depth-first order leaves .60 and .51 of the mask's blocks at 768 and 1,024 nodes",
        (toy("drafted trees", "dyspec-figure-9", _blocks),),
    ),
)
