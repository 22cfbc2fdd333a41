"""What a server has learnt, as a file: a classifier like any other, which the next server goes on from."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pairs.toy import pair_dir
from c2t_kernels.network import MAX_HIDDEN
from c2t_plugin.classifier import FILE_NAME, NodeClassifier, load_classifier, save_classifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines import learned, learning
from c2t_plugin.engines.learned import LearnedFile, folded, read, with_learnt
from c2t_plugin.errors import C2TError, ClassifierError, ConfigError
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.network import Network
from c2t_plugin.planner.step_planner import StepPlanner
from c2t_plugin.weights import fingerprint, known, same

D_MAX = 6
# for the file's thread, which takes a moment unless the machine is busy
PATIENCE_S = 60.0
PAIR = {"target": "T sha256:1", "draft": "D sha256:2", "kind": "eagle3", "draft_vocab_size": 4096}
SLOPE, OFFSETS = 1.7, [0.5, -0.25, -1.0, -1.0, 0.75, -2.0]
STATE: dict[str, Any] = {
    **{"slope": 0.3, "own": 0.7, "offsets": OFFSETS[::-1], "joint": {"slope": SLOPE, "offsets": OFFSETS}},
    **{"seen": 12_345, "nll": [0.6, 0.5], "auc": [0.8, 0.81], "discarded": 0, "turns": 0},
}


@pytest.fixture
def classifier() -> NodeClassifier:
    return load_classifier(pair_dir() / "eagle3" / FILE_NAME)


def raw_features(classifier: NodeClassifier, rows: int = 200) -> torch.Tensor:
    """Of tokens of all depths, deeper ones than were learnt too."""
    spec = classifier.spec
    drawn = torch.randn(rows, len(spec.features), generator=torch.Generator().manual_seed(0))
    found = drawn * torch.tensor(spec.scale) + torch.tensor(spec.shift)
    found[:, spec.features.index("depth")] = spec.depth_origin + torch.arange(rows) % (D_MAX + 2)
    return found


def test_the_file_is_a_classifier_with_confidences_as_they_were_learnt(classifier: NodeClassifier):
    features = raw_features(classifier)
    depth = (torch.arange(len(features)) % (D_MAX + 2)).clamp(max=D_MAX - 1)
    expected = SLOPE * classifier(features).double() + torch.tensor(OFFSETS, dtype=torch.float64)[depth]
    found = folded(classifier, SLOPE, OFFSETS)
    assert torch.allclose(found(features).double(), expected, atol=2e-4)
    assert found.spec.hidden == classifier.spec.hidden + D_MAX <= MAX_HIDDEN
    # of chains of one there is one offset, and of networks that are too wide already
    assert folded(classifier, SLOPE, [0.5]).spec.hidden == classifier.spec.hidden
    wide = folded(folded(folded(classifier, SLOPE, OFFSETS), 1.0, OFFSETS), 1.0, [1.0, 3.0] * 6)
    assert wide.spec.hidden == classifier.spec.hidden + 2 * D_MAX
    twice = SLOPE * classifier(features).double() + 2 * torch.tensor(OFFSETS, dtype=torch.float64)[depth] + 2.0
    assert torch.allclose(wide(features).double(), twice, atol=4e-4)


def test_the_next_server_goes_on_from_it(classifier: NodeClassifier, tmp_path: Path):
    path = tmp_path / "learned.safetensors"
    file = LearnedFile(path, classifier, PAIR)
    file.keep({"learnt": STATE})
    file.close({"learnt": {**STATE, "seen": 20_000}}, PATIENCE_S)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    start = read(path, classifier, PAIR, D_MAX)
    deep = STATE["offsets"]
    assert (start.slope, start.own, start.offsets.tolist(), start.seen) == (0.3, 0.7, deep, 20_000)
    # longer and shorter chains than it was learnt with
    assert read(path, classifier, PAIR, 8).offsets.tolist() == [*deep, deep[-1], deep[-1]]
    assert read(path, classifier, PAIR, 2).offsets.tolist() == deep[:2]
    spec = load_classifier(path).spec
    assert spec.pair == PAIR and spec.training["calibrated"] == "chain"
    assert spec.training["learned"]["seen"] == 20_000 and spec.training["learned"]["nll"] == [0.6, 0.5]
    assert 0.0 < spec.suggested_beta < 1.0


def test_what_cannot_be_written_is_said_once_and_raises_nothing(
    classifier: NodeClassifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    file = LearnedFile(tmp_path / "file" / "learned.safetensors", classifier, PAIR)
    for _ in range(2):
        file.close({"learnt": STATE}, PATIENCE_S)
    assert file.failed == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def written(path: Path, classifier: NodeClassifier, **changed: Any) -> Path:
    found = with_learnt(classifier, STATE, PAIR)
    record = {**found.spec.training["learned"], **changed}
    found.spec = replace(found.spec, training={**found.spec.training, "learned": record})
    save_classifier(found, path)
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, "version 2, this build reads 1"),
        ({"over": "of another"}, "over another classifier"),
        ({"slope": 1e9}, "slopes of 1000000000.0"),
        ({"slope": "steep"}, "slopes of 'steep'"),
        ({"own": None}, "slopes of 0.3 and None"),
        ({"offsets": []}, "offsets of \\[\\]"),
        ({"offsets": [1e9]}, "offsets of"),
        ({"offsets": None}, "offsets of None"),
        ({"seen": 0.5}, "slopes of"),
        ({"seen": True}, "slopes of"),
        ({"seen": 10**400}, "slopes of"),
        ({"offsets": [0.0, 10**400]}, "offsets of"),
        ({"slope": -(10**400)}, "slopes of -1000"),
    ],
)
def test_a_file_that_is_no_good_is_refused_in_a_line(
    classifier: NodeClassifier, tmp_path: Path, changed: dict[str, Any], message: str
):
    with pytest.raises(ClassifierError, match=message) as refusal:
        read(written(tmp_path / "learned.safetensors", classifier, **changed), classifier, PAIR, D_MAX)
    assert "\n" not in str(refusal.value)


def test_so_is_one_of_another_pair_and_one_that_nothing_was_learnt_in(classifier: NodeClassifier, tmp_path: Path):
    path = written(tmp_path / "learned.safetensors", classifier)
    with pytest.raises(ClassifierError, match=r"was learnt on D sha256:2 for T sha256:1, this server has D sha256:3"):
        read(path, classifier, {**PAIR, "draft": "D sha256:3"}, D_MAX)
    with pytest.raises(ClassifierError, match="of what a server learnt none"):
        read(pair_dir() / "eagle3" / FILE_NAME, classifier, PAIR, D_MAX)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ClassifierError, match="is not a readable safetensors file"):
        read(path, classifier, PAIR, D_MAX)


def config(learned: Path, **options: Any) -> C2TConfig:
    return C2TConfig(learned=str(learned), **options)


def test_options_that_do_not_go_together_are_refused(classifier: NodeClassifier, tmp_path: Path):
    with pytest.raises(ConfigError, match="learn off"):
        config(tmp_path / "new", learn="off")
    with pytest.raises(ConfigError, match="there is none; leave it out"):
        learned.check(config(tmp_path / "new", beta=0.5), classifier, lambda: PAIR)
    with pytest.raises(C2TError, match="it is a directory"):
        learned.check(config(tmp_path), classifier, lambda: PAIR)
    learned.check(config(tmp_path / "new"), classifier, lambda: PAIR)
    path = written(tmp_path / "learned.safetensors", classifier)
    learned.check(config(path), classifier, lambda: PAIR)
    other = {**PAIR, "target": "T sha256:9"}
    with pytest.raises(ClassifierError, match="was learnt on"):
        learned.check(config(path), classifier, lambda: other)
    # weights that are yet to be fetched
    learned.check(config(path), classifier, lambda: {**PAIR, "target": "someone/target"})


def served(kind: str = "eagle3") -> dict[str, Any]:
    return learning.pair_of(kind, (str(pair_dir() / "target"), None), (str(pair_dir() / kind), None))


def test_a_pair_is_known_by_its_weights_as_the_lab_knows_it(classifier: NodeClassifier):
    assert served() == classifier.spec.pair
    assert known(served()) and same(classifier.spec.pair, served())
    assert not same(classifier.spec.pair, {**served(), "draft": "D sha256:3"})


def test_a_target_may_carry_its_draft():
    found = learning.pair_of("mtp", (str(pair_dir() / "target"), None), (None, None))
    assert found["draft"] == found["target"] and found["kind"] == "mtp"


def test_weights_that_are_not_there_have_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "vocab_size": 9}')
    found = learning.pair_of("eagle3", (str(tmp_path), None), (str(tmp_path), None))
    assert found["target"] == tmp_path.name and not known(found)
    assert "cannot be told from others" in caplog.text


@pytest.mark.parametrize("place", [0, 5_000_000, 9_999_999])
def test_large_weights_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int):
    monkeypatch.setattr("c2t_plugin.weights.WHOLE", 1000)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10_000_000))
    before = fingerprint(tmp_path, {"model_type": "m"})
    assert before.startswith("m sampled:")
    with weights.open("r+b") as handle:
        # a layer is a good deal larger than what lies between two samples
        handle.seek(max(0, place - 100_000))
        handle.write(b"\1" * 200_000)
    weights.open("r+b").truncate(10_000_000)
    assert fingerprint(tmp_path, {"model_type": "m"}) != before


def test_auto_believes_a_classifier_more_that_was_fitted_on_this_very_pair(classifier: NodeClassifier):
    def started(learn: str, pair: dict[str, Any]) -> Calibration | None:
        return learning.calibration(C2TConfig(learn=learn), classifier, D_MAX, lambda: pair)

    def believed(learn: str, pair: dict[str, Any]) -> bool:
        found = started(learn, pair)
        assert found is not None
        return found.learnt.precision is not None

    assert started("off", PAIR) is None
    assert [believed("auto", PAIR), believed("auto", dict(classifier.spec.pair))] == [False, True]
    assert not believed("calibrate", dict(classifier.spec.pair))


def test_a_planner_writes_what_it_learns(classifier: NodeClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ends: list[Any] = []
    monkeypatch.setattr(learning.atexit, "register", ends.append)
    path = tmp_path / "learned.safetensors"
    found = learning.calibration(config(path), classifier, 2, lambda: PAIR)
    shape: dict[str, Any] = {"steps": 2, "most": 2, "device": torch.device("cpu"), "depths": (0, 1, 2)}
    planner = StepPlanner(None, None, **shape, calibration=found)
    learning.report(planner, str(path), classifier, lambda: PAIR)
    for step in range(40):
        planner.learn((torch.full((4, 2), 0.6), torch.full((4,), 2), torch.full((4,), step % 3), [step] * 4))
    ends[0]()
    again = learning.calibration(config(path), classifier, 2, lambda: PAIR)
    assert again is not None and again.seen == 40 * 8
    assert json.loads(json.dumps(again.state()))["offsets"] == planner.state()["learnt"]["offsets"]


def test_records_are_written_by_a_thread(classifier: NodeClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrote: list[str] = []
    monkeypatch.setattr(learned, "save_classifier", lambda *_: wrote.append(learned.threading.current_thread().name))
    file = LearnedFile(tmp_path / "learned.safetensors", classifier, PAIR)
    file.keep({"learnt": STATE})
    file.close({"learnt": STATE}, PATIENCE_S)
    assert len(wrote) == 1 and wrote[0] != "MainThread"


RETRAINED = {**STATE, "network": {"swaps": 3, "discarded": 1}}


def trained(classifier: NodeClassifier) -> Network:
    return Network(*(1.5 * each for each in Network.of(classifier)))


def goes_on(path: Path, classifier: NodeClassifier, learn: str = "network") -> Any:
    make = learned.network if learn == "network" else learning.calibration
    return make(config(path, learn=learn), classifier, D_MAX, lambda: PAIR)


def test_a_network_is_kept_too_and_the_next_server_goes_on_from_it(classifier: NodeClassifier, tmp_path: Path):
    path, network = tmp_path / "learned.safetensors", trained(classifier)
    file = LearnedFile(path, classifier, PAIR, lambda: network)
    file.keep({"learnt": RETRAINED})
    file.close({"learnt": RETRAINED}, PATIENCE_S)
    assert file.failed == 0
    kept = load_classifier(path)
    assert kept.spec.training["learned"]["networks"]["swaps"] == 3
    chain = torch.rand(50, len(kept.spec.features)) * 3
    expected = folded(learned.with_network(classifier, network), SLOPE, OFFSETS)
    assert torch.allclose(kept(chain), expected(chain), atol=1e-4)
    learner = goes_on(path, classifier)
    for found, mine in zip(learner.network, network, strict=True):
        assert (found == mine).all()
    # the prior is still the classifier
    assert (learner._prior.out_weight == Network.of(classifier).out_weight).all()
    assert (learner.calibration.learnt.slope, learner.calibration.seen) == (0.3, 12_345)
    # one that calibrates alone has another classifier
    with pytest.raises(ClassifierError, match="over another classifier"):
        goes_on(path, classifier, "calibrate")
    # where no network was learnt, that one goes on from what confidences mean
    written(path, classifier)
    assert (goes_on(path, classifier).network.out_weight == Network.of(classifier).out_weight).all()
    assert goes_on(path, classifier).calibration.learnt.slope == 0.3


@pytest.mark.parametrize("network", [None, [], [[1.0]] * 4, "flat", [[[float("nan")]]] * 4])
def test_a_damaged_network_is_refused_in_a_line(classifier: NodeClassifier, tmp_path: Path, network: Any):
    path = tmp_path / "learned.safetensors"
    written(path, classifier, network_from=learned.digest(classifier), network=network)
    with pytest.raises(ClassifierError, match="holds no network of this classifier's shape") as refusal:
        goes_on(path, classifier)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ClassifierError, match="holds no network"):
        learned.check(config(path, learn="network"), classifier, lambda: PAIR, network=True)


def test_a_calibration_of_a_network_is_refused_where_that_is_not_served(classifier: NodeClassifier, tmp_path: Path):
    """By a server that learns no network."""
    path = tmp_path / "learned.safetensors"
    save_classifier(with_learnt(classifier, RETRAINED, PAIR, trained(classifier)), path)
    asked = config(path, learn="network")
    learned.check(asked, classifier, lambda: PAIR, network=True)
    for judge in (learned.check, lambda *given: learning.calibration(given[0], given[1], D_MAX, given[2])):
        with pytest.raises(ClassifierError, match="was learnt over another classifier than this server has") as refusal:
            judge(asked, classifier, lambda: PAIR)
        assert "\n" not in str(refusal.value)
    # what no network was learnt in serves both
    written(path, classifier)
    found = learning.calibration(asked, classifier, D_MAX, lambda: PAIR)
    assert found is not None and found.learnt.slope == 0.3


def test_the_file_of_a_network_that_began_from_another_classifier_is_refused(
    classifier: NodeClassifier, tmp_path: Path
):
    other = learned.with_network(classifier, trained(classifier))
    path = tmp_path / "learned.safetensors"
    save_classifier(with_learnt(other, RETRAINED, PAIR, trained(other)), path)
    with pytest.raises(ClassifierError, match="over another classifier"):
        goes_on(path, classifier)


def test_a_disk_that_hangs_holds_no_server_that_ends(
    classifier: NodeClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    back = threading.Event()
    monkeypatch.setattr(learned, "save_classifier", lambda *_: back.wait())
    file = LearnedFile(tmp_path / "learned.safetensors", classifier, PAIR)
    for _ in range(2):
        file.close({"learnt": STATE}, timeout=0.0)
    back.set()
    assert len(caplog.records) == 2 and "is not written" in caplog.messages[0]
    caplog.clear()
    file.close({"learnt": STATE}, PATIENCE_S)
    assert not caplog.records
