"""Shapes of the pair: the targets and the stand-alone draft are transformers' Llama, the heads are the lab's."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pairs.toy.recipe import HEAD_DIM, STAGES, Recipe
from c2t_plugin.lab.heads import HEADS, Eagle3Head, EagleHead, HeadShape, MtpHead
from c2t_plugin.lab.layers import RMS_EPS

ROPE_THETA = 10000.0


def llama_config(recipe: Recipe, kind: str) -> LlamaConfig:
    """Configuration of a target or of the stand-alone draft."""
    shape = recipe.shape(kind)
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rms_norm_eps=RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=shape.tied,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def seed_weights(recipe: Recipe, kind: str) -> None:
    """Make the weights that are drawn next a function of the recipe's seed and the stage."""
    torch.manual_seed(recipe.seed + STAGES.index(kind))


def new_target(recipe: Recipe, kind: str = "target") -> LlamaForCausalLM:
    """An untrained target or small_target, fp32; its weights depend on the recipe's seed alone."""
    seed_weights(recipe, kind)
    return LlamaForCausalLM(llama_config(recipe, kind))


def new_draft(recipe: Recipe, target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A stand-alone draft, fp32, whose tied embedding starts as the target's LM head in fewer dimensions.

    The dimensions kept are those of the largest singular values, so that the logits' geometry is known from the start.
    """
    seed_weights(recipe, "draft")
    draft = LlamaForCausalLM(llama_config(recipe, "draft"))
    with torch.no_grad():
        head = (target.lm_head.weight * target.model.norm.weight).float()
        directions = torch.linalg.svd(head, full_matrices=False).Vh[: recipe.draft_hidden]
        draft.model.embed_tokens.weight[:, : len(directions)] = head @ directions.T
    return draft


def pair_rates() -> torch.Tensor:
    """Rotary angle per position of each pair of dimensions, (HEAD_DIM / 2,) float32."""
    return ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)


def head_shape(recipe: Recipe, kind: str) -> HeadShape:
    """Of a head of the pair."""
    shape = recipe.shape(kind)
    return HeadShape(
        recipe.hidden,
        recipe.intermediate,
        shape.heads,
        shape.kv_heads,
        recipe.vocab_size,
        pair_rates(),
        recipe.captured,
    )


def new_head(kind: str, recipe: Recipe, target: LlamaForCausalLM) -> EagleHead:
    """An untrained head of kind eagle3, eagle1 or mtp, fp32.

    An EAGLE-3 head starts with the target's LM head and norm, an MTP head, which shares the LM head, with its norm.
    """
    seed_weights(recipe, kind)
    head = HEADS[kind](head_shape(recipe, kind))
    with torch.no_grad():
        if isinstance(head, MtpHead):
            head.final_layernorm.weight.copy_(target.model.norm.weight)
        if isinstance(head, Eagle3Head):
            head.lm_head.weight.copy_(target.lm_head.weight)
            head.norm.weight.copy_(target.model.norm.weight)
    return head
