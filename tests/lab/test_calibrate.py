"""Calibrating a finished classifier: the means, the order, the beta that moves along, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from c2t_plugin import cli
from c2t_plugin.classifier import load_classifier, save_classifier
from c2t_plugin.lab.calibration import calibrated, mapped
from c2t_plugin.lab.sweeps import path_minimum, truncate
from c2t_plugin.traces.file import save_traces
from tests.lab.test_tune import follows_the_draft

DEPTH = 4


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_the_lowest_confidence_on_the_way_becomes_the_chance(make_traces, kind: str, tmp_path: Path) -> None:
    traces = make_traces(prompts=40, steps=10)
    before, out = tmp_path / "before.safetensors", tmp_path / "new/after.safetensors"
    save_classifier(follows_the_draft(), before)
    save_traces(traces, tmp_path / "t.traces")
    arguments = ["calibrate", str(before), str(tmp_path / "t.traces"), "--on", kind, "--depth", str(DEPTH)]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    old, new = load_classifier(before), load_classifier(out)
    forest = truncate(getattr(traces, kind), DEPTH)
    was, found = (path_minimum(forest, each.confidence(forest.stats())) for each in (old, new))
    # the intercept of a logistic regression makes the means equal
    assert float(found.mean()) == pytest.approx(float(forest.accepted.float().mean()), abs=1e-4)
    assert abs(float(was.mean()) - float(found.mean())) > 0.01
    assert torch.equal(found >= new.spec.suggested_beta, was >= old.spec.suggested_beta)
    assert new.spec.training["calibrated"] == kind
    assert new.spec.training["calibration"]["depth"] == DEPTH and new.spec.training["calibration_run"]["command"]


def test_nodes_without_a_confidence_are_left_out(make_traces) -> None:
    traces = make_traces(prompts=40, steps=10)
    clean = calibrated(follows_the_draft(), truncate(traces.chain, DEPTH)[1:])[1:]
    traces.chain.joint_log_prob[0] = float("nan")
    assert calibrated(follows_the_draft(), truncate(traces.chain, DEPTH))[1:] == pytest.approx(clean, abs=1e-6)


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_a_beta_that_cuts_nothing_or_all_stays(end: float) -> None:
    assert mapped(end, 0.7, 0.4) == end


def test_traces_of_another_top_m_are_refused(make_traces, tmp_path: Path, capsys) -> None:
    classifier = follows_the_draft()
    classifier.spec = type(classifier.spec)(**{**classifier.spec.__dict__, "top_m": 7})
    save_classifier(classifier, tmp_path / "c.safetensors")
    save_traces(make_traces(), tmp_path / "t.traces")
    assert cli.main(["calibrate", *(str(tmp_path / n) for n in ("c.safetensors", "t.traces")), "--out", "x"]) == 2
    assert capsys.readouterr().err == "c2t calibrate: the classifier's top_m is 7, the traces' 4\n"
