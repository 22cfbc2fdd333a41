"""What `c2t doctor --gpu` makes of an engine that checks itself, without starting one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from c2t_plugin.engines.sglang import trial  # noqa: E402

CHECK = {
    "device": "a GPU",
    "worst": 0.00312,
    "allowed": 0.05,
    "proved": 12,
    "poison": "nan",
    "microseconds": {"8": 300.0, "16": 450.0},
    "window_microseconds": {"8": 400.0, "16": 500.0},
}
PACKED = "fa3 on a GPU: off by 0.0031, allowed 0.05, in 12 sizes"
REFUSED = "self-check on a GPU: 8 rows of 3 requests, graph, depth 4: logits are off by 9, allowed 0.05; start with ..."
LOG = f"""
[2026-01-01] C2T: packed verification by fa3 (attention backend FlashAttentionBackend)
Traceback (most recent call last):
  File "scheduler.py", line 1, in run
c2t_plugin.errors.ConfigError: {REFUSED}
Traceback (most recent call last):
RuntimeError: Rank 0 scheduler died during initialization
"""


@pytest.mark.parametrize(
    ("configuration", "check", "expected"),
    [
        ({}, {}, f"{PACKED}, with nan in all that it may not read; takes 0.75 to 0.90 of the windows' time"),
        ({}, {"poison": None, "microseconds": {}}, PACKED),
        (
            {"packing": "triton", "attention": "tree"},
            {"poison": None, "microseconds": {}},
            "triton on a GPU, kernel tree: off by 0.0031, allowed 0.05, in 12 sizes",
        ),
        ({"packing": "off"}, {}, "the uniform window is verified: fa4 has not been tried (see there)"),
    ],
)
def test_what_is_told(configuration: dict[str, Any], check: dict[str, Any], expected: str):
    found = {"packing": "fa3", "attention": "stock", "self_check": {**CHECK, **check}, **configuration}
    log = "C2T: verification over the uniform window (fa4 has not been tried (see there))\nready"
    assert trial.told(found, log) == expected


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOG, REFUSED),
        ("x\nValueError: no such backend\nRuntimeError: died", "ValueError: no such backend"),
        ("Killed\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_an_engine_that_does_not_start_says_why(log: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=log))
    assert trial.run("chain", None) == (False, f"SGLang did not start: {expected}")


def test_one_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch):
    def hangs(*_: Any, **named: Any) -> Any:
        raise subprocess.TimeoutExpired("", named["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert trial.run("tree", None) == (False, "SGLang took more than 900 s to start")


def test_the_engine_is_told_what_to_try_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    """Options that the user's own servers have in their environment would be tried in its place."""
    monkeypatch.setenv("C2T_SELF_CHECK", "off")
    monkeypatch.setenv("C2T_BETA", "0.5")

    def started(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        job = json.loads(command[-1])
        assert (job["mode"], job["attention"]) == ("tree", "triton")
        assert {name: env[name] for name in env if name.startswith("C2T_")} == {
            "C2T_CONFIG": json.dumps({"mode": "tree", "self_check": "strict"})
        }
        found = {"packing": "triton", "attention": "stock", "self_check": CHECK}
        Path(job["folder"], "found.json").write_text(json.dumps(found))
        return SimpleNamespace(stdout="")

    monkeypatch.setattr(subprocess, "run", started)
    ok, text = trial.run("tree", "triton")
    assert ok and text.startswith("triton on a GPU: off by 0.0031")


def test_the_model_is_one_whose_attention_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All of its weights are there, and a token looks at those before it."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(trial, "MODEL", {**trial.MODEL, **small, "head_dim": 16, "vocab_size": 50})
    trial.write_model(tmp_path / "target", torch.float32)
    model, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits = [model(torch.tensor([[first, 7, 9]])).logits[0, -1] for first in (3, 4)]
    assert (logits[0] - logits[1]).abs().mean() > 0.1 * logits[0].abs().mean()
