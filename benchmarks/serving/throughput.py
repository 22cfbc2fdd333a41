"""Every arm of a scenario against a server, one server after the other: speed, latency and what speculation did.

    python -m benchmarks.serving.throughput --scenario pair-held-out --cpu
    python -m benchmarks.serving.throughput --scenario c2t-v2-table3 --target LLAMA --draft EAGLE --base eagle \\
        --data gsm8k=test.jsonl --data alpaca=alpaca_data.json --data cnn-dailymail=stories/
    python -m benchmarks.serving.throughput --scenario gsm8k --data gsm8k=test.jsonl --url http://HOST:PORT \\
        --target LLAMA
    python -m benchmarks.serving.throughput --scenario pair-held-out --cpu --engine vllm

On a CPU the rows are functional: they show that arms run and what they verify, never how fast they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.pairs.toy import pair_dir
from benchmarks.report.rows import BenchRow, append_rows
from benchmarks.report.tables import listing
from benchmarks.serving.arms import ARMS, STATIC, Arm, Speculation, chosen
from benchmarks.serving.datasets import Hub, source_of
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.measuring import Condition, Outcome, measure, metrics_of, one_line
from benchmarks.serving.options import (
    OWN_CLASSIFIER,
    add_arm_options,
    dtype_of,
    kind_of,
    models,
    runner,
    speculation,
)
from benchmarks.serving.scenarios import OWN_END, SCENARIOS, WHOLE, Scenario, prompts_of
from benchmarks.serving.server import Runner
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

PIPE_WIDTH = 200
# what a row says of a server that this run did not start
AS_SERVED = "as served"


@dataclass(frozen=True)
class Contest:
    """Arms against each other, each on a server of its own.

    url: of a server that runs already, which is then the only arm; empty to start one for each arm. on: what fills in
    arms, where the scenario does not say it. repeats: passes of each condition.
    """

    runner: Runner
    on: Speculation
    url: str
    repeats: int

    def run(
        self, scenario: Scenario, arm: Arm, prompts: Sequence[Sequence[int]], console: Console
    ) -> dict[Condition, Outcome]:
        """Outcomes of an arm; a server that does not start leaves its reason at each condition."""
        conditions = [each for each in scenario.conditions if arm.concurrency in (None, each[0])]
        if not conditions:
            return {}
        console.print(f"{scenario.name}: {arm.name}", markup=False)
        try:
            with (
                self._served(scenario, arm) as url,
                self.runner.engine.client(url, scenario.max_tokens, scenario.whole) as client,
            ):
                return {
                    each: measure(
                        client,
                        prompts[: scenario.requests(each[0])],
                        each,
                        self.repeats,
                        warm_ups=arm.warm_ups,
                        few=scenario.few,
                    )
                    for each in conditions
                }
        except C2TError as error:
            console.print(f"{arm.name}: {one_line(error)}", markup=False)
            return {each: Outcome(error=one_line(error)) for each in conditions}

    def filled(self, scenario: Scenario) -> Speculation:
        """What fills in arms: the scenario's d_max and beta where it states them."""
        beta = self.on.beta if scenario.beta is None else scenario.beta
        return replace(self.on, d_max=scenario.d_max or self.on.d_max, beta=beta)

    @contextmanager
    def _served(self, scenario: Scenario, arm: Arm) -> Iterator[str]:
        """The address of a server of this arm."""
        if self.url:
            yield self.url
            return
        engine = self.runner.engine
        flags = engine.room(max(scenario.concurrencies))
        # where a set is sent more than once, the later copies would find the earlier ones' prefixes
        flags += engine.no_prefixes() if scenario.repeat > 1 else []
        started = replace(self.runner, flags=(*flags, *self.runner.flags))
        with started.server(f"{scenario.name}-{arm.name}", arm, self.filled(scenario)) as server:
            yield server.base_url


def rows_of(
    scenario: Scenario,
    found: Mapping[str, Mapping[Condition, Outcome]],
    setting: Mapping[str, Any],
    run: Mapping[str, Any],
    cpu: bool,
) -> Iterator[BenchRow]:
    """One row an arm and condition, with ratios to the plain and static arms of the same run. cpu: of the servers."""
    kind = kind_of(run, cpu)
    statics = [f"static {length}" for length in STATIC]
    uncounted = {each.name for each in ARMS.values() if not each.counted}
    for arm, outcomes in found.items():
        for condition, outcome in outcomes.items():
            concurrency, temperature = condition
            plain = found.get("plain", {}).get(condition)
            rivals = [found[name][condition] for name in statics if name in found and condition in found[name]]
            # an SGLang before 0.5.23 does not tell this client what it verified
            counted = arm == "plain" or (arm not in uncounted and outcome.verifies)
            metrics = {} if outcome.error else metrics_of(outcome, plain, rivals, temperature == 0.0, counted)
            label = {**setting, "concurrency": concurrency, "temperature": temperature}
            yield BenchRow(scenario.name, kind, arm, label, metrics, outcome.error, run)


