"""Every arm of a scenario against a server, one server after the other: speed, latency and what speculation did.

    python -m benchmarks.throughput --scenario pair-held-out --cpu
    python -m benchmarks.throughput --scenario c2t-v2-table3 --target LLAMA --draft EAGLE --base eagle \\
        --data gsm8k=test.jsonl --data alpaca=alpaca_data.json --data cnn-dailymail=stories/
    python -m benchmarks.throughput --scenario gsm8k --data gsm8k=test.jsonl --url http://HOST:PORT --target LLAMA

On a CPU the rows are functional: they show that arms run and what they verify, never how fast they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.arms import ENGINES, STATIC, Arm, chosen, threshold_beta, write_threshold_classifier
from benchmarks.measuring import Condition, Outcome, measure, metrics_of, one_line
from benchmarks.record import BenchRow, append_rows
from benchmarks.scenarios import SCENARIOS, Scenario, prompts_of
from benchmarks.server import Server
from benchmarks.serving import Client
from benchmarks.tables import listing
from c2t_plugin.errors import C2TError
from c2t_plugin.pair import pair_dir
from c2t_plugin.provenance import RunRecord

BASES = ("eagle3", "eagle", "standalone")
PAIR_DRAFTS = {"eagle3": "eagle3", "eagle": "eagle1", "standalone": "draft"}
TOP_M = 1000
WARM_UP = 2
PIPE_WIDTH = 200


@dataclass(frozen=True)
class Bench:
    """Everything that a run needs besides the scenario.

    url: of a server that runs already, which is then the only arm; empty to start one for each arm.
    values: what flags of arms are filled in with. server_args: flags for every server.
    """

    target: Path
    values: Mapping[str, object]
    server_args: tuple[str, ...]
    out: Path
    cpu: bool
    url: str
    repeats: int
    start_timeout: float

    def run(
        self, scenario: Scenario, arms: Sequence[Arm], prompts: Sequence[Sequence[int]], console: Console
    ) -> dict[str, dict[Condition, Outcome]]:
        """Outcomes by arm and condition; a server that does not start leaves its reason at each condition."""
        return {arm.name: self._arm(scenario, arm, prompts, console) for arm in arms}

    def _arm(
        self, scenario: Scenario, arm: Arm, prompts: Sequence[Sequence[int]], console: Console
    ) -> dict[Condition, Outcome]:
        conditions = [
            (concurrency, temperature)
            for temperature in scenario.temperatures
            for concurrency in scenario.concurrencies
            if arm.concurrency in (None, concurrency)
        ]
        console.print(f"{scenario.name}: {arm.name}", markup=False)
        try:
            with self._server(scenario, arm) as server:
                url = self.url or server.base_url  # type: ignore[union-attr]
                with Client(url, scenario.max_tokens, scenario.whole) as client:
                    for prompt in prompts[:WARM_UP]:
                        client.complete(prompt)
                    return {each: measure(client, prompts, each, self.repeats) for each in conditions}
        except C2TError as error:
            console.print(f"{arm.name}: {one_line(error)}", markup=False)
            return {each: Outcome(error=one_line(error)) for each in conditions}

    def _server(self, scenario: Scenario, arm: Arm) -> Server | nullcontext[None]:
        if self.url:
            return nullcontext()
        d_max = scenario.d_max or int(str(self.values["d_max"]))
        flags = arm.command({**self.values, "d_max": d_max, "width": d_max + 1})
        log = self.out / f"{scenario.name}-{arm.name}.log".replace(" ", "-")
        return Server(self.target, [*self.server_args, *flags], log, self.cpu, self.start_timeout)


def rows_of(
    scenario: Scenario,
    found: Mapping[str, Mapping[Condition, Outcome]],
    setting: Mapping[str, Any],
    run: Mapping[str, Any],
) -> Iterator[BenchRow]:
    """One row an arm and condition, with ratios to the plain and static arms of the same run."""
    kind = kind_of(run)
    statics = [f"static {length}" for length in STATIC]
    for arm, outcomes in found.items():
        for condition, outcome in outcomes.items():
            concurrency, temperature = condition
            plain = found.get("plain", {}).get(condition)
            rivals = [found[name][condition] for name in statics if name in found and condition in found[name]]
            metrics = {} if outcome.error else metrics_of(outcome, plain, rivals, temperature == 0.0)
            label = {**setting, "concurrency": concurrency, "temperature": temperature}
            yield BenchRow(scenario.name, kind, arm, label, metrics, outcome.error, run)


def _data(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"NAME=PATH expected, got {text!r}")
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--scenario", choices=SCENARIOS, required=True, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("--target", type=Path, help="directory of the target (default: the shipped pair's)")
    parser.add_argument("--draft", type=Path, help="directory of the draft (default: the shipped pair's)")
    parser.add_argument("--base", choices=BASES, default=BASES[0], help="what kind of draft it is")
    parser.add_argument("--data", type=_data, action="append", default=[], metavar="NAME=PATH", help="a data set")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these arms")
    parser.add_argument("--concurrency", type=int, nargs="+", help="in place of the scenario's")
    parser.add_argument("--temperature", type=float, nargs="+", help="in place of the scenario's")
    parser.add_argument("--prompts", type=int, help="prompts of each data set, in place of the scenario's")
    parser.add_argument("--max-tokens", type=int, help="output tokens of a request, in place of the scenario's")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each condition")
    parser.add_argument("--d-max", type=int, default=6, help="C2T's longest chain, where the scenario has none")
    parser.add_argument("--beta", type=float, default=0.5, help="of the arm C2T")
    parser.add_argument("--threshold", type=float, default=0.3, help="of the arm threshold on P")
    parser.add_argument("--url", default="", help="a running server: it is the only arm, under the name of --arms")
    parser.add_argument("--cpu", action="store_true", help="start servers on the CPU engine")
    parser.add_argument("--server-args", default="", help="further flags of every server, one string")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must answer")
    parser.add_argument("--out", type=Path, default=Path("build/throughput"), help="directory of rows and logs")
    return parser


def main(argv: list[str]) -> int:
    """Run one scenario, print its table, append its rows; status 1 if an arm failed, 2 if nothing could be run."""
    options = _parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    try:
        scenario, arms, prompts = _workload(options)
        bench = _bench(options)
    except C2TError as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 2
    run = RunRecord.capture(seed=0).to_json()
    setting = {
        "engine": options.engine,
        "target": bench.target.name,
        "base": options.base,
        "requests": len(prompts),
        "max_tokens": scenario.max_tokens,
        "d_max": scenario.d_max or options.d_max,
        "beta": options.beta,
        "threshold": options.threshold,
    }
    rows = list(rows_of(scenario, bench.run(scenario, arms, prompts, console), setting, run))
    append_rows(options.out / "rows.jsonl", rows)
    for temperature in scenario.temperatures:
        console.print(f"temperature {temperature:g}")
        console.print(Markdown(listing([row for row in rows if row.setting["temperature"] == temperature])))
    return 1 if any(row.error for row in rows) else 0


def _workload(options: argparse.Namespace) -> tuple[Scenario, list[Arm], list[list[int]]]:
    scenario = SCENARIOS[options.scenario]
    scenario = replace(
        scenario,
        concurrencies=tuple(options.concurrency or scenario.concurrencies),
        temperatures=scenario.temperatures if options.temperature is None else tuple(options.temperature),
        each=options.prompts or scenario.each,
        max_tokens=options.max_tokens or scenario.max_tokens,
    )
    if options.url:
        arms = [Arm((options.arms or ["the server as it runs"])[0], ())]
    else:
        arms = chosen(options.engine, tuple(options.arms) if options.arms else scenario.arms)
    target = options.target or pair_dir() / "target"
    return scenario, arms, prompts_of(scenario, dict(options.data), target, pair_dir())


def arm_values(options: argparse.Namespace) -> dict[str, object]:
    """What flags of arms are filled in with; writes the classifier of the arm threshold on P into --out."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    threshold = out / "threshold-on-p.safetensors"
    write_threshold_classifier(threshold, TOP_M)
    return {
        "draft": options.draft or pair_dir() / PAIR_DRAFTS[options.base],
        "base": options.base.upper(),
        "d_max": options.d_max,
        "beta": options.beta,
        "threshold_classifier": threshold,
        "threshold": threshold_beta(options.threshold),
    }


def kind_of(run: Mapping[str, Any]) -> str:
    """Of rows that this process writes: functional without a GPU."""
    return "functional" if "no GPU" in run["machine"] else "measured"


def _bench(options: argparse.Namespace) -> Bench:
    return Bench(
        target=options.target or pair_dir() / "target",
        values=arm_values(options),
        server_args=tuple(options.server_args.split()),
        out=options.out,
        cpu=options.cpu,
        url=options.url,
        repeats=options.repeats,
        start_timeout=options.start_timeout,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
