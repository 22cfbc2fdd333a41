"""What a worker is given: which classifier, what the log says of it, and what a cost curve must be."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang]

import huggingface_hub  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled  # noqa: E402

from benchmarks.pairs.toy import pair_dir  # noqa: E402
from c2t_plugin.classifier import (  # noqa: E402
    CALIBRATED_NAME,
    FILE_NAME,
    NodeClassifier,
    load_classifier,
    save_classifier,
)
from c2t_plugin.config import C2TConfig  # noqa: E402
from c2t_plugin.engines import learning, served_traces  # noqa: E402
from c2t_plugin.engines.checkpoints import CLASSIFIERS, find_classifier, read_config  # noqa: E402
from c2t_plugin.engines.learned import with_learnt  # noqa: E402
from c2t_plugin.engines.sglang import checkpoints, startup, validate  # noqa: E402
from c2t_plugin.errors import ClassifierError, ConfigError, HubError  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from c2t_plugin.planner.network import Network  # noqa: E402
from c2t_plugin.planner.network_learner import Trial  # noqa: E402
from c2t_plugin.scorer import ChainScorer  # noqa: E402
from tests.engines.test_learned import RETRAINED, trained  # noqa: E402

ANOTHER_PAIR = "this classifier was fitted on another pair; fit your own: c2t collect, then c2t fit"
CURVE = CostCurve(verify=((1, 1.0), (9, 2.0)), draft=((1, 0.1), (9, 0.2)))


@pytest.fixture(autouse=True)
def no_options_of_the_person_who_runs_this(monkeypatch: pytest.MonkeyPatch):
    for name in ("CONFIG", "BETA", "CLASSIFIER", "TOP_M", "TRACE_DIR", "COST_CURVE"):
        monkeypatch.delenv(f"C2T_{name}", raising=False)


def prepare(
    draft: Path | None,
    revision: str | None = None,
    *,
    target_revision: str | None = None,
    leads: bool = True,
    alone: bool = True,
    deterministic: bool = False,
    **flags: Any,
) -> Any:
    server_args = SimpleNamespace(
        model_path=str(pair_dir() / "target"),
        revision=target_revision,
        speculative_draft_model_path=None if draft is None else str(draft),
        speculative_draft_model_revision=revision,
        # as 0.5.23 leaves what was not given
        speculative_eagle_topk=None,
        served_model_name="m",
        enable_metrics=False,
        enable_deterministic_inference=deterministic,
        _c2t=flags,
    )

    def make_scorer(classifier: NodeClassifier, beta: float, config: C2TConfig) -> ChainScorer:
        return ChainScorer(classifier, slots=8, rows=8, max_depth=4, beta=beta, device="cpu")

    base = "EAGLE" if draft is None else "EAGLE3"
    return startup.prepare(server_args, base, make_scorer, most=4, topk=4, leads=leads, alone=alone)


@pytest.fixture
def bare_draft(tmp_path: Path) -> Path:
    """A draft checkpoint without a classifier beside it."""
    (tmp_path / "bare").mkdir()
    shutil.copyfile(pair_dir() / "eagle3" / "config.json", tmp_path / "bare" / "config.json")
    return tmp_path / "bare"


def test_the_log_warns_of_a_classifier_that_was_fitted_on_another_pair(
    bare_draft: Path, caplog: pytest.LogCaptureFixture
):
    made = prepare(bare_draft)
    assert made.configuration["classifier_origin"].startswith("shipped")
    assert [record.levelname for record in caplog.records if ANOTHER_PAIR in record.message] == ["WARNING"]


def test_it_does_not_of_the_one_beside_the_draft(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        made = prepare(pair_dir() / "eagle3", planner="off")
    assert made.configuration["classifier"] == str(pair_dir() / "eagle3" / FILE_NAME)
    assert "beside the draft" in caplog.text
    assert ANOTHER_PAIR not in caplog.text


def test_a_classifier_by_hub_id(bare_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def download(repo: str, name: str, revision: str | None) -> str:
        asked.append((repo, name))
        return str(shutil.copyfile(pair_dir() / "eagle3" / FILE_NAME, tmp_path / name))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    made = prepare(bare_draft, classifier="someone/classifier", planner="off")
    assert asked == [("someone/classifier", FILE_NAME)]
    assert made.configuration["classifier"] == str(tmp_path / FILE_NAME)
    assert made.configuration["classifier_origin"] == "named"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (EntryNotFoundError("404"), ClassifierError, f"hub repository with {FILE_NAME}"),
        (OfflineModeIsEnabled("offline"), HubError, r"the hub was not reached, .* has c2t_classifier.* \(offline\)"),
        (
            LocalEntryNotFoundError("no\nnet"),
            HubError,
            r"the hub was not reached, .* \(no\): connect, or name local files",
        ),
    ],
)
def test_a_hub_that_has_none(
    bare_draft: Path, monkeypatch: pytest.MonkeyPatch, answer: Exception, error: type, message: str
):
    def download(repo: str, name: str, revision: str | None) -> str:
        raise answer

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(error, match=message):
        prepare(bare_draft, classifier="someone/classifier")


def unreachable(repo: str, name: str, revision: str | None) -> str:
    raise LocalEntryNotFoundError("no connection")


def test_a_draft_on_a_hub_that_is_not_reached_does_not_get_the_generic_classifier(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(HubError, match=r"does not say whether 'someone/draft' has c2t_classifier\.safetensors"):
        find_classifier(C2TConfig(), "eagle3", "someone/draft")
    # it was asked before, and had none
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: huggingface_hub._CACHED_NO_EXIST)
    assert find_classifier(C2TConfig(), "eagle3", "someone/draft")[1] == "shipped, generic"


@pytest.mark.parametrize("name", ["models/none", "./none", "/none/at", "a/b/c", "none.safetensors"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(ClassifierError, match="is neither a file nor a directory"):
        find_classifier(C2TConfig(classifier=name), "eagle3", None)
    if name != "models/none":
        # an engine may have models of that owner beside those that it takes from the hub
        with pytest.raises(ConfigError, match="is neither a directory here nor a hub id"):
            read_config(name)


def test_revisions_pin_the_classifier_and_both_configurations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []

    def download(repo: str, name: str, revision: str | None) -> str:
        asked.append((repo, name, revision))
        return str(pair_dir() / "draft" / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    pinned = {"model_path": "someone/target", "revision": "t1", "speculative_draft_model_path": "someone/draft"}
    record = SimpleNamespace(**pinned, speculative_draft_model_revision="d1")
    assert checkpoints.detect_base(record.speculative_draft_model_path, record.model_path, "d1") == "STANDALONE"
    checkpoints.check_vocabulary(record, "STANDALONE")
    checkpoints.check_draft_loop(record, "EAGLE")
    find_classifier(C2TConfig(), "standalone", "someone/draft", revision="d1")
    find_classifier(C2TConfig(classifier="someone/draft"), "standalone", "someone/draft", revision="d1")
    find_classifier(C2TConfig(classifier="other/draft"), "standalone", "someone/draft", revision="d1")
    assert set(asked) == {
        ("someone/draft", "config.json", "d1"),
        ("someone/target", "config.json", "t1"),
        ("someone/draft", FILE_NAME, "d1"),
        ("other/draft", FILE_NAME, None),
    }


def test_a_server_starts_with_what_was_pinned(bare_draft: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def find(*positional: Any, revision: str | None, **keyword: Any) -> Any:
        seen.append(revision)
        return find_classifier(*positional, **keyword)

    monkeypatch.setattr(startup, "find_classifier", find)
    prepare(bare_draft, revision="d1")
    assert seen == ["d1"]


def test_traces_name_the_vocabulary_of_the_draft_that_was_pinned(
    bare_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"d1": 77, None: 99}
    monkeypatch.setattr(served_traces, "read_config", lambda _, revision=None: {"draft_vocab_size": sizes[revision]})
    recorder = prepare(bare_draft, revision="d1", trace_dir=str(tmp_path / "traces")).recorder
    recorder.close()
    assert recorder._header["pair"]["draft_vocab_size"] == 77


def test_a_draft_that_the_target_carries_is_pinned_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"t1": 77, None: 99}
    monkeypatch.setattr(served_traces, "read_config", lambda _, revision=None: {"vocab_size": sizes[revision]})
    recorder = prepare(None, target_revision="t1", trace_dir=str(tmp_path / "traces")).recorder
    recorder.close()
    assert recorder._header["pair"]["draft_vocab_size"] == 77


def test_a_classifier_of_another_kind_of_draft_is_warned_of(caplog: pytest.LogCaptureFixture):
    prepare(pair_dir() / "eagle3")
    assert "fit one on yours" not in caplog.text
    prepare(pair_dir() / "eagle3", classifier=str(CLASSIFIERS / "draft" / FILE_NAME))
    assert f"{FILE_NAME} was fitted on draft drafts, these are eagle3: fit one on yours" in caplog.text


def test_a_number_needs_no_planner():
    made = prepare(pair_dir() / "eagle3", beta="0.5")
    assert made.planner is None
    assert float(made.scorer.beta) == made.configuration["beta"] == 0.5


def test_auto_has_one_and_says_what_it_takes_confidences_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_curve(CURVE, tmp_path / "curve.json")
    curve = str(tmp_path / "curve.json")
    made = prepare(pair_dir() / "eagle3", planner=curve)
    assert made.planner is not None
    assert made.planner.curve == CURVE
    # the threshold cuts nothing, the planner does
    assert float(made.scorer.beta) == 0.0
    assert made.configuration["classifier"] == str(pair_dir() / "eagle3" / CALIBRATED_NAME)
    assert "takes confidences for probabilities" not in caplog.text
    other = {"planner": curve, "classifier": str(pair_dir() / "eagle3" / FILE_NAME)}
    # what they mean is learnt
    learns = prepare(pair_dir() / "eagle3", **other)
    assert learns.planner is not None
    assert learns.planner.learns
    assert "c2t calibrate --on chain" not in caplog.text
    prepare(pair_dir() / "eagle3", **other, learn="off")
    assert "c2t calibrate --on chain" in caplog.text


@pytest.mark.parametrize("leads", [True, False])
def test_the_rank_that_leads_writes_the_curve_that_is_named(tmp_path: Path, leads: bool):
    made = prepare(pair_dir() / "eagle3", planner=str(tmp_path / "new.json"), leads=leads)
    assert made.planner is not None and made.planner.measures
    made.planner._learn(CURVE)
    assert (tmp_path / "new.json").exists() == leads


@pytest.mark.parametrize("learn", ["auto", "calibrate", "network"])
def test_nothing_is_learnt_where_inference_is_deterministic(learn: str, caplog: pytest.LogCaptureFixture):
    made = prepare(pair_dir() / "eagle3", planner="on", learn=learn, deterministic=True)
    assert made.planner is not None and not made.planner.learns
    assert "C2T: learns nothing: enable_deterministic_inference" in caplog.text


def test_a_network_that_is_learnt_scores_the_drafts_from_the_next_one_on():
    made = prepare(pair_dir() / "eagle3", planner="on", learn="network")
    learner = made.planner._calibration
    mine, before = made.scorer.network.out_weight, made.scorer.network.out_weight.clone()
    assert torch.equal(torch.from_numpy(learner.network.out_weight), before)
    learner._settled = Trial(Network(*(2 * each for each in learner.network)), learner.calibration, 0)
    assert torch.equal(mine, before)
    made.planner.begin(1)
    # in the same buffer, which a captured graph reads
    assert torch.equal(mine, 2 * before) and made.scorer.network.out_weight is mine
    assert made.planner.state()["learnt"]["network"]["swaps"] == 1


@pytest.mark.parametrize("leads", [True, False])
def test_of_several_ranks_the_one_that_decides_trains_the_network(leads: bool):
    before = threading.active_count()
    made = prepare(pair_dir() / "eagle3", planner="on", learn="network", alone=False, leads=leads)
    assert made.planner.network is not None and threading.active_count() - before == int(leads)


def test_every_rank_goes_on_from_the_network_that_was_learnt(tmp_path: Path):
    draft, path = pair_dir() / "eagle3", tmp_path / "learned.safetensors"
    classifier = load_classifier(draft / CALIBRATED_NAME)
    served = learning.pair_of("eagle3", (str(pair_dir() / "target"), None), (str(draft), None))
    network = trained(classifier)
    save_classifier(with_learnt(classifier, RETRAINED, served, network), path)
    before, asked = path.read_bytes(), {"planner": "on", "learned": str(path)}
    with pytest.raises(ClassifierError, match="over another classifier"):
        prepare(draft, **asked, learn="calibrate")
    assert path.read_bytes() == before
    for leads in (True, False):
        made = prepare(draft, **asked, learn="network", alone=False, leads=leads)
        assert np.array_equal(made.planner.network.out_weight, network.out_weight)
        assert torch.equal(made.scorer.network.out_weight, torch.from_numpy(network.out_weight))


@pytest.mark.parametrize("learn", ["calibrate", "network"])
@pytest.mark.parametrize(
    "rule", [{"beta": "0.5"}, {"planner": "off"}, {"mode": "tree"}, {"mode": "tree", "planner": "on"}]
)
def test_what_learns_nothing_though_it_was_asked_to_says_so(
    rule: dict[str, str], learn: str, caplog: pytest.LogCaptureFixture
):
    prepare(pair_dir() / "eagle3", **rule, learn=learn)
    assert caplog.text.count(f"learn {learn} is for a planner of chains, and there is none: nothing is learnt") == 1
    caplog.clear()
    prepare(pair_dir() / "eagle3", **rule, learn=learn, leads=False)
    prepare(pair_dir() / "eagle3", **rule)
    assert "nothing is learnt" not in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("{}"), "is no cost curve"),
        (lambda path: path.mkdir(), "is no regular file"),
    ],
)
def test_a_file_that_is_no_curve_is_refused(tmp_path: Path, make: Any, message: str):
    make(tmp_path / "curve.json")
    with pytest.raises(ConfigError, match=message):
        validate._check_curve(C2TConfig(planner=str(tmp_path / "curve.json")))


def test_a_curve_that_is_to_be_made_needs_its_directory(tmp_path: Path):
    validate._check_curve(C2TConfig(planner=str(tmp_path / "new.json")))
    with pytest.raises(ConfigError, match="neither is its directory"):
        validate._check_curve(C2TConfig(planner=str(tmp_path / "no" / "new.json")))


@pytest.mark.parametrize("leads", [True, False])
def test_one_rank_writes_the_curve(bare_draft: Path, tmp_path: Path, leads: bool):
    path = tmp_path / "curve.json"
    prepare(bare_draft, leads=leads, planner=str(path)).planner._learn(CURVE)
    assert path.exists() == leads


def test_a_server_plans_by_itself(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        made = prepare(pair_dir() / "eagle3")
    assert made.planner is not None and made.configuration["planner"] == "on" and float(made.scorer.beta) == 0.0
    assert "chains of at most 4, planner on, classifier" in caplog.text
    fixed = prepare(pair_dir() / "eagle3", beta=0.25)
    assert fixed.planner is None and fixed.configuration["planner"] == "off" and float(fixed.scorer.beta) == 0.25
