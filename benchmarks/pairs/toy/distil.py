"""Stages 3-5: drafts learn the target's distribution on corpus and own text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from benchmarks.pairs.toy.batches import TextMix
from benchmarks.pairs.toy.recipe import Recipe, Stage
from benchmarks.pairs.toy.stage import StepLoss, is_reported
from c2t_plugin.lab.heads import EagleHead, head_features, hidden_states


def teacher_targets(logits: torch.Tensor, argmax_weight: float) -> torch.Tensor:
    """What drafts learn, [..., vocabulary]: softmax(logits) with argmax_weight moved to the most likely token."""
    probabilities = logits.float().softmax(-1)
    best = probabilities.argmax(-1, keepdim=True)
    probabilities.mul_(1.0 - argmax_weight)
    return probabilities.scatter_add_(-1, best, torch.full_like(best, argmax_weight, dtype=torch.float32))


def soft_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) of logits against distributions; KL divergence up to the targets' own entropy."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(0, -2))


def agreement(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Share of positions where draft and target have the same most likely token."""
    return float((logits.argmax(-1) == targets.argmax(-1)).float().mean())


def draft_loss(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, mix: TextMix, recipe: Recipe, device: str
) -> StepLoss:
    """The loss of a step of the stand-alone draft: on the target's own tokens, or as many last tokens of corpus text.

    The tokens before are context, as a prompt is when the pair serves.
    """
    stage, first = recipe.draft, recipe.own_text.prompt - 1

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        rows = mix.batch(step, stage.batch, stage.corpus_share(step)).to(device)
        with torch.autocast(device, torch.bfloat16):
            known = hidden_states(target, rows)[-1][:, first:]
            goal = teacher_targets(target.lm_head(known), recipe.argmax_weight)
            logits = draft.lm_head(draft.model(input_ids=rows, use_cache=False).last_hidden_state[:, first:])
        figures = {"agree": agreement(logits, goal)} if is_reported(step, stage) else {}
        return soft_cross_entropy(logits, goal), figures

    return loss_of


def head_loss(
    head: EagleHead, target: LlamaForCausalLM, mix: TextMix, stage: Stage, recipe: Recipe, device: str
) -> StepLoss:
    """The loss of a step of a head, over recipe.unroll draft steps from the positions that draft_loss() uses."""
    # the base that predicts the target's first own token
    first = recipe.own_text.prompt - 2
    weights = [recipe.unroll_decay**j for j in range(recipe.unroll)]

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        rows = mix.batch(step, stage.batch, stage.corpus_share(step)).to(device)
        total, figures = torch.zeros((), device=device), {}
        with torch.autocast(device, torch.bfloat16):
            states = hidden_states(target, rows)
            # what the target knows at the positions that the bases predict from, first + 1 ...
            known = states[-1][:, first + 1 :]
            goal = teacher_targets(target.lm_head(known), recipe.argmax_weight)
            features = head_features(head, states)
            drafted = head.unroll(target.model.embed_tokens.weight, rows, features, recipe.unroll, first)
            for j, hidden in enumerate(drafted):
                # ... of which step j reaches those from first + 1 + j on
                usable = hidden[:, : known.shape[1] - j]
                logits = head.logits(usable, target.lm_head.weight)
                loss = soft_cross_entropy(logits, goal[:, j:])
                if head.regresses:
                    loss = loss + recipe.feature_weight * F.smooth_l1_loss(usable.float(), known[:, j:].float())
                total = total + weights[j] * loss
                if is_reported(step, stage):
                    figures[f"agree{j + 1}"] = agreement(logits, goal[:, j:])
        return total / sum(weights), figures

    return loss_of
