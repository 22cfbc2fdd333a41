"""What a client asks, and what it counted of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Ask:
    """A request that does not wait for others: sent `at` seconds after the first could be, for so many tokens."""

    at: float
    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """One request's output and what speculation did for it.

    verify_steps: target forwards that checked a draft. accepted: draft tokens accepted, bonus tokens excluded.
    candidates: draft tokens verified, roots excluded. All three are 0 without speculation.
    first_s, last_s: seconds from when it was sent to its first and last token.
    """

    token_ids: tuple[int, ...]
    verify_steps: int
    accepted: int
    candidates: int
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def per_token_s(self) -> float | None:
        """Seconds per output token after the first (TPOT); None with one token only."""
        after = len(self.token_ids) - 1
        return (self.last_s - self.first_s) / after if after > 0 else None


@dataclass(frozen=True)
class Pass:
    """All prompts once, in prompt order, and the wall-clock seconds from the first request to the last answer.

    most_at_once: requests that the server ran at one moment, at most, by its own word; 0 if it was not asked.
    mean_at_once: how many it ran on average while it ran any. client_share: processor seconds of this process over
    wall-clock seconds; near 1 the client was what was measured. client_waited: likewise the seconds in which it had
    something to do and no processor, where Linux tells.
    """

    completions: tuple[Completion, ...]
    seconds: float
    most_at_once: int = 0
    mean_at_once: float = 0.0
    client_share: float = 0.0
    client_waited: float = 0.0

    @property
    def output_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def verify_steps(self) -> int:
        return sum(completion.verify_steps for completion in self.completions)

    @property
    def tau(self) -> float | None:
        """Accepted draft tokens per verify step, bonus excluded; None without speculation."""
        accepted = sum(completion.accepted for completion in self.completions)
        return accepted / self.verify_steps if self.verify_steps else None

    @property
    def gamma_per_token(self) -> float:
        """Draft tokens verified per output token."""
        return sum(completion.candidates for completion in self.completions) / self.output_tokens

    def n_identical(self, other: Pass) -> int:
        """Prompts with the same output tokens in both."""
        pairs = zip(self.completions, other.completions, strict=True)
        return sum(mine.token_ids == theirs.token_ids for mine, theirs in pairs)
