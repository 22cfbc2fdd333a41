"""Where a draft ends, decided while it is under way: where that costs no wait, as on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from c2t_plugin.planner.budget import falling, pass_seconds
from c2t_plugin.planner.curve import LEAST_SECONDS
from c2t_plugin.planner.planner import PROBE_EVERY, WHOLE_FIRST, Planner, draft_passes


class DraftEnd:
    """Has each draft go on as long as that is expected to bring more output tokens per second than ending it.

    A token that is not drafted yet is as likely as the planner's means make it after the one before it. All depths that
    may follow are looked at: the next pass alone may not pay where two do. One answer of `probe_every` is yes where no
    seems best, so that a change for the better is noticed.
    """

    def __init__(self, probe_every: int = PROBE_EVERY) -> None:
        self._probe_every = probe_every
        self._ended = 0

    def goes_on(self, planner: Planner, acceptance: Tensor) -> bool:
        """Whether to draft one more token, by the (requests, drafted) acceptance of those that there are."""
        drafted = acceptance.shape[1]
        if planner.whole_drafts < WHOLE_FIRST or drafted >= planner.d_max:
            return drafted < planner.d_max
        if _pays(falling(acceptance).tolist(), planner.accepted[drafted:].tolist(), _seconds(planner, len(acceptance))):
            return True
        self._ended += 1
        return self._ended % self._probe_every == 0


def _pays(
    chances: Sequence[Sequence[float]], ratios: Sequence[float], seconds: Callable[[int], Sequence[float]]
) -> bool:
    """chances: of each request, of its tokens, falling. ratios: of the depths that may follow. seconds: depth -> of a
    step that drafts so deep, by its draft tokens verified, from 0 on."""
    requests, drafted = len(chances), len(chances[0])
    gains = sorted((chance for row in chances for chance in row), reverse=True)
    least = _rate(requests, gains, seconds(drafted))
    last = [row[-1] for row in chances]
    for depth, ratio in enumerate(ratios, start=drafted + 1):
        last = [chance * ratio for chance in last]
        gains = sorted(gains + last, reverse=True)
        if _rate(requests, gains, seconds(depth)) > least:
            return True
    return False


def _rate(requests: int, gains: Sequence[float], seconds: Sequence[float]) -> float:
    """The most output tokens per second of a step, whose likeliest draft tokens are verified."""
    expected = accumulate(gains, initial=float(requests))
    return max(tokens / took for tokens, took in zip(expected, seconds, strict=True))


def _seconds(planner: Planner, requests: int) -> Callable[[int], list[float]]:
    curve, depths = planner.curve, range(planner.d_max + 1)
    costs = planner.costs(requests)
    verify: list[float] = pass_seconds(curve, requests, requests * planner.d_max, (), costs).tolist()
    a_pass, beside = curve.draft_s(requests), planner.beside(costs, depths)

    def seconds(depth: int) -> list[float]:
        count = depth * requests
        drafting = draft_passes(depth) * a_pass + beside[depth]
        run = verify[: count + 1] if planner.packed else [verify[count]] * (count + 1)
        return [max(took + drafting, LEAST_SECONDS) for took in run]

    return seconds
