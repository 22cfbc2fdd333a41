"""The target's own answers to chat prompts, written by vLLM in shards, so that an interrupted run goes on.

A shard is an .npz of `tokens` (uint16, all texts behind each other), `lengths` and `prompts` (int32, tokens per text
and of these the prompt's), `numbers` (int32, the prompt's number) and `temperatures` (float32, 0 is greedy).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from c2t_plugin.errors import C2TError

SHARD = 512
# prompts that vLLM is given at once; their last answers run in smaller batches
ROUND = 16384
# of a CPU's memory, for weights and cache: what the answers in flight need, beside other work
MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class Writing:
    """How answers are written. new: tokens at most. temperatures: taken in turn, 0 is greedy. dtype: vLLM computes in.

    in_flight: answers at a time. The default is for training: three of four answers greedy.
    """

    new: int = 144
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.0, 1.0)
    dtype: str = "bfloat16"
    in_flight: int = 192

    def temperature(self, number: int) -> float:
        """Of the answer to the prompt of this number; every kind of prompt gets each, since there are eight kinds."""
        turns = len(self.temperatures)
        return self.temperatures[(number + number // turns) % turns]


@dataclass(frozen=True, eq=False)
class Text:
    """tokens: uint16, prompt and answer. prompt: how many of them are the prompt's. number: of the prompt."""

    tokens: np.ndarray
    prompt: int
    number: int
    temperature: float


@dataclass
class Shards:
    """The shards of one directory. size: texts per shard."""

    folder: Path
    size: int = SHARD
    waiting: list[Text] = field(default_factory=list)

    def paths(self) -> list[Path]:
        """Finished shards in the order of writing."""
        return sorted(path for path in self.folder.glob("*.npz") if re.fullmatch(r"\d{5}\.npz", path.name))

    def done(self) -> set[int]:
        """Numbers of the prompts that have an answer."""
        return {int(number) for path in self.paths() for number in np.load(path)["numbers"]}

    def add(self, text: Text) -> None:
        """Keep a text; a full shard is written."""
        self.waiting.append(text)
        if len(self.waiting) >= self.size:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard, wholly or not at all."""
        if not self.waiting:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{len(self.paths()):05}.npz"
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            np.savez(file, **_columns(self.waiting))
        temporary.replace(path)
        self.waiting = []

    def texts(self) -> Iterator[Text]:
        """All texts of the finished shards."""
        for path in self.paths():
            yield from read_shard(path)


def _columns(texts: Sequence[Text]) -> dict[str, Any]:
    return {
        "tokens": np.concatenate([text.tokens for text in texts]),
        "lengths": np.array([len(text.tokens) for text in texts], np.int32),
        "prompts": np.array([text.prompt for text in texts], np.int32),
        "numbers": np.array([text.number for text in texts], np.int32),
        "temperatures": np.array([text.temperature for text in texts], np.float32),
    }


def read_shard(path: Path) -> Iterator[Text]:
    """The texts of one shard."""
    with np.load(path) as shard:
        ends = shard["lengths"].cumsum()
        tokens = np.split(shard["tokens"], ends[:-1])
        columns = (shard[name].tolist() for name in ("prompts", "numbers", "temperatures"))
        yield from (Text(*row) for row in zip(tokens, *columns, strict=True))


def write_own_text(
    target: Path, prompts: Sequence[Sequence[int]], shards: Shards, writing: Writing | None = None, first: int = 0
) -> None:
    """Let vLLM answer every prompt (token ids) from number `first` on that has no answer yet.

    C2TError if vLLM is not installed.
    """
    writing, done = writing or Writing(), shards.done()
    todo = [number for number in range(first, len(prompts)) if number not in done]
    if not todo:
        return
    engine = start_engine(target, writing)
    for begin in range(0, len(todo), ROUND):
        _answer(engine, prompts, todo[begin : begin + ROUND], shards, writing)
    shards.flush()


def _answer(
    engine: Any, prompts: Sequence[Sequence[int]], numbers: Sequence[int], shards: Shards, writing: Writing
) -> None:
    for number in numbers:
        engine.add_request(str(number), {"prompt_token_ids": list(prompts[number])}, _sampling(writing, number))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                _keep(shards, output, writing)


def start_engine(target: Path, writing: Writing) -> Any:
    """vLLM's engine over the target."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise C2TError("writing own text needs vLLM; install the extra `vllm`") from error
    sizes = {"max_num_seqs": writing.in_flight, "max_model_len": 1024, "gpu_memory_utilization": MEMORY_SHARE}
    return LLM(str(target), dtype=writing.dtype, enable_prefix_caching=False, seed=0, **sizes).llm_engine


def _sampling(writing: Writing, number: int) -> Any:
    from vllm import SamplingParams

    # No seed: vLLM 0.33 rewinds the generator of a seeded answer whose prompt it reads in parts, which a CPU's cannot.
    return SamplingParams(temperature=writing.temperature(number), max_tokens=writing.new, detokenize=False)


def _keep(shards: Shards, output: Any, writing: Writing) -> None:
    number, prompt = int(output.request_id.split("-")[0]), output.prompt_token_ids
    tokens = np.array([*prompt, *output.outputs[0].token_ids], np.uint16)
    shards.add(Text(tokens, len(prompt), number, writing.temperature(number)))
    if not shards.waiting:
        print(f"own text: {len(shards.paths())} shards of {shards.size} answers", flush=True)
