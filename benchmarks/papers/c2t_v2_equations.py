"""C2T v2's lemmas and equations 9-12 as numbers, and what its own printed tables give (benchmarks.papers.equations)."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.papers import equations
from benchmarks.papers.experiment import Bench, Experiment, Findings

COLUMNS = ("what", "paper", "ours")


def _differ(rows: list[equations.Row]) -> str:
    """How many of the paper's figures its own formulas or tables do not give, rounded as printed here."""
    printed = [row for row in rows if row["paper"] is not None]
    wrong = [row for row in printed if abs(row["paper"] - row["ours"]) > 0.01 * max(1.0, abs(row["paper"]))]
    return f"{len(wrong)} of {len(printed)} printed figures are off by more than 0.01, or 1% above 1."


DRAWS = 100_000


def lemma_2_rows(seed: int, sizes: tuple[int, ...] = (3, 10, 100)) -> list[equations.Row]:
    """Lemma 2 on random pairs of distributions: paper, 1 - TVD; ours, the accepted share of DRAWS drafted tokens."""
    rows = []
    rng = np.random.default_rng(seed)
    for count in sizes:
        draft, target = rng.dirichlet(np.ones(count), 2)
        drawn = rng.choice(count, DRAWS, p=draft)
        accepted = rng.random(DRAWS) < target[drawn] / draft[drawn]
        variation = equations.total_variation(torch.from_numpy(draft), torch.from_numpy(target))
        what = f"C2T v2 lemma 2, acceptance with {count} words, {DRAWS} draws"
        rows.append({"what": what, "paper": round(1 - variation, 4), "ours": round(float(accepted.mean()), 4)})
    return rows


def lemmas(bench: Bench) -> Findings:
    rows = [*equations.lemma_rows(), *lemma_2_rows(bench.seed)]
    return Findings(rows, f"paper: the printed formula. ours: what holds for that many words. {_differ(rows)}")


def speedups(bench: Bench) -> Findings:
    rows = equations.speedup_rows()
    return Findings(rows, _differ(rows))


def arithmetic(bench: Bench) -> Findings:
    rows = [
        *equations.table2_rows(),
        *equations.table4_rows(),
        *equations.table5_rows(),
        *equations.cost_rows(),
    ]
    return Findings(rows, f"paper: as printed. ours: from the other figures of the same table. {_differ(rows)}")


EXPERIMENTS = (
    Experiment("c2t-v2-lemmas", "Lemmas 1 to 3, numerically", "C2T v2 equations 1-5", COLUMNS, lemmas),
    Experiment("c2t-v2-equations", "Speed-up in theory and in practice", "C2T v2 equations 9-12", COLUMNS, speedups),
    Experiment(
        "c2t-v2-arithmetic",
        "What the printed tables say of each other",
        "C2T v2 tables 2, 4 and 5, C2T v1 table 4 and appendices C and E; no measurement",
        COLUMNS,
        arithmetic,
    ),
)
