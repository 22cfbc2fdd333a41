"""What the four papers claim, and which rows here bear on it; the verdicts follow by benchmarks.papers.verdicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

from benchmarks.papers.catalogue import REGISTRY
from benchmarks.papers.printed import V2_TABLE_5
from benchmarks.papers.verdicts import Book, Figure, Found, Row, counted, effect, same, shown, unknown

TOY, REAL = "toy", "real"
HEADS = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1", "draft": "stand-alone"}
EAGLE2 = "EAGLE-2"


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


def _three_features(book: Book) -> Found:
    groups: dict[tuple[object, ...], dict[str, float]] = {}
    for row in book.rows("c2t-v1-table-1"):
        if row["recipe"] in ("paper's", "ours") and row["gamma / EAGLE-2"] is not None:
            key = row["draft"], row["N"], row["recipe"]
            groups.setdefault(key, {})[row["features"]] = row["gamma / EAGLE-2"]
    return counted((min(found, key=lambda name: found[name]) == "P+H+d" for found in groups.values()), "settings")


def _of_relation(book: Book, relation: str) -> float:
    """Mean gamma over EAGLE-2's of one relation in table 2, at N = 290."""
    rows = book.rows("c2t-v1-table-2")
    return fmean(row["gamma / EAGLE-2"] for row in rows if row["relation"] == relation and row["N"] == 290)


def _transfer(over: str, under: str, paper: float | None) -> Callable[[Book], Found]:
    """One relation's candidates over another's. paper: the ratio that is printed, None for the same."""

    def find(book: Book) -> Found:
        found = [Figure(_of_relation(book, over) / _of_relation(book, under))]
        return same(found, at_most=True) if paper is None else effect(found, paper)

    return find


def _second_top_k(book: Book) -> Found:
    name = "gamma / EAGLE-2 at its tau"
    rows = book.rows("c2t-v1-table-5")
    whole = {(row["draft"], row["EAGLE-2 N"]): row[name] for row in rows if row["K"] is None}
    fewer = (row[name] < whole[row["draft"], row["EAGLE-2 N"]] for row in rows if row["K"] is not None)
    return counted(fewer, "settings")


def _ratio(experiment: str, column: str, over: Row, under: Row, of: str) -> Callable[[Book], Figure]:
    """A column of one row over that of another. over, under: what tells the two rows from all others."""

    def find(book: Book) -> Figure:
        rows = book.rows(experiment)
        one, other = (
            next(row for row in rows if all(row[name] == value for name, value in wanted.items()))
            for wanted in (over, under)
        )
        return Figure(one[column] / other[column], of=of)

    return find


def _width(recipe: str) -> Callable[[Book], Figure]:
    narrow, wide = ({"recipe": recipe, "hidden": units} for units in (12, 48))
    return _ratio("c2t-v1-figure-6", "gamma / EAGLE-2", narrow, wide, "")


def _fine_tuned(book: Book) -> Found:
    rows = book.rows("c2t-v1-figure-7")
    drafts = dict.fromkeys(row["used on"] for row in rows)
    both = [[row for row in rows if row["used on"] == draft] for draft in drafts]
    return counted(
        (after[name] > before[name] for before, after in both for name in ("recall", "theta", "setting")), "changes"
    )


def _corpora(book: Book) -> Found:
    by_draft: dict[str, list[float]] = {}
    for row in book.rows("c2t-v1-figure-8"):
        by_draft.setdefault(row["draft"], []).append(row["gamma / EAGLE-2"])
    return same([Figure(max(each) / min(each), of=draft) for draft, each in by_draft.items()])


def _by_row(experiment: str, column: str, wanted: Mapping[str, object], name: str) -> Callable[[Book], list[Figure]]:
    """A column of all rows that match. name: column that tells them apart, empty for a single row."""

    def find(book: Book) -> list[Figure]:
        rows = [row for row in book.rows(experiment) if all(row[key] == value for key, value in wanted.items())]
        return [Figure(row[column], of=row[name] if name else "") for row in rows if row[column] is not None]

    return find


