"""Contexts of 512 to 4,096 tokens and answers of 16 to 512 on the real pair, arriving by themselves: rows of kind
measured-cpu.

    python -m benchmarks.serving.long_mixed                                   Poisson arrivals, ten minutes of each arm
    python -m benchmarks.serving.long_mixed --arrivals day                    a day in ten minutes
    python -m benchmarks.serving.long_mixed --seconds 60 --contexts 512 1024 --outputs 16 64 \\
        --arms "static 2" "SGLang adaptive" C2T                               some ten minutes in all

Arms are those of the demo. All servers are up, one of them runs; each gets the same requests at the same times. Nothing
else may run on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.pairs.smollm2.commands import write_pair
from benchmarks.report.rows import MEASURED_CPU, BenchRow
from benchmarks.serving.answers import Ask, Pass
from benchmarks.serving.arms import Arm
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.host import Host, measure_host, threads_of
from benchmarks.serving.interleaved import Interleaved
from benchmarks.serving.measuring import BUSY, one_line
from benchmarks.serving.open_loop import Mix, figures
from benchmarks.serving.real_command import measure_once, real_parser, real_setting, starting
from benchmarks.serving.real_demo import CONTESTANTS, PLAIN
from benchmarks.serving.real_pair import chat_prompts, real_runner, real_speculation, use_threads
from benchmarks.serving.scenarios import WHOLE
from benchmarks.simulation.fleet.arrivals import PATTERNS
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

SCENARIO = "long-mixed"
# tokens that a request may have beside its context and its answer: a draft's, and what a template adds
SPARE = 64
# a server plans by what it has measured at these loads; the others get the first alone
WARM_UP = (1, 2, 4)
WARM_UP_TOKENS = 24


def _parser() -> argparse.ArgumentParser:
    parser = real_parser("long_mixed", __doc__, "only these arms of the demo; plain is always there", "build/long")
    parser.add_argument("--contexts", type=int, nargs=2, default=list(Mix.contexts), help="least and most tokens")
    parser.add_argument("--outputs", type=int, nargs=2, default=list(Mix.outputs), help="least and most tokens")
    parser.add_argument("--arrivals", choices=PATTERNS, default=Mix.arrivals)
    parser.add_argument("--rate", type=float, default=Mix.rate, help="requests per second, on average")
    parser.add_argument("--seconds", type=float, default=Mix.seconds, help="in which requests arrive, for each arm")
    parser.add_argument("--tpot-ms", type=float, default=150.0, help="that an answer that counts as good keeps")
    parser.add_argument("--slots", type=int, default=8, help="requests at once, at most")
    parser.add_argument("--tokens", type=int, default=20_480, help="of all requests at once, at most")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def contestants(engine: str, names: list[str] | None) -> Mapping[str, Arm]:
    """The demo's arms by name, plain decoding first. C2TError for one that there is not."""
    every = CONTESTANTS[engine]
    if unknown := set(names or ()) - set(every):
        raise C2TError(f"{engine} has the arms {', '.join(every)}; got {', '.join(sorted(unknown))}")
    return {name: arm for name, arm in every.items() if not names or name in (PLAIN, *names)}


def measured(contest: Interleaved, arms: Mapping[str, Arm], asks: list[Ask]) -> tuple[dict[str, Pass], dict[str, str]]:
    """A pass of every arm that has a server, and why others have none. C2TError if plain decoding fails."""
    found: dict[str, Pass] = {}
    failed: dict[str, str] = {}
    for name in arms:
        try:
            with contest.turn(name) as client:
                for load in WARM_UP if arms[name].planned else WARM_UP[:1]:
                    client.run([asks[place % len(asks)].prompt for place in range(load)], load, lambda: None)
                print(f"{name}: {len(asks)} requests arrive in {asks[-1].at:.0f} s", flush=True)
                served = client.arrive(asks)
                if served.client_share > BUSY:
                    raise C2TError("the client was measured and not the server: run it on a faster machine")
                found[name] = served
        except C2TError as error:
            if name == PLAIN:
                raise
            failed[name] = one_line(error)
    return found, failed


def rows_of(
    arms: Mapping[str, Arm],
    found: Mapping[str, Pass],
    failed: Mapping[str, str],
    setting: Mapping[str, str | int | float | None],
    host: Host,
    run: Mapping[str, object],
) -> list[BenchRow]:
    """A row an arm: its figures, or why it has none."""
    limit_s = float(setting["tpot_limit_ms"] or 0.0) / 1e3
    rows = []
    for name, arm in arms.items():
        metrics: dict[str, float | None] = {}
        if name in found:
            plain = None if name == PLAIN else found[PLAIN]
            metrics = {**figures(found[name], plain, limit_s, name == PLAIN or arm.counted), **host.metrics}
        rows.append(BenchRow(SCENARIO, MEASURED_CPU, name, setting, metrics, failed.get(name, ""), run))
    return rows


def _measure(options: argparse.Namespace, out: Path) -> list[BenchRow]:
    mix = Mix(
        tuple(options.contexts), tuple(options.outputs), options.arrivals, options.rate, options.seconds, options.seed
    )
    engine, arms = ENGINES[options.engine], contestants(options.engine, options.arms)
    threads = threads_of(options)
    use_threads(threads)
    pair = write_pair(options.work)
    prompts = chat_prompts(pair / "target", "development")
    asks = mix.asks(prompts.ids)
    host = measure_host(pair / "target", threads)
    context = mix.contexts[1] + mix.outputs[1] + SPARE
    runner = real_runner(engine, pair, out, options.slots, context=context, tokens=max(options.tokens, context))
    on = real_speculation(engine, pair, out, None, 0.3)
    setting: dict[str, str | int | float | None] = {
        **real_setting(engine, prompts, WHOLE, host),
        "temperature": 0.0,
        "slots": options.slots,
        "tpot_limit_ms": options.tpot_ms,
        **mix.setting,
    }
    with Interleaved(lambda url: engine.client(url, WARM_UP_TOKENS)) as contest:
        refused = contest.start_all(arms, starting(runner, arms, on), PLAIN)
        started = {name: arm for name, arm in arms.items() if name not in refused}
        found, failed = measured(contest, started, asks)
    return rows_of(arms, found, {**refused, **failed}, setting, host, RunRecord.capture(seed=options.seed).to_json())


def main(argv: list[str]) -> int:
    """Measure, append rows, print the table; status 1 if an arm failed, 2 if nothing could be run."""
    options = _parser().parse_args(argv)
    out: Path = options.out or Path(f"build/long-{options.engine}")
    return measure_once("long_mixed", out, lambda into: _measure(options, into))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
