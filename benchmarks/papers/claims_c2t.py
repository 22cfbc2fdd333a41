"""The claims of C2T, v1 and v2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.papers.c2t_found import (
    at_half,
    bias,
    by_row,
    chains,
    corpora,
    equal_tau,
    f1,
    falls_with_depth,
    fine_tuned,
    ratio,
    second_top_k,
    table_3,
    three_features,
    transfer,
    trees,
    width,
)
from benchmarks.papers.claim import REAL, TOY, Claim, Trial, both, toy
from benchmarks.papers.verdicts import Book, Figure, Found, effect, same, unknown

TABLE_3 = "results-simulated.md#the-papers-table-3-simulated"


def _effect_of(figures: Callable[[Book], list[Figure]], paper: float) -> Callable[[Book], Found]:
    return lambda book: effect(figures(book), paper)


C2T: Sequence[Claim] = (
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
        (toy("two recipes, N of 26 and 100", "c2t-v1-table-1", three_features),),
    ),
    Claim(
        "C2T",
        "v1 table 2, v2 figure 3",
        "a classifier serves other models of its family as it is",
        (toy("candidates over the own one's", "c2t-v1-table-2", transfer("same family", "own", None)),),
    ),
    Claim(
        "C2T",
        "v1 table 2",
        "on another family 13% more candidates, which fine-tuning on a tenth wins back",
        (
            toy("other over own", "c2t-v1-table-2", transfer("other family", "own", 0.867 / 0.769)),
            toy(
                "fine-tuned over other",
                "c2t-v1-table-2",
                transfer("other family, fine-tuned", "other family", 0.733 / 0.867),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v1 table 4",
        "EAGLE-2 accepts .11 more than EAGLE-1 with a tree of its size",
        (
            toy(
                "three drafts",
                "c2t-v1-table-4",
                lambda book: effect(
                    [
                        ratio(
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
        (toy("against EAGLE-2 at the same tau", "c2t-v1-table-5", second_top_k),),
    ),
    Claim(
        "C2T",
        "v1 table 6",
        "the entropy of the 1,000 most probable tokens is as good as that of all",
        (
            toy(
                "candidates over those with all tokens",
                "c2t-v1-table-6",
                lambda book: same(by_row("c2t-v1-table-6", "gamma / all", {"M": 1000}, "")(book)),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v1 figure 6",
        "12 hidden units are as good as 48",
        (
            toy("the paper's recipe", "c2t-v1-figure-6", lambda book: same([width("paper's")(book)], at_most=True)),
            toy("our recipe", "c2t-v1-figure-6", lambda book: same([width("ours")(book)], at_most=True)),
        ),
    ),
    Claim(
        "C2T",
        "v1 figure 7",
        "fine-tuning raises recall, positive rate and beta",
        (toy("on a tenth of the prompts", "c2t-v1-figure-7", fine_tuned),),
    ),
    Claim(
        "C2T",
        "v1 figure 8",
        "classifiers fitted on other text are nearly identical",
        (toy("most over fewest candidates", "c2t-v1-figure-8", corpora),),
    ),
    Claim(
        "C2T",
        "v1 table 7",
        "a frozen classifier of the EAGLE head works on an MTP head: chains .63, trees .81 of the candidates",
        (
            toy(
                "chains",
                "c2t-v1-table-7",
                _effect_of(
                    by_row("c2t-v1-table-7", "gamma / without", {"paper head": "MTP", "rule": "chain + C2T"}, "head"),
                    98_141 / 156_040,
                ),
            ),
            toy(
                "trees",
                "c2t-v1-table-7",
                _effect_of(
                    by_row("c2t-v1-table-7", "gamma / without", {"paper head": "MTP", "rule": "C2T"}, "head"),
                    724_913 / 900_090,
                ),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v2 table 1",
        "at equal P the accepted share falls with depth",
        both("nodes that EAGLE-2 verifies", "c2t-v2-table-1", falls_with_depth),
    ),
    Claim(
        "C2T",
        "v1 figure 2, v2 figure 1",
        "the first token is overestimated where entropy is low",
        both("probability less accepted share", "c2t-v1-figure-2", partial(bias, lowest=True)),
    ),
    Claim(
        "C2T",
        "v1 figure 2, v2 figure 1",
        "and underestimated where it is high",
        both("probability less accepted share", "c2t-v1-figure-2", partial(bias, lowest=False)),
    ),
    Claim(
        "C2T",
        "v2 table 2",
        "on top of EAGLE-2 and EAGLE-3, 8 to 9% fewer candidates",
        (toy("at equal tau", "c2t-v2-table-2", equal_tau),),
    ),
    Claim(
        "C2T",
        "v2 table 2",
        "at beta .5 the accept length rises by 3 to 11%",
        (toy("the paper's recipe", "c2t-v2-table-2", at_half),),
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
        (
            Trial(
                TOY,
                "simulated, best fixed beta",
                TABLE_3,
                table_3("1 x L40"),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v2 table 3",
        "6, 13 and 12% faster, 70B on four A100",
        (
            Trial(
                TOY,
                "simulated, best fixed beta",
                TABLE_3,
                table_3("4 x A100"),
            ),
        ),
    ),
    Claim(
        "C2T",
        "v2 table 5",
        "F1 on nodes 1.85 times EAGLE-2's at its recall",
        (toy("the paper's features, our recipe", "c2t-v2-table-5", f1),),
    ),
)
