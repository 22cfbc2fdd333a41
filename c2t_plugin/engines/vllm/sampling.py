"""What model runner V1 samples by, where its rejection sampler does more than the step needs.

vLLM sends every step of an engine with a draft through that sampler. It copies the logits, a step's without any draft
too. Of greedy drafts it copies them up to three times, and looks for the largest by torch's argmax, where its plain
sampler has an operation of its own. On a CPU at 16 requests that takes a hundredth or two of a step. Both give the same
tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID


def sampling(runner: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner._sample of this runner. logits: (tokens, vocabulary), of each request those of its draft tokens
    and one more."""

    @functools.wraps(stock)
    def _sample(logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        if logits is None or spec_decode_metadata is None:
            return stock(logits, spec_decode_metadata)
        if not spec_decode_metadata.max_spec_len:
            # as a server without a draft does
            return stock(logits, None)
        if logits.is_cpu and not runner.rejection_sampler.synthetic_mode and only_largest(runner.input_batch):
            largest = runner.sampler.greedy_sample(logits.float()).tolist()
            drafts = spec_decode_metadata.draft_token_ids.tolist()
            return SamplerOutput(accepted(largest, drafts, spec_decode_metadata.num_draft_tokens), None)
        return stock(logits, spec_decode_metadata)

    return _sample


def only_largest(batch: Any) -> bool:
    """Whether each token of this InputBatch's requests is the one of the largest logit, and nobody wants to know
    more."""
    asked = batch.sampling_metadata
    processors, thinking = asked.logitsprocs.non_argmax_invariant, asked.thinking_budget_state_holder
    return (
        asked.all_greedy
        and asked.max_num_logprobs is None
        and not asked.logprob_token_ids
        and asked.no_penalties
        and asked.allowed_token_ids_mask is None
        and not asked.bad_words_token_ids
        and all(isinstance(each, MinTokensLogitsProcessor) and not each.min_toks for each in processors)
        and (thinking is None or not thinking.has_tracked_requests())
    )


def accepted(largest: Sequence[int], drafts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """(requests, 1 + longest draft) int32 tokens: each draft as far as the target agrees, and its own token behind.

    largest: the target's tokens, of each request one more than it has draft tokens. drafts: of all requests, one after
    the other. counts: draft tokens of each request.
    """
    width, own, drafted, rows = 1 + max(counts), iter(largest), iter(drafts), []
    for count in counts:
        targets, draft = [next(own) for _ in range(count + 1)], [next(drafted) for _ in range(count)]
        agreed = next((place for place in range(count) if targets[place] != draft[place]), count)
        rows.append(targets[: agreed + 1] + [PLACEHOLDER_TOKEN_ID] * (width - agreed - 1))
    return torch.tensor(rows, dtype=torch.int32)
