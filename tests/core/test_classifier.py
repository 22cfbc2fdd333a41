"""The classifier and its file: size, round trip, scaling, and everything a damaged file can do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from c2t_plugin.classifier import (
    FORMAT,
    PAPER_PARAMETERS,
    VERSION,
    ClassifierSpec,
    NodeClassifier,
    NodeStats,
    load_classifier,
    save_classifier,
)
from c2t_plugin.classifier import file as classifier_file
from c2t_plugin.errors import ClassifierError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "classifier.safetensors"
    save_classifier(NodeClassifier(ClassifierSpec(suggested_beta=0.4, pair={"draft": "d"})), path)
    return path


def stats(n: int = 5) -> NodeStats:
    generator = torch.Generator().manual_seed(1)
    columns = {name: torch.rand(n, generator=generator) for name in NodeStats._fields}
    return NodeStats(**{name: -column if name.endswith("log_prob") else column for name, column in columns.items()})


def test_the_papers_network_has_241_parameters():
    assert sum(p.numel() for p in NodeClassifier(ClassifierSpec()).parameters()) == PAPER_PARAMETERS == 241


def test_confidence_is_the_papers_formula():
    classifier = NodeClassifier(ClassifierSpec(shift=(0.1, 0.2, 0.3), scale=(2.0, 3.0, 4.0)))
    s = stats()
    x = torch.stack([(s.joint_log_prob.exp() - 0.1) / 2, (s.entropy - 0.2) / 3, (s.depth - 0.3) / 4], dim=-1)
    hidden = torch.relu(x @ classifier.hidden.weight.T + classifier.hidden.bias)
    expected = torch.sigmoid(hidden @ classifier.out.weight.T + classifier.out.bias).squeeze(-1)
    # both sum 48 products in float32, in another order
    torch.testing.assert_close(classifier.confidence(s), expected, atol=1e-6, rtol=1e-6)


def test_depth_origin_shifts_the_depth():
    one = NodeClassifier(ClassifierSpec(depth_origin=1))
    zero = NodeClassifier(ClassifierSpec(depth_origin=0))
    zero.load_state_dict(one.state_dict())
    # whole numbers, as depths are: adding 1 and taking it off again leaves them as they were
    s = stats()._replace(depth=torch.arange(1.0, 6.0))
    assert torch.equal(zero.confidence(s._replace(depth=s.depth + 1)), one.confidence(s))
    assert not torch.equal(zero.confidence(s), one.confidence(s))


def test_round_trip_keeps_everything(saved: Path):
    loaded = load_classifier(saved)
    torch.manual_seed(0)
    original = NodeClassifier(ClassifierSpec(suggested_beta=0.4, pair={"draft": "d"}))
    assert loaded.spec == original.spec
    assert torch.equal(loaded.confidence(stats()), original.confidence(stats()))
    assert not loaded.training


def test_missing_file(tmp_path: Path):
    with pytest.raises(ClassifierError, match="not found"):
        load_classifier(tmp_path / "none.safetensors")


@pytest.mark.parametrize("keep", [0, 7, 200], ids=["empty", "cut header", "cut tensors"])
def test_truncated_file(saved: Path, keep: int):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ClassifierError, match="not a readable safetensors file"):
        load_classifier(saved)


def test_another_kind_of_file(saved: Path):
    saved.write_text("{}")
    with pytest.raises(ClassifierError, match="not a readable safetensors file"):
        load_classifier(saved)


def test_safetensors_without_our_format(saved: Path):
    save_file(load_file(saved), saved, metadata={"format": "pt"})
    with pytest.raises(ClassifierError, match="format 'pt'"):
        load_classifier(saved)


def rewrite(path: Path, *, spec: dict | None = None, tensors: dict | None = None) -> None:
    found = load_file(path)
    text = ClassifierSpec().to_json()
    save_file(
        {**found, **(tensors or {})},
        path,
        metadata={"format": FORMAT, "version": VERSION, "spec": json.dumps({**json.loads(text), **(spec or {})})},
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"features": ["joint_prob", "entropy", "height"]}, "this build computes"),
        ({"features": ["joint_prob", "entropy"]}, "one entry per feature"),
        ({"shift": [0.0, 0.0, float("inf")]}, "finite"),
        ({"scale": [1.0, 0.0, 1.0]}, "scale not 0"),
        ({"depth_origin": 2}, "depth_origin 0 or 1"),
        ({"top_m": 0}, "top_m >= 1"),
        ({"suggested_beta": 1.5}, r"in \[0, 1\]"),
        ({"colour": "blue"}, "exactly the keys"),
        ({"hidden": 47}, "its spec needs"),
        ({"hidden": 2**40}, "its spec needs"),
        ({"hidden": 10**400}, "its spec needs"),
        ({"hidden": "48"}, "another type: hidden"),
        ({"hidden": 48.0}, "another type: hidden"),
        ({"depth_origin": True}, "another type: depth_origin"),
        ({"top_m": None}, "another type: top_m"),
        ({"top_m": 2**31}, "top_m >= 1"),
        ({"suggested_beta": "0.5"}, "another type: suggested_beta"),
        ({"negatives_per_positive": []}, "another type: negatives_per_positive"),
        ({"pair": []}, "another type: pair"),
        ({"training": "none"}, "another type: training"),
        ({"features": 3}, "another type: features"),
        ({"features": "abc"}, "another type: features"),
        ({"features": [["joint_prob"], "entropy", "depth"]}, "this build computes"),
        ({"shift": [0.0, 0.0, "0"]}, "finite"),
        ({"shift": [0.0, 0.0, 10**400]}, "finite"),
        ({"shift": [0.0, 0.0, 1e300]}, "finite"),
        ({"scale": [1.0, 1e-300, 1.0]}, "scale not 0"),
    ],
)
def test_a_spec_that_does_not_hold_is_refused(saved: Path, spec: dict, message: str):
    rewrite(saved, spec=spec)
    with pytest.raises(ClassifierError, match=message):
        load_classifier(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(saved: Path, value: float):
    weight = load_file(saved)["hidden.weight"]
    weight[3, 1] = value
    rewrite(saved, tensors={"hidden.weight": weight})
    with pytest.raises(ClassifierError, match=r"NaN or infinity in hidden\.weight"):
        load_classifier(saved)


@pytest.mark.parametrize("name", ["hidden.weight", "out.weight", "out.bias"])
def test_finite_weights_that_overflow_are_refused(saved: Path, name: str):
    rewrite(saved, tensors={name: torch.full_like(load_file(saved)[name], 3e38)})
    with pytest.raises(ClassifierError, match="numbers that overflow"):
        load_classifier(saved)


def test_a_declared_size_is_compared_before_there_is_a_network(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """5 KB declared 1.7 GB, which were allocated first."""
    monkeypatch.setattr(classifier_file, "NodeClassifier", lambda spec: pytest.fail(f"{spec.hidden} are allocated"))
    rewrite(saved, spec={"hidden": 10**8})
    with pytest.raises(ClassifierError, match="its spec needs"):
        load_classifier(saved)


def test_a_file_of_a_model_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(classifier_file, "MOST_BYTES", 1_000)
    with pytest.raises(ClassifierError, match="more than 1000 bytes"):
        load_classifier(saved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_another_type_are_refused(saved: Path, dtype: torch.dtype):
    rewrite(saved, tensors={"out.bias": load_file(saved)["out.bias"].to(dtype)})
    with pytest.raises(ClassifierError, match=r"something else than float32 in out\.bias"):
        load_classifier(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "maximum recursion"),
        ("1" * 5_000, "Exceeds the limit"),
        ('{"hidden": 48, "hidden": 48}', "the name 'hidden' comes twice"),
        ("[]", "exactly the keys"),
        ("", "not valid JSON"),
    ],
    ids=["deep", "many digits", "twice", "a list", "empty"],
)
def test_hostile_json_is_one_line(saved: Path, text: str, message: str):
    save_file(load_file(saved), saved, metadata={"format": FORMAT, "version": VERSION, "spec": text})
    with pytest.raises(ClassifierError, match=message) as error:
        load_classifier(saved)
    assert "\n" not in str(error.value)


def test_spec_rejects_repeated_features():
    with pytest.raises(ClassifierError, match="at most once"):
        replace(ClassifierSpec(), features=("entropy", "entropy", "depth"))
