"""`c2t doctor --gpu`: a server's self-check without a server, in a process of its own.

SGLang's engine is started on a made-up pair, with the attention that SGLang chooses itself or that is named. It checks
itself as a server does (proof/), at every size of packed rows, before it would serve, and nothing is asked of it. What
a kernel does with packed rows hangs on heads, dtype and pages, not on what was learnt: weights are random.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from c2t_plugin.config import OFF, STRICT

# Starting an engine, with its graphs at every depth.
TIMEOUT_S = 900
# Of usual models, but for the number of layers and of words.
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 8192,
}
STEPS, TOPK = 4, 4
_ROOM = {"max_total_tokens": 16384, "max_running_requests": 16}

_WINDOW = re.compile(r"C2T: verification over the uniform window \((.*)\)")
# ours first, which names what is wrong: whatever waits for a scheduler says later that it is gone
_ERRORS = (r"ConfigError: (.*)", r"(\w+(?:Error|Exception): .*)")


def run(mode: str, attention: str | None) -> tuple[bool, str]:
    """Whether what is verified here is right, and what was found: one line. mode: chain or tree. attention: a backend
    of SGLang's; None: its own choice."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps({"folder": folder, "mode": mode, "attention": attention})
        # what the user has set for a server of theirs is no part of this
        env = {name: value for name, value in os.environ.items() if not name.startswith("C2T_")}
        env["C2T_CONFIG"] = json.dumps({"mode": mode, "self_check": STRICT})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "c2t_plugin.engines.sglang.trial", job],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"SGLang took more than {TIMEOUT_S} s to start"
        found = Path(folder, "found.json")
        if not found.exists():
            return False, f"SGLang did not start: {_reason(done.stdout)}"
        return True, told(json.loads(found.read_text()), done.stdout)


def told(configuration: Mapping[str, Any], log: str) -> str:
    """One line of what a server that has started says of itself, whose check would else have been an error."""
    if configuration["packing"] == OFF:
        reason = _WINDOW.search(log)
        return f"the uniform window is verified: {reason[1] if reason else 'the log does not say why'}"
    check = configuration["self_check"]
    text = f"{configuration['packing']} on {check['device']}"
    if configuration["attention"] != "stock":
        text += f", kernel {configuration['attention']}"
    text += f": off by {check['worst']:.2g}, allowed {check['allowed']:.2g}, in {check['proved']} sizes"
    if check["poison"] is not None:
        text += f", with {check['poison']} in all that it may not read"
    windows = check["window_microseconds"]
    shares = [took / windows[rows] for rows, took in check["microseconds"].items()]
    return text + (f"; takes {min(shares):.2f} to {max(shares):.2f} of the windows' time" if shares else "")


def _reason(log: str) -> str:
    for pattern in _ERRORS:
        found = re.search(pattern, log)
        if found is not None:
            return found[1].strip()
    return (log.strip().splitlines() or ["it said nothing"])[-1]


def write_model(folder: Path, dtype: torch.dtype) -> None:
    """A Llama of MODEL's shape, whose random weights leave the size of what they are given about as it is."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner, words = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    queries, keys = (MODEL[f"num_{name}_heads"] * MODEL["head_dim"] for name in ("attention", "key_value"))
    shapes = {"model.embed_tokens": (words, hidden), "lm_head": (words, hidden), "model.norm": (hidden,)}
    for i in range(MODEL["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        scale = 1.0 if name == "model.embed_tokens" else shape[1] ** -0.5
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    folder.mkdir()
    save_file(
        {f"{name}.weight": drawn(name, shape) for name, shape in shapes.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = {
        **MODEL,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))


def main(argv: list[str]) -> None:
    """Start SGLang's engine as `run` says, and write down what it has found about itself."""
    import sglang

    job = json.loads(argv[0])
    target, draft = (Path(job["folder"], name) for name in ("target", "draft"))
    on_gpu = torch.cuda.is_available()
    write_model(target, torch.bfloat16 if on_gpu else torch.float32)
    # by another name: a draft of its own, not one that the target carries
    draft.symlink_to(target)
    named: dict[str, Any] = {} if on_gpu else {"device": "cpu", "dtype": "float32"}
    if job["attention"] is not None:
        named["attention_backend"] = job["attention"]
    if job["mode"] == "tree":
        named["speculative_eagle_topk"] = TOPK
    with sglang.Engine(
        model_path=str(target),
        speculative_algorithm="C2T",
        speculative_draft_model_path=str(draft),
        speculative_num_steps=STEPS,
        skip_tokenizer_init=True,
        **_ROOM,
        **named,
    ) as engine:
        state = engine.get_server_info()["internal_states"][0]["c2t"]
        Path(job["folder"], "found.json").write_text(json.dumps(state["configuration"]))


if __name__ == "__main__":
    main(sys.argv[1:])
