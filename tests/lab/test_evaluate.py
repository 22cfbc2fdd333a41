"""`c2t evaluate`: its figures against the parts they are made of, its file, its errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.engines.learned import LearnedFile
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab import evaluate, judging
from c2t_plugin.lab.curves import gamma_at, serve
from c2t_plugin.lab.evaluate import named_classifiers
from c2t_plugin.lab.judging import evaluate_chains, evaluate_trees
from c2t_plugin.lab.pair_files import file_hash
from c2t_plugin.lab.plans import EvaluatePlan
from c2t_plugin.lab.rivals import TREE_FORMS, OnlineLogistic, tempered
from c2t_plugin.lab.scores import ChainReplay, auc, weighted_auc
from c2t_plugin.lab.sweeps import eagle2_sweep, threshold_sweep, truncate
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.traces.file import save_traces

FORMS = [form.name for form in TREE_FORMS]
PLAN = EvaluatePlan(d_max=4, tree_depth=4, taus=(0.4, 0.8), replicates=20, starts=1)


def untrained(**spec) -> NodeClassifier:
    torch.manual_seed(0)
    return NodeClassifier(ClassifierSpec(top_m=4, **spec)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def traces(make_traces):
    return make_traces(prompts=30, steps=8, k=3)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft a step: the estimator refits every 100 of the 240 states."""
    monkeypatch.setattr(judging, "ESTIMATOR_BATCH", 1)


def test_auc_with_weights_counts_rows_as_often_as_they_are_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (60,), generator=generator).float()
    accepted = torch.rand(60, generator=generator) < 0.4
    owner = torch.arange(60) // 6
    weights = np.random.default_rng(0).multinomial(10, np.full(10, 0.1), size=5).astype(float)
    for found, drawn in zip(weighted_auc(scores, accepted, owner, weights), weights, strict=True):
        rows = torch.arange(60).repeat_interleave(torch.tensor(drawn).long()[owner])
        assert found == pytest.approx(auc(scores[rows], accepted[rows]))


def test_chains_are_judged_at_the_taus_of_static_ones(traces) -> None:
    classifier = untrained()
    found = evaluate_chains({"ours": classifier}, traces, traces, replace(PLAN, d_max=3))
    replay = ChainReplay(traces, 3)
    assert found.taus == pytest.approx([replay.static(1).tau, replay.static(2).tau])
    assert found.baselines["static"] == pytest.approx([1.0, 2.0])
    by_name = {rule.name: rule for rule in found.rules}
    assert next(iter(by_name)) == "P" and list(by_name)[-1] == "ours"
    assert {"vLLM's estimator, online", "vLLM's estimator, whole", "DyMax", "entropy"} <= set(by_name)
    confidence = classifier.confidence(traces.chain.stats())[:, :3]
    assert by_name["ours"].auc == pytest.approx(auc(confidence.flatten(), traces.chain.accepted[:, :3].flatten()))
    gain = by_name["ours"].auc - by_name[found.reference].auc
    assert by_name["ours"].auc_gain == pytest.approx(gain) and by_name[found.reference].auc_gain is None
    ours = by_name["ours"].compared
    first, second = ours["static"]["gamma"]
    assert ours["static"]["ratio"] == pytest.approx([first / 1, second / 2])
    assert ours["P"]["gamma"] == ours["static"]["gamma"]
    assert by_name["DyMax"].calibration is None
    form = by_name["log P + .2 path entropy"]
    assert ours[form.name]["gamma"] == ours["static"]["gamma"] and form.calibration["confidence"] <= 1.0
    # the estimator drops the token that fails
    chain = truncate(traces.chain, 3)
    survival = OnlineLogistic(3).fit_whole(traces.chain, 3).survival(chain)
    curve = serve(traces, threshold_sweep(chain, survival)).curve()
    assert by_name[found.reference].compared["static"]["gamma"] == gamma_at(*curve, np.array(found.taus)).tolist()
    assert by_name["ours"].calibration["accepted"] == pytest.approx(float(traces.chain.accepted[:, :3].float().mean()))


def test_without_training_traces_the_estimator_is_left_out(traces) -> None:
    found = evaluate_chains({}, traces, None, PLAN)
    assert found.reference is None
    assert not [rule for rule in found.rules if "vLLM" in rule.name]


@pytest.mark.parametrize("every_state", [False, True])
def test_trees_are_judged_against_eagle2(traces, every_state) -> None:
    classifier = untrained()
    found = evaluate_trees({"ours": classifier}, traces, replace(PLAN, every_state=every_state, second_top_k=2))
    assert [rule.name for rule in found.rules] == ["P", *FORMS, "ours", "ours, second top-2"]
    baseline = serve(traces, eagle2_sweep(traces.tree), every_state)
    assert found.baselines["EAGLE-2"] == gamma_at(*baseline.curve(), np.array(PLAN.taus)).tolist()
    confidence = classifier.confidence(traces.tree.stats())
    curve = serve(traces, threshold_sweep(traces.tree, confidence), every_state)
    expected = gamma_at(*curve.curve(), np.array(PLAN.taus))
    ours = found.rules[1 + len(FORMS)]
    assert ours.compared["EAGLE-2"]["gamma"] == expected.tolist()
    assert ours.censored["nodes"] >= 0.0
    assert set(ours.compared) == {"EAGLE-2", "P", *FORMS} and set(found.rules[1].compared) == {"EAGLE-2", "P"}
    # more than 1 is no probability, and yet an order
    form = serve(traces, threshold_sweep(traces.tree, tempered(traces.tree).exp()), every_state)
    assert found.rules[1].compared["EAGLE-2"]["gamma"] == gamma_at(*form.curve(), np.array(PLAN.taus)).tolist()


