"""What rows here say of the claims of C2T, v1 and v2; see claims_c2t.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from benchmarks.papers.printed import V2_TABLE_5
from benchmarks.papers.verdicts import Book, Figure, Found, Row, counted, effect, same

HEADS = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1", "draft": "stand-alone"}
EAGLE2 = "EAGLE-2"


def trees(rule: str, evaluation: str = "rules", heads: Sequence[str] = tuple(HEADS)) -> Callable[[Book], Found]:
    """gamma over EAGLE-2's at equal tau, against the paper's .75."""

    def find(book: Book) -> Found:
        found = [book.evaluated(f"{evaluation}-{head}", "trees", rule, EAGLE2, HEADS[head]) for head in heads]
        return effect(found, 0.75)

    return find


def chains(rule: str, evaluation: str = "rules", heads: Sequence[str] = tuple(HEADS)) -> Callable[[Book], Found]:
    """gamma over that of the threshold on P at equal tau, against table 3's 1.040 / 1.157."""

    def find(book: Book) -> Found:
        found = [book.evaluated(f"{evaluation}-{head}", "chains", rule, "P", HEADS[head]) for head in heads]
        return effect(found, 1.040 / 1.157)

    return find


def three_features(book: Book) -> Found:
    """Of drafts, N and recipes, where P, H and depth together need the fewest candidates."""
    groups: dict[tuple[object, ...], dict[str, float]] = {}
    for row in book.rows("c2t-v1-table-1"):
        if row["recipe"] in ("paper's", "ours") and row["gamma / EAGLE-2"] is not None:
            key = row["draft"], row["N"], row["recipe"]
            groups.setdefault(key, {})[row["features"]] = row["gamma / EAGLE-2"]
    return counted((min(found, key=lambda name: found[name]) == "P+H+d" for found in groups.values()), "settings")


def of_relation(book: Book, relation: str) -> float:
    """Mean gamma over EAGLE-2's of one relation in table 2, at N = 290."""
    rows = book.rows("c2t-v1-table-2")
    return fmean(row["gamma / EAGLE-2"] for row in rows if row["relation"] == relation and row["N"] == 290)


def transfer(over: str, under: str, paper: float | None) -> Callable[[Book], Found]:
    """One relation's candidates over another's. paper: the ratio that is printed, None for the same."""

    def find(book: Book) -> Found:
        found = [Figure(of_relation(book, over) / of_relation(book, under))]
        return same(found, at_most=True) if paper is None else effect(found, paper)

    return find


def second_top_k(book: Book) -> Found:
    """Of drafts and K, where fewer candidates than without a second top-K reach the same accept length."""
    name = "gamma / EAGLE-2 at its tau"
    rows = book.rows("c2t-v1-table-5")
    whole = {(row["draft"], row["EAGLE-2 N"]): row[name] for row in rows if row["K"] is None}
    fewer = (row[name] < whole[row["draft"], row["EAGLE-2 N"]] for row in rows if row["K"] is not None)
    return counted(fewer, "settings")


def ratio(experiment: str, column: str, over: Row, under: Row, of: str) -> Callable[[Book], Figure]:
    """A column of one row over that of another. over, under: what tells the two rows from all others."""

    def find(book: Book) -> Figure:
        rows = book.rows(experiment)
        one, other = (
            next(row for row in rows if all(row[name] == value for name, value in wanted.items()))
            for wanted in (over, under)
        )
        return Figure(one[column] / other[column], of=of)

    return find


def width(recipe: str) -> Callable[[Book], Figure]:
    """Candidates with 12 hidden units over those with 48."""
    narrow, wide = ({"recipe": recipe, "hidden": units} for units in (12, 48))
    return ratio("c2t-v1-figure-6", "gamma / EAGLE-2", narrow, wide, "")


def fine_tuned(book: Book) -> Found:
    """What fine-tuning raises: recall, positive rate, beta."""
    rows = book.rows("c2t-v1-figure-7")
    drafts = dict.fromkeys(row["used on"] for row in rows)
    both = [[row for row in rows if row["used on"] == draft] for draft in drafts]
    return counted(
        (after[name] > before[name] for before, after in both for name in ("recall", "theta", "setting")), "changes"
    )


