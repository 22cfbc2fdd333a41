"""Verdicts on the papers' claims: the rule by hand, every claim with its rows, and other rows with other verdicts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.papers.all_claims import CLAIMS
from benchmarks.papers.claim import REAL, TOY
from benchmarks.papers.verdicts import FILES, Book, Figure, Verdict, counted, effect, same
from benchmarks.report.claims import ORDER, changes, claims_section, judged, totals
from benchmarks.report.command import PAGE, RESULTS
from c2t_plugin.errors import C2TError


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure(0.75, 0.7, 0.8), Verdict.SIZE),
        (Figure(0.5, 0.4, 0.6), Verdict.SIZE),
        (Figure(0.85, 0.8, 0.9), Verdict.DIRECTION),
        (Figure(0.85, 0.6, 1.01), Verdict.NOT),
        (Figure(1.02, 0.9, 1.1), Verdict.NOT),
        (Figure(1.2, 1.1, 1.3), Verdict.CONTRADICTED),
        (Figure(0.8), Verdict.SIZE),
        (Figure(0.93), Verdict.DIRECTION),
        (Figure(0.95), Verdict.NOT),
        (Figure(1.05), Verdict.NOT),
        (Figure(1.07), Verdict.CONTRADICTED),
    ],
)
def test_an_effect_by_hand(figure: Figure, verdict: Verdict) -> None:
    """The paper has .75, nothing would be 1."""
    assert effect([figure], 0.75).verdict is verdict
    # the same of an effect upwards
    turned = Figure(2 - figure.value, *(2 - end if end else None for end in (figure.high, figure.low)))
    assert effect([turned], 1.25).verdict is verdict


def test_the_least_favourable_draft_counts() -> None:
    one, other = Figure(0.75, 0.7, 0.8, "one"), Figure(0.9, 0.85, 0.95, "other")
    found = effect([one, other], 0.75)
    assert found.verdict is Verdict.DIRECTION
    assert found.shown == "one 0.75 (0.70 to 0.80), other 0.90 (0.85 to 0.95)"
    assert effect([other, other], [0.75, 0.9]).verdict is Verdict.DIRECTION
    assert effect([one] * 5, 0.75).shown == "0.75 to 0.75"


@pytest.mark.parametrize(
    ("hits", "verdict"),
    [("111", Verdict.SIZE), ("110", Verdict.DIRECTION), ("10", Verdict.NOT), ("000", Verdict.CONTRADICTED)],
)
def test_cases_are_counted(hits: str, verdict: Verdict) -> None:
    found = counted((hit == "1" for hit in hits), "cases")
    assert found.verdict is verdict and found.shown == f"in {hits.count('1')} of {len(hits)} cases"


def test_what_is_called_the_same_may_differ_a_little() -> None:
    assert same([Figure(1.04), Figure(0.96)]).verdict is Verdict.SIZE
    assert same([Figure(1.04), Figure(0.94)]).verdict is Verdict.NOT
    assert same([Figure(1.04), Figure(0.94)], at_most=True).verdict is Verdict.SIZE
    assert same([Figure(1.06), Figure(0.94)], at_most=True).verdict is Verdict.NOT


def test_every_claim_has_its_rows_and_stands_first_on_the_page() -> None:
    found = judged(Book(RESULTS))
    assert len(found) == sum(len(claim.trials) for claim in CLAIMS)
    assert {claim.paper for claim, _, _ in found} == {"C2T", "DySpec", "Entropy trees"}
    assert {trial.pair for _, trial, _ in found} == {TOY, REAL}
    page = PAGE.read_text(encoding="utf-8")
    text = claims_section(Book(RESULTS))
    assert text in page and page.index(text) == page.index("\n## ") + 1


def test_a_claim_without_its_row_is_no_table(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / FILES[TOY]
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["experiment"] != "c2t-v2-table-1"]
    path.write_text("\n".join(kept) + "\n")
    with pytest.raises(C2TError, match="no rows of c2t-v2-table-1 on the toy pair"):
        claims_section(Book(tmp_path / "results"))
    evaluation = tmp_path / "results/evaluations/rules-eagle3.json"
    record = json.loads(evaluation.read_text())
    record["trees"]["rules"] = [rule for rule in record["trees"]["rules"] if rule["name"] != "three"]
    evaluation.write_text(json.dumps(record))
    with pytest.raises(C2TError, match="does not compare three with EAGLE-2 on trees"):
        judged(Book(tmp_path / "results"))


def test_other_rows_are_another_verdict(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / FILES[TOY]
    record = [json.loads(line) for line in path.read_text().splitlines()]
    record = [each for each in record if each["experiment"] == "c2t-v2-table-1"][-1]
    for row in record["rows"]:
        row |= {"d=1": 0.9, "d=2": 0.8, "d=3": 0.7}
    with path.open("a") as handle:
        handle.write(json.dumps(record) + "\n")
    before, after = (
        next(found for claim, trial, found in judged(Book(folder)) if claim.place == "v2 table 1" and trial.pair == TOY)
        for folder in (RESULTS, tmp_path / "results")
    )
    assert before.verdict is not Verdict.SIZE and after.verdict is Verdict.SIZE


def test_totals_and_changes_are_those_of_the_table() -> None:
    every = judged(Book(RESULTS))
    assert sum(int(part.split()[0]) for part in totals(every).partition(": ")[2].split(", ")) == len(every)
    assert set(ORDER) == set(Verdict)
    none = [each for each in every if each[1].pair == TOY]
    assert changes(none) == "No verdict is another one on the real pair."
