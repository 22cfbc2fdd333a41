"""Decoding states to grow trees at: prompts of a pair and the target's own greedy text after them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2t_plugin import json_text
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.causal import check_positions
from c2t_plugin.lab.corpus import HELD_OUT_ONE_IN, cut_prompts, read_corpus, standard_library
from c2t_plugin.lab.own_text import continue_rows
from c2t_plugin.lab.pair_files import load_prompts, load_tokenizer
from c2t_plugin.traces.file import novel_tokens

PROMPT_TOKENS = (64, 128)


class Prompt(NamedTuple):
    """token_ids: the prompt. source: what it was cut from, a file's path; prompts of one source are alike. A
    prompt that was written for itself has a source of its own."""

    token_ids: list[int]
    source: str


@dataclass(frozen=True)
class Texts:
    """Greedy texts of prompts of one length.

    numbers: (texts,) int64 prompt numbers. token_ids: (texts, length) int64: prompt, new tokens, then `layers` more,
    which say what the target accepts below the last root. roots: indices of the new tokens; each is a state's root.
    """

    numbers: Tensor
    token_ids: Tensor
    roots: range

    def continuation(self, layers: int) -> Tensor:
        """(states, layers) int64: the target's tokens after each root, text by text."""
        windows = self.token_ids[:, self.roots[0] + 1 :].unfold(1, layers, 1)[:, : len(self.roots)]
        return windows.flatten(0, 1)

    def running(self, end_ids: Sequence[int]) -> Tensor:
        """(states,) bool: whether the target had not ended its text at or before the root."""
        new = self.token_ids[:, self.roots[0] : self.roots[-1] + 1]
        return (torch.isin(new, torch.tensor(end_ids, dtype=torch.int64)).cumsum(dim=1) == 0).flatten()

    def novel(self) -> Tensor:
        """(states,) bool: whether the last 8 tokens, root included, occur nowhere earlier in prompt and text."""
        rows = torch.tensor([novel_tokens(row) for row in self.token_ids.tolist()])
        return rows[:, self.roots[0] : self.roots[-1] + 1].flatten()


def held_out_paths(pair: Path) -> frozenset[str]:
    """Files of the standard library, by relative path, that no model of the pair was trained on."""
    listing = pair / "held_out_files.json"
    if not listing.is_file():
        raise C2TError(f"{listing} is missing: expected a JSON list of files to keep out of training")
    found = json_text.load(listing)
    if not isinstance(found, list) or not all(isinstance(path, str) for path in found):
        raise C2TError(f"{listing} is no list of files to keep out of training")
    return frozenset(found)


def training_prompts(pair: Path, count: int, seed: int) -> list[Prompt]:
    """At least count distinct prompts of 64-128 tokens from files that the pair's training read, spread over the files.

    The pair's held-out files stay out, so that a classifier can be judged on them.
    """
    held_out = held_out_paths(pair)
    corpus = read_corpus(standard_library(), HELD_OUT_ONE_IN)
    files = [source for source in (*corpus.train, *corpus.held_out) if source.path not in held_out]
    random.Random(seed).shuffle(files)
    # a quarter more than asked for: some repeat each other, and some texts end early
    cut = cut_prompts(load_tokenizer(pair), files, count + count // 4 + 4, *PROMPT_TOKENS, seed)
    return distinct(Prompt(prompt["ids"], prompt["file"]) for prompt in cut)


def held_out_prompts(pair: Path, count: int, seed: int) -> list[Prompt]:
    """All distinct prompts that the pair ships, from its held-out files, in random order; C2TError if below count."""
    prompts = distinct(Prompt(prompt["ids"], prompt["file"]) for prompt in load_prompts(pair))
    if count > len(prompts):
        raise C2TError(f"{count} held-out prompts are needed, the pair has {len(prompts)}; ask for fewer trees")
    random.Random(seed).shuffle(prompts)
    return prompts


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts in order, each once: of equal ones the first."""
    found: dict[tuple[int, ...], Prompt] = {}
    for prompt in prompts:
        found.setdefault(tuple(prompt.token_ids), prompt)
    return list(found.values())


def of_equal_length(prompts: Mapping[int, list[int]], batch: int) -> Iterator[list[int]]:
    """Numbers of prompts to read together: at most `batch`, all of one length, shorter ones first.

    Padding would change nothing but the rounding of sums, and without it there is no such difference to think of.
    """
    by_length: dict[int, list[int]] = {}
    for number, prompt in prompts.items():
        by_length.setdefault(len(prompt), []).append(number)
    for _, numbers in sorted(by_length.items()):
        for start in range(0, len(numbers), batch):
            yield numbers[start : start + batch]


def greedy_text(target: PreTrainedModel, prompts: Mapping[int, list[int]], new: int, layers: int) -> Texts:
    """Continue prompts of one length greedily. prompts: by number. C2TError if the target has too few positions."""
    rows = torch.tensor(list(prompts.values()))
    length = rows.shape[1]
    check_positions(target, length + new + layers)
    greedy = torch.zeros(len(rows), dtype=torch.bool)
    text = continue_rows(target, rows, new + layers, sampled=greedy, seed=0)
    return Texts(torch.tensor(list(prompts)), text, range(length, length + new))


def end_of_text(target: PreTrainedModel) -> list[int]:
    """The tokens that end a text of this target."""
    found: set[int] = set()
    for config in (target.config, target.generation_config):
        end: Any = getattr(config, "eos_token_id", None)
        found.update([] if end is None else end if isinstance(end, list) else [end])
    return sorted(found)
