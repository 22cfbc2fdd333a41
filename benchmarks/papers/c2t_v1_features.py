"""C2T v1's classifiers at equal tau: tables 1 (which features) and 2 (transfer between models)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.c2t_v1_common import AT_EQUAL_TAU, RECIPES, TITLES, Curve, Ground
from benchmarks.papers.experiment import Bench, Cell, Experiment, Findings, Row
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.training import FINE_TUNING_RATE, FINE_TUNING_SHARE

D_MAX = 10

# features -> the paper's tau, gamma in millions; EAGLE-2 at N = 100 has 3.89 and 1.0
TABLE_1_N = 100
# a smaller tree too: EAGLE-2 with 100 nodes accepts more of this pair's text than of the paper's
TABLE_1_NS = (26, TABLE_1_N)
TABLE_1_EAGLE2 = (3.89, 1.0)
TABLE_1 = {"P+H": (3.92, 0.9), "P+d": (3.92, 0.9), "H+d": (0.98, 3.3), "P+H+d": (3.92, 0.7)}
FEATURE_OF = {
    "paper's": {"P": "joint_prob", "H": "entropy", "d": "depth"},
    "ours": {"P": "joint_log_prob", "H": "entropy", "d": "depth"},
}


def table_1(bench: Bench) -> Findings:
    rows = [row for draft in ("eagle3", "draft") for row in _table_1_rows(bench, draft)]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        share = row["gamma / EAGLE-2"]
        if isinstance(share, float) and row["recipe"] in RECIPES:
            found.setdefault(f"{row['draft']}, N = {row['N']}, {row['recipe']}", {})[str(row["features"])] = share
    fewest = "; ".join(f"{title}: {min(shares, key=lambda name: shares[name])}" for title, shares in found.items())
    return Findings(
        rows,
        "Every rule is cut where it accepts what EAGLE-2 does with N nodes (K = 10 for both, 15 in the paper; P alone "
        "is a threshold on P). gamma is per output token. The paper's H+d accepts far less than its other rows. The "
        f"paper's recipe takes P as it is, ours its logarithm. Fewest candidates with: {fewest}. {common.FITTED}",
    )


def _table_1_rows(bench: Bench, draft: str) -> list[Row]:
    ground = Ground.of(common.held_out(bench, draft), D_MAX)
    rows: list[Row] = []

    def add(score: Tensor | None, recipe: str | None, letters: str | None, paper: tuple[float, float] | None) -> None:
        curve = None if score is None else ground.threshold(score)
        for n in TABLE_1_NS:
            base = ground.eagle2_at(n)
            tau, gamma = paper if paper and n == TABLE_1_N else (None, None)
            cells: dict[str, float | None] = {"setting": base.setting, "tau": base.tau, "gamma / EAGLE-2": 1.0}
            cells["missing"] = 0.0
            if score is not None and curve is not None:
                cells = ground.cells(score, curve, base)
            names: dict[str, Cell] = {"draft": TITLES[draft], "N": n, "recipe": recipe, "features": letters}
            rows.append({**names, "paper tau": tau, "paper gamma / EAGLE-2": gamma, **cells})

    add(None, "EAGLE-2", None, TABLE_1_EAGLE2)
    add(ground.forest.joint_log_prob.exp(), "threshold", "P", None)
    training = common.training(bench, draft)
    for recipe, like in RECIPES.items():
        for letters, paper in TABLE_1.items():
            features = tuple(FEATURE_OF[recipe][letter] for letter in letters.split("+"))
            classifier, _ = common.small_fit(training, replace(like, features=features), bench.seed)
            add(ground.confidence(classifier), recipe, letters, paper)
    return sorted(rows, key=lambda row: float(row["N"] or 0))


TABLE_2_N = 290
# and EAGLE-2's own size
TABLE_2_NS = (60, TABLE_2_N)
# How the draft that a classifier was fitted on relates to the one that it is used on: the paper's models, and its
# gamma of C2T over EAGLE-2's, both rounded to tenths of a million there.
RELATIONS = {
    "own": ("LLaMA-2 7B", 2.0 / 2.6),
    "same family": ("LLaMA-2 7B on 13B", 1.9 / 2.6),
    "other family": ("LLaMA-2 7B on Vicuna 7B", 1.3 / 1.5),
    "other family, fine-tuned": ("Vicuna 7B, C2T*", 1.1 / 1.5),
}
HEADS = ("eagle3", "eagle1")


def relation(source: str, target: str) -> str:
    """Heads read the target's states, a stand-alone draft does not: two families."""
    if source == target:
        return "own"
    return "same family" if source in HEADS and target in HEADS else "other family"