def _falls_with_depth(pair: str) -> Callable[[Book], Found]:
    def find(book: Book) -> Found:
        shares = [[row[f"d={depth}"] for depth in (1, 2, 3)] for row in book.rows("c2t-v2-table-1", pair)]
        known = [[share for share in each if share is not None] for each in shares]
        return counted((all(one > other for one, other in pairwise(each)) for each in known), "rows")

    return find


# of an interval of entropy, so that its bias says something
ENOUGH = 50


def _bias(pair: str, lowest: bool) -> Callable[[Book], Found]:
    """Of the first word, where the entropy is lowest (the paper: overestimated), or highest (underestimated)."""

    def find(book: Book) -> Found:
        rows = [row for row in book.rows("c2t-v1-figure-2", pair) if row["states"] >= ENOUGH]
        by_draft = {row["draft"]: [each for each in rows if each["draft"] == row["draft"]] for row in rows}
        biases = [each[0 if lowest else -1]["bias"] for each in by_draft.values()]
        found = counted((bias > 0.0 if lowest else bias < 0.0 for bias in biases), "drafts")
        return Found(found.verdict, f"{found.shown}: {', '.join(f'{bias:+.2f}' for bias in biases)}")

    return find


def _equal_tau(book: Book) -> Found:
    rows = [row for row in book.rows("c2t-v2-table-2") if str(row["method"]).endswith("equal tau")]
    rows = [row for row in rows if not str(row["method"]).startswith("SD")]
    return effect(
        [Figure(row["gamma / without"], of=row["draft"]) for row in rows],
        [row["paper gamma / without"] for row in rows],
    )


def _at_half(book: Book) -> Found:
    rows = [row for row in book.rows("c2t-v2-table-2") if str(row["method"]).endswith("paper's recipe")]
    found = [Figure(row["tau / without"], of=row["draft"]) for row in rows]
    return effect(found, [row["paper tau / without"] for row in rows])


def _f1(book: Book) -> Found:
    (eagle2, c2t) = (2 * p * r / (p + r) for _, p, r in V2_TABLE_5["Total"])
    rows = [row for row in book.rows("c2t-v2-table-5") if row["entropy"] == "Total"]
    return effect([Figure(row["C2T F1"] / row["E2 F1"], of=row["draft"]) for row in rows], c2t / eagle2)


def _table_3(column: str) -> Callable[[Book], Found]:
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


def _toy(what: str, experiment: str, find: Callable[[Book], Found]) -> Trial:
    return Trial(TOY, what, section(experiment), find, experiment)


def _both(what: str, experiment: str, find: Callable[[str], Callable[[Book], Found]]) -> Sequence[Trial]:
    """The same on both pairs. find: by pair."""
    return tuple(Trial(pair, what, section(experiment), find(pair), experiment) for pair in (TOY, REAL))


def _effect_of(figures: Callable[[Book], list[Figure]], paper: float) -> Callable[[Book], Found]:
    return lambda book: effect(figures(book), paper)