def test_taus_are_chosen_where_all_rules_reach(traces) -> None:
    found = evaluate_trees({}, traces, replace(PLAN, taus=None))
    assert len(found.taus) > 4
    for rule in found.rules:
        assert not any(math.isnan(gamma) for gamma in rule.compared["EAGLE-2"]["gamma"])


def test_by_command_with_provenance(traces, tmp_path, capsys) -> None:
    save_traces(traces, tmp_path / "held.traces")
    folder = tmp_path / "eagle3"
    folder.mkdir()
    save_classifier(untrained(), folder / "c2t_classifier.safetensors")
    out = tmp_path / "new" / "found.json"
    files = [str(folder / "c2t_classifier.safetensors"), f"other={folder / 'c2t_classifier.safetensors'}"]
    arguments = ["--traces", str(tmp_path / "held.traces"), "--d-max", "4", "--tree-depth", "3", "--replicates", "10"]
    assert evaluate.main([*files, *arguments, "--json", str(out), "--seed", "7"]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert (record["format"], record["version"], record["run"]["seed"]) == ("c2t-evaluation", 2, 7)
    assert record["classifiers"] == dict.fromkeys(("eagle3", "other"), file_hash(folder / "c2t_classifier.safetensors"))
    assert record["traces"]["prompts"] == 30 and record["plan"]["tree_depth"] == 3
    assert [rule["name"] for rule in record["trees"]["rules"]] == ["P", *FORMS, "eagle3", "other"]
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "EAGLE-2" in printed and "static" in printed and "other" in printed


def test_what_a_server_has_learnt_is_judged_by_what_it_means_there(traces, tmp_path) -> None:
    """The file that `--speculative-c2t-learned` names, of a server that served these chains."""
    save_traces(traces, tmp_path / "held.traces")
    classifier, chain = untrained(), truncate(traces.chain, 4)
    save_classifier(classifier, tmp_path / "begun.safetensors")
    learner, sure = Calibration(4), classifier.confidence(chain.stats())
    for rows in torch.arange(len(chain)).split(8):
        accepted = chain.accepted[rows].long().sum(1)
        learner.observe(sure[rows], torch.full_like(accepted, 4), accepted, log_prob=chain.log_prob[rows])
    file = LearnedFile(tmp_path / "learned.safetensors", classifier, traces.header["pair"])
    file.close({"learnt": learner.state()})
    files = [str(tmp_path / f"{name}.safetensors") for name in ("begun", "learned")]
    arguments = ["--traces", str(tmp_path / "held.traces"), "--d-max", "4", "--tree-depth", "3", "--replicates", "10"]
    assert evaluate.main([*files, *arguments, "--json", str(tmp_path / "found.json")]) == 0
    record = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    judged = {rule["name"]: rule["calibration"] for rule in record["chains"]["rules"]}
    share = float(chain.accepted.float().mean())
    assert judged["learned"]["accepted"] == judged["begun"]["accepted"] == pytest.approx(share)
    assert abs(judged["learned"]["confidence"] - share) < 0.1 < abs(judged["begun"]["confidence"] - share)
    assert judged["learned"]["error"] < judged["begun"]["error"] / 2


def test_a_name_that_comes_twice_is_refused(traces, tmp_path) -> None:
    save_classifier(untrained(), tmp_path / "c.safetensors")
    with pytest.raises(C2TError, match="two classifiers are named c"):
        named_classifiers([str(tmp_path / "c.safetensors")] * 2, traces)


def test_another_top_m_is_refused(traces, tmp_path) -> None:
    save_classifier(NodeClassifier(ClassifierSpec(top_m=1000)), tmp_path / "c")
    with pytest.raises(C2TError, match="top_m 1000, the traces 4"):
        named_classifiers([str(tmp_path / "c")], traces)


def test_rivals_from_another_draft_are_refused(traces, tmp_path) -> None:
    save_traces(traces, tmp_path / "one")
    save_traces(replace(traces, header={**traces.header, "pair": {"draft": "other"}}), tmp_path / "other")
    with pytest.raises(C2TError, match="different drafts"):
        evaluate.main(["--traces", str(tmp_path / "one"), "--rivals-from", str(tmp_path / "other"), "--d-max", "4"])


@pytest.mark.parametrize(
    "values",
    [
        {"d_max": 1},
        {"tree_depth": 0},
        {"taus": ()},
        {"taus": (0.0,)},
        {"taus": (float("inf"),)},
        {"second_top_k": 0},
        {"seed": -1},
    ],
    ids=str,
)
def test_a_senseless_plan_is_refused(values) -> None:
    with pytest.raises(ConfigError):
        EvaluatePlan(**values)
