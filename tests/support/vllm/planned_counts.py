"""What a planned engine of vLLM drafts and verifies in each step, as a simulation has it.

Requests are decoded together, their prompts are read in chunks, and one may be aborted on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from tests.support.sglang.planned_rule import FREE, Limits, Plan
from tests.support.sglang.simulate import Draft, Target, Text
from tests.support.sglang.verify_counts import Rule
from tests.support.vllm.verify_counts import Steps, as_told

if TYPE_CHECKING:
    from tests.support.vllm.grammar import Grammar

# Two choices whose output per second is so near that the rounding of sums decides.
UNDECIDED = 1e-5


@dataclass
class Request:
    """One request of the simulation.

    text: prompt and output. waiting: what the next step verifies of its draft. read: tokens of the prompt that were
    read, or cached. ends: of the chunks that were read, but for the last one. leaves: steps of its batch after which it
    is aborted. limits: of its own.
    """

    prompt: list[int]
    most: int
    read: int = 0
    ends: list[int] = field(default_factory=list)
    leaves: float = math.inf
    limits: Limits = FREE
    text: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = list(self.prompt)

    @property
    def left(self) -> int:
        return self.most - (len(self.text) - len(self.prompt))

    @property
    def ended(self) -> bool:
        return self.left <= 0

    @property
    def reading(self) -> bool:
        return self.read < len(self.prompt)

    def reads(self, room: float) -> int:
        """How many tokens it has in a step with room for so many; of a prompt they are read here."""
        if not self.reading:
            return 1 + len(self.waiting)
        tokens = int(min(len(self.prompt) - self.read, room))
        self.read += tokens
        self.ends += [self.read] if self.reading else []
        return tokens

    def verify(self, target: Target | Text) -> list[torch.Tensor]:
        """The target's hidden states of the text, but for the token that this adds behind what is accepted."""
        choices, states = target.run([*self.text, *self.waiting])
        n, waiting = len(self.text) - 1, self.waiting
        hits = next((i for i, token in enumerate(waiting) if token != choices[n + i]), len(waiting))
        self.text += [*waiting[:hits], choices[n + hits]]
        self.steps += [(len(waiting), hits)] if waiting else []
        return [state[: n + hits + 1] for state in states]

    def chain(self, draft: Draft, states: Sequence[torch.Tensor], depth: int) -> torch.Tensor:
        """Logits of its draft."""
        told = as_told(self.text, len(self.prompt), self.ends)
        return draft.chain(told, draft.features(states), depth) if depth else torch.zeros(0, 1)

    def counts(self) -> Steps:
        """As vLLM tells it, which says nothing of the steps of an aborted one."""
        output = self.text[len(self.prompt) :][: self.most]
        return Steps(tuple(output), tuple(self.steps) if self.ended else ())


Group = list[tuple[list[int], int]]


def simulated(
    target: Target,
    draft: Draft,
    rule: Rule,
    group: Group,
    plan: Plan,
    *,
    spares: bool = False,
    own: Sequence[Limits] = (),
) -> list[Request]:
    """All requests of a group of prompts and lengths decoded together; see `decode`. own: limits of each; (): they have
    none."""
    asked = zip(group, own or [FREE] * len(group), strict=True)
    requests = [Request(prompt, most, limits=limits) for (prompt, most), limits in asked]
    decode(target, draft, rule, requests, plan, spares=spares)
    return requests


def decode(
    target: Target | Text,
    draft: Draft,
    rule: Rule,
    requests: Sequence[Request],
    plan: Plan,
    *,
    budget: int | None = None,
    grammar: Grammar | None = None,
    spares: bool = False,
) -> None:
    """All requests decoded together. In a step of vLLM the target reads what is left of the drafts before, and then all
    its requests are drafted for, those that have ended with it too.

    budget: tokens that the target reads in a step; None: any number. grammar: of all requests, which cuts their drafts;
    the target has it too. spares: not where it is sure that all end.
    """
    for step in count():
        those = (request for request in requests if not request.ended and step < request.leaves)
        running = list(scheduled(those, budget))
        if not running:
            return
        depth = plan.depth(len(running), [request.limits for request in running])
        if spares and all(request.left == 1 for request in running):
            depth = plan.depths[-1] = 0
        # the draft of a prompt that is not read whole is nobody's
        running = [request for request in running if not request.reading]
        limits = [request.limits for request in running]
        chains = [request.chain(draft, request.verify(target), depth) for request in running]
        chances = [list(rule.confidences(logits)) for logits in chains]
        if depth and plan.ends and running:
            depth = plan.drafted(chances, limits)
        taking = [row for row, request in enumerate(running) if not request.ended]
        kept = [0] * len(taking)
        if depth and taking:
            kept = plan.keep([chances[row][:depth] for row in taking], [limits[row] for row in taking])
        for row, length in zip(taking, kept, strict=True):
            request, tokens = running[row], chains[row].argmax(-1).tolist()[:length]
            output = request.text[len(request.prompt) :]
            request.waiting = tokens if grammar is None else grammar.valid(output, tokens)


def scheduled(running: Iterator[Request], budget: int | None) -> Iterator[Request]:
    """Those of a step, the first ones first, as long as there is room."""
    room = math.inf if budget is None else budget
    for request in running:
        if room <= 0:
            return
        room -= request.reads(room)
        yield request


def cache_of(run: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
    found = cache(run)
    return lambda tokens: found(tuple(tokens))
