"""What C2T did, counted on the host from results that are there anyway, for /get_server_info and Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# name without "c2t:", help text, further labels
COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("chains", "Chains verified, one per running request and step, by their number of draft tokens.", ("verified",)),
    ("draft_tokens_verified", "Draft tokens that the target verified.", ()),
    ("draft_tokens_accepted", "Draft tokens that the target accepted, bonus tokens excluded.", ()),
    ("rows_computed", "Rows of the target's verify passes: roots, draft tokens and padding.", ()),
)
GAUGES: tuple[tuple[str, str], ...] = (
    ("beta", "Confidence below which a draft token is dropped."),
    ("max_depth", "Longest chain that is verified."),
)
PREFIX = "c2t:"


def names() -> list[str]:
    """Every metric as Prometheus lists it."""
    return [*(f"{PREFIX}{name}_total" for name, _, _ in COUNTERS), *(f"{PREFIX}{name}" for name, _ in GAUGES)]


class Exporter:
    """The metrics in prometheus_client, which SGLang has pointed at its own directory before a worker exists."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if registry is None else registry
        own = list(labels)
        self._labels = labels
        self._counters = {
            name: Counter(PREFIX + name, text, [*own, *more], registry=registry) for name, text, more in COUNTERS
        }
        self._gauges = {
            name: Gauge(PREFIX + name, text, own, registry=registry, multiprocess_mode="mostrecent")
            for name, text in GAUGES
        }

    def add(self, name: str, amount: int, **labels: str) -> None:
        self._counters[name].labels(**self._labels, **labels).inc(amount)

    def set(self, name: str, value: float) -> None:
        self._gauges[name].labels(**self._labels).set(value)


@dataclass
class Counts:
    """Since the server started. verified, accepted: steps of single requests by how many draft tokens the target
    verified and accepted, 0 to `most`. steps: of the batch. rows_computed: of the target's verify passes."""

    most: int
    exporter: Exporter | None = None
    steps: int = 0
    rows_computed: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verified, self.accepted = ([0] * (self.most + 1) for _ in range(2))

    def add(self, verified: Iterable[int], accepted: Iterable[int], rows_computed: int) -> None:
        """One step: draft tokens verified and accepted of each running request, and the rows of the whole batch."""
        self.steps += 1
        self.rows_computed += rows_computed
        lengths: dict[int, int] = {}
        hits = 0
        for length, hit in zip(verified, accepted, strict=True):
            self.verified[length] += 1
            self.accepted[hit] += 1
            lengths[length] = lengths.get(length, 0) + 1
            hits += hit
        if self.exporter is not None:
            for length, chains in lengths.items():
                self.exporter.add("chains", chains, verified=str(length))
            self.exporter.add("draft_tokens_verified", sum(length * n for length, n in lengths.items()))
            self.exporter.add("draft_tokens_accepted", hits)
            self.exporter.add("rows_computed", rows_computed)

    def state(self) -> dict[str, Any]:
        """gamma and tau per running request and step (bonus excluded), and what they are means of."""
        chains = sum(self.verified)
        tokens, hits = (sum(n * count for n, count in enumerate(each)) for each in (self.verified, self.accepted))
        return {
            "gamma": tokens / chains if chains else 0.0,
            "tau": hits / chains if chains else 0.0,
            "steps": self.steps,
            "rows_computed": self.rows_computed,
            "verified": list(self.verified),
            "accepted": list(self.accepted),
        }
