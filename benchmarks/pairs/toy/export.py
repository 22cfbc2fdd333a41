"""`benchmarks.pairs.toy export`: directories made from a pair's weights, so that they need not be shipped twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.pairs.toy.load import save_weights
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.pair_files import PROMPTS_FILE, read_weights

MTP_PREFIX = "model.mtp_layers.0."


def export(write: Callable[[Path, Path], None], pair: Path, out: Path) -> None:
    """Let write(pair, directory) fill `out`, wholly or not at all; C2TError if out exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise C2TError(f"{out} exists and is not an empty directory; name another")
    unfinished = out.with_name(out.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        write(pair, unfinished)
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_mimo(pair: Path, out: Path) -> None:
    """The target with its MTP head inside, as both engines load MiMo checkpoints.

    No classifier stands beside it: the engines would load it with the target's weights. MiMo is Qwen2 with
    `model.mtp_layers`, and Qwen2 is this Llama with biases on queries, keys and values: here they are 0, so the
    target's logits stay what they are.
    """
    target, head = read_weights(pair / "target"), read_weights(pair / "mtp")
    tensors = target | {MTP_PREFIX + name: tensor for name, tensor in head.items()}
    for name, tensor in list(tensors.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.removesuffix("weight") + "bias"] = tensor.new_zeros(len(tensor))
    config = json.loads((pair / "target" / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["MiMoForCausalLM"],
        # MiMo's own type needs code from a hub; the engines go by the architecture
        "model_type": "qwen2",
        "attention_bias": True,
        "use_sliding_window": False,
        "num_nextn_predict_layers": 1,
    }
    shutil.copytree(pair / "target", out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_weights(tensors, out)


def write_small_pair(pair: Path, out: Path) -> None:
    """A pair directory whose target is the smaller one and whose only draft is the stand-alone one."""
    read_weights(pair / "small_target")
    shutil.copytree(pair / "small_target", out / "target")
    shutil.copytree(pair / "draft", out / "draft", ignore=shutil.ignore_patterns("c2t_classifier*"))
    for name in (PROMPTS_FILE, "held_out_files.json"):
        shutil.copy(pair / name, out)
