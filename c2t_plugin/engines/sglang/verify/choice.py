"""Which attention verifies packed rows (packing.py), or why the window stays uniform (windows.py)."""

from __future__ import annotations

import inspect
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from c2t_plugin.config import AUTO, MASKED, OFF, TREE_ATTENTION, UNIFORM, C2TConfig
from c2t_plugin.engines.sglang import args, ranks
from c2t_plugin.engines.sglang.patches import PACKING, PATCHES
from c2t_plugin.engines.sglang.verify.backends import packing_attention, parts
from c2t_plugin.engines.sglang.verify.packing import PackedVerify
from c2t_plugin.errors import ConfigError

logger = logging.getLogger(__name__)

# Of the argument record: field, and why the window stays uniform where it is set.
_UNIFORM_ONLY: tuple[tuple[str, str], ...] = (
    ("enable_return_aux_hidden_states", "hidden states are returned by place in the uniform window"),
    ("disable_cuda_graph_padding", "rows are padded to the size of a captured graph"),
    ("enable_hisparse", "its buffers are laid out for the uniform window"),
)
# The same of trees alone: of chains SGLang keeps it by the slot of each row, which is packed as the row is.
_OF_TREES: tuple[tuple[str, str], ...] = (
    ("enable_return_routed_experts", "routed experts are kept by slot, and accepted nodes change theirs"),
    ("enable_return_indexer_topk", "the indexer's choice is kept by slot, and accepted nodes change theirs"),
)

# Those that verify latent keys, the first two of trees too, and sliding windows, by each request's own length.
_LATENT = ("fa3", "triton", "trtllm_mla", "cutedsl_mla", "flashinfer", "flashmla")
_SLIDING = ("fa3", "trtllm_mha", "triton")


@dataclass(frozen=True)
class Choice:
    """backend: whose attention packs rows; None: the uniform window. reason: for the log. masked: rows are trees."""

    backend: str | None
    reason: str
    masked: bool = False


def choose(config: C2TConfig, server_args: Any, runner: Any) -> Choice:
    """What `--speculative-c2t-packing` comes to on the target's model runner, whose attention backend exists already.

    Raises ConfigError if a backend is named that cannot be had.
    """
    wanted = config.packing
    if wanted in UNIFORM:
        return Choice(None, "as asked for")
    backend, linear = parts(runner.attn_backend)
    found = packing_attention(backend)
    kind = type(backend).__name__
    masked = config.mode == "tree"
    obstacle: str | None = None
    if found is None or linear is not None:
        from c2t_plugin.engines.sglang.verify import one_length

        obstacle = one_length.reason(backend) if found is None else one_length.linear_obstacle(linear, masked)
    if found is not None and obstacle is None and ranks.apart():
        from c2t_plugin.engines.sglang.verify import one_tier

        obstacle = one_tier.obstacle(wanted, server_args, linear)
    if found is not None and obstacle is None:
        obstacle = _obstacle(server_args, runner, found, masked)
        if masked and obstacle is None and (found not in MASKED or not hasattr(backend, "c2t_packing")):
            obstacle = f"{found} packs chains only: it takes no mask for each request"
    if wanted != "auto" and (obstacle is not None or found != wanted):
        raise ConfigError(
            f"--speculative-c2t-packing {wanted} cannot be had: {obstacle or f'the attention backend is {kind}'}; "
            "use auto, or start with the attention backend of that name"
        )
    if obstacle is not None:
        return Choice(None, obstacle)
    return Choice(found, f"attention backend {kind}", masked)


def verifier(attn_backend: Any) -> Any:
    """The backend of attention that verifies, where prefill and decoding, or linear layers, have others."""
    return parts(attn_backend)[0]


