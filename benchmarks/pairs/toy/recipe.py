"""What is trained and for how long: frozen, checked, and stored beside the result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.corpus import HELD_OUT_ONE_IN

HEAD_DIM = 64
# In this order: a stage's place shifts its seeds, so that no two stages start alike or draw the same text.
STAGES = ("target", "draft", "eagle3", "eagle1", "mtp", "small_target")
TARGETS = ("target", "small_target")


@dataclass(frozen=True)
class Stage:
    """One optimisation run.

    steps, batch: optimiser steps and sequences per step.
    muon_lr: learning rate of the layers' matrices (Muon).
    embed_lr, head_lr: learning rates of embedding, and of LM head with norms and biases (AdamW).
    warmup: steps of linear warm-up. cooldown: last share of the steps, over which the rate falls linearly to 0.
    corpus_first, corpus_last: share of corpus text in a batch at the first and last step; the rest is own text.
    weight_decay: of the layers' matrices only.
    """

    steps: int
    batch: int
    muon_lr: float
    embed_lr: float
    head_lr: float
    warmup: int = 60
    cooldown: float = 0.45
    corpus_first: float = 1.0
    corpus_last: float = 1.0
    weight_decay: float = 0.02

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "muon_lr", "embed_lr", "head_lr"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("cooldown", "corpus_first", "corpus_last"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.warmup < 0 or self.weight_decay < 0:
            raise ConfigError(f"warmup and weight_decay must not be negative, got {self.warmup}, {self.weight_decay}")

    def rate_factor(self, step: int) -> float:
        """Multiplier of every learning rate at `step` (0-based): warm-up, plateau, cool-down, by steps alone."""
        up = (step + 1) / self.warmup if step < self.warmup else 1.0
        left = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return min(up, left, 1.0)

    def corpus_share(self, step: int) -> float:
        """Share of corpus text in the batch of `step`."""
        return self.corpus_first + (self.corpus_last - self.corpus_first) * step / max(1, self.steps - 1)


@dataclass(frozen=True)
class LlamaShape:
    """hidden, intermediate: widths; heads are HEAD_DIM wide. tied: the LM head is the embedding."""

    hidden: int
    layers: int
    intermediate: int
    kv_heads: int
    tied: bool

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // HEAD_DIM


@dataclass(frozen=True)
class OwnText:
    """Text written by the target: `sequences` rows of prompt + new tokens, made `batch` at a time.

    greedy_share: share of the batches that are continued greedily, by greedy_new tokens only, because longer greedy
    text of a small target is mostly loops; the rest is sampled at temperature 1, `new` tokens after `prompt`.
    """

    sequences: int = 4608
    batch: int = 512
    prompt: int = 96
    new: int = 97
    greedy_new: int = 40
    greedy_share: float = 0.78

    def __post_init__(self) -> None:
        if min(self.sequences, self.batch, self.prompt, self.new) < 1 or not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"own text needs positive sizes and a greedy_share in [0, 1], got {self}")
        if not 1 <= self.greedy_new <= self.new:
            raise ConfigError(f"greedy_new must be in 1..{self.new}, got {self.greedy_new}")


def _target() -> Stage:
    return Stage(steps=1210, batch=16, muon_lr=0.02, embed_lr=0.02, head_lr=0.003)


def _distilled(steps: int, muon_lr: float, embed_lr: float, head_lr: float) -> Stage:
    return Stage(steps, 8, muon_lr, embed_lr, head_lr, corpus_first=0.4, corpus_last=0.1)


def _draft() -> Stage:
    return _distilled(2300, 0.014, 0.004, 0.003)


def _eagle3() -> Stage:
    return _distilled(2300, 0.014, 0.002, 0.0015)


def _eagle1() -> Stage:
    return _distilled(1900, 0.014, 0.002, 0.0015)


def _mtp() -> Stage:
    return _distilled(1900, 0.014, 0.002, 0.0015)


def _small_target() -> Stage:
    return _target()


@dataclass(frozen=True)
class Recipe:
    """Shapes and stages of a pair.

    block: training window of the target in tokens. unroll: draft steps a head is trained over.
    small_hidden, small_layers, small_intermediate: of the second target, which has the first one's tokenizer.
    captured: the EAGLE-3 head reads the hidden states that enter these target layers (0-based).
    argmax_weight: share of the target's most likely token mixed into the distribution that a draft learns, because a
    draft distilled on soft targets alone is less sure than greedy acceptance warrants.
    unroll_decay: weight of draft step j is unroll_decay ** j. feature_weight: smooth-L1 loss between an EAGLE-1
    head's output and the target's hidden state, the regression of the EAGLE paper.
    """

    seed: int = 1
    vocab_size: int = 4096
    block: int = 256
    hidden: int = 256
    layers: int = 5
    intermediate: int = 704
    captured: tuple[int, ...] = (1, 3, 4)
    draft_hidden: int = 192
    draft_layers: int = 2
    draft_intermediate: int = 512
    small_hidden: int = 192
    small_layers: int = 3
    small_intermediate: int = 512
    unroll: int = 4
    unroll_decay: float = 0.8
    argmax_weight: float = 0.2
    feature_weight: float = 0.5
    held_out_one_in: int = HELD_OUT_ONE_IN
    target: Stage = field(default_factory=_target)
    own_text: OwnText = field(default_factory=OwnText)
    draft: Stage = field(default_factory=_draft)
    eagle3: Stage = field(default_factory=_eagle3)
    eagle1: Stage = field(default_factory=_eagle1)
    mtp: Stage = field(default_factory=_mtp)
    small_target: Stage = field(default_factory=_small_target)

    def __post_init__(self) -> None:
        for name in ("hidden", "draft_hidden", "small_hidden"):
            if getattr(self, name) <= 0 or getattr(self, name) % HEAD_DIM:
                raise ConfigError(f"{name} must be a positive multiple of {HEAD_DIM}, got {getattr(self, name)}")
        depths = ("layers", "draft_layers", "small_layers")
        widths = ("intermediate", "draft_intermediate", "small_intermediate")
        for name in ("vocab_size", "block", *depths, *widths, "unroll"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.captured) != 3 or any(not 1 <= layer < self.layers for layer in self.captured):
            raise ConfigError(f"captured must be 3 layers in 1..{self.layers - 1}, got {self.captured}")
        if not 0 <= self.argmax_weight < 1 or self.held_out_one_in < 2:
            raise ConfigError("argmax_weight must be in [0, 1) and held_out_one_in at least 2")

    def shape(self, kind: str) -> LlamaShape:
        """Shape of a model of the pair; a head is one layer of the target's."""
        if kind == "draft":
            return LlamaShape(self.draft_hidden, self.draft_layers, self.draft_intermediate, 1, tied=True)
        if kind == "small_target":
            return LlamaShape(self.small_hidden, self.small_layers, self.small_intermediate, 1, tied=False)
        kv_heads = max(1, self.hidden // HEAD_DIM // 2)
        return LlamaShape(self.hidden, self.layers if kind == "target" else 1, self.intermediate, kv_heads, tied=False)

    def scaled(self, factor: float) -> Recipe:
        """The same recipe with every stage's steps and the own text multiplied by factor (> 0)."""
        if factor <= 0:
            raise ConfigError(f"the scale of the steps must be positive, got {factor}")
        stages = {
            name: dataclasses.replace(stage, steps=max(1, round(stage.steps * factor)))
            for name in STAGES
            if (stage := getattr(self, name))
        }
        own = dataclasses.replace(self.own_text, sequences=max(1, round(self.own_text.sequences * factor)))
        return dataclasses.replace(self, own_text=own, **stages)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, in field order."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """The inverse of to_json(); ConfigError for a key that no recipe has."""
        kinds = {**dict.fromkeys(STAGES, Stage), "own_text": OwnText}
        known = {f.name for f in dataclasses.fields(cls)}
        _refuse_unknown(values, known, "recipe")
        plain = dict(values)
        for name, kind in kinds.items():
            if name in plain:
                _refuse_unknown(plain[name], {f.name for f in dataclasses.fields(kind)}, name)
                plain[name] = kind(**plain[name])
        if "captured" in plain:
            plain["captured"] = tuple(plain["captured"])
        return cls(**plain)

    def digest(self, stage: str) -> str:
        """Short hash of what `stage` depends on: saved state of another recipe must not be continued."""
        needed = (stage,) if stage in TARGETS else ("target", "own_text", stage)
        values = {k: v for k, v in self.to_json().items() if k in needed or k not in (*STAGES, "own_text")}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _refuse_unknown(values: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown keys in {where}: {unknown}; known are {sorted(known)}")


def _gpu() -> Recipe:
    """Larger budgets, same shapes: minutes on one GPU."""
    recipe = Recipe().scaled(8.0)
    return dataclasses.replace(
        recipe,
        target=dataclasses.replace(recipe.target, steps=8000, batch=32),
        own_text=dataclasses.replace(recipe.own_text, batch=2048),
    )


PRESETS = {"cpu": Recipe, "gpu": _gpu}
