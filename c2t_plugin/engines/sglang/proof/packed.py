"""Packed verification of the real target against the uniform window: logits, and argmax where that is decided."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.engines.sglang import ranks
from c2t_plugin.engines.sglang.proof.made_up import MadeUp

# Seconds after which no further tier begins.
BUDGET_S = 5.0
# A difference of this many times what two uniform windows of the same rows show is no fault; rounding of the largest
# logit so many times is none either.
SLACK = 4.0
# The larger of the two shares of a row's logits that are judged.
SHARE = 0.99
# float32 logits of a few copies of a window may take so much
MOST_BYTES = 1 << 30
REPEATS = 3
# requests whose windows are compared where there are no graphs
WITHOUT_GRAPHS = (2, 5)


@dataclass(frozen=True)
class Spread:
    """Of the differences within one row's logits, the worst over rows: of their median, and of the 99th percentile."""

    middle: float
    high: float

    def within(self, other: Spread) -> bool:
        return self.middle <= other.middle and self.high <= other.high


@dataclass
class Findings:
    """failures: one line each. proved, tiers: numbers of rows that were compared, and that there are graphs for, over
    all depths. worst, allowed: of the tier that came nearest to its bound. poison: what stood in all that packed rows
    may not read, if anything did. microseconds: of one target pass, by its rows, at the full depth; on a GPU alone.
    window_microseconds: of the pass over whole windows of the same requests, by the same rows.
    skipped: why something was not tried, which is no failure."""

    failures: list[str] = field(default_factory=list)
    proved: int = 0
    tiers: int = 0
    worst: float = 0.0
    allowed: float = 0.0
    poison: float | None = None
    microseconds: dict[int, float] = field(default_factory=dict)
    window_microseconds: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str = ""

    def state(self) -> dict[str, Any]:
        """For the server's state and the log."""
        poison = None if self.poison is None else str(self.poison)
        return {**dataclasses.asdict(self), "poison": poison}

    def untried(self) -> list[str]:
        """What will be computed and was not compared, a line for it."""
        if self.skipped:
            return [f"it was not tried: {self.skipped}"]
        return [] if self.proved == self.tiers else [f"{self.tiers - self.proved} of {self.tiers} sizes were not tried"]


def spread(found: Tensor, expected: Tensor) -> Spread:
    """found, expected: (rows, vocabulary) float32. Not a number anywhere is infinitely far."""
    if not bool(found.isfinite().all()):
        return Spread(math.inf, math.inf)
    far = (found - expected).abs()
    places = (math.ceil(0.5 * far.shape[1]), math.ceil(SHARE * far.shape[1]))
    return Spread(*(float(far.kthvalue(place, dim=1).values.max()) for place in places))