def _obstacle(server_args: Any, runner: Any, backend: str, masked: bool) -> str | None:
    for name, reason in (*_UNIFORM_ONLY, *(_OF_TREES if masked else ())):
        if getattr(server_args, name, False):
            return f"{name}: {reason}"
    if backend == "triton" and getattr(server_args, "enable_deterministic_inference", False):
        return "enable_deterministic_inference takes a Triton kernel for requests of one length"
    if (getattr(server_args, "dcp_size", 1) or 1) > 1:
        return "dcp_size: each rank holds a part of the window"
    if runner.model_config.model_is_mrope and not takes_axes():
        return "this release of SGLang lays positions of three axes out for the uniform window itself"
    latent = _LATENT[:2] if masked else _LATENT
    if runner.use_mla_backend and backend not in latent:
        return f"latent keys are packed on {', '.join(latent)} only{', for trees' if masked else ''}"
    if (runner.sliding_window_size or 0) > 0 and (masked or backend not in _SLIDING):
        return f"sliding windows are packed on {', '.join(_SLIDING)} only, and for chains"
    if runner.attention_chunk_size is not None:
        # in eager passes alone it fills them
        return "chunked attention: SGLang's captured verification ignores it (flashattention_backend.py:1083)"
    from sglang.srt.environ import envs

    # no variable of 0.5.17
    glue = getattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH", None)
    if glue is not None and glue.get():
        return "SGLANG_ENABLE_METADATA_GLUE_GRAPH: a captured graph would read where an earlier step's lengths were"
    if torch.version.hip is not None:
        return "on AMD GPUs SGLang verifies by other kernels, which have not been tried"
    return None


def takes_axes() -> bool:
    """Whether SGLang's forward batch takes positions of three axes from whoever makes it, as 0.5.23's does."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return "spec_mrope_positions" in inspect.signature(ForwardBatch.init_new).parameters


def _check_attention(config: C2TConfig, choice: Choice, runner: Any) -> None:
    """Raises ConfigError if the kernel that is asked for cannot verify by this choice."""
    if config.attention != TREE_ATTENTION:
        return
    if choice.backend != "triton":
        raise ConfigError(
            f"--speculative-c2t-attention {TREE_ATTENTION} is a kernel of packing triton, which this server does not "
            f"verify by: {choice.reason}; leave it out"
        )
    from c2t_plugin.engines.sglang.verify.fitness import refuse_unfit

    refuse_unfit(runner)


def prepare(algorithm: Any, choice: Choice) -> None:
    """Have SGLang capture its target graphs for packed rows. To be called before it captures them."""
    if choice.backend is None:
        return
    algorithm.packing = choice
    # Read by the graph runner in this process; the algorithm's own answer keeps it from every other.
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    PATCHES.apply(PACKING)


def _verify_apart(config: C2TConfig, runner: Any) -> None:
    if config.verify_attention != AUTO:
        from c2t_plugin.engines.sglang.verify import apart

        apart.install(config.verify_attention, runner)


def start(config: C2TConfig, server_args: Any, target_worker: Any) -> PackedVerify | None:
    """Choose, prepare SGLang, and say in the log which it is; None: the uniform window. When `prepare` says."""
    runner = target_worker.model_runner
    _verify_apart(config, runner)
    choice = choose(config, server_args, runner)
    _check_attention(config, choice, runner)
    prepare(runner.spec_algorithm, choice)
    if choice.backend is None:
        logger.info("C2T: verification over the uniform window (%s)", choice.reason)
        if getattr(verifier(runner.attn_backend), "c2t_nodes_alone", False):
            # SGLang's kernels would read the columns of the prefix that our backend's masks lack
            args.override(server_args, "packing", OFF)
            target_worker.init_attention_backends()
            _verify_apart(config, runner)
        return None
    kernel = f", kernel {verifier(runner.attn_backend).c2t_kernel}" if choice.backend == "triton" else ""
    logger.info("C2T: packed verification by %s (%s%s)", choice.backend, choice.reason, kernel)
    kind: type[PackedVerify] = PackedVerify
    if ranks.apart():
        from c2t_plugin.engines.sglang.verify.one_tier import OneTier as kind
    return kind(target_worker, choice.masked, choice.backend)
