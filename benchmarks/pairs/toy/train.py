"""Tokenizer, targets, own text, drafts; every stage can be continued after an interrupt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from benchmarks.pairs.toy import load
from benchmarks.pairs.toy.batches import TextMix
from benchmarks.pairs.toy.distil import draft_loss, head_loss
from benchmarks.pairs.toy.models import new_draft, new_head, new_target
from benchmarks.pairs.toy.own_text import write_own_text
from benchmarks.pairs.toy.recipe import STAGES, TARGETS, Recipe
from benchmarks.pairs.toy.stage import StageRun
from benchmarks.pairs.toy.tokenizer import encode_files, train_tokenizer
from benchmarks.pairs.toy.train_target import held_out_loss, target_loss
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.corpus import Corpus, cut_prompts, read_corpus, standard_library
from c2t_plugin.lab.heads import EagleHead
from c2t_plugin.lab.pair_files import PROMPTS_FILE
from c2t_plugin.provenance import RunRecord

ALL_STAGES = ("tokenizer", "target", "own_text", *STAGES[1:])
PROMPT_COUNT = 256
PROMPT_TOKENS = (64, 128)


@dataclass(frozen=True)
class Training:
    """One pair in the making. out: the pair directory. work: state between runs. root: the corpus's directory."""

    recipe: Recipe
    out: Path
    work: Path
    root: Path
    device: str = "cpu"
    resume: bool = False

    @classmethod
    def on_standard_library(cls, recipe: Recipe, out: Path, work: Path, device: str, resume: bool) -> Training:
        """Train on the running interpreter's standard library."""
        return cls(recipe, out, work, standard_library(), device, resume)

    def run(self, stages: Sequence[str]) -> None:
        """Run the named stages in their order. C2TError for a stage whose predecessor has not been run."""
        unknown = sorted(set(stages) - set(ALL_STAGES))
        if unknown:
            raise C2TError(f"unknown stages {unknown}; the stages are {list(ALL_STAGES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise C2TError("--device cuda was asked for and no CUDA device is available")
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        _write_json(self.out / "recipe.json", self.recipe.to_json())
        for stage in ALL_STAGES:
            if stage in stages:
                self._run(stage)

    def _run(self, stage: str) -> None:
        if stage == "tokenizer":
            self._tokenizer()
        elif stage == "own_text":
            self._own_text()
        elif stage in TARGETS:
            self._language_model(stage)
        else:
            self._distil(stage)

    def _tokenizer(self) -> None:
        corpus = read_corpus(self.root, self.recipe.held_out_one_in)
        tokenizer = train_tokenizer((source.text for source in corpus.train), self.recipe.vocab_size)
        tokenizer.save(str(self.work / "tokenizer.json"))
        for name, half in (("train", corpus.train), ("held", corpus.held_out)):
            np.save(self.work / f"{name}.npy", encode_files(tokenizer, half))
        prompts = cut_prompts(tokenizer, corpus.held_out, PROMPT_COUNT, *PROMPT_TOKENS, self.recipe.seed)
        _write_json(self.out / PROMPTS_FILE, {"prompts": prompts})
        _write_json(self.out / "held_out_files.json", [source.path for source in corpus.held_out])
        record = self._corpus_record(corpus)
        _write_json(self.work / "record-corpus.json", record)
        print("corpus", record, flush=True)

    def _corpus_record(self, corpus: Corpus) -> dict[str, int | str]:
        return {
            "sha256": corpus.digest(),
            "train_files": len(corpus.train),
            "held_out_files": len(corpus.held_out),
            "train_tokens": len(self._stream("train")),
            "held_out_tokens": len(self._stream("held")),
        }

    def _language_model(self, name: str) -> None:
        recipe = self.recipe
        began = RunRecord.capture(recipe.seed)
        target = new_target(recipe, name)
        nn.Module.to(target, self.device)
        run = self._stage_run(name, target, getattr(recipe, name).batch * recipe.block)
        run.run(target_loss(target, self._stream("train"), recipe, self.device, name))
        self._save(name, target)
        loss = held_out_loss(target.eval(), self._stream("held"), recipe.block, self.device)
        run.record(held_out_loss=round(loss, 4), run=began.to_json())
        print(f"{name} held-out loss {loss:.4f} nats", flush=True)

    def _own_text(self) -> None:
        target = load.load_llama("target", self.recipe, self.out, self.device)
        write_own_text(target, self._stream("train"), self.recipe.own_text, self.recipe.seed, self.work, self.device)

    def _distil(self, name: str) -> None:
        recipe = self.recipe
        stage = getattr(recipe, name)
        began = RunRecord.capture(recipe.seed)
        target = load.load_llama("target", recipe, self.out, self.device)
        own = write_own_text(target, self._stream("train"), recipe.own_text, recipe.seed, self.work, self.device)
        mix = TextMix(self._stream("train"), own, own.shape[1], recipe.seed + STAGES.index(name))
        module = new_draft(recipe, target) if name == "draft" else new_head(name, recipe, target)
        nn.Module.to(module, self.device)
        run = self._stage_run(name, module, stage.batch * own.shape[1])
        if isinstance(module, EagleHead):
            run.run(head_loss(module, target, mix, stage, recipe, self.device))
        else:
            run.run(draft_loss(module, target, mix, recipe, self.device))
        self._save(name, module)
        run.record(run=began.to_json())

    def _stage_run(self, name: str, module: nn.Module, tokens: int) -> StageRun:
        stage = getattr(self.recipe, name)
        return StageRun(name, stage, module, self.work, self.recipe.digest(name), tokens, resume=self.resume)

    def _save(self, name: str, module: nn.Module) -> None:
        tokenizer = Tokenizer.from_file(str(self.work / "tokenizer.json"))
        load.save_checkpoint(name, module, self.recipe, tokenizer, self.out / name)

    def _stream(self, half: str) -> np.ndarray:
        path = self.work / f"{half}.npy"
        if not path.is_file():
            raise C2TError(f"{path} is missing; run the tokenizer stage first")
        return np.load(path)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
