"""What one server's arms come to in a fleet: replicas behind a router, from 1 to 1,000, event by event.

    python -m benchmarks.simulation.fleet                                  every part; some minutes on one core
    python -m benchmarks.simulation.fleet --parts routers --replicas 8     one part, one size
    python -m benchmarks.simulation.fleet --arrivals TRACE.csv             a recording in place of what is drawn

How fast a replica decodes with so many requests is taken from the published rows of the simulation of one server, and
what prompts cost from data sheets. The parts:

routers   every router and some arms, by replicas, at one rate
planning  how many requests a second each arm has room for: even arrivals, bursts, a day
apart     the same where prompts are read on servers of their own
learning  how soon what replicas learn is learnt, alone and together

A fleet has room for a rate if enough of its requests keep both limits: the seconds to the first token, and per token.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.report.command import RESULTS
from benchmarks.report.rows import FILE_OF, BenchRow, append_rows, read_rows
from benchmarks.report.tables import AUTO
from benchmarks.simulation.fleet.arrivals import PATTERNS, Request, Work, recorded
from benchmarks.simulation.fleet.fleet import Fleet, Limits, Run, figures
from benchmarks.simulation.fleet.learning import learning_rows
from benchmarks.simulation.fleet.routers import ROUTERS
from benchmarks.simulation.fleet.speeds import PLAIN, Reading, Speeds, speeds_of
from benchmarks.simulation.roofline import GPUS, MODELS, Machine, draft_of
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

FLEET = "fleet"
PARTS = ("routers", "planning", "apart", "learning")
SIZES = (1, 8, 64, 1000)
ARMS = (PLAIN, "static 1", "static 2", "static 4", "static 6", "SGLang adaptive", AUTO)
# those that the other parts need
FEW = (PLAIN, AUTO)
# the setting whose rows say how fast a replica decodes, and the stream of what is learnt there
SETTING: Mapping[str, str | int] = {
    "gpu": "L40",
    "tp": 1,
    "target": "llama-3.1-8b",
    "context": 512,
    "draft": "smollm2/eagle3",
}
STREAM = "SmolLM2, EAGLE-3"
# groups of requests that begin alike, per replica
GROUPS = 24
# seconds that are simulated, of large fleets fewer
SECONDS, FEWER, LARGE = 120.0, 40.0, 500
# requests per second and replica of the part routers
RATE = 3.0
# share of requests that has to be good; most requests per second and replica that are tried, and how near is enough
ENOUGH, MOST, NEAR = 0.95, 16.0, 0.2
# of the replicas, that only read prompts; 0: all do both
READERS = (0.0, 0.25, 0.5)
LOADS = (1, 8, 64)


class Simulation:
    """What all parts share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.published = read_rows(RESULTS / FILE_OF["simulated"], BenchRow)
        self.speeds = speeds_of(self.published, SETTING)
        machine, target = Machine(GPUS[str(SETTING["gpu"])], int(SETTING["tp"])), MODELS[str(SETTING["target"])]
        self.reading = Reading(machine, target, draft_of("eagle3", target))
        self.run = RunRecord.capture(seed=options.seed).to_json()

    def rows(self, parts: Sequence[str]) -> Iterator[BenchRow]:
        """Of the parts, in their order."""
        makers = {"routers": self.routers, "planning": self.planning, "apart": self.apart, "learning": self.learning}
        for part in parts:
            yield from makers[part]()

    def routers(self) -> Iterator[BenchRow]:
        """Every router and some arms, by replicas, at even arrivals."""
        for replicas in self.options.replicas:
            for router in ROUTERS:
                for arm in FEW:
                    yield self.row("routers", arm, Fleet(replicas, router), "poisson", self.options.rate)

    def planning(self) -> Iterator[BenchRow]:
        """The room of every arm, by arrivals."""
        for pattern in PATTERNS:
            for arm in ARMS:
                yield self.room("planning", arm, Fleet(self.options.fleet, "cache aware"), pattern)

    def apart(self) -> Iterator[BenchRow]:
        """The room of some arms, by the replicas that only read prompts."""
        for share in READERS:
            fleet = Fleet(self.options.fleet, "cache aware", int(share * self.options.fleet))
            for arm in FEW:
                yield self.room("apart", arm, fleet, "poisson")

    def learning(self) -> Iterator[BenchRow]:
        """Of what is learnt while serving."""
        yield from learning_rows(
            self.published, self.speeds[AUTO], STREAM, self.options.replicas, LOADS, SETTING, self.run
        )

    def row(self, part: str, arm: str, fleet: Fleet, pattern: str, rate: float) -> BenchRow:
        """One fleet over one stream, which is the same for all arms and routers."""
        label = {**self.label(part, fleet, pattern), "rate": rate}
        return BenchRow(FLEET, "simulated", arm, label, self.served(arm, fleet, pattern, rate), "", self.run)

    def room(self, part: str, arm: str, fleet: Fleet, pattern: str) -> BenchRow:
        """The largest rate, per replica, at which ENOUGH of the requests are good, by halving; its other figures are of
        the run at that rate. A recording has one rate, so that its figures are of it."""
        label = self.label(part, fleet, pattern)
        if self.options.arrivals:
            return BenchRow(FLEET, "simulated", arm, label, self.served(arm, fleet, pattern, 0.0), "", self.run)
        low, high, found = 0.0, MOST, {}
        while high - low > NEAR:
            middle = (low + high) / 2
            tried = self.served(arm, fleet, pattern, middle)
            if (tried["good_share"] or 0.0) >= ENOUGH:
                low, found = middle, tried
            else:
                high = middle
        error = "" if found else f"not even {high:.2g} requests a second and replica are served within the limits"
        metrics = {**found, "room_per_s": low} if found else {}
        return BenchRow(FLEET, "simulated", arm, label, metrics, error, self.run)

    def label(self, part: str, fleet: Fleet, pattern: str) -> dict[str, str | int | float | None]:
        """A row's setting but its rate."""
        return {
            **SETTING,
            **{"part": part, "replicas": fleet.replicas, "router": fleet.router, "readers": fleet.readers},
            "arrivals": self.options.arrivals.stem if self.options.arrivals else pattern,
            **{"ttft_limit_s": self.options.ttft, "tpot_limit_ms": 1e3 * self.options.tpot},
            "seconds": self.seconds(fleet.replicas),
        }

    def seconds(self, replicas: int) -> float:
        """That are simulated."""
        return float(self.options.seconds or (FEWER if replicas >= LARGE else SECONDS))

    def served(self, arm: str, fleet: Fleet, pattern: str, rate: float) -> dict[str, float | None]:
        """The figures of one run. C2TError for an arm whose speed is not known."""
        if arm not in self.speeds:
            raise C2TError(f"rows do not say how fast {arm} is from one request on; simulate it first")
        seconds = self.seconds(fleet.replicas)
        requests = self.requests(fleet.replicas, pattern, rate, seconds)
        if self.options.arrivals:
            seconds = requests[-1].at
        served = Run(fleet, self.speeds[arm], self.reading, self.options.seed).serve(requests)
        return figures(served, seconds, fleet.replicas, Limits(self.options.ttft, self.options.tpot))

    def requests(self, replicas: int, pattern: str, rate: float, seconds: float) -> list[Request]:
        """The stream of a fleet: the same for the same seed, whatever was simulated before."""
        work = replace(Work(), groups=GROUPS * replicas)
        rng = np.random.default_rng([self.options.seed, replicas, zlib.crc32(pattern.encode())])
        if self.options.arrivals:
            return recorded(self.options.arrivals, work, self.options.copies, rng)
        return work.draw(PATTERNS[pattern](rate * replicas, seconds, rng), rng)


