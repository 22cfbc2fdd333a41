"""Training of the head: state on disk, continued after an interrupt, on the texts that have states by then."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.pairs.smollm2.batches import WINDOW, OwnTexts
from benchmarks.pairs.smollm2.head import (
    ARGMAX_WEIGHT,
    LEAD,
    UNROLL,
    UNROLL_DECAY,
    Distillation,
    draft_vocabulary,
    new_head,
)
from benchmarks.pairs.smollm2.own_text import Shards
from benchmarks.pairs.smollm2.states import CAPTURED
from benchmarks.pairs.toy.recipe import Stage
from benchmarks.pairs.toy.stage import StageRun, is_reported
from c2t_plugin.errors import C2TError


def _stage() -> Stage:
    return Stage(steps=2400, batch=8, muon_lr=0.02, embed_lr=0.002, head_lr=0.0015, warmup=40)


@dataclass(frozen=True)
class HeadRecipe:
    """seed: of the head's first weights and the order of the texts. words: size of the draft vocabulary, under
    the name that digests and published notes have for it.
    """

    seed: int = 1
    words: int = 8192
    stage: Stage = field(default_factory=_stage)

    def digest(self) -> str:
        """Short hash of all that the head's training depends on, but the texts and how many steps there are in all.

        Both may grow between runs.
        """
        fixed = {
            "captured": CAPTURED,
            "unroll": UNROLL,
            "decay": UNROLL_DECAY,
            "argmax": ARGMAX_WEIGHT,
            "lead": LEAD,
            "window": WINDOW,
        }
        values = asdict(dataclasses.replace(self, stage=dataclasses.replace(self.stage, steps=1))) | fixed
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def choose_vocabulary(shards: Shards, size: int, path: Path, target: LlamaForCausalLM) -> torch.Tensor:
    """The draft vocabulary: the tokens most frequent in prompts and answers. Chosen once, then read from `path`."""
    if path.is_file():
        return torch.tensor(json.loads(path.read_text(encoding="utf-8")))
    counts = torch.zeros(target.config.vocab_size, dtype=torch.long)
    for text in shards.texts():
        counts += torch.bincount(torch.from_numpy(text.tokens.astype("int64")), minlength=len(counts))
    eos: Any = target.config.eos_token_id
    vocabulary = draft_vocabulary(counts, size, (eos,))
    path.write_text(json.dumps(vocabulary.tolist()) + "\n", encoding="utf-8")
    share = float(counts[vocabulary].sum() / counts.sum())
    print(f"draft vocabulary: {size} tokens, {share:.4f} of all text", flush=True)
    return vocabulary


def train(target_dir: Path, work: Path, recipe: HeadRecipe, stop_after: int | None = None) -> bool:
    """Take the remaining steps with the texts under `work` that have states; whether training is complete.

    State and record lie in work/head-DIGEST, the head's weights in state["module"] there.
    """
    target = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval().requires_grad_(False)
    shards = Shards(work / "text")
    texts = OwnTexts(shards, work / "states")
    vocabulary = choose_vocabulary(shards, recipe.words, vocabulary_path(work, recipe.words), target)
    head = new_head(target, vocabulary, recipe.seed)
    distillation = Distillation(head, target)
    stage, tokens = recipe.stage, sum(row.length for row in texts.rows) * recipe.stage.batch // len(texts.rows)
    run = StageRun("eagle3", stage, head, run_folder(work, recipe), recipe.digest(), tokens, True, stop_after)

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        figures: dict[str, float] = {}
        batch = texts.batch(step, stage.batch, recipe.seed)
        return distillation.loss(batch, figures if is_reported(step, stage) else None), figures

    print(f"{len(texts.rows)} texts with {sum(row.length for row in texts.rows)} tokens", flush=True)
    complete = run.run(loss_of)
    run.record(recipe=asdict(recipe), texts=len(texts.rows))
    return complete


def run_folder(work: Path, recipe: HeadRecipe) -> Path:
    """Directory of the state and the record of a training."""
    return work / f"head-{recipe.digest()}"


def vocabulary_path(work: Path, size: int) -> Path:
    """File with the draft vocabulary of this size."""
    return work / f"words-{size}.json"


def trained_weights(work: Path, recipe: HeadRecipe) -> tuple[dict[str, torch.Tensor], int]:
    """Weights and steps taken of the last saved state; C2TError if there is none.

    They fit any draft vocabulary, since the rows of its tokens are the target's.
    """
    path = run_folder(work, recipe) / "state-eagle3.pt"
    if not path.is_file():
        raise C2TError(f"{path} is missing; run `python -m benchmarks.pairs.smollm2 train --work {work}`")
    state = torch.load(path, map_location="cpu", weights_only=True)
    return state["module"], int(state["progress"]["step"])
