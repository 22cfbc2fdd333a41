"""What a worker is given: which classifier, what the log says of it, and what a cost curve must be."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang]

import huggingface_hub  # noqa: E402
from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled  # noqa: E402

from benchmarks.pairs.toy import pair_dir  # noqa: E402
from c2t_plugin.classifier import CALIBRATED_NAME, FILE_NAME, NodeClassifier  # noqa: E402
from c2t_plugin.config import C2TConfig  # noqa: E402
from c2t_plugin.engines.sglang import startup  # noqa: E402
from c2t_plugin.errors import ClassifierError, ConfigError  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.scorer import ChainScorer  # noqa: E402

ANOTHER_PAIR = "this classifier was fitted on another pair; fit your own: c2t collect, then c2t fit"
CURVE = CostCurve(verify=((1, 1.0), (9, 2.0)), draft=((1, 0.1), (9, 0.2)))


@pytest.fixture(autouse=True)
def no_options_of_the_person_who_runs_this(monkeypatch: pytest.MonkeyPatch):
    for name in ("CONFIG", "BETA", "CLASSIFIER", "TOP_M", "TRACE_DIR", "COST_CURVE"):
        monkeypatch.delenv(f"C2T_{name}", raising=False)


def prepare(draft: Path, *, leads: bool = True, **flags: Any) -> startup.Made:
    server_args = SimpleNamespace(
        model_path=str(pair_dir() / "target"),
        speculative_draft_model_path=str(draft),
        served_model_name="m",
        enable_metrics=False,
        _c2t=flags,
    )

    def make_scorer(classifier: NodeClassifier, beta: float, config: C2TConfig) -> ChainScorer:
        return ChainScorer(classifier, slots=8, rows=8, max_depth=4, beta=beta, device="cpu")

    return startup.prepare(server_args, "EAGLE3", make_scorer, most=4, leads=leads)


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
        made = prepare(pair_dir() / "eagle3")
    assert made.configuration["classifier"] == str(pair_dir() / "eagle3" / FILE_NAME)
    assert "beside the draft" in caplog.text
    assert ANOTHER_PAIR not in caplog.text


def test_a_classifier_by_hub_id(bare_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def download(repo: str, name: str) -> str:
        asked.append((repo, name))
        return str(shutil.copyfile(pair_dir() / "eagle3" / FILE_NAME, tmp_path / name))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    made = prepare(bare_draft, classifier="someone/classifier")
    assert asked == [("someone/classifier", FILE_NAME)]
    assert made.configuration["classifier"] == str(tmp_path / FILE_NAME)
    assert made.configuration["classifier_origin"] == "named"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (EntryNotFoundError("404"), ClassifierError, f"hub repository with {FILE_NAME}"),
        (OfflineModeIsEnabled("offline"), ConfigError, "neither a directory here nor a reachable hub repository"),
    ],
)
def test_a_hub_that_has_none(
    bare_draft: Path, monkeypatch: pytest.MonkeyPatch, answer: Exception, error: type, message: str
):
    def download(repo: str, name: str) -> str:
        raise answer

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(error, match=message):
        prepare(bare_draft, classifier="someone/classifier")


def test_a_number_needs_no_planner():
    made = prepare(pair_dir() / "eagle3", beta="0.5")
    assert made.planner is None
    assert float(made.scorer.beta) == made.configuration["beta"] == 0.5


def test_auto_has_one_and_says_what_it_takes_confidences_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    CURVE.save(tmp_path / "curve.json")
    curve = str(tmp_path / "curve.json")
    made = prepare(pair_dir() / "eagle3", planner=curve)
    assert made.planner is not None
    assert made.planner.curve == CURVE
    # the threshold cuts nothing, the planner does
    assert float(made.scorer.beta) == 0.0
    assert made.configuration["classifier"] == str(pair_dir() / "eagle3" / CALIBRATED_NAME)
    assert "takes confidences for probabilities" not in caplog.text
    prepare(pair_dir() / "eagle3", planner=curve, classifier=str(pair_dir() / "eagle3" / FILE_NAME))
    assert "c2t calibrate --on chain" in caplog.text


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
        startup.check_curve(C2TConfig(planner=str(tmp_path / "curve.json")))


def test_a_curve_that_is_to_be_made_needs_its_directory(tmp_path: Path):
    startup.check_curve(C2TConfig(planner=str(tmp_path / "new.json")))
    with pytest.raises(ConfigError, match="neither is its directory"):
        startup.check_curve(C2TConfig(planner=str(tmp_path / "no" / "new.json")))


@pytest.mark.parametrize("leads", [True, False])
def test_one_rank_writes_the_curve(bare_draft: Path, tmp_path: Path, leads: bool):
    path = tmp_path / "curve.json"
    prepare(bare_draft, leads=leads, planner=str(path)).planner._learn(CURVE)
    assert path.exists() == leads
