"""The arms as data: every flag is filled in, names are known, and a threshold on P is a C2T classifier."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pairs.toy import pair_dir
from benchmarks.serving import arms
from benchmarks.serving.arms import (
    ARMS,
    Arm,
    Speculation,
    Tree,
    arms_of,
    chosen,
)
from benchmarks.serving.closed_forms import ENTROPY_WEIGHT, beta_of, main, write_closed_forms
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.options import Models, add_arm_options, dtype_of, kind_of, models, speculation
from c2t_plugin.classifier import FILE_NAME, NodeStats, load_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.rivals import tempered
from c2t_plugin.traces.file import Traces

ON = Speculation(draft=Path("D"), beta=0.5, threshold_classifier=Path("F"), closed_form=Path("G"), threshold=0.2)
CHAIN = "--speculative-draft-model-path D --speculative-num-steps {} --speculative-eagle-topk 1"
# what SGLang is told of every arm, in words of its own
SGLANG = {
    "plain": "",
    **{
        f"static {n}": f"--speculative-algorithm EAGLE3 {CHAIN.format(n)} --speculative-num-draft-tokens {n + 1}"
        for n in (1, 2, 3, 4, 6, 8)
    },
    "SGLang adaptive": f"--speculative-algorithm EAGLE3 {CHAIN.format(3)} --speculative-num-draft-tokens 4 "
    "--speculative-adaptive",
    "EAGLE-2 tree": "--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-num-steps 6 "
    "--speculative-eagle-topk 10 --speculative-num-draft-tokens 60",
    "threshold on P": f"--speculative-algorithm C2T {CHAIN.format(6)} --speculative-num-draft-tokens 7 "
    "--speculative-c2t-classifier F --speculative-c2t-planner off --speculative-c2t-beta 0.2",
    "closed form": f"--speculative-algorithm C2T {CHAIN.format(6)} --speculative-num-draft-tokens 7 "
    "--speculative-c2t-classifier G --speculative-c2t-planner off --speculative-c2t-beta 0.2",
    "C2T": f"--speculative-algorithm C2T {CHAIN.format(6)} --speculative-num-draft-tokens 7 "
    "--speculative-c2t-planner off --speculative-c2t-beta 0.5",
    "C2T auto": f"--speculative-algorithm C2T {CHAIN.format(6)} --speculative-num-draft-tokens 7 "
    "--speculative-c2t-planner on",
    "C2T as it comes": "--speculative-algorithm C2T --speculative-draft-model-path D",
    "C2T without learning": "--speculative-algorithm C2T --speculative-draft-model-path D --speculative-c2t-learn off",
    "C2T tree": "--speculative-algorithm C2T --speculative-draft-model-path D --speculative-num-steps 6 "
    "--speculative-eagle-topk 4 --speculative-c2t-mode tree --speculative-c2t-beta 0.5",
    "C2T tree auto": "--speculative-algorithm C2T --speculative-draft-model-path D --speculative-num-steps 6 "
    "--speculative-eagle-topk 4 --speculative-c2t-mode tree --speculative-c2t-planner on",
    "C2T tree ahead": "--speculative-algorithm C2T --speculative-draft-model-path D --speculative-num-steps 6 "
    "--speculative-eagle-topk 10 --speculative-num-draft-tokens 60 --speculative-c2t-mode tree "
    "--speculative-c2t-planner on --speculative-c2t-rows lagged",
    "closed form tree": "--speculative-algorithm C2T --speculative-draft-model-path D --speculative-num-steps 6 "
    "--speculative-eagle-topk 4 --speculative-c2t-mode tree --speculative-c2t-beta 0.2 --speculative-c2t-classifier G",
}
RULES = {"threshold on P", "closed form", "closed form tree"}


def flags(engine: str, arm: Arm, on: Speculation = ON) -> list[str]:
    return ENGINES[engine].flags(arm.options(engine, on))


def able(engine: str) -> list[Arm]:
    return [arm for arm in arms_of(engine) if not arm.absent(engine)]


def test_what_sglang_is_told():
    assert {arm.name: " ".join(flags("sglang", arm)) for arm in arms_of("sglang")} == SGLANG


@pytest.mark.parametrize("engine", ENGINES)
def test_a_classifier_that_is_named_goes_to_the_arms_of_c2t_alone(engine: str):
    on = replace(ON, classifier=Path("own.safetensors"))
    named = {arm.name for arm in able(engine) if "own.safetensors" in flags(engine, arm, on)}
    # SGLang finds it beside the draft
    as_it_comes = {"C2T as it comes", "C2T without learning"} if engine == "sglang" else set()
    assert named == {arm.name for arm in able(engine) if arm.name.startswith("C2T")} - as_it_comes
    named |= as_it_comes
    assert {arm.name for arm in able(engine) if arm.c2t} == named | {
        name for name in RULES if not ARMS[name].absent(engine)
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_beta_that_is_not_named_is_the_classifiers_own(engine: str):
    given, left = (flags(engine, ARMS["C2T"], replace(ON, beta=beta)) for beta in (0.5, None))
    at = given.index("0.5")
    assert "beta" in given[at - 1] and given[: at - 1] + given[at + 1 :] == left


def test_a_tree_of_another_size():
    on = replace(ON, tree=Tree(4, 5, 12))
    size = "--speculative-num-steps 4 --speculative-eagle-topk 5 --speculative-num-draft-tokens 12"
    assert all(size in " ".join(flags("sglang", ARMS[name], on)) for name in ("EAGLE-2 tree", "C2T tree"))


def test_a_command_line_of_vllm():
    (arm,) = chosen("vllm", ("vLLM adaptive",))
    spec = dict(zip(*[iter(flags("vllm", arm))] * 2, strict=True))
    assert spec == {
        "--speculative-config.method": "eagle3",
        "--speculative-config.model": "D",
        "--speculative-config.num_speculative_tokens": "6",
        "--speculative-config.enable_adaptive_verification": "true",
    }


@pytest.mark.parametrize(
    ("name", "base", "method", "steps"),
    [
        ("static 4", "standalone", "draft_model", 4),
        ("static 4", "eagle3", "eagle3", 4),
        ("C2T", "eagle3", "c2t:eagle3", 6),
    ],
)
def test_vllms_methods(name: str, base: str, method: str, steps: int):
    found = ARMS[name].options("vllm", replace(ON, base=base))
    assert (found["method"], found["num_speculative_tokens"]) == (method, steps)


def test_every_arm_is_for_an_engine_and_what_an_engine_cannot_has_a_reason():
    for arm in ARMS.values():
        assert set(arm.engines) <= set(ENGINES) and any(not arm.absent(engine) for engine in arm.engines)
        for engine in arm.engines:
            if arm.absent(engine):
                with pytest.raises(C2TError, match="not supported"):
                    arm.options(engine, ON)


def parsed(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arm_options(parser, tmp_path)
    return parser.parse_args(words)


def test_vllm_gets_the_pair_in_its_own_layout_and_is_told_the_classifier(tmp_path: Path):
    found = models(parsed(tmp_path), ENGINES["vllm"])
    config = json.loads((tmp_path / "pair/eagle3/config.json").read_text(encoding="utf-8"))
    assert found.draft == tmp_path / "pair/eagle3" and "eagle_aux_hidden_state_layer_ids" in config
    # the generic one would be of another pair where C2T_PAIR is set
    assert not (tmp_path / "pair/eagle3" / FILE_NAME).exists()
    assert found.classifier == pair_dir() / "eagle3" / FILE_NAME
    mine = parsed(tmp_path, "--draft", "mine", "--target", "big", "--base", "standalone")
    found = models(mine, ENGINES["vllm"])
    assert found == Models(Path("big"), Path("mine"), None)
    assert speculation(mine, found).method == "draft_model"


def test_sglang_finds_the_classifier_beside_the_draft(tmp_path: Path):
    pair = pair_dir()
    assert models(parsed(tmp_path), ENGINES["sglang"]) == Models(pair / "target", pair / "eagle3", None)


def test_an_unknown_base_is_named():
    with pytest.raises(C2TError, match="got 'eagle2'"):
        Speculation(draft=Path("D"), base="eagle2")


def test_an_unknown_arm_is_named():
    with pytest.raises(C2TError, match="got SGLang adaptive"):
        chosen("vllm", ("plain", "SGLang adaptive"))


def test_arms_are_chosen_by_name():
    assert [arm.name for arm in chosen("sglang", ("C2T", "plain"))] == ["plain", "C2T"]
    assert {arm.name for arm in chosen("sglang", None)} == set(SGLANG) - {
        "C2T as it comes",
        "C2T without learning",
        "C2T tree auto",
        "C2T tree ahead",
        "static 8",
    }
    assert [arm.name for arm in chosen("vllm", ("C2T as it comes",))] == ["C2T as it comes"]


def built(source: str) -> int:
    """How many arms a file makes."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sum(getattr(call.func, "id", getattr(call.func, "attr", "")) == "Arm" for call in calls)


