"""Accepted draft tokens per verify step of a static chain on held-out prompts, by kind of prompt and by depth.

Computed along the target's finished texts, without an engine: see benchmarks/pairs/toy/acceptance.py. The bonus token
is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from benchmarks.pairs.smollm2.batches import Batch, OwnTexts
from benchmarks.pairs.smollm2.head import TurnedHead
from benchmarks.pairs.smollm2.prompts import Prompt
from benchmarks.pairs.toy.acceptance import Visits, accepted_runs, interval, mean_accepted, walk
from c2t_plugin.traces.file import novel_tokens

GAMMA = 4
NEW_TOKENS = 128
# texts go on beyond the counted tokens, so that the last chains end where a running engine's would
TAIL = GAMMA + 1
ROWS = 8


@dataclass(frozen=True)
class Measured:
    """One text. kind, number: of its prompt.

    depths: [verify steps, GAMMA], chance that the chain is accepted to each depth (0 or 1 for greedy text). novel: bool
    of each step's root.
    """

    kind: str
    number: int
    depths: np.ndarray
    novel: tuple[bool, ...]

    @property
    def visits(self) -> Visits:
        return Visits(tuple(self.depths.sum(1).tolist()), self.novel)


@torch.no_grad()
def guesses_of(head: TurnedHead, embedding: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Most likely tokens [rows, GAMMA, length] as accepted_runs() takes them; embedding: the target's, fp32."""
    hiddens = head.unroll(embedding, batch.tokens, batch.features.float(), GAMMA)
    best = [head.vocabulary[F.linear(head.known(hidden), head.rows.float()).argmax(-1)] for hidden in hiddens]
    # base t holds the root t + 1
    return torch.stack([torch.cat([torch.full_like(b[:, :1], -1), b[:, :-1]], dim=1) for b in best], dim=1)


def measure(
    head: TurnedHead, target: LlamaForCausalLM, texts: OwnTexts, prompts: Sequence[Prompt], temperature: float
) -> list[Measured]:
    """Verify steps of every text; texts hold the answers to `prompts`, greedy (0) or sampled at `temperature`."""
    found = []
    for begin in range(0, len(texts.rows), ROWS):
        rows = texts.rows[begin : begin + ROWS]
        batch = texts.read(rows)
        guesses = guesses_of(head, target.model.embed_tokens.weight, batch)
        runs = accepted_runs(guesses, batch.tokens)
        depths = _depths(target, batch, guesses, runs, temperature)
        for i, row in enumerate(rows):
            found.append(_one(prompts[row.number]["kind"], row.number, batch, depths[i], runs[i].tolist(), i))
    return found


def _one(kind: str, number: int, batch: Batch, depths: torch.Tensor, runs: list[int], i: int) -> Measured:
    length, prompt = int(batch.lengths[i]), int(batch.prompts[i])
    tokens = batch.tokens[i, :length].tolist()
    # the text's last token is never a root: nothing follows it
    end = min(prompt + NEW_TOKENS, length - 1)
    roots = [int(root) for root in walk(tokens, runs, range(length), prompt, end).accepted]
    novel = novel_tokens(tokens)
    return Measured(kind, number, depths[:, roots].T.numpy(), tuple(novel[root] for root in roots))


@torch.no_grad()
def _depths(
    target: LlamaForCausalLM, batch: Batch, guesses: torch.Tensor, runs: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[rows, GAMMA, length], see Measured.depths.

    A deterministic guess is accepted with the target's probability of it in exact speculative sampling; it counts
    where the sampled text agreed with the guesses before it, so the mean over sampled texts is exact.
    """
    depth = torch.arange(GAMMA)[:, None]
    if temperature == 0:
        return (runs[:, None] > depth).float()
    chances = torch.empty(guesses.shape)
    for row, known, guess in zip(chances, batch.known.float(), guesses, strict=True):
        probabilities = (target.lm_head(known) / temperature).softmax(-1)
        for k in range(GAMMA):
            row[k] = probabilities.roll(-k, dims=0).gather(-1, guess[k, :, None].clamp(min=0)).squeeze(-1)
    return (runs[:, None] >= depth) * chances


def summarise(measured: Sequence[Measured]) -> dict[str, Any]:
    """Figures over all texts and by kind of prompt. Intervals: 95%, over prompts; depths: chance to be accepted."""
    kinds = sorted({one.kind for one in measured})
    chosen = {kind: [one for one in measured if one.kind == kind] for kind in kinds}
    return {name: _figures(found) for name, found in {"all": list(measured), **chosen}.items()}


def _figures(measured: list[Measured]) -> dict[str, Any]:
    visits = [one.visits for one in measured if len(one.depths)]
    depths = np.concatenate([one.depths for one in measured])
    return {
        "mean": round(mean_accepted(visits), 3),
        "interval": [round(bound, 3) for bound in interval(visits)],
        "novel_states": round(mean_accepted(visits, novel_only=True), 3),
        "depths": [round(float(share), 3) for share in depths.mean(0)],
        "verify_steps": len(depths),
        "texts": len(visits),
    }
