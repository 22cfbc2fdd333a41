"""What is decided and refused before a server of tree mode starts."""

from __future__ import annotations

from typing import Any

from c2t_plugin.config import MASKED
from c2t_plugin.engines.contract import check_contract
from c2t_plugin.engines.sglang.args import ATTENTION_OF
from c2t_plugin.engines.sglang.contract import SUPPORTED_TREES, TREE_SYMBOLS
from c2t_plugin.errors import ConfigError
from c2t_plugin.trees.shape import fitting_shape

# Attention that verifies under a mask of the tree; the others take chains only.
_MASKED = tuple(ATTENTION_OF[name] for name in MASKED)
# Of them, those whose draft attention reads branches of several tokens per page.
_PAGED = ("fa3", "flashinfer", "triton")
_BACKENDS = (
    *("attention_backend", "decode_attention_backend", "prefill_attention_backend"),
    "speculative_draft_attention_backend",
)


def resolve(server_args: Any, policy: str) -> None:
    """Write top-k and verified width of tree mode into the record, whose draft steps are known.

    Raises ConfigError for a shape that cannot be grown or verified, ContractError if the engine lacks what trees need.
    """
    check_contract("sglang", TREE_SYMBOLS, SUPPORTED_TREES)
    if getattr(server_args, "kv_canary", None) not in (None, "none"):
        raise ConfigError("--kv-canary watches SGLang's own draft loop, which tree mode replaces; leave it out")
    _check_backends(server_args)
    topk, width = fitting_shape(
        policy,
        server_args.speculative_num_steps,
        server_args.speculative_eagle_topk,
        server_args.speculative_num_draft_tokens,
    )
    server_args.speculative_eagle_topk, server_args.speculative_num_draft_tokens = topk, width


def _check_backends(server_args: Any) -> None:
    page_size = getattr(server_args, "page_size", None) or 1
    for field in _BACKENDS:
        backend = getattr(server_args, field, None)
        if backend is None:
            continue
        flag = "--" + field.replace("_", "-")
        if backend not in _MASKED:
            raise ConfigError(
                f"{flag} is {backend}, which takes no trees: use one of {', '.join(_MASKED)}, or "
                "--speculative-c2t-mode chain"
            )
        if page_size > 1 and backend not in _PAGED:
            raise ConfigError(
                f"--page-size is {page_size}; on {backend} trees need pages of one token: use 1 or leave it out"
            )
