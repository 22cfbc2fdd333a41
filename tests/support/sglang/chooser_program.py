"""Has SGLang resolve command lines as if on other machines, for test_attention_chosen.py.

Usage: python chooser_program.py FOLDER OUTPUT.json, in the CPU engine's environment. Makes configurations of models in
FOLDER, and writes, by machine, model and command line, which attention SGLang chooses for verification; "unwritten" is
C2T without a top-k of its own. Nothing of a model is read but its configuration, and no GPU is asked for anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.arg_groups import memory_hook  # noqa: E402
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view  # noqa: E402
from sglang.srt.runtime_context import override_platform  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402

from c2t_plugin.engines.sglang import args as c2t_args  # noqa: E402

OTHERS = ("is_hip", "is_npu", "is_xpu", "is_musa", "is_mps", "is_sm110", "is_sm120", "has_amx")
KINDS = ("is_sm90", "is_sm100", "is_sm100_or_sm110", "is_blackwell", "is_hopper_with_cuda_12_3")
GPU: dict[str, Any] = {**dict.fromkeys((*OTHERS, *KINDS), False), "is_cuda": True, "has_flashinfer": True}
MACHINES: dict[str, dict[str, Any]] = {
    "H100": {
        **GPU,
        **dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), True),
        "device_sm": 90,
        "device_capability": (9, 0),
    },
    "B200": {
        **GPU,
        **dict.fromkeys(("is_sm100", "is_sm100_or_sm110", "is_blackwell"), True),
        "device_sm": 100,
        "device_capability": (10, 0),
    },
    "A100": {**GPU, "device_sm": 80, "device_capability": (8, 0)},
}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
MODELS = {
    "llama": {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gpt_oss": {**SHAPE, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4},
    "deepseek": {
        **SHAPE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
    },
}
DRAFT = {**SHAPE, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
C2T = ("--speculative-algorithm", "C2T", "--speculative-num-steps", "4")
TREE = ("--speculative-c2t-mode", "tree")


def verified_by_triton(others: str) -> tuple[str, ...]:
    """What docs/sglang.md says of another backend for verification alone. others: of prefill and draft."""
    return (
        *("--prefill-attention-backend", others, "--decode-attention-backend", "triton"),
        *("--speculative-attention-mode", "decode", "--speculative-draft-attention-backend", others),
    )


# by name: more arguments
LINES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "chains": C2T,
    "trees": (*C2T, *TREE),
    "pages_of_16": (*C2T, "--page-size", "16"),
    "unwritten": C2T,
    "triton_beside_fa3": (*C2T, *verified_by_triton("fa3")),
    "trees_on_triton_beside_fa3": (*C2T, *TREE, *verified_by_triton("fa3")),
    "triton_beside_trtllm_mha": (*C2T, *verified_by_triton("trtllm_mha")),
    "trees_on_triton_beside_trtllm_mha": (*C2T, *TREE, *verified_by_triton("trtllm_mha")),
    "without_the_mode": (*C2T, *verified_by_triton("fa3")[:4]),
}


def chosen(line: str, model: str, folder: Path) -> str:
    """The attention that verifies, or decodes where nothing is verified; beside it those of prefill and draft, where
    they are named; or why there is none."""
    argv = ["--model-path", str(folder / model), "--device", "cuda", "--log-level", "error", *LINES[line]]
    if line != "plain" and model != "deepseek":
        argv += ["--speculative-draft-model-path", str(folder / "draft")]
    try:
        record = prepare_server_args(argv)
        record.resolve_once()
    except (SystemExit, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    view = resolved_view(record)
    prefill, decode = attention_backends_of(view)
    # that of prefill, unless --speculative-attention-mode says otherwise, as in HybridAttnBackend
    verifies = decode if line == "plain" or view.speculative_attention_mode == "decode" else prefill
    others = ("", f", prefill {prefill}, draft {view.speculative_draft_attention_backend}")
    return f"{verifies}{others['--prefill-attention-backend' in argv]}"


def main(folder: Path, output: Path) -> None:
    for name, config in {**MODELS, "draft": DRAFT}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    # MiB
    memory_hook.get_device_memory_capacity = lambda *_: 81559
    found: dict[str, dict[str, dict[str, str]]] = {}
    for machine, facts in MACHINES.items():
        with override_platform(**facts):
            for model in MODELS:
                by_line = found.setdefault(machine, {}).setdefault(model, {})
                for line in LINES:
                    if line == "unwritten":
                        with patch.object(c2t_args, "_choose_topk", lambda *_: None):
                            by_line[line] = chosen(line, model, folder)
                    else:
                        by_line[line] = chosen(line, model, folder)
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
