"""The tables of docs/classifiers.md, from what `c2t evaluate --json` wrote; none of their figures is written by hand.

    python -m benchmarks.report.training_tables                         write the tables between the page's markers
    python -m benchmarks.report.training_tables --add rules-eagle3=OUT.json
                                                                 take in an evaluation first

The evaluations are in benchmarks/results/evaluations, each with its command, commit and machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.report.command import RESULTS, ROOT
from benchmarks.report.evaluations import Part, against, load, number, rule, with_interval
from benchmarks.report.tables import filled, table
from c2t_plugin.errors import C2TError
from c2t_plugin.output import write_text

PAGE = ROOT / "docs/classifiers.md"
FOLDER = RESULTS / "evaluations"
DRAFTS = {"draft": "stand-alone", "eagle3": "EAGLE-3", "eagle1": "EAGLE-1"}
KINDS = ("held-out", "docstrings", "tests", "arithmetic", "dialogue")
# name in the evaluation: name in the table
PATH_ENTROPY = {
    "old": "the six features",
    "A": "`extended`, with the path's entropy",
    "B": "P, the path's entropy and depth",
}
PAPER = {"paper": "the paper's", "default": "`default`"}
TRIED = {
    "shipped": "shipped, all prompts",
    "tenth": "a tenth",
    "weighted": "a tenth, `--positive-weight 20 --prior`",
    "monotone": "a tenth, `--monotone 1`",
}
FROZEN_RULES = ("P", "log P + .2 path entropy", "P among siblings at .8", "three", "extended")
# Beside these the page says something of them in words.
NOT_SHOWN = ("P, failing kept",)


def error_of(found: Part) -> str:
    """Expected calibration error; of rules that give a probability."""
    return number(found["calibration"]["error"]) if found["calibration"] else ""


def rules_of_chains() -> str:
    """Every rule of chains, by draft."""
    parts = {name: load(FOLDER / f"rules-{name}.json")["chains"] for name in DRAFTS}
    columns = [f"{DRAFTS[name]}: gamma ratio | AUC | ECE" for name in DRAFTS]
    names = [each["name"] for each in parts["draft"]["rules"] if each["name"] not in NOT_SHOWN]
    rows = []
    for name in names:
        found = [rule(parts[draft], name) for draft in DRAFTS]
        cells = [(against(each, "static"), number(each["auc"], 4), error_of(each)) for each in found]
        rows.append([name, *(cell for row in cells for cell in row)])
    return table(["chains of at most 6", *(cell for column in columns for cell in column.split(" | "))], rows)


def rules_on_the_real_model() -> str:
    """Every rule of chains and of trees for SmolLM2-135M and its head, development prompts."""
    found = load(FOLDER / "real-eagle3.json")
    chains, trees = ({each["name"]: each for each in found[part]["rules"]} for part in ("chains", "trees"))
    rows = []
    for name in dict.fromkeys([*chains, *trees]):
        cells = [against_or_not(chains.get(name), "static"), against_or_not(chains.get(name), "P")]
        cells += [number(chains[name]["auc"], 4), error_of(chains[name])] if name in chains else ["", ""]
        rows.append([name, *cells, against_or_not(trees.get(name), "EAGLE-2"), against_or_not(trees.get(name), "P")])
    head = ["rule", "chains: gamma ratio to static", "to P", "AUC", "ECE", "trees: gamma ratio to EAGLE-2", "to P"]
    return table(head, rows)


def against_or_not(found: Part | None, baseline: str) -> str:
    """As `against`; nothing for a rule that there is not, or that was not compared."""
    return against(found, baseline) if found and baseline in found["compared"] else ""


def rules_of_trees(draft: str) -> str:
    """Gamma of every rule of trees over EAGLE-2's, by tau."""
    part = load(FOLDER / f"rules-{draft}.json")["trees"]
    rows = [["EAGLE-2, gamma", *(f"{gamma:.2f}" for gamma in part["baselines"]["EAGLE-2"]), ""]]
    for each in part["rules"]:
        ratios = each["compared"]["EAGLE-2"]["ratio"]
        mean = each["compared"]["EAGLE-2"]["mean_interval"]
        shown = ["out of reach" if ratio is None else f"{number(ratio, 2)}x" for ratio in ratios]
        missing = f", of {sum(ratio is not None for ratio in ratios)}" * (None in ratios)
        text = with_interval(each["compared"]["EAGLE-2"]["mean"], mean).replace(" (", "x (", 1)
        rows.append([each["name"], *shown, text + missing])
    return table([f"{DRAFTS[draft]}, tau", *(f"{tau:.2f}" for tau in part["taus"]), "mean"], rows)