def table_2(bench: Bench) -> Findings:
    rows: list[Row] = []
    pictures: dict[str, dict[str, Curve]] = {}
    for target, title in TITLES.items():
        ground = Ground.of(common.held_out(bench, target), D_MAX)
        pictures[title] = {"EAGLE-2": ground.eagle2}
        for source, kind, classifier in _transfers(bench, target):
            score = ground.confidence(classifier)
            curve = ground.threshold(score)
            pictures[title][f"C2T of {TITLES[source]}, {kind}"] = curve
            rows += [_table_2_row(ground, score, curve, n, source, target, kind) for n in TABLE_2_NS]
    said = []
    for n in TABLE_2_NS:
        own = [row for row in rows if row["N"] == n]
        means = {kind: common.mean([_share(row) for row in own if row["relation"] == kind]) for kind in RELATIONS}
        listed = ", ".join(f"{kind} {share:.3f}" for kind, share in means.items() if share is not None)
        said.append(f"at N = {n} {listed}")
    return Findings(
        rows,
        "Drafts stand for the paper's models. C2T without second top-K is cut where it accepts what EAGLE-2 does with "
        f"N nodes; gamma is per output token. Mean gamma / EAGLE-2 {'; '.join(said)}. Classifiers are the shipped "
        f"ones of P, H and d; fine-tuned on {FINE_TUNING_SHARE:.0%} of the training prompts. {common.SAMPLED}",
        common.curves_figure(pictures),
    )


def _transfers(bench: Bench, target: str) -> Iterator[tuple[str, str, NodeClassifier]]:
    """Source, relation and classifier of everything that is used on a target."""
    for source in TITLES:
        classifier, kind = common.paper_features(bench, source), relation(source, target)
        yield source, kind, classifier
        if kind == "other family":
            tuned, _ = common.small_fit(
                common.tuning(bench, target), common.OUR_RECIPE, bench.seed, classifier, FINE_TUNING_RATE
            )
            yield source, f"{kind}, fine-tuned", tuned


def _share(row: Row) -> float | None:
    found = row["gamma / EAGLE-2"]
    return found if isinstance(found, float) else None


def _table_2_row(ground: Ground, score: Tensor, curve: Curve, n: int, source: str, target: str, kind: str) -> Row:
    models, paper = RELATIONS[kind]
    base = ground.eagle2_at(n)
    return {
        "fitted on": TITLES[source],
        "used on": TITLES[target],
        "relation": kind,
        "N": n,
        "paper models": models if n == TABLE_2_N else None,
        "paper gamma / EAGLE-2": paper if n == TABLE_2_N else None,
        "EAGLE-2 tau": base.tau,
        **ground.cells(score, curve, base),
    }


EXPERIMENTS = (
    Experiment(
        name="c2t-v1-table-1",
        title="Which features: classifiers against EAGLE-2",
        source="C2T v1 table 1; tau without bonus",
        columns=("draft", "N", "recipe", "features", "paper tau", "paper gamma / EAGLE-2", *AT_EQUAL_TAU),
        run=table_1,
    ),
    Experiment(
        name="c2t-v1-table-2",
        title="Transfer between models: a classifier of one draft on another",
        source="C2T v1 table 2, C2T v2 figure 3; tau without bonus",
        columns=(
            "fitted on",
            "used on",
            "relation",
            "N",
            "paper models",
            "paper gamma / EAGLE-2",
            "EAGLE-2 tau",
            *AT_EQUAL_TAU,
        ),
        run=table_2,
    ),
)
