"""Requests that arrive when they arrive: long contexts, short and long answers, a server that may fall behind.

Every arm gets the same requests at the same times. Arms are compared request by request.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.serving.answers import Ask, Completion, Pass
from benchmarks.serving.interleaved import STUDENT
from benchmarks.simulation.fleet.arrivals import PATTERNS
from c2t_plugin.errors import C2TError


@dataclass(frozen=True)
class Mix:
    """What is asked. contexts, outputs: least and most tokens, as likely in each octave between. arrivals: one of
    PATTERNS. rate: requests per second on average. seconds: in which they arrive. seed: of all that is drawn."""

    contexts: tuple[int, int] = (512, 4096)
    outputs: tuple[int, int] = (16, 512)
    arrivals: str = "poisson"
    rate: float = 0.15
    seconds: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("contexts", "outputs"):
            least, most = getattr(self, name)
            if not 1 < least <= most:
                raise C2TError(f"{name} are two numbers of tokens above 1, the lesser one first; got {least} {most}")
        if self.arrivals not in PATTERNS:
            raise C2TError(f"arrivals are {', '.join(PATTERNS)}; got {self.arrivals!r}")
        if not self.rate > 0 or not self.seconds > 0:
            raise C2TError(f"requests need a rate and a time above 0, got {self.rate} and {self.seconds}")

    def asks(self, prompts: Sequence[Sequence[int]]) -> list[Ask]:
        """The requests, in the order of their arrival. prompts: token ids of chats, at least two. C2TError if nobody
        comes."""
        rng = np.random.default_rng(self.seed)
        times = PATTERNS[self.arrivals](self.rate, self.seconds, rng).tolist()
        if not times:
            raise C2TError(f"no request arrives in {self.seconds:g} s at {self.rate:g}/s; raise one of them")
        contexts, outputs = (_lengths(bounds, len(times), rng) for bounds in (self.contexts, self.outputs))
        order = random.Random(self.seed)
        return [
            Ask(at, grown(prompts, context, order), output)
            for at, context, output in zip(times, contexts, outputs, strict=True)
        ]

    @property
    def setting(self) -> dict[str, str | int | float | None]:
        """Of a row."""
        return {
            "contexts": " to ".join(map(str, self.contexts)),
            "outputs": " to ".join(map(str, self.outputs)),
            "arrivals": self.arrivals,
            "rate": self.rate,
            "arriving_s": self.seconds,
        }


def _lengths(bounds: tuple[int, int], count: int, rng: np.random.Generator) -> list[int]:
    least, most = bounds
    return [int(length) for length in np.exp(rng.uniform(math.log(least), math.log(most + 1), count))]


def grown(prompts: Sequence[Sequence[int]], length: int, order: random.Random) -> list[int]:
    """A prompt of so many tokens: a chat behind others of the same part, the end of them as far as there is room."""
    *before, last = order.sample(range(len(prompts)), len(prompts))
    history: list[int] = []
    for place in before:
        if len(history) + len(prompts[last]) >= length:
            break
        history += prompts[place]
    room = length - len(prompts[last])
    return [*(history[-room:] if room > 0 else ()), *prompts[last]][-length:]


def figures(served: Pass, plain: Pass | None, limit_s: float, counted: bool) -> dict[str, float | None]:
    """What a row says of a pass. plain: the same requests without speculation. limit_s: seconds per token, of answers
    that count as good. counted: the server says what it verified.

    Tokens per second are over the time until the last answer. Percentiles are of requests.
    """
    answers = served.completions
    per_token = [each.per_token_s for each in answers if each.per_token_s is not None]
    good = [each for each in answers if (each.per_token_s or 0.0) <= limit_s]
    found: dict[str, float | None] = {
        "output_tokens_per_s": served.output_tokens / served.seconds,
        "seconds": served.seconds,
        **_percentiles("ttft", [each.first_s for each in answers]),
        **_percentiles("tpot", per_token),
        "goodput_tokens_per_s": sum(len(each.token_ids) for each in good) / served.seconds,
        "good_share": len(good) / len(answers),
        "tau": served.tau,
        "gamma_per_token": served.gamma_per_token if counted else None,
        "requests": len(answers),
        "ran_at_once": served.most_at_once,
        "mean_at_once": served.mean_at_once,
        "client_share": served.client_share,
        "client_waited": served.client_waited,
    }
    if plain is not None:
        found["identical_share"] = served.n_identical(plain) / len(answers)
        found |= paired_tpot(answers, plain.completions)
    return found


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_p{share}_ms": 1e3 * float(np.percentile(seconds, share)) if seconds else None for share in (50, 99)
    }


def paired_tpot(mine: Sequence[Completion], theirs: Sequence[Completion]) -> dict[str, float | None]:
    """The geometric mean over requests of the ratio of seconds per token, with 95% bounds by Student's t of its
    logarithm. Requests of one run queue behind each other, so the bounds are too narrow where servers fall behind."""
    pairs = [(one.per_token_s, other.per_token_s) for one, other in zip(mine, theirs, strict=True)]
    logs = [math.log(one / other) for one, other in pairs if one and other]
    if not logs:
        return {}
    middle = statistics.fmean(logs)
    found: dict[str, float | None] = {"tpot_ratio_to_plain": math.exp(middle)}
    if len(logs) < 2:
        return found
    half = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    bounds = {"low": math.exp(middle - half), "high": math.exp(middle + half)}
    return found | {f"tpot_ratio_to_plain_{name}": value for name, value in bounds.items()}
