"""What is decided and refused about the shape of trees before a server starts. Imports no engine."""

from __future__ import annotations

from typing import Any

from c2t_plugin.engines.contract import check_contract
from c2t_plugin.engines.sglang.trees.contract import SUPPORTED, SYMBOLS
from c2t_plugin.errors import ConfigError

# Children per node and nodes per layer when --speculative-eagle-topk is not given: SGLang's own choice for most models.
DEFAULT_TOPK = 4
# What one launch of the growth kernel holds: top-k squared children of one request.
MAX_TOPK = 32

# Attention that verifies under a mask of the tree; the others take chains only.
_MASKED = ("fa3", "flashinfer", "triton", "intel_amx")
# Of them, those whose draft attention reads branches of several tokens per page.
_PAGED = ("fa3", "flashinfer", "triton")
_BACKENDS = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")


def resolve(server_args: Any) -> None:
    """Write top-k and verified width of tree mode into the record, whose draft steps are known.

    Raises ConfigError for a shape that cannot be grown or verified, ContractError if the engine lacks what trees need.
    """
    check_contract("sglang", SYMBOLS, SUPPORTED)
    _check_backends(server_args)
    steps, topk = server_args.speculative_num_steps, server_args.speculative_eagle_topk
    topk = DEFAULT_TOPK if topk is None else topk
    if not 1 <= topk <= MAX_TOPK:
        raise ConfigError(f"--speculative-eagle-topk is {topk}; in tree mode it must be from 1 to {MAX_TOPK}")
    server_args.speculative_eagle_topk = topk
    largest, width = topk * steps + 1, server_args.speculative_num_draft_tokens
    # SGLang itself verifies the whole chain at top-k 1, whatever the width.
    smallest = 2 if topk > 1 else largest
    if width is not None and not smallest <= width <= largest:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {width}; for top-k {topk} and {steps} draft steps it must be from "
            f"{smallest} to {largest}, the root included: choose one of them or leave it out"
        )
    server_args.speculative_num_draft_tokens = largest if width is None else width


def _check_backends(server_args: Any) -> None:
    page_size = getattr(server_args, "page_size", None) or 1
    for field in _BACKENDS:
        backend = getattr(server_args, field, None)
        if backend is None:
            continue
        flag = "--" + field.replace("_", "-")
        if backend not in _MASKED:
            raise ConfigError(
                f"{flag} is {backend}, which verifies no trees: use one of {', '.join(_MASKED)}, or "
                "--speculative-c2t-mode chain"
            )
        if page_size > 1 and backend not in _PAGED:
            raise ConfigError(
                f"--page-size is {page_size}; on {backend} trees need pages of one token: use 1 or leave it out"
            )