def corpora(book: Book) -> Found:
    """Most over fewest candidates among classifiers of one draft, each fitted on other text."""
    by_draft: dict[str, list[float]] = {}
    for row in book.rows("c2t-v1-figure-8"):
        by_draft.setdefault(row["draft"], []).append(row["gamma / EAGLE-2"])
    return same([Figure(max(each) / min(each), of=draft) for draft, each in by_draft.items()])


def by_row(experiment: str, column: str, wanted: Mapping[str, object], name: str) -> Callable[[Book], list[Figure]]:
    """A column of all rows that match. name: column that tells them apart, empty for a single row."""

    def find(book: Book) -> list[Figure]:
        rows = [row for row in book.rows(experiment) if all(row[key] == value for key, value in wanted.items())]
        return [Figure(row[column], of=row[name] if name else "") for row in rows if row[column] is not None]

    return find


def falls_with_depth(pair: str) -> Callable[[Book], Found]:
    """Of intervals of P, where the accepted share falls from depth to depth."""

    def find(book: Book) -> Found:
        shares = [[row[f"d={depth}"] for depth in (1, 2, 3)] for row in book.rows("c2t-v2-table-1", pair)]
        known = [[share for share in each if share is not None] for each in shares]
        return counted((all(one > other for one, other in pairwise(each)) for each in known), "rows")

    return find


# of an interval of entropy, so that its bias says something
ENOUGH = 50


def bias(pair: str, lowest: bool) -> Callable[[Book], Found]:
    """Of the first token, where the entropy is lowest (the paper: overestimated), or highest (underestimated)."""

    def find(book: Book) -> Found:
        rows = [row for row in book.rows("c2t-v1-figure-2", pair) if row["states"] >= ENOUGH]
        by_draft = {row["draft"]: [each for each in rows if each["draft"] == row["draft"]] for row in rows}
        biases = [each[0 if lowest else -1]["bias"] for each in by_draft.values()]
        found = counted((bias > 0.0 if lowest else bias < 0.0 for bias in biases), "drafts")
        return Found(found.verdict, f"{found.shown}: {', '.join(f'{bias:+.2f}' for bias in biases)}")

    return find


def equal_tau(book: Book) -> Found:
    """Candidates with C2T over those without, at equal tau."""
    rows = [row for row in book.rows("c2t-v2-table-2") if str(row["method"]).endswith("equal tau")]
    rows = [row for row in rows if not str(row["method"]).startswith("SD")]
    return effect(
        [Figure(row["gamma / without"], of=row["draft"]) for row in rows],
        [row["paper gamma / without"] for row in rows],
    )


def at_half(book: Book) -> Found:
    """Accept length with C2T over that without, at a beta of .5."""
    rows = [row for row in book.rows("c2t-v2-table-2") if str(row["method"]).endswith("paper's recipe")]
    found = [Figure(row["tau / without"], of=row["draft"]) for row in rows]
    return effect(found, [row["paper tau / without"] for row in rows])


def f1(book: Book) -> Found:
    """C2T's F1 on all nodes over EAGLE-2's."""
    (eagle2, c2t) = (2 * p * r / (p + r) for _, p, r in V2_TABLE_5["Total"])
    rows = [row for row in book.rows("c2t-v2-table-5") if row["entropy"] == "Total"]
    return effect([Figure(row["C2T F1"] / row["E2 F1"], of=row["draft"]) for row in rows], c2t / eagle2)


def table_3(column: str) -> Callable[[Book], Found]:
    """What the best fixed beta gains over the static chain of 4, at each batch size, both drafts."""

    def find(book: Book) -> Found:
        rows = [row for row in book.simulated if row.scenario == "c2t-v2-table3" and row.setting["column"] == column]
        ours, papers = [], []
        cells = {(str(row.setting["draft"]), int(row.setting["requests_in_flight"] or 0)) for row in rows}
        for draft, batch in sorted(cells):
            mine = [r for r in rows if (r.setting["draft"], r.setting["requests_in_flight"]) == (draft, batch)]
            static = next(row.metrics for row in mine if row.arm == "static 4")
            betas = [row.metrics for row in mine if row.arm.startswith("C2T beta")]
            best = max(each["ratio_to_plain"] or 0.0 for each in betas)
            ours.append(Figure(best / (static["ratio_to_plain"] or 1.0), of=f"{draft} at {batch}"))
            papers.append((betas[0]["paper_ratio"] or 0.0) / (static["paper_ratio"] or 1.0))
        return effect(ours, papers)

    return find