def _data(text: str) -> tuple[str, Path | Hub]:
    name, equals, source = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"NAME=PATH or NAME=hub:ID expected, got {text!r}")
    try:
        return name, source_of(source)
    except C2TError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.throughput",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--scenario", choices=SCENARIOS, required=True, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument(
        "--data", type=_data, action="append", default=[], metavar="NAME=PATH", help="a data set, or NAME=hub:ID"
    )
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these arms")
    parser.add_argument("--concurrency", type=int, nargs="+", help="in place of the scenario's")
    parser.add_argument("--temperature", type=float, nargs="+", help="in place of the scenario's")
    parser.add_argument("--prompts", type=int, help="prompts of each data set, in place of the scenario's")
    parser.add_argument("--max-tokens", type=int, help="output tokens of a request, in place of the scenario's")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each condition")
    parser.add_argument("--url", default="", help="a running server: it is the only arm, under the name of --arms")
    add_arm_options(parser, Path("build/throughput"))
    return parser


def main(argv: list[str]) -> int:
    """Run one scenario, print its table, append its rows; status 1 if an arm failed, 2 if nothing could be run."""
    options = _parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    try:
        scenario, arms = _chosen(options)
        contest = _contest(options)
        prompts = prompts_of(scenario, dict(options.data), contest.runner.target, pair_dir())
    except C2TError as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 2
    run = RunRecord.capture(seed=0).to_json()
    setting = _setting(options, scenario, contest)
    found: dict[str, dict[Condition, Outcome]] = {}
    try:
        for arm in arms:
            found[arm.name] = contest.run(scenario, arm, prompts, console)
    finally:
        # a run that is interrupted keeps the arms that it finished
        rows = list(rows_of(scenario, found, setting, run, options.cpu))
        append_rows(options.out / "rows.jsonl", rows)
    for temperature in scenario.temperatures:
        console.print(f"temperature {temperature:g}")
        console.print(Markdown(listing([row for row in rows if row.setting["temperature"] == temperature])))
    return 1 if any(row.error for row in rows) else 0


def _setting(options: argparse.Namespace, scenario: Scenario, contest: Contest) -> dict[str, Any]:
    """What tells this run's rows from those of others, arm and condition aside."""
    on = contest.filled(scenario)
    servers = {
        "dtype": dtype_of(options),
        "base": options.base,
        "draft": on.draft.name,
        "classifier": options.classifier.name if options.classifier else OWN_CLASSIFIER,
        "d_max": on.d_max,
        "beta": on.beta,
        "threshold": options.threshold,
    }
    found = {
        "engine": options.engine,
        "target": contest.runner.target.name,
        "requests": scenario.prompts,
        "max_tokens": scenario.max_tokens,
        "ends": WHOLE if scenario.whole else OWN_END,
        **(dict.fromkeys(servers, AS_SERVED) if options.url else servers),
    }
    if contest.runner.flags:
        found["server_args"] = " ".join(contest.runner.flags)
    return found


def _chosen(options: argparse.Namespace) -> tuple[Scenario, list[Arm]]:
    scenario = SCENARIOS[options.scenario]
    scenario = replace(
        scenario,
        concurrencies=tuple(options.concurrency or scenario.concurrencies),
        temperatures=scenario.temperatures if options.temperature is None else tuple(options.temperature),
        each=options.prompts or scenario.each,
        per_slot=0 if options.prompts else scenario.per_slot,
        max_tokens=options.max_tokens or scenario.max_tokens,
    )
    if options.url:
        return scenario, [Arm((options.arms or ["the server as it runs"])[0], {})]
    return scenario, chosen(options.engine, tuple(options.arms) if options.arms else scenario.arms)


def _contest(options: argparse.Namespace) -> Contest:
    engine = ENGINES[options.engine]
    found = models(options, engine)
    return Contest(runner(options, engine, found.target), speculation(options, found), options.url, options.repeats)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
