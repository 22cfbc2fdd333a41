"""Two ranks of one server with requests of their own (DP attention), on the CPU engine over gloo.

The target is the shipped one's weights as a Qwen3 checkpoint, whose attention SGLang gives each rank alone; a Llama's
it does not. Queries and keys are normed there, so it is another model, of which the head foretells less.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.pairs.toy.load import save_weights  # noqa: E402
from c2t_plugin.lab.pair_files import read_weights  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402

D_MAX, NEW_TOKENS = 4, 96
RANKS = ("--tp-size", "2", "--attn-dp-size", "2", "--load-balance-method", "round_robin")


def write_qwen3(pair: Path, out: Path) -> Path:
    tensors = read_weights(pair / "target")
    config = json.loads((pair / "target" / "config.json").read_text(encoding="utf-8"))
    shutil.copytree(pair / "target", out, ignore=shutil.ignore_patterns("*.safetensors"))
    for layer in range(config["num_hidden_layers"]):
        for norm in ("q_norm", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{norm}.weight"] = torch.full((config["head_dim"],), 1.5)
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_weights(tensors, out)
    return out


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The pair, prompts, and what a server without drafts answers."""
    folder = tmp_path_factory.mktemp("dp")
    target = write_qwen3(pair_dir(), folder / "qwen3")
    prompts = held_out_prompts(9, seed=3)
    with CpuServer(target, log=folder / "plain.log") as server:
        plain = answers(server, prompts)
    return SimpleNamespace(folder=folder, target=target, prompts=prompts, plain=plain)


@pytest.fixture(scope="module")
def served(setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Answers of the two ranks: one request alone, so that a rank is idle; then several, which come and end apart."""
    draft = ("--speculative-draft-model-path", str(pair_dir() / "eagle3"), "--speculative-num-steps", str(D_MAX))
    log = setting.folder / "dp.log"
    # which core each rank may take: SGLang asks for that on a machine of one NUMA node
    env = {**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with CpuServer(setting.target, "--speculative-algorithm", "C2T", *draft, *RANKS, log=log, env=env) as server:
        alone = answers(server, setting.prompts[:2], concurrency=1)
        found = [answers(server, setting.prompts, concurrency=5) for _ in range(3)]
        states = server.request("/get_server_info")["internal_states"]
    yield SimpleNamespace(alone=alone, found=found, states=states, log=log.read_text(errors="replace"))


def answers(server: CpuServer, prompts: list[list[int]], concurrency: int = 4) -> list[list[int]]:
    given = vc.answers(server, prompts, concurrency=concurrency, new_tokens=NEW_TOKENS, spread=(0, 9, 31))
    return [answer["output_ids"] for answer in given]


def test_outputs_are_plain_decodings(setting: SimpleNamespace, served: SimpleNamespace):
    assert served.alone == setting.plain[:2]
    assert served.found == [setting.plain] * 3


def test_both_ranks_served_requests_at_several_depths(served: SimpleNamespace):
    counted: list[dict[str, Any]] = [state["c2t"] for state in served.states]
    assert len(counted) == 2 and all(each["steps"] > 50 and len(each["depths"]) > 2 for each in counted)
    assert "DP attention: all ranks draft as deep as the one with the most requests plans" in served.log
    assert "the draft reads every plain step at once: DP attention" in served.log
