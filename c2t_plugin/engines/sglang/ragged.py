"""Compact verification: the target computes each request's root and kept draft tokens, and nothing behind a cut.

The rows of all requests are packed end to end for the target's forward pass alone. Logits and hidden states are then
put back at their places in the uniform window, so that sampling, grammar, logprobs and the draft model's extend pass
are SGLang's own and see what they always see. Nothing of SGLang's batch is changed, so nothing has to be restored.

A tree packs as a chain does, since its pads stand behind its nodes. Only what its rows see of each other is not plain
from their order: its verify input brings a mask for packed rows (trees/verify_input.py).

SGLang has the parts of this for another algorithm (srt/speculative/ragged_verify.py); the attention backend has to
take requests of different lengths, which `choose` decides.

Longer than most files, as what decides on packing and what packs read the same facts.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from c2t_kernels import pack_ragged, scatter_ragged
from c2t_plugin.config import TREE_ATTENTION, UNIFORM, C2TConfig
from c2t_plugin.engines.sglang.layout import rows_to_compute
from c2t_plugin.errors import ConfigError

logger = logging.getLogger(__name__)

# Where a verify forward has one row per token, whatever its request.
_PER_ROW = ("next_token_logits", "hidden_states")

# Of the argument record: field, and why the window stays uniform where it is set.
_UNIFORM_ONLY: tuple[tuple[str, str], ...] = (
    ("enable_return_routed_experts", "routed experts are returned by place in the uniform window"),
    ("enable_return_indexer_topk", "the indexer's choice is returned by place in the uniform window"),
    ("enable_return_aux_hidden_states", "hidden states are returned by place in the uniform window"),
    ("disable_cuda_graph_padding", "rows are padded to the size of a captured graph"),
    ("enable_hisparse", "its buffers are laid out for the uniform window"),
)

_UNTRIED_FLASHINFER = ", unless --speculative-c2t-ragged flashinfer is tried, which nobody has run yet"


@dataclass(frozen=True)
class Choice:
    """backend: which ragged attention verifies; None: uniform width. reason: for the log. masked: rows are trees."""

    backend: str | None
    reason: str
    masked: bool = False


def choose(config: C2TConfig, server_args: Any, runner: Any) -> Choice:
    """What `--speculative-c2t-ragged` comes to on the target's model runner, whose attention backend exists already.

    Raises ConfigError if a backend is named that cannot be had.
    """
    wanted = config.ragged
    if wanted in UNIFORM:
        return Choice(None, "as asked for")
    found = _ragged_attention(runner.attn_backend)
    kind = type(runner.attn_backend).__name__
    masked = config.mode == "tree"
    if found is None:
        hint = _UNTRIED_FLASHINFER if kind == "FlashInferAttnBackend" else ""
        obstacle: str | None = f"{kind} verifies requests of one length only{hint}"
    elif found == "fa3" and masked:
        obstacle = "fa3 packs chains only: it takes trees of one size, each as a list of pages"
    else:
        obstacle = _obstacle(server_args, runner, found)
    if wanted != "auto" and (obstacle is not None or found != wanted):
        raise ConfigError(
            f"--speculative-c2t-ragged {wanted} cannot be had: {obstacle or f'the attention backend is {kind}'}; "
            "use auto, or start with the attention backend of that name"
        )
    if obstacle is not None:
        return Choice(None, obstacle)
    if found == "fa3" and wanted == "auto":
        # Of the other backends the attention has at least been run in an interpreter.
        return Choice(None, "nobody has run C2T on fa3 yet: --speculative-c2t-ragged fa3 tries it")
    return Choice(found, f"attention backend {kind}", masked)


def _ragged_attention(attn_backend: Any) -> str | None:
    own: str | None = getattr(attn_backend, "c2t_ragged", None)
    if own is None and type(attn_backend).__name__ == "FlashAttentionBackend" and attn_backend.fa_impl_ver == 3:
        return "fa3"
    return own


def _obstacle(server_args: Any, runner: Any, backend: str) -> str | None:
    for name, reason in _UNIFORM_ONLY:
        if getattr(server_args, name, False):
            return f"{name}: {reason}"
    if backend == "triton" and getattr(server_args, "enable_deterministic_inference", False):
        return "enable_deterministic_inference takes a Triton kernel for requests of one length"
    if (getattr(server_args, "dcp_size", 1) or 1) > 1:
        return "dcp_size: each rank holds a part of the window"
    if runner.model_config.model_is_mrope:
        return "positions of three axes are laid out for the uniform window"
    if runner.use_mla_backend or (runner.sliding_window_size or 0) > 0 or runner.attention_chunk_size is not None:
        return "latent, sliding-window and chunked attention have not been tried"
    from sglang.srt.environ import envs

    # no variable of 0.5.17
    glue = getattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH", None)
    if glue is not None and glue.get():
        return "SGLANG_ENABLE_METADATA_GLUE_GRAPH: a captured graph would read where an earlier step's lengths were"
    if torch.version.hip is not None:
        return "on AMD GPUs SGLang verifies by other kernels, which have not been tried"
    return None


def install(config: C2TConfig) -> None:
    """Have SGLang build our backends in place of its own. To be called before it builds attention backends."""
    if config.ragged == "flashinfer":
        _install_flashinfer()
    if config.ragged not in ("auto", "triton"):
        return
    from sglang.srt.layers.attention import attention_registry

    stock = attention_registry.ATTENTION_BACKENDS["triton"]

    def create(runner: Any) -> Any:
        if runner.model_config.is_encoder_decoder:
            # SGLang's own refuses these, with its reason.
            return stock(runner)
        return _triton(config, runner)

    attention_registry.register_attention_backend("triton")(create)


def _install_flashinfer() -> None:
    from sglang.srt.layers.attention import attention_registry

    stock = attention_registry.ATTENTION_BACKENDS["flashinfer"]

    def create(runner: Any) -> Any:
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        from c2t_plugin.engines.sglang.flashinfer_ragged import RaggedFlashInferAttnBackend

        backend = stock(runner)
        # The one for latent keys is another class, which `choose` leaves alone.
        return RaggedFlashInferAttnBackend.of(backend) if type(backend) is FlashInferAttnBackend else backend

    attention_registry.register_attention_backend("flashinfer")(create)


def _triton(config: C2TConfig, runner: Any) -> Any:
    if config.attention == TREE_ATTENTION:
        from c2t_plugin.engines.sglang.triton_tree import TreeTritonAttnBackend

        return TreeTritonAttnBackend(runner, masked=config.mode == "tree")
    from c2t_plugin.engines.sglang.triton_ragged import RaggedTritonAttnBackend

    return RaggedTritonAttnBackend(runner)


def _check_attention(config: C2TConfig, choice: Choice, runner: Any) -> None:
    """Raises ConfigError if the kernel that is asked for cannot verify by this choice."""
    if config.attention != TREE_ATTENTION:
        return
    if choice.backend != "triton":
        raise ConfigError(
            f"--speculative-c2t-attention {TREE_ATTENTION} is a kernel of ragged triton, which this server does not "
            f"verify by: {choice.reason}; leave it out"
        )
    from c2t_plugin.engines.sglang.triton_tree import refuse_unfit

    refuse_unfit(runner)


def prepare(algorithm: Any, choice: Choice) -> None:
    """Have SGLang capture its target graphs for packed rows. To be called before it captures them."""
    if choice.backend is None:
        return
    algorithm.ragged = True
    # Read by the graph runner in this process; the algorithm's own answer keeps it from every other.
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    if not hasattr(DecodeCudaGraphRunner.get_spec_info, "c2t"):
        DecodeCudaGraphRunner.get_spec_info = _with_capture_layout(DecodeCudaGraphRunner.get_spec_info, choice.masked)


def start(config: C2TConfig, server_args: Any, target_worker: Any) -> RaggedVerify | None:
    """Choose, prepare SGLang, and say in the log which it is; None: the uniform window. When `prepare` says."""
    runner = target_worker.model_runner
    choice = choose(config, server_args, runner)
    _check_attention(config, choice, runner)
    prepare(runner.spec_algorithm, choice)
    if choice.backend is None:
        logger.info("C2T: verification over the uniform width (%s)", choice.reason)
        return None
    kernel = f", kernel {config.attention}" if choice.backend == "triton" else ""
    logger.info("C2T: verification of kept tokens only, ragged %s (%s%s)", choice.backend, choice.reason, kernel)
    return RaggedVerify(target_worker, choice.masked, choice.backend)


def _with_capture_layout(original: Callable[..., Any], masked: bool) -> Callable[..., Any]:
    def get_spec_info(self: Any, num_tokens: int) -> Any:
        spec_info = original(self, num_tokens)
        # SGLang sets it for the algorithms that it verifies compactly itself.
        if spec_info is not None and getattr(self, "ragged_verify_mode", False):
            spec_info.ragged_verify_layout = self._capture_ragged_verify_layout(num_tokens)
            if not masked:
                spec_info.custom_mask = None
        return spec_info

    get_spec_info.c2t = True  # type: ignore[attr-defined]
    return get_spec_info


@dataclass
class RaggedVerify:
    """Packs the target's verify forwards of one server process.

    masked: whether the rows of a request are a tree, whose verify input has a mask for packed rows. backend: which
    attention. The verify input's `c2t_rows` says how many rows it takes; None: as many as hold what is kept.
    rows: that the target computed in the last one, padding to the next tier included. ran_graph: whether from a graph.
    """

    target_worker: Any
    masked: bool = False
    backend: str = ""
    rows: int = 0
    ran_graph: bool = False
    _step: tuple[Any, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        forward = self.target_worker.forward_batch_generation

        def forward_batch_generation(batch: Any = None, forward_batch: Any = None, **keyword: Any) -> Any:
            if self._step is None:
                return forward(batch, forward_batch, **keyword)
            batch, kept = self._step
            packed, cu_seqlens = self.pack(batch, kept, forward_batch)
            result = forward(None, packed, **keyword)
            self.ran_graph = result.can_run_cuda_graph
            self.scatter(result.logits_output, cu_seqlens, batch.spec_info.draft_token_num)
            return result

        self.target_worker.forward_batch_generation = forward_batch_generation

    @contextlib.contextmanager
    def verifying(self, batch: Any, kept: Tensor) -> Iterator[None]:
        """Within it the target's forward of this batch computes kept rows only; kept: (bs,) int32."""
        self._step = batch, kept
        try:
            yield
        finally:
            self._step = None

    def pack(self, batch: Any, kept: Tensor, uniform: Any) -> tuple[Any, Tensor]:
        """The forward batch of the packed rows, and where each request's begin: (bs + 1,) int32.

        batch: the scheduler's, prepared for the uniform window and left as it is. uniform: its forward batch.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch
        from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

        window: Any = batch.spec_info
        width = window.draft_token_num
        self.rows = rows = getattr(window, "c2t_rows", None) or self._rows(kept, width)
        sources = [part.view(-1, width) for part in (window.draft_token, window.positions, batch.out_cache_loc)]
        # A row of nobody is token 0 at position 0, written to slot 0, which no request owns.
        (tokens, positions, slots), cu_seqlens = pack_ragged(kept, sources, capacity=rows, pads=(0, 0, 0))

        compact = copy.copy(window)
        compact.draft_token, compact.positions = tokens, positions
        if not self.masked:
            compact.custom_mask = None
        # What SGLang worked out for the uniform window, where this version does so.
        compact.prepared_out_cache_loc = compact.prepared_mrope_positions = compact.kv_loc_plan = None
        compact.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=kept + 1, graph_num_tokens=rows
        )
        packed_batch = copy.copy(batch)
        packed_batch.input_ids, packed_batch.out_cache_loc, packed_batch.spec_info = tokens, slots, compact
        packed = ForwardBatch.init_new(
            packed_batch,
            self.target_worker.model_runner,
            capture_hidden_mode=uniform.capture_hidden_mode,
            return_hidden_states_before_norm=False,
        )
        return packed, cu_seqlens

    def _rows(self, kept: Tensor, width: int) -> int:
        # The one wait of a step: the host chooses the graph. SGLang's preparation ran while the draft was computed.
        needed = int(kept.sum()) + len(kept)
        return rows_to_compute(needed, len(kept) * width, self.sizes())

    def scatter(self, output: Any, cu_seqlens: Tensor, width: int) -> None:
        """Put the packed rows of the target's output back into the uniform window; rows behind a cut are 0.

        Nothing reads those: acceptance ends at the cut, and the draft's extend pass selects the last accepted row.
        """
        for name in _PER_ROW:
            packed = getattr(output, name)
            if packed is not None:
                setattr(output, name, scatter_ragged(packed, cu_seqlens, width, fill=0).flatten(0, 1))

    def sizes(self) -> list[int]:
        """Token counts of the captured graphs, rising."""
        runner = self.target_worker.model_runner.decode_cuda_graph_runner
        return runner.capture_num_tokens if getattr(runner, "ragged_verify_mode", False) else []