def several(prefix: str, drafts: Sequence[str], names: Mapping[str, str], calibration: bool) -> str:
    """Classifiers of several drafts, each as chains and as trees."""
    rows = []
    for draft in drafts:
        found = load(FOLDER / f"{prefix}-{draft}.json")
        for name, shown in names.items():
            chains, trees = rule(found["chains"], name), rule(found["trees"], name)
            row = [f"{DRAFTS[draft]}: {shown}", against(chains, "static"), number(chains["auc"], 4)]
            row += [error_of(chains)] * calibration
            rows.append([*row, against(trees, "EAGLE-2"), number(trees["auc"], 4)])
    head = ["", "chains: gamma ratio", "AUC", *["ECE"] * calibration, "trees: gamma ratio", "AUC"]
    return table(head, rows)


def prompts_of(found: Part) -> str:
    """How many, and from how many files where intervals are over these."""
    files = re.search(r"their (\d+) sources", found["intervals"])
    return f"{found['traces']['prompts']}" + (f" of {files[1]} files" if files else "")


def kinds_of_text() -> str:
    """EAGLE-3's classifiers on texts unlike those that they were fitted on."""
    rows = []
    for kind in KINDS:
        found = load(FOLDER / f"kind-{kind}.json")
        prob, three, extended = (rule(found["chains"], name) for name in ("P", "three", "extended"))
        trees = [rule(found["trees"], name) for name in ("P", "extended")]
        rows.append(
            [
                *(f"`{kind}`", prompts_of(found), number(prob["auc"]), number(three["auc"])),
                with_interval(extended["auc"], extended["auc_interval"]),
                *(against(each, "P") for each in (three, extended)),
                error_of(extended),
                " / ".join(number(each["auc"]) for each in trees),
                against(trees[1], "P"),
            ]
        )
    head = ["kind", "prompts", "chains: AUC of P", "`three`", "`extended`"]
    head += ["gamma to P, `three`", "gamma to P, `extended`", "ECE, `extended`"]
    return table([*head, "trees: AUC of P / `extended`", "gamma to P, `extended`"], rows)


def frozen_part() -> str:
    """The EAGLE-3 head's rules on the development files and, once, on the frozen ones."""
    development, frozen = (load(FOLDER / f"{name}-eagle3.json") for name in ("development", "frozen"))
    rows = []
    for name in FROZEN_RULES:
        cells = []
        for part, baseline in (("chains", "static"), ("trees", "EAGLE-2")):
            for found in (development, frozen):
                known = next((each for each in found[part]["rules"] if each["name"] == name), None)
                cells.append(against_or_not(known, baseline))
        rows.append([name, *cells])
    head = ["rule", "chains, development", "chains, frozen", "trees, development", "trees, frozen"]
    return table(head, rows)


def seeds() -> str:
    """The same recipe fitted with other seeds, on the real pair."""
    found = load(FOLDER / "seeds-real.json")
    trees = {each["name"]: each for each in found["trees"]["rules"]}
    rows = []
    for each in found["chains"]["rules"]:
        if each["name"].startswith("seed"):
            tree = trees[each["name"]]
            row = [each["name"], against(each, "static"), against(each, "P"), number(each["auc"], 4), error_of(each)]
            rows.append([*row, against(tree, "EAGLE-2"), against(tree, "P")])
    head = [
        "`extended`",
        "chains: gamma ratio to static",
        "to P",
        "AUC",
        "ECE",
        "trees: gamma ratio to EAGLE-2",
        "to P",
    ]
    return table(head, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "paper-recipe": lambda: several("paper", ("eagle3", "draft"), PAPER, calibration=False),
    "chains": rules_of_chains,
    **{f"trees-{draft}": partial(rules_of_trees, draft) for draft in DRAFTS},
    "real": rules_on_the_real_model,
    "seeds": seeds,
    "frozen": frozen_part,
    "path-entropy": lambda: several("path-entropy", ("draft", "eagle3"), PATH_ENTROPY, calibration=False),
    "kinds": kinds_of_text,
    "tried": lambda: several("tried", tuple(DRAFTS), TRIED, calibration=True),
}


def render(page: str) -> str:
    """The page with every table between its markers made anew."""
    for name, make in TABLES.items():
        page = filled(page, name, f"\n\n{make()}\n\n", PAGE.name)
    return page


def main(argv: list[str]) -> int:
    """Take in evaluations, then write the page's tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report.training_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--add", action="append", default=[], metavar="NAME=FILE", help="an evaluation; may be repeated"
    )
    options = parser.parse_args(argv)
    try:
        for added in options.add:
            name, _, file = added.partition("=")
            if not (FOLDER / f"{name}.json").is_file():
                known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
                raise C2TError(f"--add got {added!r}; expected NAME=FILE, NAME one of {known}")
            write_text(FOLDER / f"{name}.json", json.dumps(load(Path(file)), separators=(",", ":")) + "\n")
        write_text(PAGE, render(PAGE.read_text(encoding="utf-8")))
    except C2TError as error:
        print(f"training_tables: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
