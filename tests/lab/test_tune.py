"""Choosing beta: against a search by hand, by command, and out of reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, load_classifier, save_classifier
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab import tune
from c2t_plugin.lab.scores import ChainReplay
from c2t_plugin.lab.tune import TunePlan
from c2t_plugin.provenance import RunRecord
from c2t_plugin.traces.file import save_traces


def follows_the_draft() -> NodeClassifier:
    """A confidence that rises with P and is spread over (0, 1)."""
    classifier = NodeClassifier(ClassifierSpec(features=("joint_log_prob",), shift=(0.0,), scale=(1.0,), top_m=4))
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.zero_()
        classifier.hidden.weight[0, 0] = -1.0
        classifier.out.weight[0, 0] = -1.0
        classifier.out.bias += 2.0
    return classifier.eval().requires_grad_(False)


def test_the_largest_beta_that_is_accepted_long_enough(make_traces, monkeypatch, capsys) -> None:
    # in many parts, with a bar
    monkeypatch.setattr(tune, "STATES_AT_A_TIME", 7)
    traces, classifier = make_traces(prompts=40, steps=10), follows_the_draft()
    replay, confidence = ChainReplay(traces, 4), classifier.confidence(traces.chain.stats())
    found = tune.tune(classifier, traces, TunePlan(static=2, depth=4, replicates=50))
    assert found.wanted == replay.static(2).tau
    reached = [beta for beta in found.betas if replay.cut(confidence, beta).tau >= found.wanted]
    assert found.beta == max(reached) and 0.01 < found.beta < 0.99
    at = found.betas.index(found.beta)
    cut = replay.cut(confidence, found.beta)
    assert (found.tau[at], found.gamma[at]) == pytest.approx((cut.tau, cut.gamma))
    assert found.tau_interval[0] < found.tau[at] < found.tau_interval[1]
    assert "scoring" in capsys.readouterr().out


def test_trees_reach_further_than_chains(make_traces) -> None:
    traces, classifier = make_traces(prompts=40, steps=10, k=3), follows_the_draft()
    chain = tune.tune(classifier, traces, TunePlan(tau=0.9, depth=4, replicates=5))
    tree = tune.tune(classifier, traces, TunePlan(tau=0.9, depth=4, tree=True, replicates=5))
    assert tree.beta > chain.beta
    assert max(tree.tau) > max(chain.tau)


def test_what_is_out_of_reach_is_an_error(make_traces) -> None:
    with pytest.raises(C2TError, match=r"tau 3\.900 is out of reach: beta 0\.01 is accepted for"):
        tune.tune(follows_the_draft(), make_traces(), TunePlan(tau=3.9, depth=4))


def test_another_top_m_is_refused(make_traces) -> None:
    traces = make_traces()
    with pytest.raises(C2TError, match="top_m is 4, the traces' 7"):
        tune.tune(follows_the_draft(), replace(traces, header={**traces.header, "top_m": 7}), TunePlan(depth=4))


@pytest.mark.parametrize(
    "values", [{"tau": 0.0}, {"static": 7}, {"static": 0}, {"replicates": 0}, {"seed": -1}], ids=str
)
def test_a_senseless_plan_is_refused(values) -> None:
    with pytest.raises(ConfigError):
        TunePlan(**values)


def test_by_command(make_traces, tmp_path, capsys) -> None:
    save_traces(make_traces(prompts=20), tmp_path / "t")
    save_classifier(follows_the_draft(), tmp_path / "c")
    arguments = [str(tmp_path / "c"), str(tmp_path / "t"), "--depth", "4", "--replicates", "20"]
    assert tune.main([*arguments, "--static", "2", "--out", str(tmp_path / "new" / "c")]) == 0
    before, after = load_classifier(tmp_path / "c"), load_classifier(tmp_path / "new" / "c")
    assert after.spec.suggested_beta != before.spec.suggested_beta
    assert "accepted for" in after.spec.training["suggested_beta"]
    tuned = after.spec.training["tuned"]
    assert tuned["run"]["git_sha"] == RunRecord.capture().git_sha and tuned["run"]["seed"] == 0
    assert tuned["traces"]["prompts"] == "train"
    assert f"{after.spec.suggested_beta:.2f}" in capsys.readouterr().out
    assert torch.equal(after.hidden.weight, before.hidden.weight)
    with pytest.raises(SystemExit):
        tune.main([*arguments, "--static", "2", "--tau", "1"])
