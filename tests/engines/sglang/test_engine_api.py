"""sglang.Engine in a program of one's own: C2T's options come from the environment, errors go to the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine import cpu_engine_env  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.sglang.verify_counts import DRAFTS, save_hand_made_classifier  # noqa: E402

NEW_TOKENS = 24
D_MAX = 4

# First with an impossible beta, which the caller may catch; then, in the same process, as it should be.
PROGRAM = """
import json
import os
import sys

import sglang

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    os.environ["C2T_BETA"] = "1.5"
    try:
        sglang.Engine(**job["engine"])
    except ValueError as error:
        refusal = [type(error).__name__, str(error)]
    del os.environ["C2T_BETA"]
    with sglang.Engine(**job["engine"]) as engine:
        answers = engine.generate(input_ids=job["prompts"], sampling_params=job["sampling_params"])
        state = engine.get_server_info()["internal_states"][0]["c2t"]
    with open(sys.argv[2], "w") as output:
        json.dump({"refusal": refusal, "answers": answers, "state": state}, output)
"""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return held_out_prompts(4, seed=9)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> dict[str, Any]:
    """What the program wrote down."""
    folder = tmp_path_factory.mktemp("engine")
    program, output = folder / "program.py", folder / "output.json"
    program.write_text(PROGRAM)
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    job = {
        "engine": {
            "model_path": str(pair_dir() / "target"),
            "speculative_algorithm": "C2T",
            "speculative_draft_model_path": str(pair_dir() / DRAFTS["eagle3"]),
            "speculative_num_steps": D_MAX,
            "device": "cpu",
            "dtype": "float32",
            "max_total_tokens": 4000,
            "max_running_requests": 8,
            "sleep_on_idle": True,
        },
        "prompts": prompts,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    env = {name: value for name, value in cpu_engine_env(os.environ).items() if name not in ("C2T_BETA", "C2T_BASE")}
    # the file is named by JSON and, with precedence over it, by its own variable
    env |= {"C2T_CONFIG": json.dumps({"beta": 0.45, "classifier": "/nowhere"}), "C2T_CLASSIFIER": str(classifier)}
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, program, json.dumps(job), output]
        subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=900, check=False)
    assert output.exists(), (folder / "log.txt").read_text(errors="replace")[-5000:]
    return json.loads(output.read_text())


def test_an_impossible_beta_is_the_callers_error(told: dict[str, Any]):
    name, message = told["refusal"]
    assert name == "ConfigError"
    assert "beta must be a number in [0, 1], got 1.5" in message


def test_options_come_from_the_environment(told: dict[str, Any]):
    assert told["state"]["beta"] == pytest.approx(0.45)
    assert told["state"]["d_max"] == D_MAX


def test_chains_are_cut(told: dict[str, Any]):
    lengths = {
        length - 1
        for answer in told["answers"]
        for length, steps in enumerate(answer["meta_info"]["spec_cap_lens_histogram"])
        if steps
    }
    assert len(lengths) >= 3
    assert max(lengths) <= D_MAX


def test_output_is_plain_decodings(told: dict[str, Any], prompts: list[list[int]]):
    target = Target(pair_dir() / "target")
    expected = [target.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    assert [answer["output_ids"] for answer in told["answers"]] == expected