CLAIMS: Sequence[Claim] = (
    Claim(
        "C2T",
        "v1 and v2, abstract; v2 F",
        "25% fewer candidates than EAGLE-2 at its accept length",
        (
            Trial(
                TOY,
                "trees, the paper's recipe on all prompts",
                "classifiers.md#the-papers-own-recipe",
                trees("paper", "paper", ("eagle3", "draft")),
            ),
            Trial(
                TOY,
                "trees, the paper's features, our recipe",
                "classifiers.md#trees-of-at-most-6-layers",
                trees("three"),
            ),
            Trial(TOY, "trees, seven features", "classifiers.md#trees-of-at-most-6-layers", trees("extended")),
            Trial(
                TOY,
                "the same on frozen files",
                "classifiers.md#files-that-nobody-had-looked-at",
                trees("extended", "frozen", ("eagle3",)),
            ),
            *(
                Trial(
                    REAL,
                    f"trees, {what}",
                    "classifiers.md#on-a-real-language-model",
                    trees(rule, "real", ("eagle3",)),
                )
                for rule, what in (
                    ("paper", "the paper's recipe on all prompts"),
                    ("three", "the paper's features, our recipe"),
                )
            ),
            Trial(
                REAL,
                "trees, seven features",
                "classifiers.md#on-a-real-language-model",
                trees("extended", "real", ("eagle3",)),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v1 table 3",
        "in chains 10% fewer than the threshold on P (DyJoint)",
        (
            Trial(TOY, "the paper's features, our recipe", "classifiers.md#chains-of-at-most-6", chains("three")),
            Trial(TOY, "seven features", "classifiers.md#chains-of-at-most-6", chains("extended")),
            Trial(
                TOY,
                "the same on frozen files",
                "classifiers.md#files-that-nobody-had-looked-at",
                chains("extended", "frozen", ("eagle3",)),
            ),
            Trial(
                REAL,
                "the paper's features, our recipe",
                "classifiers.md#on-a-real-language-model",
                chains("three", "real", ("eagle3",)),
            ),
            Trial(
                REAL,
                "seven features",
                "classifiers.md#on-a-real-language-model",
                chains("extended", "real", ("eagle3",)),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v1 table 1",
        "P, H and depth together need fewest candidates",
        (_toy("two recipes, N of 26 and 100", "c2t-v1-table-1", _three_features),),
    ),
    Claim(
        "C2T",
        "v1 table 2, v2 figure 3",
        "a classifier serves other models of its family as it is",
        (_toy("candidates over the own one's", "c2t-v1-table-2", _transfer("same family", "own", None)),),
    ),
    Claim(
        "C2T",
        "v1 table 2",
        "on another family 13% more candidates, which fine-tuning on a tenth wins back",
        (
            _toy("other over own", "c2t-v1-table-2", _transfer("other family", "own", 0.867 / 0.769)),
            _toy(
                "fine-tuned over other",
                "c2t-v1-table-2",
                _transfer("other family, fine-tuned", "other family", 0.733 / 0.867),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v1 table 4",
        "EAGLE-2 accepts .11 more than EAGLE-1 with a tree of its size",
        (
            _toy(
                "three drafts",
                "c2t-v1-table-4",
                lambda book: effect(
                    [
                        _ratio(
                            "c2t-v1-table-4",
                            "tau",
                            {"draft": draft, "method": "EAGLE-2", "setting": "N = 26"},
                            {"draft": draft, "method": "EAGLE-1"},
                            draft,
                        )(book)
                        for draft in ("EAGLE-3 head", "EAGLE-1 head", "stand-alone")
                    ],
                    2.95 / 2.66,
                ),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v1 table 5",
        "the second top-K leaves fewer candidates at equal accept length",
        (_toy("against EAGLE-2 at the same tau", "c2t-v1-table-5", _second_top_k),),
    ),
    Claim(
        "C2T",
        "v1 table 6",
        "the entropy of the 1,000 most probable words is as good as that of all",
        (
            _toy(
                "candidates over those with all words",
                "c2t-v1-table-6",
                lambda book: same(_by_row("c2t-v1-table-6", "gamma / all", {"M": 1000}, "")(book)),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v1 figure 6",
        "12 hidden units are as good as 48",
        (
            _toy("the paper's recipe", "c2t-v1-figure-6", lambda book: same([_width("paper's")(book)], at_most=True)),
            _toy("our recipe", "c2t-v1-figure-6", lambda book: same([_width("ours")(book)], at_most=True)),
        ),
    ),
    Claim(
        "C2T",
        "v1 figure 7",
        "fine-tuning raises recall, positive rate and beta",
        (_toy("on a tenth of the prompts", "c2t-v1-figure-7", _fine_tuned),),
    ),
    Claim(
        "C2T",
        "v1 figure 8",
        "classifiers fitted on other text are nearly identical",
        (_toy("most over fewest candidates", "c2t-v1-figure-8", _corpora),),
    ),
    Claim(
        "C2T",
        "v1 table 7",
        "a frozen classifier of the EAGLE head works on an MTP head: chains .63, trees .81 of the candidates",
        (
            _toy(
                "chains",
                "c2t-v1-table-7",
                _effect_of(
                    _by_row("c2t-v1-table-7", "gamma / without", {"paper head": "MTP", "rule": "chain + C2T"}, "head"),
                    98_141 / 156_040,
                ),
            ),
            _toy(
                "trees",
                "c2t-v1-table-7",
                _effect_of(
                    _by_row("c2t-v1-table-7", "gamma / without", {"paper head": "MTP", "rule": "C2T"}, "head"),
                    724_913 / 900_090,
                ),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v2 table 1",
        "at equal P the accepted share falls with depth",
        _both("nodes that EAGLE-2 verifies", "c2t-v2-table-1", _falls_with_depth),
    ),
    Claim(
        "C2T",
        "v1 figure 2, v2 figure 1",
        "the first word is overestimated where entropy is low",
        _both("probability less accepted share", "c2t-v1-figure-2", partial(_bias, lowest=True)),
    ),
    Claim(
        "C2T",
        "v1 figure 2, v2 figure 1",
        "and underestimated where it is high",
        _both("probability less accepted share", "c2t-v1-figure-2", partial(_bias, lowest=False)),
    ),
    Claim(
        "C2T",
        "v2 table 2",
        "on top of EAGLE-2 and EAGLE-3, 8 to 9% fewer candidates",
        (_toy("at equal tau", "c2t-v2-table-2", _equal_tau),),
    ),
    Claim(
        "C2T",
        "v2 table 2",
        "at beta .5 the accept length rises by 3 to 11%",
        (_toy("the paper's recipe", "c2t-v2-table-2", _at_half),),
    ),
    Claim(
        "C2T",
        "v2 table 2",
        "7 to 17% more tokens per second at one request",
        (
            Trial(
                TOY,
                "nothing",
                "gpu.md",
                lambda book: unknown("no GPU has run a trained pair of that size here"),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v2 table 3",
        "5, 11 and 12% faster than EAGLE at 64, 128 and 256 requests, 8B on an L40",
        (Trial(TOY, "simulated, best fixed beta", "results.md#the-papers-table-3-simulated", _table_3("1 x L40")),),
    ),
    Claim(
        "C2T",
        "v2 table 3",
        "6, 13 and 12% faster, 70B on four A100",
        (Trial(TOY, "simulated, best fixed beta", "results.md#the-papers-table-3-simulated", _table_3("4 x A100")),),
    ),
    Claim(
        "C2T",
        "v2 table 5",
        "F1 on nodes 1.85 times EAGLE-2's at its recall",
        (_toy("the paper's features, our recipe", "c2t-v2-table-5", _f1),),
    ),
    Claim(
        "DySpec",
        "figure 2",
        "acceptance grows with the draft's probability",
        (_toy("both models at temperature .6", "dyspec-figure-2", _rising),),
    ),
    Claim(
        "DySpec",
        "abstract",
        "9.1 tokens a step at 64 nodes and temperature 0",
        (_toy("greedy construction", "dyspec-tables-1-3", _tokens_per_step),),
    ),
    *(
        Claim(
            "DySpec",
            "tables 1 to 3",
            f"more tokens a step than Sequoia at 64 nodes, temperature {temperature:g}",
            (
                _toy(
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
            _toy(
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
        (_toy("drafted trees", "dyspec-figure-9", _blocks),),
    ),
    Claim(
        "Entropy trees",
        "figure 1",
        "mismatches grow likelier with entropy",
        _both("chains of 4", "entropy-figure-1", _mismatches_rise),
    ),
    Claim(
        "Entropy trees",
        "figure 1",
        "and likelier than matches above 1 nat",
        _both("chains of 4", "entropy-figure-1", _mismatches_from_1),
    ),
    Claim(
        "Entropy trees",
        "figure 3",
        "correct generations have less entropy",
        _both("chains of 4", "entropy-figure-3", _lower_entropy),
    ),
    *(
        Claim(
            "Entropy trees",
            "figure 2",
            f"{method} saves {saved} of the time",
            (_toy("modelled time, candidates free", "entropy-figure-2", _time_saved(method)),),
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
        (_toy("correlation over prompts", "entropy-figures-5-6", _correlated),),
    ),
)