def speeds_shown(speeds: Mapping[str, Speeds]) -> str:
    """Tokens per second of one request by load, so that a reader sees what the fleet is made of."""
    slots = next(iter(speeds.values())).slots
    shown = {arm: speeds[arm] for arm in ARMS if arm in speeds}
    return "; ".join(f"{arm} {each.rates[1]:.0f} and {each.rates[slots]:.0f}" for arm, each in shown.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--replicas", type=int, nargs="+", default=SIZES, help="of the tables by size")
    parser.add_argument("--fleet", type=int, default=64, help="replicas of the parts planning and apart (default: 64)")
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second and replica, part routers")
    parser.add_argument("--seconds", type=float, help=f"simulated (default: {SECONDS:g}, of large fleets {FEWER:g})")
    parser.add_argument("--ttft", type=float, default=Limits.ttft, help="seconds that a good request may wait")
    parser.add_argument("--tpot", type=float, default=Limits.tpot, help="seconds per token of a good request, at most")
    parser.add_argument("--arrivals", type=Path, help="a recording: CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--copies", type=int, default=1, help="of the recording, at the same time (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/simulate/fleet.jsonl"), help="rows are appended here")
    return parser


def main(argv: list[str]) -> int:
    """Simulate, print a line a row, append rows; status 2 with one line if an input does not hold."""
    options, console = _parser().parse_args(argv), Console()
    try:
        simulation = Simulation(options)
        console.print(f"tokens/s of a request, alone and among most: {speeds_shown(simulation.speeds)}", soft_wrap=True)
        for row in simulation.rows(options.parts):
            append_rows(options.out, [row])
            console.print(_line(row), markup=False, highlight=False, soft_wrap=True)
    except C2TError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 2
    return 0


def _line(row: BenchRow) -> str:
    shown: dict[str, Any] = {name: value for name, value in row.setting.items() if name not in SETTING}
    shown |= {name: value if value is None else round(value, 3) for name, value in row.metrics.items()}
    return f"{row.scenario}, {row.arm}: {row.error or ', '.join(f'{name} {value}' for name, value in shown.items())}"
