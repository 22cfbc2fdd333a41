"""Text that a target writes itself, many prompts at a time."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def continue_rows(
    target: PreTrainedModel, rows: torch.Tensor, new: int, sampled: torch.Tensor, seed: int
) -> torch.Tensor:
    """Append `new` tokens to rows [batch, prompt]: the most likely one, or a sample at temperature 1 where `sampled`.

    sampled: bool [batch]. Runs in fp32 unless the caller has opened an autocast region. Returns int64
    [batch, prompt + new].
    """
    generator = torch.Generator(rows.device).manual_seed(seed)
    cache = DynamicCache(config=target.config)
    step, pieces = rows, [rows]
    for _ in range(new):
        logits = target(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        step = torch.where(sampled[:, None], drawn, logits.argmax(-1, keepdim=True))
        pieces.append(step)
    return torch.cat(pieces, dim=1)
