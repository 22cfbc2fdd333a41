"""Passes of one arm at one condition, and what a row says about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.serving.client import Client, Pass
from c2t_plugin.errors import C2TError

REPLICATES = 2000
LEVEL = 0.95
# of the speeds of a condition's passes
PERCENTILES = (20, 50, 80)
# of a client's processor, above which it is no longer the server that is measured
BUSY = 0.9
# of the time, above which a client that waits for a processor may be why requests did not run together
STARVED = 0.5

Condition = tuple[int, float]  # concurrency and temperature


@dataclass
class Outcome:
    """One arm at one condition: its passes, or why there are none. warm_up: requests before the first of them."""

    passes: list[Pass] = field(default_factory=list)
    error: str = ""
    warm_up: int = 0

    @property
    def most_at_once(self) -> int:
        """Requests that the server ran at once, at most, in the pass that reached least."""
        return min(each.most_at_once for each in self.passes)

    @property
    def verifies(self) -> bool:
        """Whether the server told of a step that verified drafts."""
        return any(each.verify_steps for each in self.passes)

    @property
    def client_share(self) -> float:
        """Of a processor that the client took, in the pass where it took most."""
        return max(each.client_share for each in self.passes)

    @property
    def client_waited(self) -> float:
        """Of the time, that the client was ready and had no processor, in the pass where that was most."""
        return max(each.client_waited for each in self.passes)

    @property
    def speeds(self) -> list[float]:
        """Output tokens per second of each pass."""
        return [each.output_tokens / each.seconds for each in self.passes]


def measure(
    client: Client,
    prompts: Sequence[Sequence[int]],
    condition: Condition,
    repeats: int,
    *,
    warm_ups: int = 1,
    few: bool = False,
) -> Outcome:
    """All passes of one condition; an error of the server becomes the outcome's.

    warm_ups: passes of `concurrency` prompts before, which do not count. few: there may be fewer prompts than that.
    """
    concurrency, temperature = condition
    wanted = min(concurrency, len(prompts))
    if wanted < concurrency and not few:
        return Outcome(error=f"{len(prompts)} requests cannot fill {concurrency} places: take more or a larger set")
    try:
        outcome = Outcome(warm_up=warm_up(client, prompts, condition, warm_ups))
        for _ in range(repeats):
            outcome.passes.append(client.run(prompts, concurrency, lambda: None, temperature))
    except C2TError as error:
        return Outcome(error=one_line(error))
    return checked(outcome, wanted)


def checked(outcome: Outcome, wanted: int) -> Outcome:
    """The outcome, or one with the error that its passes were not of `wanted` requests at once, or of the client."""
    if outcome.most_at_once < wanted:
        reached = f"only {outcome.most_at_once} of {wanted} requests ever ran at once"
        if outcome.client_waited > STARVED:
            return Outcome(
                error=f"{reached}: the client waited for a processor {outcome.client_waited:.0%} of the time"
            )
        return Outcome(error=f"{reached}: raise the server's limit or take longer answers")
    if outcome.client_share > BUSY:
        busy = f"the client took {outcome.client_share:.0%} of a processor"
        return Outcome(error=f"{busy}, so that it was measured and not the server: run it on a faster machine")
    return outcome


def warm_up(client: Client, prompts: Sequence[Sequence[int]], condition: Condition, passes: int) -> int:
    """Passes of one batch that do not count. Returns how many requests they sent."""
    concurrency, temperature = condition
    batch = prompts[:concurrency]
    for _ in range(passes):
        client.run(batch, concurrency, lambda: None, temperature)
    return passes * len(batch)


def one_line(error: C2TError) -> str:
    """The first line of an error's message."""
    return str(error).splitlines()[0]


def metrics_of(
    outcome: Outcome, plain: Outcome | None, statics: Sequence[Outcome], greedy: bool, counted: bool = True
) -> dict[str, float | None]:
    """What a row says about an outcome that has passes. plain, statics: of the same condition. counted: the server
    says what was verified."""
    completions = [each for one in outcome.passes for each in one.completions]
    per_token = [1e3 * each.per_token_s for each in completions if each.per_token_s is not None]
    steps = sum(each.verify_steps for each in completions)
    tokens = sum(len(each.token_ids) for each in completions)
    spread = {f"output_tokens_per_s_p{share}": float(np.percentile(outcome.speeds, share)) for share in PERCENTILES}
    found: dict[str, float | None] = {
        "output_tokens_per_s": float(np.mean(outcome.speeds)),
        **spread,
        "seconds": float(np.mean([each.seconds for each in outcome.passes])),
        "tpot_p50_ms": float(np.quantile(per_token, 0.5)) if per_token else None,
        "tpot_p99_ms": float(np.quantile(per_token, 0.99)) if per_token else None,
        "ttft_p50_ms": 1e3 * float(np.quantile([each.first_s for each in completions], 0.5)),
        "tau": sum(each.accepted for each in completions) / steps if steps else None,
        "gamma_per_token": sum(each.candidates for each in completions) / tokens if counted else None,
        "requests": len(outcome.passes[0].completions),
        "ran_at_once": outcome.most_at_once,
        "mean_at_once": float(np.mean([each.mean_at_once for each in outcome.passes])),
        "client_share": outcome.client_share,
        "client_waited": outcome.client_waited,
        "passes": len(outcome.passes),
        "warm_up": outcome.warm_up,
    }
    if plain is not None and plain.passes:
        found |= ratio("ratio_to_plain", outcome.speeds, plain.speeds)
        if greedy:
            same = outcome.passes[0].n_identical(plain.passes[0])
            found["identical_share"] = same / len(plain.passes[0].completions)
    ran = [each for each in statics if each.passes]
    if ran:
        found |= ratio("ratio_to_best_static", outcome.speeds, max((each.speeds for each in ran), key=np.mean))
    return found


def ratio(name: str, mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """Of two means, with a bootstrap interval over passes where both have several."""
    found: dict[str, float | None]
    found = {name: float(np.mean(mine) / np.mean(theirs))}
    if min(len(mine), len(theirs)) < 2:
        return found
    rng = np.random.default_rng(0)
    top, bottom = (rng.choice(each, (REPLICATES, len(each))).mean(1) for each in (mine, theirs))
    low, high = np.quantile(top / bottom, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {**found, f"{name}_low": float(low), f"{name}_high": float(high)}
