"""Where random decisions come from, so that one code path can be sampled, replayed or enumerated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Outcome = TypeVar("Outcome")


class Chance(Protocol):
    """A source of random decisions. Drafting and verification ask nothing else for randomness."""

    def accepts(self, ratio: float) -> bool:
        """True with probability min(1, ratio); a ratio of 0 never accepts."""
        ...

    def draw(self, probs: Tensor) -> int:
        """An index drawn with these probabilities: (n,) any float, not negative, summing to 1 up to rounding."""
        ...


class Sampler:
    """Decisions from a torch.Generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def accepts(self, ratio: float) -> bool:
        # rand is in [0, 1), so strictly below: a ratio of 0 must never accept.
        return bool(torch.rand((), dtype=torch.float64, generator=self.generator) < ratio)

    def draw(self, probs: Tensor) -> int:
        return int(torch.multinomial(probs, 1, generator=self.generator))


class Replay:
    """Decisions read from a script; past its end, the first possible option. Keeps the weight of what it decided."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.script = script
        self.choices: tuple[int, ...] = ()
        self.options: list[list[int]] = []
        self.weight = 1.0

    def accepts(self, ratio: float) -> bool:
        accept = min(1.0, ratio)
        return self._choose([1.0 - accept, accept]) == 1

    def draw(self, probs: Tensor) -> int:
        return self._choose(probs.tolist())

    def _choose(self, weights: list[float]) -> int:
        possible = [option for option, weight in enumerate(weights) if weight > 0]
        place = len(self.choices)
        chosen = self.script[place] if place < len(self.script) else possible[0]
        self.choices += (chosen,)
        self.options.append(possible)
        self.weight *= weights[chosen]
        return chosen


def outcomes(run: Callable[[Chance], Outcome]) -> dict[Outcome, float]:
    """The exact distribution of what `run` returns: it is called once for every path of decisions.

    run: returns something hashable and asks only the Chance it is given for randomness.
    The number of calls is the number of paths, so keep vocabularies and trees tiny.
    """
    found: dict[Outcome, float] = {}
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        script = scripts.pop()
        replay = Replay(script)
        outcome = run(replay)
        found[outcome] = found.get(outcome, 0.0) + replay.weight
        for place in range(len(script), len(replay.choices)):
            others = (option for option in replay.options[place] if option != replay.choices[place])
            scripts.extend((*replay.choices[:place], option) for option in others)
    return found
