"""What is learnt by the number of states: the order in which they are served, the figures, and the command."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.report.pictures import draw_learning
from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.simulation import learning
from benchmarks.simulation.learning import NOTHING, RIVAL, Judge, Told, main
from benchmarks.simulation.streams import repeated, visits
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.lab.sweeps import truncate
from c2t_plugin.traces.file import Traces, save_traces


def test_states_are_served_in_their_order_some_prompts_at_a_time(traces: Traces):
    accepted = truncate(traces.chain, learning.D_MAX).accepted.long().sum(1)
    served = list(itertools.islice(visits(traces, accepted), 400))
    assert set(served) <= set(range(len(traces)))
    first = traces.first.tolist()
    assert served[: learning.CONCURRENT] == first[: learning.CONCURRENT]

    def walk(start: int, end: int) -> list[int]:
        found = []
        while start < end:
            found.append(start)
            start += 1 + int(accepted[start])
        return found

    walks = [walk(start, end) for start, end in zip(first, [*first[1:], len(traces)], strict=True)]
    once = sum(map(len, walks))
    assert [[state for state in served[:once] if state in one] for one in walks] == walks
    # when all have been served they are again, from another state
    assert served[once] == 1


def test_so_many_prompts_are_served_at_a_time(traces: Traces):
    accepted = truncate(traces.chain, learning.D_MAX).accepted.long().sum(1)
    served = list(itertools.islice(visits(traces, accepted, 3), 3))
    assert served == traces.first[:3].tolist()


def test_a_step_is_told_with_whose_it_is_and_what_was_verified_of_it(traces: Traces):
    accepted = torch.full((len(traces),), 2)
    told = Told(accepted, traces.prompt, list(range(len(traces))), at_once=3)
    _, steps = next(each for each in told.steps() if each[0])
    rows = next(steps)
    verified, hits, whose = told.of(rows, torch.tensor([1, 2, 4]))
    assert rows == [0, 1, 2] and verified.tolist() == [1, 2, 4] and hits.tolist() == [1, 2, 2]
    assert whose == traces.prompt[:3].tolist()


def test_what_is_judged_is_served_again_as_other_prompts(traces: Traces):
    again = repeated(traces, 3)
    assert len(again) == 3 * len(traces) and len(again.first) == 3 * len(traces.first)
    assert again.chain[torch.arange(len(traces), 2 * len(traces))].accepted.equal(traces.chain.accepted)


def test_figures_of_those_who_know(traces: Traces):
    chain = truncate(traces.chain, learning.D_MAX)
    judge, known = Judge(chain, replace(traces, chain=chain, tree=chain)), chain.accepted.double().cumprod(1)
    found = judge.figures(known)
    assert found["nll"] < 1e-5 and found["auc"] == pytest.approx(1.0, abs=0.5)
    guessed = judge.figures(torch.full_like(known, 0.5))
    assert guessed["nll"] == pytest.approx(0.6931, abs=1e-3)
    assert found["gamma_ratio"] < guessed["gamma_ratio"]
    contrary = judge.figures(1 - known)
    assert contrary["auc"] < 0.5 < found["auc"]
    # with one request at once means of such chances swing too much
    for load in learning.LOADS[1:]:
        speed = f"tokens_per_s_{load}"
        assert contrary[speed] < found[speed]


@pytest.mark.slow
def test_the_command_writes_every_contestant_at_every_number_of_states(
    traces: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(learning, "MARKS", (0, 100, 300))
    torch.manual_seed(0)
    save_classifier(NodeClassifier(ClassifierSpec(top_m=4)), tmp_path / "c.safetensors")
    save_traces(traces, tmp_path / "t.traces")
    files = ("--learn", str(tmp_path / "t.traces"), "--judge", str(tmp_path / "t.traces"))
    start = ("--offline", str(tmp_path / "c.safetensors"), "--from", f"other={tmp_path / 'c.safetensors'}")
    out = tmp_path / "rows.jsonl"
    assert main([*files, *start, "--name", "toy", "--out", str(out)]) == 0
    rows = read_rows(out, BenchRow)
    arms = {"from other", "from offline fit", f"from {NOTHING}", RIVAL}
    arms |= {"from offline fit, auto", "from other, network", "from offline fit, network"}
    assert {(row.arm, row.setting["states"], row.setting["poisoned"]) for row in rows} == set(
        itertools.product(arms, (0, 100, 300), (0, 1))
    )
    by = {(row.arm, row.setting["states"]): row.metrics["nll"] for row in rows if not row.setting["poisoned"]}
    for arm in arms:
        assert by[arm, 300] < by[arm, 0], "it has learnt nothing"
    assert "| from other |" in capsys.readouterr().out
    draw_learning(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
