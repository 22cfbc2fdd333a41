"""A load that swings within a run: few requests at once, then many, so that no fixed setting is right. Rows of kind
measured-cpu.

    python -m benchmarks.serving.swinging                          SGLang: some eight minutes a round on two cores
    python -m benchmarks.serving.swinging --engine vllm --loads 1 8 2 --rounds 1

Arms are those of the demo. All servers are up and take turns; in its turn each gets every load once, in this order,
without a break for it to settle. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.pairs.smollm2.commands import write_pair
from benchmarks.report.rows import MEASURED_CPU, BenchRow
from benchmarks.serving.answers import Pass
from benchmarks.serving.arms import Arm
from benchmarks.serving.cells import figures
from benchmarks.serving.client import Client
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.host import measure_host, threads_of
from benchmarks.serving.interleaved import ArmError, Interleaved, turned
from benchmarks.serving.long_mixed import contestants
from benchmarks.serving.measuring import Outcome, checked, warm_up
from benchmarks.serving.real_command import drawing_client, measure_once, real_parser, real_setting, starting
from benchmarks.serving.real_demo import PLAIN
from benchmarks.serving.real_pair import ChatPrompts, chat_prompts, real_runner, real_speculation, use_threads
from benchmarks.serving.scenarios import DRAWN
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

SCENARIO = "swinging-load"
LOADS = (1, 32, 2, 16, 4, 8)


def _parser() -> argparse.ArgumentParser:
    parser = real_parser("swinging", __doc__, "only these arms of the demo; plain is always there", "build/swinging")
    parser.add_argument("--loads", type=int, nargs="+", default=list(LOADS), help="requests at once, in their order")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of an answer, in the mean")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2, help="prompts of a load for each request at once")
    parser.add_argument("--least", type=int, default=8, help="prompts of a load at least")
    return parser


class Swing:
    """What every arm is sent. loads: requests at once, in their order. slots, least: see the command's options."""

    def __init__(
        self, prompts: ChatPrompts, loads: Sequence[int], slots: int, least: int, temperature: float = 0.0
    ) -> None:
        self.prompts, self.loads, self.temperature = prompts, tuple(loads), temperature
        self._sizes = [max(least, slots * load) for load in loads]

    def run(self, client: Client, number: int) -> Pass:
        """Round `number` of one server, as one pass; prompts are the same for every server."""
        passes = []
        for place, (load, size) in enumerate(zip(self.loads, self._sizes, strict=True)):
            batch = self.prompts.batch(number * len(self.loads) + place, size)
            passes.append(client.run(batch, load, lambda: None, self.temperature))
        return joined(passes)

    def warm_up(self, client: Client, passes: int) -> int:
        """At every load, of prompts that no round has first. Returns how many requests that took."""
        return sum(
            warm_up(client, self.prompts.batch(-1, load), (load, self.temperature), passes)
            for load in sorted(set(self.loads))
        )


def joined(passes: Sequence[Pass]) -> Pass:
    """Passes of one server, one after the other, as one."""
    seconds = sum(each.seconds for each in passes)
    return Pass(
        tuple(answer for each in passes for answer in each.completions),
        seconds,
        max(each.most_at_once for each in passes),
        sum(each.mean_at_once * each.seconds for each in passes) / seconds,
        max(each.client_share for each in passes),
        max(each.client_waited for each in passes),
    )


def measured(contest: Interleaved, arms: Mapping[str, Arm], swing: Swing, rounds: int) -> dict[str, Outcome]:
    """Every arm's outcome, of one that failed its error. C2TError if plain decoding fails."""
    found = {name: Outcome() for name in arms}

    def attempt(name: str, number: int | None) -> None:
        try:
            with contest.turn(name) as client:
                if number is None:
                    found[name].warm_up = swing.warm_up(client, arms[name].warm_ups)
                else:
                    found[name].passes.append(swing.run(client, number))
        except ArmError as error:
            if name == PLAIN:
                raise
            found[name] = Outcome(error=str(error))

    for name in arms:
        attempt(name, None)
    for number in range(rounds):
        for name in turned([name for name in arms if not found[name].error], number):
            attempt(name, number)
        print(f"round {number + 1} of {rounds}", flush=True)
    return {name: each if each.error else checked(each, max(swing.loads)) for name, each in found.items()}


def _measure(options: argparse.Namespace, out: Path) -> list[BenchRow]:
    if min(*options.loads, options.rounds, options.slots, options.least) < 1:
        raise C2TError("--loads, --rounds, --slots and --least are 1 or more")
    engine, arms = ENGINES[options.engine], contestants(options.engine, options.arms)
    threads = threads_of(options)
    use_threads(threads)
    pair = write_pair(options.work)
    prompts = chat_prompts(pair / "target", "development")
    host = measure_host(pair / "target", threads)
    runner = real_runner(engine, pair, out, max(options.loads))
    on = real_speculation(engine, pair, out, None, 0.3)
    swing = Swing(prompts, options.loads, options.slots, options.least, options.temperature)
    setting = {
        **real_setting(engine, prompts, DRAWN, host),
        "d_max": on.d_max,
        "loads": ", ".join(map(str, options.loads)),
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    with Interleaved(drawing_client(engine, options.max_tokens)) as contest:
        refused = contest.start_all(arms, starting(runner, arms, on), PLAIN)
        started = {name: arm for name, arm in arms.items() if name not in refused}
        found = measured(contest, started, swing, options.rounds)
    found |= {name: Outcome(error=why) for name, why in refused.items()}
    run = RunRecord.capture(seed=0).to_json()
    rows = []
    for name, arm in arms.items():
        failed, metrics = found[name].error, {}
        if not failed:
            condition = max(options.loads), options.temperature
            metrics = {**figures(found, name, condition, name == PLAIN or arm.counted), **host.metrics}
        rows.append(BenchRow(SCENARIO, MEASURED_CPU, name, setting, metrics, failed, run))
    return rows


def main(argv: list[str]) -> int:
    """Measure, append rows, print the table; status 1 if an arm failed, 2 if nothing could be run."""
    options = _parser().parse_args(argv)
    out: Path = options.out or Path(f"build/swinging-{options.engine}")
    return measure_once("swinging", out, lambda into: _measure(options, into))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
