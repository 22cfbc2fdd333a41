"""What each command of `python -m benchmarks.pairs.smollm2` does; options: see __main__.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.pairs.smollm2.batches import OwnTexts
from benchmarks.pairs.smollm2.evaluate import GAMMA, NEW_TOKENS, TAIL, measure, summarise
from benchmarks.pairs.smollm2.head import TurnedHead, head_shape, write_head
from benchmarks.pairs.smollm2.own_text import Shards, Writing, write_own_text
from benchmarks.pairs.smollm2.prompts import Prompt, build_prompts, content_hash, read_split, write_split
from benchmarks.pairs.smollm2.ship import WEIGHTS, pack, read_shipped, unpack, write_shipped
from benchmarks.pairs.smollm2.sources import read_passages
from benchmarks.pairs.smollm2.states import write_states
from benchmarks.pairs.smollm2.target import write_target
from benchmarks.pairs.smollm2.train import HeadRecipe, choose_vocabulary, run_folder, trained_weights, vocabulary_path
from benchmarks.pairs.smollm2.train import train as train_head
from benchmarks.report.evaluations import HEAD_FORMAT
from c2t_plugin.classifier import CALIBRATED_NAME, FILE_NAME
from c2t_plugin.errors import C2TError
from c2t_plugin.output import check_file, write_text
from c2t_plugin.provenance import RunRecord

PROMPTS = Path(__file__).parent / "prompts"
HELD_OUT = {"development": 240, "frozen": 240}
TEMPERATURES = (0.0, 0.7)
# training prompts whose drafts a classifier is fitted on; others than the head's first ones
COLLECTED, COLLECT_SEED = 240, 1
# prompts of the check on a server, two of each kind
CHECKED = 16


def prepare(options: argparse.Namespace) -> dict[str, str]:
    """Target and head as plain checkpoints, the head's classifiers beside it; each is written once."""
    pair = write_pair(options.work, options.weights)
    return {"target": str(pair / "target"), "draft": str(pair / "eagle3")}


def write_pair(work: Path, weights: Path = WEIGHTS) -> Path:
    """Write what is missing of WORK/pair, and return it. weights: directory of the shipped head.

    C2TError, in one line, if the target's package cannot be had.
    """
    write_target(work / "pair" / "target")
    head = work / "pair" / "eagle3"
    if not (head / "config.json").is_file():
        write_head(*read_shipped(weights), load_target(work), head)
    for name in (FILE_NAME, CALIBRATED_NAME):
        shutil.copyfile(WEIGHTS / name, head / name)
    return work / "pair"


def prompts(options: argparse.Namespace) -> dict[str, str]:
    """The shipped prompts of both held-out parts, and their hashes."""
    passages = [passage for passage in read_passages(options.sources) if passage.shippable]
    PROMPTS.mkdir(exist_ok=True)
    return {
        part: write_split(PROMPTS / f"{part}.json", build_prompts(passages, part, count))
        for part, count in HELD_OUT.items()
    }


def lines(options: argparse.Namespace) -> dict[str, str]:
    """Prompts for `c2t collect`, as JSON lines under the chat template: training ones, and the development part."""
    training = build_prompts(read_passages(options.sources), "train", COLLECTED, seed=COLLECT_SEED)
    tokenizer: Any = AutoTokenizer.from_pretrained(write_target(options.work / "pair" / "target"))
    found = {}
    for part, asked in {"train": training, "development": read_split(PROMPTS / "development.json")}.items():
        path = options.work / f"{part}.jsonl"
        texts = [
            tokenizer.apply_chat_template(p["messages"], tokenize=False, add_generation_prompt=True) for p in asked
        ]
        rows = [json.dumps({"text": text, "source": f"{part}:{i}"}) for i, text in enumerate(texts)]
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        found[part] = str(path)
    return found


def text(options: argparse.Namespace) -> None:
    """Answers to training prompts."""
    target = write_target(options.work / "pair" / "target")
    asked = build_prompts(read_passages(options.sources), "train", options.prompts)
    write_own_text(target, encode(target, asked), Shards(options.work / "text"), first=options.first)


