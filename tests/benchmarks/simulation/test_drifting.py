"""A stream that turns: what is served when, and that what was learnt follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.simulation import drifting, learning
from benchmarks.simulation.drifting import main, turned
from benchmarks.simulation.learning import OFFLINE, RIVAL, Told
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.lab.sweeps import truncate
from c2t_plugin.traces.file import Traces, save_traces


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learning, "MARKS", (0, 20, 400))
    monkeypatch.setattr(drifting, "BEFORE", 300)


def test_states_say_the_contrary_until_the_turn(traces: Traces):
    chain = truncate(traces.chain, 4)
    true = chain.accepted.long().sum(1)
    order = [state % len(traces) for state in range(400)]
    twice, told = turned(Told(true, traces.prompt, order, 8), chain)
    steps = {mark: [state for step in each for state in step] for mark, each in told.steps()}
    assert [len(steps[mark]) for mark in (0, 20, 400)] == [300, 20, 380]
    assert told.accepted[steps[0]].equal(4 - true[order[:300]])
    after = steps[20] + steps[400]
    assert told.accepted[after].equal(true[order]) and told.prompt[after].equal(traces.prompt[order])
    # the drafts are those of the states, before and after
    assert twice.log_prob[steps[0]].equal(chain.log_prob[order[:300]])
    assert twice.log_prob[after].equal(chain.log_prob[order])


@pytest.mark.slow
def test_what_was_learnt_follows(traces: Traces, tmp_path: Path):
    torch.manual_seed(0)
    save_classifier(NodeClassifier(ClassifierSpec(top_m=4)), tmp_path / "c.safetensors")
    save_traces(traces, tmp_path / "t.traces")
    files = ("--learn", str(tmp_path / "t.traces"), "--judge", str(tmp_path / "t.traces"))
    out = tmp_path / "rows.jsonl"
    assert main([*files, "--offline", str(tmp_path / "c.safetensors"), "--name", "toy", "--out", str(out)]) == 0
    rows = read_rows(out, BenchRow)
    nats = {(row.arm, row.setting["states"]): row.metrics["nll"] for row in rows}
    for arm in (f"from {OFFLINE}", f"from {OFFLINE}, auto", f"from {OFFLINE}, network", "from nothing", RIVAL):
        assert nats[arm, 400] < nats[arm, 0], "it has not followed"
