"""The real pair as benchmarks serve it: checkpoints, chat prompts of a held-out part, and servers with room."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pairs.smollm2.commands import PROMPTS, encode
from benchmarks.pairs.smollm2.prompts import content_hash, read_split
from benchmarks.serving.arms import Speculation
from benchmarks.serving.closed_forms import beta_of, write_closed_forms
from benchmarks.serving.engines import Device, Engine
from benchmarks.serving.server import Runner
from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.errors import C2TError

WORK = Path("build/smollm2")
BASE = "eagle3"
PARTS = ("development", "frozen")
# tokens; longer ones are left out, so that every request of a full batch has room
LONGEST_PROMPT = 384
CONTEXT = 1024
# bytes of keys and values of one token: 30 layers, 3 heads of 64, fp32
KV_BYTES = 30 * 2 * 3 * 64 * 4
# a server that stands still for longer than its watchdog waits must not take that for a hang
PATIENCE_S = 86_400
THREADS = "OMP_NUM_THREADS"
# vLLM would take threads of its own choice: one less than there are cores
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True)
class ChatPrompts:
    """ids: of every prompt under the target's chat template, in an order drawn once. digest: of the part's file."""

    part: str
    ids: Sequence[Sequence[int]]
    digest: str

    def batch(self, number: int, size: int) -> list[Sequence[int]]:
        """The `number`th group of so many prompts; groups follow each other and begin again at the end."""
        return [self.ids[(number * size + place) % len(self.ids)] for place in range(size)]


def chat_prompts(target: Path, part: str, seed: int = 0) -> ChatPrompts:
    """Prompts of a part of at most LONGEST_PROMPT tokens. C2TError for a part that there is not."""
    if part not in PARTS:
        raise C2TError(f"prompts are of the part {' or '.join(PARTS)}; got {part!r}")
    asked = read_split(PROMPTS / f"{part}.json")
    digest = content_hash(asked)
    random.Random(seed).shuffle(asked)
    return ChatPrompts(part, [ids for ids in encode(target, asked) if len(ids) <= LONGEST_PROMPT], digest)


def use_threads(threads: int) -> None:
    """Have servers that this process starts compute with so many threads."""
    # in the environment of this process, since servers are forked from one that has this environment
    os.environ |= {THREADS: str(threads), BINDING: "nobind"}


def real_runner(
    engine: Engine, pair: Path, out: Path, requests: int, *, context: int = CONTEXT, tokens: int | None = None
) -> Runner:
    """Starts servers of the pair's target on a CPU in float32, for so many requests at once, `use_threads` first.

    context: tokens of a request at most. tokens: of all together; None: so many of each.
    """
    tokens = requests * context if tokens is None else tokens
    # the draft has a layer of keys too, and blocks are not of one token
    blocks = max(tokens, 2 * context)
    room = {
        "sglang": (
            *("--max-total-tokens", str(tokens), "--context-length", str(context)),
            *("--watchdog-timeout", str(PATIENCE_S)),
        ),
        "vllm": ("--max-model-len", str(context), "--kv-cache-memory-bytes", str(blocks * KV_BYTES)),
    }
    flags = (*engine.room(requests), *room[engine.name])
    return Runner(engine, Device.CPU, engine.layout(pair, out) / "target", out / "logs", flags)


def real_speculation(engine: Engine, pair: Path, out: Path, beta: float | None, threshold: float) -> Speculation:
    """What fills in arms. beta: of C2T at a fixed one. threshold: of the arms threshold on P and closed form, whose
    files are written.

    SGLang finds the classifiers beside the draft. vLLM would load them as the draft's weights, so that they are named.
    """
    out.mkdir(parents=True, exist_ok=True)
    on_p, closed_form = write_closed_forms(out)
    beside = engine.layout_has_classifiers
    return Speculation(
        draft=engine.layout(pair, out) / BASE,
        base=BASE,
        beta=beta,
        classifier=None if beside else pair / BASE / FILE_NAME,
        threshold_classifier=on_p,
        closed_form=closed_form,
        threshold=beta_of(threshold),
    )