def states(options: argparse.Namespace) -> None:
    """States of all texts."""
    write_states(load_target(options.work), Shards(options.work / "text"), options.work / "states")


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Training, from its last state."""
    recipe = recipe_of(options)
    complete = train_head(options.work / "pair" / "target", options.work, recipe, options.stop_after)
    return {"complete": complete, "state": str(run_folder(options.work, recipe))}


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a head, in the 8 bits that it is shipped in, at both temperatures."""
    if options.json is not None:
        check_file(options.json)
    asked = read_split(PROMPTS / f"{options.part}.json")
    target = load_target(options.work)
    head = load_head(shipped_or_trained(options), target)
    figures = {
        str(temperature): summarise(measure(head, target, texts, asked, temperature))
        for temperature in TEMPERATURES
        for texts in [held_out_texts(options.work, options.part, asked, temperature)]
    }
    if options.json is not None:
        of = {"part": options.part, "prompts": content_hash(asked), "chain": GAMMA, "new_tokens": NEW_TOKENS}
        record = {"format": HEAD_FORMAT, **of, "run": RunRecord.capture(seed=0).to_json(), "temperatures": figures}
        write_text(options.json, json.dumps(record, indent=1) + "\n")
    return {f"temperature {temperature}": found for temperature, found in figures.items()}


def check(options: argparse.Namespace) -> dict[str, Any]:
    """The prepared pair on a real server, on the first CHECKED prompts, and what evaluate says of them."""
    from benchmarks.pairs.smollm2.check import check_served

    target, pair = load_target(options.work), options.work / "pair"
    asked = read_split(PROMPTS / f"{options.part}.json")
    head = load_head(read_shipped(options.weights), target)
    texts = held_out_texts(options.work, options.part, asked, 0.0)
    measured = [one for one in measure(head, target, texts, asked, 0) if one.number < CHECKED]
    served = check_served(pair, encode(pair / "target", asked[:CHECKED]), options.work / "check.log")
    return {"evaluated": summarise(measured)["all"], "served": served}


def ship(options: argparse.Namespace) -> dict[str, Any]:
    """The trained head's shipped file."""
    weights, vocabulary, step = trained(options)
    notes = {"steps": step, "recipe": json.dumps(dataclasses.asdict(recipe_of(options)))}
    path = write_shipped(weights, vocabulary, options.weights, notes)
    return {"file": str(path), "bytes": path.stat().st_size}


def trained(options: argparse.Namespace) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    """Weights of the head in training, the draft vocabulary that was asked for, and the steps taken."""
    recipe, shards = recipe_of(options), Shards(options.work / "text")
    size = options.vocabulary or recipe.words
    weights, step = trained_weights(options.work, recipe)
    vocabulary = choose_vocabulary(shards, size, vocabulary_path(options.work, size), load_target(options.work))
    return weights, vocabulary, step


def shipped_or_trained(options: argparse.Namespace) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The shipped head, or the one in training, rounded as it would be shipped."""
    if not options.trained:
        return read_shipped(options.weights)
    weights, vocabulary, step = trained(options)
    print(f"head after {step} steps, {len(vocabulary)} tokens", flush=True)
    return unpack(pack(weights, vocabulary))


def load_head(shipped: tuple[dict[str, torch.Tensor], torch.Tensor], target: LlamaForCausalLM) -> TurnedHead:
    """A head of shipped weights and vocabulary, fp32."""
    weights, vocabulary = shipped
    head = TurnedHead(head_shape(target.config, len(vocabulary)), vocabulary, target.lm_head.weight[vocabulary])
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


def recipe_of(options: argparse.Namespace) -> HeadRecipe:
    """The recipe with the steps that were asked for."""
    recipe = HeadRecipe()
    if options.steps is None:
        return recipe
    return dataclasses.replace(recipe, stage=dataclasses.replace(recipe.stage, steps=options.steps))


def held_out_texts(work: Path, part: str, asked: Sequence[Prompt], temperature: float) -> OwnTexts:
    """The target's answers to held-out prompts with their states, written (fp32) unless they are there."""
    folder = work / f"{part}-{temperature}"
    shards = Shards(folder / "text")
    writing = Writing(new=NEW_TOKENS + TAIL, temperatures=(temperature,), dtype="float32")
    write_own_text(work / "pair" / "target", encode(work / "pair" / "target", asked), shards, writing)
    write_states(load_target(work), shards, folder / "states")
    return OwnTexts(shards, folder / "states", window=1024)


def encode(target: Path, asked: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts under the target's chat template, up to where the answer begins."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    return [
        tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
        for prompt in asked
    ]


def load_target(work: Path) -> LlamaForCausalLM:
    """The prepared target, fp32; C2TError if it has not been prepared."""
    folder = work / "pair" / "target"
    if not (folder / "config.json").is_file():
        raise C2TError(f"{folder} is missing; run `python -m benchmarks.pairs.smollm2 prepare --work {work}`")
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
