"""Stage 2: text that the target writes itself, on which the drafts learn what they will have to predict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.pairs.toy.batches import TextMix
from benchmarks.pairs.toy.recipe import OwnText
from c2t_plugin.lab.own_text import continue_rows


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
