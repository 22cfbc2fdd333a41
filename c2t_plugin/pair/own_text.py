"""Stage 2: text that the target writes itself, on which the drafts learn what they will have to predict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, LlamaForCausalLM

from c2t_plugin.pair.batches import TextMix
from c2t_plugin.pair.recipe import OwnText


@torch.no_grad()
def continue_rows(
    target: LlamaForCausalLM, rows: torch.Tensor, new: int, sampled: torch.Tensor, seed: int
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


def write_own_text(
    target: LlamaForCausalLM, corpus: np.ndarray, settings: OwnText, seed: int, work: Path, device: str
) -> np.ndarray:
    """All own text, int16 [sequences, prompt + new]; finished batches in `work` are not written again."""
    parts = []
    batches = -(-settings.sequences // settings.batch)
    for number in range(batches):
        size = min(settings.batch, settings.sequences - number * settings.batch)
        path = work / f"own-text-{number:03}.npy"
        if not path.is_file():
            greedy = number < round(settings.greedy_share * batches)
            new = settings.greedy_new if greedy else settings.new
            prompts = TextMix(corpus, None, settings.prompt + settings.new - new, seed)
            rows = prompts.batch(number, size, 1.0).to(device)
            sampled = torch.full((size,), not greedy, device=device)
            with torch.autocast(device, torch.bfloat16):
                text = continue_rows(target, rows, new, sampled, seed + number)
            temporary = path.with_suffix(".part")
            with temporary.open("wb") as file:
                np.save(file, text.cpu().numpy().astype(np.int16))
            temporary.replace(path)
            print(f"own text {number + 1}/{batches} batches, {'greedy' if greedy else 'sampled'}", flush=True)
        parts.append(np.load(path))
    return np.concatenate(parts)
