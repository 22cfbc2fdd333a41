"""The goal of transfer: a classifier on another draft, target or kind of text, and what fine-tuning brings back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers import c2t_v1_common as common
from benchmarks.papers.c2t_v1_corpora import EXTENDED, KIND_PROMPTS, KINDS, halves
from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from benchmarks.papers.goals import SOURCE, plan
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.curves import bootstrap_unit
from c2t_plugin.lab.judging import RuleResult, evaluate_chains, evaluate_trees
from c2t_plugin.lab.plans import EvaluatePlan
from c2t_plugin.lab.training import FINE_TUNING_RATE, FINE_TUNING_SHARE, FIT_RECIPES
from c2t_plugin.traces.file import Traces

DRAFTS = (("draft", "eagle3"), ("eagle3", "draft"))
# The small target's own classifier is fitted on so many prompts, as in docs/pair.md: half of those recorded.
SMALL_PROMPTS = 127
OWN, FOREIGN, TUNED = "own", "foreign", "foreign, fine-tuned"


@dataclass(frozen=True)
class Case:
    """between: what differs. used_on, fitted_on: of the foreign classifier. traces: judged on. by: own, foreign and
    fine-tuned classifier."""

    between: str
    used_on: str
    fitted_on: str
    traces: Traces
    by: dict[str, NodeClassifier]


def small_bench(bench: Bench) -> Bench:
    """The same for the pair of the small target, whose draft is this pair's stand-alone one."""
    from benchmarks.pairs.toy.export import export, write_small_pair

    directory = bench.traces_dir / "small-pair"
    if not directory.is_dir():
        export(write_small_pair, bench.pair, directory)
    return Bench(directory, bench.traces_dir, bench.seed, bench.quick, prefix="small-")


def tuned(bench: Bench, draft: str, foreign: NodeClassifier) -> NodeClassifier:
    """Fine-tuned on a tenth of the prompts of this draft."""
    traces = common.tuning(bench, draft)
    return common.small_fit(traces, FIT_RECIPES["extended"], bench.seed, foreign, FINE_TUNING_RATE)[0]


def between_drafts(bench: Bench) -> list[Case]:
    cases = []
    for draft, other in DRAFTS:
        foreign = bench.classifier(other)
        by = {OWN: bench.classifier(draft), FOREIGN: foreign, TUNED: tuned(bench, draft, foreign)}
        cases.append(Case("drafts", common.TITLES[draft], common.TITLES[other], bench.traces(draft), by))
    return cases


def between_targets(bench: Bench) -> list[Case]:
    """The stand-alone draft over both targets."""
    draft, small = "draft", small_bench(bench)
    known = common.first_prompts(small.traces(draft, "train"), SMALL_PROMPTS)
    shipped, (other, _) = bench.classifier(draft), common.small_fit(known, FIT_RECIPES["extended"], bench.seed)
    cases = []
    for where, used_on, fitted_on, own, foreign in (
        (small, "small target", "target", other, shipped),
        (bench, "target", "small target", shipped, other),
    ):
        by = {OWN: own, FOREIGN: foreign, TUNED: tuned(where, draft, foreign)}
        cases.append(Case("targets", used_on, fitted_on, where.traces(draft), by))
    return cases


def between_corpora(bench: Bench) -> list[Case]:
    """The EAGLE-3 head on text that its classifier was not fitted on. Own and fine-tuned see the same few prompts."""
    draft, cases = "eagle3", []
    for kind in KINDS[1:]:
        known, judged = halves(bench.traces(draft, kind), KIND_PROMPTS)
        foreign = bench.classifier(draft)
        by = {
            OWN: common.small_fit(known, EXTENDED, bench.seed)[0],
            FOREIGN: foreign,
            TUNED: common.small_fit(known, FIT_RECIPES["extended"], bench.seed, foreign, FINE_TUNING_RATE)[0],
        }
        cases.append(Case("corpora", kind, "source code", judged, by))
    return cases


def rows_of(bench: Bench, case: Case) -> list[Row]:
    """The threshold on P, which is fitted on nothing, and the three classifiers."""
    asked = plan(bench, case.traces)
    in_chains, in_trees = (
        {rule.name: rule for rule in found.rules}
        for found in (evaluate_chains(case.by, case.traces, None, asked), evaluate_trees(case.by, case.traces, asked))
    )
    names = {"between": case.between, "used on": case.used_on, "fitted on": case.fitted_on}
    return [
        {
            **names,
            "classifier": name,
            **_cells("chains", in_chains[name], "static"),
            "chains AUC": in_chains[name].auc,
            "chains error": (in_chains[name].calibration or {})["error"],
            **_cells("trees", in_trees[name], "EAGLE-2"),
            "trees AUC": in_trees[name].auc,
        }
        for name in ("P", *case.by)
    ]


def _cells(what: str, rule: RuleResult, baseline: str) -> dict[str, float | None]:
    compared = rule.compared[baseline]
    values = (compared["mean"], *compared["mean_interval"])
    names = (f"{what} / {baseline}", f"{what} from", f"{what} to")
    return {name: None if value != value else value for name, value in zip(names, values, strict=True)}


def transfer(bench: Bench) -> Findings:
    cases = [*between_drafts(bench), *between_targets(bench), *between_corpora(bench)]
    rows = [row for case in cases for row in rows_of(bench, case)]
    judged = ", ".join(f"{case.used_on} {bootstrap_unit(case.traces)}" for case in cases)
    return Findings(
        rows,
        f"Extended features. Chains of at most {EvaluatePlan.d_max} against static ones, trees of at most "
        f"{EvaluatePlan.tree_depth} layers against EAGLE-2: mean ratio of gamma over the taus that the rows of a block "
        f"reach, 95% by bootstrap over files ({judged}); chains error: calibration error. Fine-tuned on "
        f"{FINE_TUNING_SHARE:.0%} of the training prompts, on corpora on the {KIND_PROMPTS} prompts that the own "
        f"one was fitted on; the small target's own on {SMALL_PROMPTS} prompts. {lost(rows)}",
    )


def lost(rows: Sequence[Row]) -> str:
    """What the foreign classifier verifies over the own one, and what is left of that after fine-tuning."""
    said = []
    for between in dict.fromkeys(row["between"] for row in rows):
        block = [row for row in rows if row["between"] == between]
        parts = [
            f"{what.split()[0]} {_over_own(block, FOREIGN, what)}, fine-tuned {_over_own(block, TUNED, what)}"
            for what in ("chains / static", "trees / EAGLE-2")
        ]
        said.append(f"{between}: {'; '.join(parts)}")
    return f"Candidates over those of the own classifier, means: {'. '.join(said)}."


def _over_own(block: Sequence[Row], name: str, what: str) -> str:
    found, own = ([row[what] for row in block if row["classifier"] == each] for each in (name, OWN))
    known = [
        one / other
        for one, other in zip(found, own, strict=True)
        if isinstance(one, float) and isinstance(other, float) and other
    ]
    return f"{sum(known) / len(known):.3f}x" if known else "unknown"


EXPERIMENTS = (
    Experiment(
        name="goals-transfer",
        title="Goal: what a classifier loses on another draft, target or kind of text",
        source=SOURCE,
        columns=(
            "between",
            "used on",
            "fitted on",
            "classifier",
            "chains / static",
            "chains from",
            "chains to",
            "chains AUC",
            "chains error",
            "trees / EAGLE-2",
            "trees from",
            "trees to",
            "trees AUC",
        ),
        run=transfer,
    ),
)
