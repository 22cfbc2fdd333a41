"""Every form of the kernels that a step launches outside of CUDA graphs, launched once before there are requests.

Triton compiles a kernel anew for twice as many requests and for a wider window (c2t_kernels rounds both up, so that
there are few). The first batch of such a size would wait for that, in the middle of serving. Kernels within a graph are
compiled when it is captured. Imported on a GPU, when its graphs are captured, and by nothing else.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

from c2t_kernels import clip_trees
from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter
from c2t_plugin.engines.sglang.proof.drafted import words_of

logger = logging.getLogger(__name__)


def every_form(worker: Any) -> None:
    """Launch them for nobody's rows. worker: ours, as it serves. Never raises: what does not run here is compiled, or
    fails, where it is needed, which the log says."""
    try:
        most, drafter = worker.req_to_token_pool.size, worker._draft_worker.drafter
        of_chains = isinstance(drafter, ChainDrafter)
        for width in _widths(worker, of_chains):
            for requests in sorted({*(1 << power for power in range((most - 1).bit_length())), most}):
                kept = _cut(worker, requests, width) if of_chains else _tree(worker, requests, width)
                if worker.c2t.packing is not None:
                    _pack(worker, kept, width)
        _seeds(worker, of_chains)
    except Exception as failure:  # whatever a compiler or a driver raises
        text = "C2T: kernels are not compiled for every size before serving (%s: %s)"
        logger.warning(text, type(failure).__name__, failure)


def _widths(worker: Any, of_chains: bool) -> list[int]:
    """Places of a request, of all depths that drafts have and windows that they get."""
    depths, windows = getattr(worker.adaptive_controller, "depths", ()), worker.c2t.windows
    if of_chains and depths:
        return [depth + 1 for depth in depths if depth]
    return [worker.speculative_num_draft_tokens] if of_chains or windows is None else list(windows.widths)


def _cut(worker: Any, requests: int, width: int) -> Any:
    """As ChainDrafter decides. Returns draft tokens to verify: (requests,) int32."""
    parts, drafter = worker.c2t, worker._draft_worker.drafter
    scorer = parts.scorer
    links = torch.zeros(requests, width, dtype=torch.int64, device=worker.device) if drafter.cuts_links else None
    scorer.drafted(width - 1)
    kept = scorer.end(requests, links) if parts.lagged is None else scorer.end_within(requests, 0, links)[1]
    scorer.forget()
    return kept


def _tree(worker: Any, requests: int, width: int) -> Any:
    """As TreeDrafter builds what is verified, of roots alone. Returns that of `_cut`."""
    from c2t_plugin.engines.sglang.drafters.tree_input import build_verify_input
    from c2t_plugin.engines.sglang.step import step_of

    columns = len(worker.c2t.scorer.layers("cpu"))
    zeros = torch.zeros(requests, columns, dtype=torch.int64, device=worker.device)
    lengths = torch.ones(requests, dtype=torch.int64, device=worker.device)
    drafter = worker._draft_worker.drafter
    if worker.c2t.lagged is None:
        drafter.filled(zeros.bool(), zeros.float(), None)
    else:
        clip_trees(zeros.bool(), zeros.float(), drafter.scorer.max_nodes, 0)
    made = build_verify_input(
        SimpleNamespace(seq_lens=lengths, seq_lens_sum=requests),
        SimpleNamespace(bonus_tokens=lengths),
        (zeros - 1, zeros.bool(), zeros),
        width,
        attn_backend=worker.target_worker.model_runner.attn_backend,
        topk=worker.topk,
        num_steps=worker.speculative_num_steps,
        tree_mask_mode=worker._draft_worker.tree_mask_mode,
        packed=worker.c2t.packing is not None,
    )
    step = step_of(made)
    assert step is not None
    return step.kept


def _pack(worker: Any, kept: Any, width: int) -> None:
    """As PackedVerify does, and back: a row alone, since those of a whole window are in their places."""
    packing, target = worker.c2t.packing, worker.target_worker.model_runner
    requests, axes = len(kept), 3 if target.model_config.model_is_mrope else 0
    words = torch.zeros(requests, width, dtype=torch.int64, device=worker.device)
    _, starts, _ = packing.packed_words(kept, [words] * (3 + axes), requests)
    if requests == 1:
        hidden = None
        if not target.spec_algorithm.is_standalone():
            size = get_draft_input_from_target_hidden_dim(worker._draft_worker.draft_runner)
            hidden = torch.zeros(1, size, dtype=target.dtype, device=worker.device)
        logits = torch.zeros(1, target.model_config.vocab_size, device=worker.device)
        packing.scatter(SimpleNamespace(next_token_logits=logits, hidden_states=hidden), starts[:2], width)


def _seeds(worker: Any, of_chains: bool) -> None:
    slots = torch.zeros(1, dtype=torch.int64, device=worker.device)
    worker.c2t.scorer.write_seed(slots, torch.zeros(1, words_of(worker._draft_worker), device=worker.device))
    if of_chains:
        worker.c2t.scorer.clear_seed(slots)
