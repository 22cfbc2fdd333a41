"""Workloads as named data: which prompts, how long the answers, at which concurrencies, and the paper's arms if any."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from benchmarks.serving import datasets
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.corpora import SOURCES

# of a row, how its answers end
WHOLE, OWN_END = "at max_tokens", "where the model ends them"
DRAWN = "at lengths drawn between half and one and a half of max_tokens"
# how many lengths of answers are drawn
LENGTHS = 64
CONCURRENCIES = (1, 4, 8, 32, 64, 128, 256)
QUALITY_SETS = ("mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dailymail", "natural-questions")
SERVING_SETS = ("gsm8k", "alpaca", "cnn-dailymail")


def lengths_of(tokens: int) -> list[int]:
    """Output tokens of a pass's answers in their order, the same for every arm; about `tokens` in the mean.

    Of one length, answers that begin together end together where nothing is drafted, and only there. The next prompts
    would then be read in one pass of the target by plain decoding, and one by one by every arm that drafts. Requests
    that arrive by themselves are read one by one by all.
    """
    drawn = random.Random(0)
    return [drawn.randint(max(1, tokens // 2), tokens + tokens // 2) for _ in range(LENGTHS)]


@dataclass(frozen=True)
class Scenario:
    """name: in rows. data: data sets, prompts of each; several are mixed in turn. own: prompts of the shipped pair's
    texts instead, by their name in `lab.corpora`. repeat: how often the set of prompts is sent, for batches larger than
    it; servers then keep no prefixes. per_slot: prompts of a pass for each request at once, if that is more than `each`
    and there are so many. few: a batch may be larger than the set. arms: names of arms.py, None for all.
    d_max, beta: of C2T, None for the command's own. whole: every answer has max_tokens tokens, past the end of the text
    too; else it ends where the model ends it, as in the paper."""

    name: str
    max_tokens: int
    concurrencies: tuple[int, ...] = CONCURRENCIES
    temperatures: tuple[float, ...] = (0.0, 1.0)
    data: tuple[str, ...] = ()
    own: str = ""
    each: int = 80
    repeat: int = 1
    per_slot: int = 0
    few: bool = False
    arms: tuple[str, ...] | None = None
    d_max: int | None = None
    beta: float | None = None
    whole: bool = True

    @property
    def prompts(self) -> int:
        """How many requests a pass sends, if no more are needed to fill its batch."""
        return self.each * max(1, len(self.data)) * self.repeat

    @property
    def conditions(self) -> list[tuple[int, float]]:
        """Every concurrency at every temperature, in the order of measurement."""
        return [(load, temperature) for temperature in self.temperatures for load in self.concurrencies]

    def requests(self, concurrency: int) -> int:
        """How many requests a pass at this concurrency sends, if there are so many."""
        return max(self.prompts, self.per_slot * concurrency)


def _table3(name: str, concurrencies: tuple[int, ...], repeat: int = 1) -> Scenario:
    """C2T v2 5.4."""
    arms = ("plain", "static 4", "C2T")
    return Scenario(
        name,
        1024,
        concurrencies,
        (0.0,),
        SERVING_SETS,
        repeat=repeat,
        few=True,
        arms=arms,
        d_max=4,
        whole=False,
    )


def _table2(data: str) -> Scenario:
    """C2T v2 5.1: "+C" is two tokens deeper."""
    arms = ("static 4", "C2T")
    return Scenario(f"c2t-v2-table2-{data}", 1024, (1,), (0.0,), (data,), arms=arms, d_max=6, beta=0.5, whole=False)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _table3("c2t-v2-table3", (64, 128, 256)),
        # 240 requests cannot fill a batch of 256
        _table3("c2t-v2-table3-twice", (256,), repeat=2),
        *map(_table2, QUALITY_SETS),
        *(
            Scenario(name, 512, data=(name,), per_slot=2, whole=each.continues)
            for name, each in datasets.DATA_SETS.items()
        ),
        *(
            Scenario(f"pair-{own}", 40, (1, 4, 8), own=own, each=64)
            for own in ("held-out", "docstrings", "arithmetic", "dialogue")
        ),
    )
}


def prompts_of(
    scenario: Scenario, paths: Mapping[str, Path | datasets.Hub], tokenizer: Path, pair: Path, seed: int = 0
) -> list[list[int]]:
    """Token ids of all requests, data sets taken in turn, questions through the target's chat template if it has one.

    paths: where each data set lies, or its id. tokenizer: the target's directory. C2TError if a path is missing.
    """
    if scenario.own:
        found = [prompt.token_ids for prompt in SOURCES[scenario.own](pair, scenario.each, seed)][: scenario.each]
        return found * scenario.repeat
    missing = [name for name in scenario.data if name not in paths]
    if missing:
        raise C2TError(f"{scenario.name} needs --data {' '.join(f'{name}=PATH' for name in missing)}")
    from transformers import AutoTokenizer

    try:
        words = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise C2TError(f"no tokenizer of a target in {tokenizer}; name the target's directory with --target") from error
    sets: list[Sequence[list[int]]] = []
    for name in scenario.data:
        most = max(map(scenario.requests, scenario.concurrencies)) if scenario.per_slot else scenario.each
        texts = datasets.load(name, paths[name], most, scenario.each)
        chat = words.chat_template is not None and not datasets.DATA_SETS[name].continues
        sets.append([_ids(words, text, chat) for text in texts])
    mixed = [ids for ids in chain.from_iterable(zip_longest(*sets)) if ids is not None]
    return mixed * scenario.repeat


def _ids(words: object, text: str, chat: bool) -> list[int]:
    if not chat:
        return list(words(text).input_ids)  # type: ignore[operator]
    turns = [{"role": "user", "content": text}]
    rendered = words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
    return list(words(rendered, add_special_tokens=False).input_ids)  # type: ignore[operator]
