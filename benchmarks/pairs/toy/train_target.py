"""The targets: ordinary language models of the corpus."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from benchmarks.pairs.toy.batches import TextMix
from benchmarks.pairs.toy.recipe import STAGES, Recipe
from benchmarks.pairs.toy.stage import StepLoss


def language_loss(target: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy (nats) of rows [batch, length + 1]; bf16 matrix products."""
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = target(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def target_loss(
    target: LlamaForCausalLM, corpus: np.ndarray, recipe: Recipe, device: str, kind: str = "target"
) -> StepLoss:
    """The loss of a step of the training of target or small_target (kind). corpus: int16 [tokens]."""
    mix = TextMix(corpus, None, recipe.block + 1, recipe.seed + STAGES.index(kind))
    batch = getattr(recipe, kind).batch

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        return language_loss(target, mix.batch(step, batch, 1.0).to(device)), {}

    return loss_of


@torch.no_grad()
def held_out_loss(target: LlamaForCausalLM, stream: np.ndarray, block: int, device: str, limit: int = 256) -> float:
    """Mean loss in nats over contiguous windows of a held-out stream (int16 [tokens]), at most `limit` of them."""
    count = min(limit, (len(stream) - 1) // block)
    starts = np.linspace(0, len(stream) - 1 - block, count).astype(int)
    rows = torch.from_numpy(np.stack([stream[start : start + block + 1] for start in starts]).astype(np.int64))
    losses = [language_loss(target, chunk.to(device)) for chunk in rows.split(16)]
    sizes = torch.tensor([len(chunk) for chunk in rows.split(16)], dtype=torch.float32)
    return float((torch.stack(losses).cpu() * sizes).sum() / sizes.sum())
