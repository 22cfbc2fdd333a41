"""An MTP head: the shipped target as a MiMo checkpoint, whose head is made of the target's own last layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.sglang.simulate import Target  # noqa: E402
from tests.engines.sglang.verify_counts import save_hand_made_classifier  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.engines.vllm.verify_counts import Steps  # noqa: E402

NEW_TOKENS = 24
STEPS = 4
BETA = 0.3


def write_mimo(target: Path, out: Path) -> Path:
    """A MiMo is a Qwen2 with MTP layers, and a Qwen2 a Llama with biases of the attention, 0 here."""
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).symlink_to((target / name).resolve())
    config = json.loads((target / "config.json").read_text())
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (out / "config.json").write_text(json.dumps({**config, **mimo}))
    weights = {name: value.float() for name, value in load_file(target / "model.safetensors").items()}
    for name in [name for name in weights if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")]:
        weights[name.replace("weight", "bias")] = torch.zeros(weights[name].shape[0])
    last, head = f"model.layers.{config['num_hidden_layers'] - 1}.", "model.mtp_layers.0."
    weights |= {head + name.removeprefix(last): w.clone() for name, w in weights.items() if name.startswith(last)}
    size = config["hidden_size"]
    weights[f"{head}input_proj.weight"] = torch.cat([torch.eye(size), torch.eye(size)], dim=1)
    weights[f"{head}final_layernorm.weight"] = weights["model.norm.weight"].clone()
    for name in ("token_layernorm", "hidden_layernorm"):
        weights[f"{head}{name}.weight"] = torch.ones(size)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_output_is_plain_decodings_and_chains_are_cut(engine: Engine, tmp_path: Path):
    from vllm import SamplingParams

    target = pair_dir() / "target"
    mimo = write_mimo(target, tmp_path / "mimo")
    classifier = save_hand_made_classifier(tmp_path / "hand.safetensors")
    prompts = held_out_prompts(6, seed=4)
    with engine("c2t:mtp", STEPS, target=mimo, c2t_classifier=str(classifier), c2t_beta=BETA) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    steps = [Steps.of_output(output) for output in found]
    plain = Target(target)
    assert [each.output_ids for each in steps] == [tuple(plain.greedy(ids, NEW_TOKENS)) for ids in prompts]
    lengths = {drafted for each in steps for drafted, _ in each.steps}
    assert lengths and min(lengths) < STEPS, f"drafts of {lengths} tokens: beta cuts nothing or everything"
