"""The arms as data: every flag is filled in, names are known, and a threshold on P is a C2T classifier."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.pairs.toy import pair_dir
from benchmarks.serving.arms import ENGINES, SGLANG, VLLM, Arm, chosen, threshold_beta, write_threshold_classifier
from benchmarks.serving.options import add_arm_options, arm_values, dtype_of, kind_of
from c2t_plugin.classifier import FILE_NAME, NodeStats, load_classifier
from c2t_plugin.errors import C2TError

VALUES = {
    "draft": "D",
    "base": "EAGLE3",
    "method": "eagle3",
    "d_max": 6,
    "width": 7,
    "beta": 0.5,
    "classifier": None,
    "threshold_classifier": "F",
    "threshold": 0.2,
}


@pytest.mark.parametrize("arm", [*SGLANG, *VLLM], ids=lambda arm: arm.name)
def test_every_flag_is_filled_in(arm: Arm):
    assert not [flag for flag in arm.command(VALUES) if "{" in flag]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_classifier_that_is_named_goes_to_the_arms_of_c2t_alone(engine: str):
    named = {
        arm.name
        for arm in ENGINES[engine]
        if "own.safetensors" in arm.command({**VALUES, "classifier": "own.safetensors"})
    }
    assert named == {arm.name for arm in ENGINES[engine] if arm.name.startswith("C2T") and not arm.absent}


def test_a_command_line_of_vllm():
    (arm,) = chosen("vllm", ("vLLM adaptive",))
    spec = dict(zip(*[iter(arm.command(VALUES))] * 2, strict=True))
    assert spec == {
        "--speculative-config.method": "eagle3",
        "--speculative-config.model": "D",
        "--speculative-config.num_speculative_tokens": "6",
        "--speculative-config.enable_adaptive_verification": "true",
    }


def test_vllm_gets_the_pair_in_its_own_layout_and_is_told_the_classifier(tmp_path: Path):
    parser = argparse.ArgumentParser()
    add_arm_options(parser, tmp_path)
    values = arm_values(parser.parse_args([]), "vllm")
    config = json.loads((tmp_path / "pair/eagle3/config.json").read_text(encoding="utf-8"))
    assert values["draft"] == tmp_path / "pair/eagle3" and "eagle_aux_hidden_state_layer_ids" in config
    assert not (tmp_path / "pair/eagle3" / FILE_NAME).exists()
    assert values["classifier"] == pair_dir() / "eagle3" / FILE_NAME
    mine = parser.parse_args(["--draft", "mine", "--target", "big", "--base", "standalone"])
    values = arm_values(mine, "vllm")
    assert (values["target"], values["draft"], values["classifier"]) == (Path("big"), Path("mine"), None)
    assert values["method"] == "draft_model"


def test_an_unknown_arm_is_named():
    with pytest.raises(C2TError, match="got SGLang adaptive"):
        chosen("vllm", ("plain", "SGLang adaptive"))


def test_arms_are_chosen_by_name():
    assert [arm.name for arm in chosen("sglang", ("C2T", "plain"))] == ["plain", "C2T"]
    assert len(chosen("sglang", None)) == len(SGLANG)


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9])
def test_the_threshold_classifier_is_a_threshold_on_p(threshold: float, tmp_path: Path):
    write_threshold_classifier(tmp_path / "p.safetensors", top_m=1000)
    probability = torch.tensor([threshold * 0.99, threshold * 1.01, 1.0])
    others = dict.fromkeys(NodeStats._fields, torch.rand(3))
    stats = NodeStats(**{**others, "joint_log_prob": probability.log()})
    kept = load_classifier(tmp_path / "p.safetensors").confidence(stats) >= threshold_beta(threshold)
    assert kept.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ([], "auto"),
        (["--cpu"], "float32"),
        (["--server-args=--tp 2 --dtype bfloat16"], "bfloat16"),
        (["--cpu", "--server-args=--dtype=half"], "half"),
    ],
)
def test_the_type_of_a_servers_weights(words: list[str], dtype: str, tmp_path: Path):
    parser = argparse.ArgumentParser()
    add_arm_options(parser, tmp_path)
    assert dtype_of(parser.parse_args(words)) == dtype


@pytest.mark.parametrize(
    ("machine", "cpu", "kind"),
    [("x, no GPU", False, "functional"), ("x, 1 x GPU", False, "measured"), ("x, 1 x GPU", True, "functional")],
)
def test_a_row_is_measured_where_a_gpu_ran(machine: str, cpu: bool, kind: str):
    assert kind_of({"machine": machine}, cpu) == kind
