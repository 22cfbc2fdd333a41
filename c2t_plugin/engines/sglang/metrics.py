"""What C2T did, counted on the host from results that are there anyway, for /get_server_info and Prometheus."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

# name without "c2t:", help text, further labels
COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("chains", "Chains verified, one per running request and step, by their number of draft tokens.", ("verified",)),
    ("steps", "Steps of the batch, by the depth that they drafted to.", ("depth",)),
    ("tiers", "Steps of the batch, by the rows of the target's verify pass, padding included.", ("rows",)),
    ("draft_tokens_clipped", "Draft tokens that were drafted and not verified.", ()),
    ("draft_tokens_over_budget", "Draft tokens that beta left, and the planner or lagged rows dropped.", ()),
    ("draft_tokens_verified", "Draft tokens that the target verified.", ()),
    ("draft_tokens_accepted", "Draft tokens that the target accepted, bonus tokens excluded.", ()),
    ("rows_computed", "Rows of the target's verify passes: roots, draft tokens and padding.", ()),
    ("settings_ignored", "Requests whose own settings did not hold, and that were served as the server is set.", ()),
    ("classifier_seconds", "Time for statistics, confidences and cuts, where the draft runs on the host's clock.", ()),
)
GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("beta", "Confidence below which a draft token is dropped.", ()),
    ("max_depth", "Longest chain that is verified.", ()),
)
PREFIX = "c2t:"


class Exporter:
    """The metrics in prometheus_client, which SGLang has pointed at its own directory before a worker exists."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Gauge
        from prometheus_client import Counter as Total

        # by servers that tell alone
        from c2t_plugin.engines import figures

        registry = REGISTRY if registry is None else registry
        own = list(labels)
        self._labels = labels
        self._counters = {
            name: Total(PREFIX + name, text, [*own, *more], registry=registry) for name, text, more in COUNTERS
        }
        self._gauges = {
            name: Gauge(PREFIX + name, text, [*own, *more], registry=registry, multiprocess_mode="mostrecent")
            for name, text, more in (*GAUGES, *figures.GAUGES)
        }

    def add(self, name: str, amount: float, **labels: str) -> None:
        self._counters[name].labels(**self._labels, **labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._gauges[name].labels(**self._labels, **labels).set(value)


def publish_learnt(exporter: Exporter, state: dict[str, Any]) -> None:
    """Tell Prometheus what a planner has learnt. state: see StepPlanner.state."""
    from c2t_plugin.engines.figures import figures

    for name, value, labels in figures(state):
        exporter.set(name, value, **labels)


@dataclass
class RequestCounts:
    """Of one request. depths, tiers: its steps by drafted depth, and by rows of the target's verify pass, which it
    shared with the batch's other requests; None where they are not told. classifier_s: of those steps, shared
    likewise. clipped, over_budget: as in Counts. verified, accepted: draft tokens."""

    verified: int = 0
    accepted: int = 0
    clipped: int = 0
    over_budget: int = 0
    classifier_s: float | None = None
    depths: Counter[int] = field(default_factory=Counter)
    tiers: Counter[int] | None = None

    def add(
        self, verified: int, rows_computed: int, depth: int, wanted: int, classifier_s: float | None, accepted: int
    ) -> None:
        """One step, as Counts.add has it of all requests, and Counts.lap of the classifier's time."""
        self.verified += verified
        self.accepted += accepted
        self.clipped += max(0, depth - verified)
        self.over_budget += max(0, wanted - verified)
        self.depths[depth] += 1
        if self.tiers is not None:
            self.tiers[rows_computed] += 1
        if classifier_s is not None:
            self.classifier_s = (self.classifier_s or 0.0) + classifier_s

    def state(self) -> dict[str, Any]:
        """As JSON; acceptance by the names that vLLM has for it."""
        return {
            "num_spec_steps": self.depths.total(),
            "num_draft_tokens": self.verified,
            "num_accepted_draft_tokens": self.accepted,
            "clipped": self.clipped,
            "over_budget": self.over_budget,
            "classifier_s": self.classifier_s,
            "depths": _named(self.depths),
            **({} if self.tiers is None else {"tiers": _named(self.tiers)}),
        }


def _named(counts: Counter[int]) -> dict[str, int]:
    # as JSON has them: names are text
    return {str(key): counts[key] for key in sorted(counts)}


@dataclass
class Counts:
    """Since the server started. verified, accepted: steps of single requests by how many draft tokens the target
    verified and accepted, 0 to `most`. depths, tiers: steps of the batch by drafted depth, and by rows of the target's
    verify pass. clipped: draft tokens that were drafted and not verified. over_budget: those that beta left, and beta
    auto or lagged rows dropped. settings_ignored: requests whose own did not hold. classifier_s: None where only the
    device's clock would know."""

    most: int
    exporter: Exporter | None = None
    clipped: int = 0
    over_budget: int = 0
    settings_ignored: int = 0
    classifier_s: float | None = None
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depths: Counter[int] = field(default_factory=Counter)
    tiers: Counter[int] = field(default_factory=Counter)
    _told_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.verified, self.accepted = ([0] * (self.most + 1) for _ in range(2))

    @property
    def steps(self) -> int:
        """Of the batch."""
        return self.depths.total()

    @property
    def rows_computed(self) -> int:
        """Of the target's verify passes."""
        return sum(rows * steps for rows, steps in self.tiers.items())

    def add(
        self, verified: Sequence[int], accepted: Sequence[int], rows_computed: int, depth: int, wanted: Sequence[int]
    ) -> None:
        """One step: draft tokens verified and accepted of each running request, rows of the whole batch, how deep it
        drafted, and how many of each would have been verified without a budget."""
        lengths = Counter(verified)
        for length, chains in lengths.items():
            self.verified[length] += chains
        for hits in accepted:
            self.accepted[hits] += 1
        # a tree verifies more nodes than it is deep
        clipped = sum(max(0, depth - length) for length in verified)
        # other ranks than the first, whose lengths hold, may have wanted less
        over_budget = sum(max(0, asked - length) for asked, length in zip(wanted, verified, strict=True))
        self.clipped += clipped
        self.over_budget += over_budget
        self.depths[depth] += 1
        self.tiers[rows_computed] += 1
        if self.exporter is None:
            return
        for length, chains in lengths.items():
            self.exporter.add("chains", chains, verified=str(length))
        self.exporter.add("steps", 1, depth=str(depth))
        self.exporter.add("tiers", 1, rows=str(rows_computed))
        tokens = {"clipped": clipped, "over_budget": over_budget, "verified": sum(verified), "accepted": sum(accepted)}
        for name, amount in tokens.items():
            self.exporter.add(f"draft_tokens_{name}", amount)
        self.exporter.add("rows_computed", rows_computed)

    def ignore(self, error: Exception) -> None:
        """Count a request whose own settings do not hold. The first one is said in the log: clients decide how many."""
        if not self.settings_ignored:
            logger.warning("C2T: a request's settings are ignored, here and from now on: %s", error)
        self.settings_ignored += 1
        if self.exporter is not None:
            self.exporter.add("settings_ignored", 1)

    @contextmanager
    def classifying(self) -> Iterator[None]:
        """Around what the host computes for C2T itself; only where `classifier_s` is counted."""
        if self.classifier_s is None:
            yield
            return
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.classifier_s += seconds
        if self.exporter is not None:
            self.exporter.add("classifier_seconds", seconds)

    def lap(self) -> float | None:
        """Seconds of `classifier_s` since this was last asked: of one step, if each step asks."""
        if self.classifier_s is None:
            return None
        seconds, self._told_s = self.classifier_s - self._told_s, self.classifier_s
        return seconds

    def state(self) -> dict[str, Any]:
        """Means per running request and step, and what they are means of. accept_len counts the bonus token."""
        chains = sum(self.verified)
        tokens, hits = (sum(n * count for n, count in enumerate(each)) for each in (self.verified, self.accepted))
        return {
            "verified_tokens": tokens / chains if chains else 0.0,
            "accept_len": 1 + hits / chains if chains else 0.0,
            "steps": self.steps,
            "rows_computed": self.rows_computed,
            "clipped": self.clipped,
            "over_budget": self.over_budget,
            "settings_ignored": self.settings_ignored,
            "classifier_s": self.classifier_s,
            "verified": list(self.verified),
            "accepted": list(self.accepted),
            "depths": _named(self.depths),
            "tiers": _named(self.tiers),
        }
