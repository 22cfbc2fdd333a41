"""What is decided and refused about the shape of trees before a server starts. Imports no engine."""

from __future__ import annotations

from typing import Any

from c2t_plugin.engines.contract import check_contract
from c2t_plugin.engines.sglang.trees.contract import SUPPORTED, SYMBOLS
from c2t_plugin.engines.sglang.trees.policies import EAGLE1_DEPTH, EAGLE1_WIDTH, largest_tree
from c2t_plugin.errors import ConfigError

# Children per node and nodes per layer when --speculative-eagle-topk is not given: SGLang's own choice for most models.
DEFAULT_TOPK = 4
# What one launch of the growth kernel holds: top-k squared children of one request.
MAX_TOPK = 32
# What one launch that lays out trees holds: children of all layers, and nodes of one tree.
MAX_CHILDREN, MAX_NODES = 4096, 1024

# Attention that verifies under a mask of the tree; the others take chains only.
_MASKED = ("fa3", "flashinfer", "triton", "intel_amx")
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
    check_contract("sglang", SYMBOLS, SUPPORTED)
    if getattr(server_args, "kv_canary", None) not in (None, "none"):
        raise ConfigError("--kv-canary watches SGLang's own draft loop, which tree mode replaces; leave it out")
    _check_backends(server_args)
    steps, topk = server_args.speculative_num_steps, server_args.speculative_eagle_topk
    topk = DEFAULT_TOPK if topk is None else topk
    if not 1 <= topk <= MAX_TOPK:
        raise ConfigError(f"--speculative-eagle-topk is {topk}; in tree mode it must be from 1 to {MAX_TOPK}")
    children = topk + (steps - 1) * topk**2
    if children > MAX_CHILDREN:
        raise ConfigError(
            f"--speculative-eagle-topk {topk} and --speculative-num-steps {steps} draft {children} nodes; tree mode "
            f"takes up to {MAX_CHILDREN}: use less of either"
        )
    if policy == "static" and (topk < EAGLE1_WIDTH or steps < EAGLE1_DEPTH):
        raise ConfigError(
            f"policy static is EAGLE-1's tree: it needs --speculative-eagle-topk of at least {EAGLE1_WIDTH} and "
            f"--speculative-num-steps of at least {EAGLE1_DEPTH}, got {topk} and {steps}"
        )
    server_args.speculative_eagle_topk = topk
    largest = min(largest_tree(policy, topk, steps) + 1, MAX_NODES)
    width = server_args.speculative_num_draft_tokens
    # SGLang itself verifies the whole chain at top-k 1, whatever the width.
    smallest = largest if topk == 1 or policy == "static" else 2
    if width is not None and not smallest <= width <= largest:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {width}; with policy {policy}, top-k {topk} and {steps} draft "
            f"steps it must be from {smallest} to {largest}, the root included: choose one of them or leave it out"
        )
    fitting = min(largest, topk * steps + 1) if policy != "static" else largest
    server_args.speculative_num_draft_tokens = fitting if width is None else width


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
