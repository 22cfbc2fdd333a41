"""Verification by an attention of its own, for `--speculative-c2t-verify-attention`.

Prefill, decoding and the draft keep the server's. SGLang's hybrid backend knows two: here its "decode" child verifies,
and its "prefill" child does all else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

from c2t_plugin.engines.sglang import args
from c2t_plugin.engines.sglang.patches import APART, PATCHES
from c2t_plugin.engines.sglang.verify.backends import packing_attention, parts
from c2t_plugin.errors import ConfigError

_FLAG = "--speculative-c2t-verify-attention"


class VerifyApartBackend(HybridAttnBackend):
    """stock: what SGLang made for the target, a hybrid of its own perhaps. verifying: what takes verify passes."""

    def __init__(self, runner: Any, stock: Any, verifying: Any) -> None:
        super().__init__(runner, prefill_backend=stock, decode_backend=verifying)
        self.spec_attn_is_decode, self.spec_attn_is_prefill = True, False
        self.needs_cpu_seq_lens = stock.needs_cpu_seq_lens or verifying.needs_cpu_seq_lens
        for name in ("prefill_attention_backend_str", "decode_attention_backend_str"):
            setattr(self, name, getattr(stock, name, None))

    def _select_backend(self, forward_mode: Any) -> Any:
        return self.decode_backend if forward_mode.is_target_verify() else self.prefill_backend

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        # steps that draft nothing are graphs of the other
        for backend in (self.prefill_backend, self.decode_backend):
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def forward_decode(self, *positional: Any, **keyword: Any) -> Any:
        return self.prefill_backend.forward_decode(*positional, **keyword)


def install(name: str, runner: Any) -> None:
    """Have the target's model runner verify by the attention of that name, as `packing` names it, at each depth and
    width. Before its graphs are captured; nothing changes where it does already.

    Raises ConfigError where it cannot be had.
    """
    runner.attn_backend = _apart(name, runner, runner.attn_backend)
    PATCHES.apply(APART)


def verifying_apart(stock: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's method of a model runner that makes a backend for a further state of the worker."""

    @functools.wraps(stock)
    def get_attention_backend(self: Any, *positional: Any, **keyword: Any) -> Any:
        backend = stock(self, *positional, **keyword)
        if self.is_draft_worker:
            return backend
        return _apart(args.config_of(self.server_args).verify_attention, self, backend)

    return get_attention_backend


def _apart(name: str, runner: Any, stock: Any) -> Any:
    """What has `name` for verification and `stock` for all else; `stock` itself where it verifies so already."""
    verifier, linear = parts(stock)
    if packing_attention(verifier) == name:
        return stock
    if runner.use_mla_backend:
        raise ConfigError(
            f"{_FLAG} {name} cannot be had: with latent keys SGLang's models choose by the server's backends; leave it "
            f"out, and start with --decode-attention-backend {name} --speculative-attention-mode decode"
        )
    if linear is not None:
        raise ConfigError(f"{_FLAG} {name} cannot be had beside layers of linear attention; leave it out")
    try:
        verifying = ATTENTION_BACKENDS[args.ATTENTION_OF[name]](runner)
    except (AssertionError, ImportError, KeyError, ValueError) as reason:
        raise ConfigError(f"{_FLAG} {name} cannot be had: {reason or type(reason).__name__}; leave it out") from reason
    found = VerifyApartBackend(runner, stock, verifying)
    bind = getattr(getattr(runner, "kv_index_translator", None), "bind_and_verify_backends", None)
    if bind is not None:
        # as SGLang 0.5.23 does with each backend of a runner
        bind([found, verifying])
    return found