def lengths(rows: int, below: int, requests: int, width: int, draw: random.Random) -> list[int] | None:
    """Rows of each request, 1 to `width`, ragged, that take more than `below` rows and at most `rows`: None where so
    many requests cannot fill them."""
    fewest, most = max(below + 1, 1), min(rows, requests * width)
    if most < fewest:
        return None
    total = draw.randint(fewest, most)
    # about half a window each, where there are requests for that
    count = max(-(-total // width), min(requests, total, -(-2 * total // (width + 1))))
    each = [1] * count
    for _ in range(total - count):
        each[draw.choice([i for i, length in enumerate(each) if length < width])] += 1
    return each


def prove(worker: Any, clock: Callable[[], float] = time.monotonic, *, whole: bool = False) -> Findings:
    """Compare every captured number of rows, or without graphs a few, at every depth, as far as time and memory allow.

    worker: ours, whose packing is decided and whose graphs are captured. whole: however long it takes, and with all the
    memory that it takes. Never raises: what does not run has failed.
    """
    found, begun, budget = Findings(), clock(), math.inf if whole else BUDGET_S
    try:
        vocabulary = worker.target_worker.model_runner.model_config.vocab_size
        width = worker.speculative_num_draft_tokens
        sizes = worker.c2t.packing.sizes()
        needed = -(-sizes[-1] // width) if len(sizes) else max(WITHOUT_GRAPHS)
        most = needed if whole else min(MOST_BYTES // (4 * 4 * width * vocabulary), needed)
        made = MadeUp(worker, max(most, 1))
        try:
            for part in _depths(worker):
                timed = not found.tiers and made.device.type == "cuda"
                ends = begun + part * budget
                _prove_depth(worker, made, found, lambda ends=ends: clock() < ends, timed)  # type: ignore[misc]
        finally:
            made.close()
    except (MemoryError, torch.cuda.OutOfMemoryError) as failure:
        found.skipped = f"{type(failure).__name__}: {failure}"
    except Exception as failure:  # whatever a kernel, a compiler or an allocator raises: the server can do without
        found.failures.append(f"it did not run ({type(failure).__name__}: {failure})")
    found.seconds = clock() - begun
    return found


def _depths(worker: Any) -> Iterator[float]:
    """Each draft depth that verifies more than roots, the deepest first: the share of all time at which it ends. Back
    to the deepest at last."""
    switch = worker.adaptive_controller
    depths = [depth for depth in getattr(switch, "depths", ()) if depth > 0]
    if not depths:
        yield 1.0
        return
    try:
        for done, depth in enumerate(reversed(depths), start=1):
            switch.switch(depth)
            yield done / len(depths)
    finally:
        switch.switch(depths[-1])


def _prove_depth(worker: Any, made: MadeUp, found: Findings, time_is_left: Callable[[], bool], timed: bool) -> None:
    width, draw = worker.speculative_num_draft_tokens, random.Random(0)
    tiers = list(worker.c2t.packing.sizes())
    tiers = tiers or sorted({min(requests, made.requests) * width for requests in WITHOUT_GRAPHS})
    found.tiers += len(tiers)
    # what comes first costs as much as a few sizes
    if not ranks.agree_on(int(time_is_left())):
        return
    everyone = torch.arange(made.requests)
    few = everyone[: min(len(everyone), 8)]
    floor = _floor(made, few)
    poison = found.poison = _survived(made, few, floor, worker.target_worker.model_runner.dtype)
    below = 0
    for rows in tiers:
        if not ranks.agree_on(int(time_is_left())):
            return
        each = lengths(rows, below, made.requests, width, draw)
        below = rows
        if each is None:
            return
        who, before = everyone[: len(each)], len(found.failures)
        _prove_tier(worker, made, found, who, each, floor, poison)
        found.proved += 1
        if timed and len(found.failures) == before:
            kept = torch.tensor(each, dtype=torch.int32) - 1
            windows, packed = (_timed(made, who, each) for each in (torch.full_like(kept, width - 1), kept))
            # of the later one
            computed = worker.c2t.packing.rows
            found.microseconds[computed], found.window_microseconds[computed] = packed, windows


def _floor(made: MadeUp, who: Tensor) -> Spread:
    """How far two uniform windows of the same rows are apart: in another order, and beside fewer others."""
    window = made.window(who)
    other = made.window(who.flip(0)).flip(0)
    half = made.window(who[: max(len(who) // 2, 1)])
    pairs = (other, window), (half, window[: len(half)])
    apart = [spread(a.flatten(0, 1), b.flatten(0, 1)) for a, b in pairs]
    return Spread(max(each.middle for each in apart), max(each.high for each in apart))


def _survived(made: MadeUp, who: Tensor, floor: Spread, dtype: torch.dtype) -> float | None:
    """The sharpest poison with which the uniform window is what it was: only then may packed rows be asked for the
    same."""
    before = made.window(who).flatten(0, 1)
    for value in made.poisons():
        if not made.poison(value):
            return None
        if spread(made.window(who).flatten(0, 1), before).within(_allowed(floor, before, dtype)):
            return value
        made.poison(0.0)
    return None


def _prove_tier(
    worker: Any, made: MadeUp, found: Findings, who: Tensor, each: Sequence[int], floor: Spread, poison: float | None
) -> None:
    width, rows = worker.speculative_num_draft_tokens, sum(each)
    kept = torch.tensor(each, dtype=torch.int32) - 1
    window = made.window(who, kept)
    if poison is not None:
        made.poison(poison)
    packed, graph = made.packed(who, kept)
    own = (torch.arange(width) <= kept[:, None]).to(made.device)
    mine, theirs = packed[own], window[own]
    apart, allowed = spread(mine, theirs), _allowed(floor, theirs, worker.target_worker.model_runner.dtype)
    if found.allowed == 0.0 or apart.high * found.allowed > found.worst * allowed.high:
        found.worst, found.allowed = apart.high, allowed.high
    where = f"{rows} rows of {len(each)} requests, {'graph' if graph else 'eager'}, depth {width - 1}"
    if not apart.within(allowed):
        found.failures.append(f"{where}: logits are off by {apart.high:.3g}, allowed {allowed.high:.3g}")
        return
    best, second = theirs.topk(2, dim=-1).values.unbind(-1)
    turned = (mine.argmax(-1) != theirs.argmax(-1)) & (best - second > 2 * allowed.high)
    if bool(turned.any()):
        found.failures.append(f"{where}: {int(turned.sum())} rows have another best token")


def _allowed(floor: Spread, logits: Tensor, dtype: torch.dtype) -> Spread:
    rounding = SLACK * torch.finfo(dtype).eps * float(logits.abs().max())
    return Spread(SLACK * floor.middle + rounding, SLACK * floor.high + rounding)


def _timed(made: MadeUp, who: Tensor, kept: Tensor) -> float:
    """Microseconds of one packed pass with what the host does for it, the least of a few."""
    least = math.inf
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        made.packed(who, kept)
        torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begun)
    return 1e6 * least
