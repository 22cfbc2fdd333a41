"""Accepted draft tokens per verify step of a static chain, computed without an engine.

A chain is accepted up to its first token that differs from the target's. So the accept length at a state follows from
drafting along the target's text, and one pass over a finished text gives it for all states at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

from c2t_plugin.lab.heads import EagleHead, head_features, hidden_states
from c2t_plugin.lab.own_text import continue_rows
from c2t_plugin.traces.file import novel_tokens

PROMPT_MULTIPLE = 16


@dataclass(frozen=True)
class Visits:
    """Verify steps of one prompt, in order: a root is the last token known before the step.

    accepted: accepted draft tokens of each step, bonus excluded (greedy: a count; temperature 1: its expectation).
    novel: of each root, see traces.novel_tokens.
    """

    accepted: tuple[float, ...]
    novel: tuple[bool, ...]


def accepted_runs(guesses: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Matching draft tokens before the first mismatch, int64 [batch, length].

    guesses: [batch, gamma, length], the token drafted at depth k (0-based) after the root at position r, for position
    r + 1 + k. tokens: [batch, length]. Depths beyond the text do not match.
    """
    return _following_matches(guesses, tokens).cumprod(dim=1).sum(dim=1)


def expected_runs(guesses: torch.Tensor, chances: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Expected accepted draft tokens when the target samples, float [batch, length].

    chances: [batch, gamma, length], the target's probability of each guess after the text up to r + k. A
    deterministic guess x is accepted with probability p(x) in exact speculative sampling. Depth k counts with p of its
    guess where the sampled text agreed with the guesses before it, so the mean over sampled texts is exact.
    """
    matches = _following_matches(guesses, tokens)
    reached = torch.cat([torch.ones_like(matches[:, :1]), matches.cumprod(dim=1)[:, :-1]], dim=1)
    return (reached * chances).sum(dim=1)


def walk(tokens: Sequence[int], runs: Sequence[int], accepted: Sequence[float], first: int, end: int) -> Visits:
    """Take verify steps from root `first` until the root reaches `end`: each moves on by its run and the bonus token.

    runs and accepted: per root position; what moves the root, and what is counted.
    """
    is_novel = novel_tokens(tokens)
    counts, novel, root = [], [], first
    while root < end:
        counts.append(float(accepted[root]))
        novel.append(is_novel[root])
        root += int(runs[root]) + 1
    return Visits(tuple(counts), tuple(novel))


@torch.no_grad()
def draft_guesses(
    draft: LlamaForCausalLM | EagleHead, target: LlamaForCausalLM, tokens: torch.Tensor, gamma: int
) -> torch.Tensor:
    """Most likely draft tokens [batch, gamma, length] as accepted_runs() takes them, drafted along the given text.

    The stand-alone draft does not get the first token, as in SGLang.
    """
    if not isinstance(draft, EagleHead):
        best = draft(input_ids=tokens[:, 1:], use_cache=False).logits.argmax(-1)
        # no guess for a root at the dropped token
        best = torch.cat([torch.full_like(best[:, :1], -1), best], dim=1)
        return torch.stack([_shifted(best, depth) for depth in range(gamma)], dim=1)
    states = hidden_states(target, tokens)
    hiddens = draft.unroll(target.model.embed_tokens.weight, tokens, head_features(draft, states), gamma)
    best = [draft.logits(hidden, target.lm_head.weight).argmax(-1) for hidden in hiddens]
    # base t holds the root t + 1
    return torch.stack([torch.cat([torch.full_like(b[:, :1], -1), b[:, :-1]], dim=1) for b in best], dim=1)


@torch.no_grad()
def guess_chances(target: LlamaForCausalLM, tokens: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
    """The target's probability of each guess, [batch, gamma, length], after the text up to the guess's position."""
    probabilities = target(input_ids=tokens, use_cache=False).logits.float().softmax(-1)
    depths = range(guesses.shape[1])
    chances = [
        probabilities.roll(-k, dims=1).gather(-1, guesses[:, k, :, None].clamp(min=0)).squeeze(-1) for k in depths
    ]
    return torch.stack(chances, dim=1)


@dataclass(frozen=True)
class Texts:
    """Continued prompts of one length. tokens: int64 [batch, prompt + new + gamma + 1]; the tail only ends chains."""

    tokens: torch.Tensor
    prompt: int
    new: int


def continue_prompts(
    target: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new: int, gamma: int, sample: bool, seed: int
) -> list[Texts]:
    """Let the target continue prompts, cut to multiples of PROMPT_MULTIPLE tokens so that equal lengths share a batch.

    new: tokens whose verify steps count. sample: temperature 1 instead of greedy.
    """
    groups: dict[int, list[Sequence[int]]] = {}
    for prompt in prompts:
        length = len(prompt) // PROMPT_MULTIPLE * PROMPT_MULTIPLE
        groups.setdefault(length, []).append(prompt[:length])
    texts = []
    for length, rows in sorted(groups.items()):
        tokens = torch.tensor(rows, device=target.device)
        sampled = torch.full((len(rows),), sample, device=target.device)
        done = continue_rows(target, tokens, new + gamma + 1, sampled, seed + length)
        texts.append(Texts(done, length, new))
    return texts


def visits_of(
    draft: LlamaForCausalLM | EagleHead, target: LlamaForCausalLM, texts: Sequence[Texts], gamma: int, sample: bool
) -> list[Visits]:
    """Verify steps of every text with a static chain of gamma draft tokens; the first root is the first new token."""
    visits = []
    for text in texts:
        guesses = draft_guesses(draft, target, text.tokens, gamma)
        runs = accepted_runs(guesses, text.tokens)
        counted: torch.Tensor = runs
        if sample:
            counted = expected_runs(guesses, guess_chances(target, text.tokens, guesses), text.tokens)
        for tokens, row_runs, row_counted in zip(text.tokens.tolist(), runs.tolist(), counted.tolist(), strict=True):
            visits.append(walk(tokens, row_runs, row_counted, text.prompt, text.prompt + text.new))
    return visits


def mean_accepted(visits: Sequence[Visits], novel_only: bool = False) -> float:
    """Accepted draft tokens per verify step over all prompts, each step with the same weight."""
    counts = [c for v in visits for c, novel in zip(v.accepted, v.novel, strict=True) if novel or not novel_only]
    return float(np.mean(counts)) if counts else float("nan")


def interval(visits: Sequence[Visits], novel_only: bool = False, draws: int = 1000) -> tuple[float, float]:
    """95% bootstrap interval of mean_accepted(), prompts drawn with repetition (one fixed seed)."""
    rng = np.random.default_rng(0)
    kept = [[c for c, novel in zip(v.accepted, v.novel, strict=True) if novel or not novel_only] for v in visits]
    sums, sizes = np.array([sum(k) for k in kept]), np.array([len(k) for k in kept])
    picks = rng.integers(0, len(kept), (draws, len(kept)))
    low, high = np.percentile(sums[picks].sum(1) / np.maximum(1, sizes[picks].sum(1)), [2.5, 97.5])
    return float(low), float(high)


def _shifted(best: torch.Tensor, depth: int) -> torch.Tensor:
    """best at position r + depth, -1 beyond the text."""
    if depth == 0:
        return best
    return torch.cat([best[:, depth:], torch.full_like(best[:, :depth], -1)], dim=1)


def _following_matches(guesses: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 [batch, gamma, length]: whether the guess of depth k at root r is the text's token r + 1 + k."""
    depths = range(guesses.shape[1])
    return torch.stack(
        [(guesses[:, k] == _shifted(tokens, k + 1)) & (guesses[:, k] >= 0) for k in depths], dim=1
    ).long()