def test_arms_are_made_in_the_table_alone():
    """But for a server that somebody else has started, which is given a name."""
    root = Path(arms.__file__).parents[1]
    found = {path.name for path in root.rglob("*.py") if built(path.read_text(encoding="utf-8"))}
    assert found == {"arms.py", "throughput.py"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_without_its_file_is_not_served_as_c2t(engine: str):
    without = replace(ON, threshold_classifier=None, closed_form=None)
    for name in RULES - {arm.name for arm in arms_of(engine) if arm.absent(engine)}:
        with pytest.raises(C2TError, match="needs the file of its rule"):
            ARMS[name].options(engine, without)


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9])
def test_the_threshold_classifier_is_a_threshold_on_p(threshold: float, tmp_path: Path):
    on_p, _ = write_closed_forms(tmp_path)
    probability = torch.tensor([threshold * 0.99, threshold * 1.01, 1.0])
    others = dict.fromkeys(NodeStats._fields, torch.rand(3))
    stats = NodeStats(**{**others, "joint_log_prob": probability.log()})
    kept = load_classifier(on_p).confidence(stats) >= beta_of(threshold)
    assert kept.tolist() == [False, True, True]


def test_the_closed_form_is_the_labs_rule(make_traces: Callable[..., Traces], tmp_path: Path):
    """As an engine reads it: a file with another share of the entropy orders nodes otherwise."""
    chain = make_traces().chain
    _, file = write_closed_forms(tmp_path, top_m=4)
    classifier = load_classifier(file)
    assert classifier(classifier.features_of(chain.stats())).tolist() == pytest.approx(tempered(chain), abs=1e-5)
    score = tempered(chain)
    # where rounding does not decide
    clear = (score - score.median()).abs() > 1e-4
    kept = classifier.confidence(chain.stats()) >= beta_of(float(score.median().exp()))
    assert kept[clear].equal((score > score.median())[clear]) and clear.sum() > 0
    assert main(["--out", str(tmp_path / "same"), "--top-m", "4"]) == 0
    assert main(["--out", str(tmp_path / "other"), "--top-m", "4", "--path-entropy", str(2 * ENTROPY_WEIGHT)]) == 0
    same, other = (load_classifier(tmp_path / name) for name in ("same", "other"))
    assert same.confidence(chain.stats()).equal(classifier.confidence(chain.stats()))
    assert not other.confidence(chain.stats()).equal(classifier.confidence(chain.stats()))


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
    assert dtype_of(parsed(tmp_path, *words)) == dtype


@pytest.mark.parametrize(
    ("machine", "cpu", "kind"),
    [("x, no GPU", False, "functional"), ("x, 1 x GPU", False, "measured"), ("x, 1 x GPU", True, "functional")],
)
def test_a_row_is_measured_where_a_gpu_ran(machine: str, cpu: bool, kind: str):
    assert kind_of({"machine": machine}, cpu) == kind
