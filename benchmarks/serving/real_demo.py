"""The demo's rounds: arms of the real pair by turns, at every concurrency, until its time is up."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.progress import Progress

from benchmarks.report.rows import MEASURED_CPU, BenchRow
from benchmarks.serving.arms import ARMS, Arm
from benchmarks.serving.cells import figures
from benchmarks.serving.engines import Engine
from benchmarks.serving.host import Host
from benchmarks.serving.interleaved import Interleaved, turned
from benchmarks.serving.measuring import Outcome, one_line
from benchmarks.serving.real_command import real_setting
from benchmarks.serving.real_pair import ChatPrompts, real_runner, real_speculation
from benchmarks.serving.scenarios import DRAWN
from c2t_plugin.errors import C2TError
from c2t_plugin.provenance import RunRecord

PLAIN = "plain"
AS_IT_COMES = "C2T"
BY_BATCH = "vLLM by batch size"
# Prompts of a pass for each request at once: with one, most of a pass is its end, where the slowest answer runs alone.
# Passes are short nevertheless: a machine drifts, and what is compared is of one round.
PROMPTS_A_PLACE = 2
LOADS = (1, 4, 16)

# By engine: names in the demo, where C2T is as it comes, and arms.
CONTESTANTS: Mapping[str, Mapping[str, Arm]] = {
    engine: {name: ARMS[name] for name in (PLAIN, "static 2", "static 4", own)} | {AS_IT_COMES: ARMS["C2T as it comes"]}
    for engine, own in (("sglang", "SGLang adaptive"), ("vllm", BY_BATCH))
}
# An engine's own that may refuse a CPU, which is then said and is no failure of the demo.
MAY_REFUSE = ("SGLang adaptive", BY_BATCH)


def prompts_of_a_pass(concurrency: int) -> int:
    """How many prompts a pass at this concurrency sends."""
    return PROMPTS_A_PLACE * concurrency


class RealDemo:
    """One run. found: outcomes by concurrency and arm. refused: lines on arms that did not start. missing: whether one
    of them had to."""

    def __init__(
        self,
        engine: Engine,
        pair: Path,
        out: Path,
        prompts: ChatPrompts,
        contest: Interleaved,
        progress: Progress,
        host: Host,
    ) -> None:
        self.engine, self.pair, self.out = engine, pair, out
        self.prompts, self.contest, self.progress, self.host = prompts, contest, progress, host
        self.record = RunRecord.capture(seed=0).to_json()
        self.found: dict[int, dict[str, Outcome]] = {}
        self.refused: list[str] = []
        self.missing = False
        self.begun = time.monotonic()
        self.task = progress.add_task("", total=None)

    def say(self, what: str) -> None:
        """Show what is being done: beside the bar on a terminal, as a line elsewhere."""
        self.progress.update(self.task, description=what)
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"{time.monotonic() - self.begun:4.0f} s  {what}", markup=False)

    def start(self, loads: Sequence[int], passes: int) -> None:
        """Start all servers, one after the other, and send each what does not count. C2TError if plain does not start.

        An arm that plans measures its steps in a pass of every concurrency first; the others get one request.
        """
        runner = real_runner(self.engine, self.pair, self.out, max(loads))
        on = real_speculation(self.engine, self.pair, self.out, None, 0.3)
        contestants = CONTESTANTS[self.engine.name]
        self.found = {load: {} for load in loads}
        answers = sum(map(prompts_of_a_pass, loads))
        self.progress.update(self.task, total=answers * len(contestants) * passes)
        for name, arm in contestants.items():
            self.say(f"{name}: starting")
            try:
                self.contest.start(name, runner.server(name, arm, on))
            except C2TError as error:
                self._refused(name, error)
                continue
            self._warm_up(name, loads if arm.planned else ())
            for load in loads:
                self.found[load][name] = Outcome(warm_up=answers if arm.planned else 1)

    def _refused(self, name: str, error: C2TError) -> None:
        if name == PLAIN:
            raise error
        self.refused.append(f"{name}: {one_line(error)}")
        self.missing = self.missing or name not in MAY_REFUSE

    def _warm_up(self, name: str, loads: Sequence[int]) -> None:
        with self.contest.turn(name) as client:
            client.complete(self.prompts.ids[-1])
            for load in loads:
                self.say(f"{name}: measures its own steps, {load} at once")
                # from the end, so that no round has the same prompts
                client.run(self.prompts.ids[-prompts_of_a_pass(load) :], load, lambda: None)

    def measure(self, loads: Sequence[int], passes: int, least: int, minutes: float) -> None:
        """Rounds of all arms at all concurrencies: `passes`, or as many as end in time, but `least`."""
        longest = 0.0
        for number in range(passes):
            start = time.monotonic()
            if number >= least and start - self.begun + longest > 60 * minutes:
                self.say(f"no time for round {number + 1}")
                return
            for load in loads:
                self._round(number, load, passes)
            longest = max(longest, time.monotonic() - start)

    def _round(self, number: int, load: int, passes: int) -> None:
        batch = self.asked(load, number)
        for name in turned(self.contest.names, number):
            self.say(f"round {number + 1} of {passes}, {load} at once: {name}")
            found = self.contest.round(batch, (load, 0.0), [name], lambda: self.progress.advance(self.task))
            self.found[load][name].passes.append(found[name])

    def asked(self, load: int, number: int) -> list[Sequence[int]]:
        """Prompts of a round at a concurrency."""
        return self.prompts.batch(number, prompts_of_a_pass(load))

    def rows(self, tokens: int) -> list[BenchRow]:
        """A row an arm and concurrency."""
        setting = {
            **real_setting(self.engine, self.prompts, DRAWN, self.host),
            "max_tokens": tokens,
            "temperature": 0.0,
        }
        found = []
        for load, outcomes in self.found.items():
            for name in outcomes:
                counted = CONTESTANTS[self.engine.name][name].counted
                metrics = {**figures(outcomes, name, (load, 0.0), counted), **self.host.metrics}
                found.append(
                    BenchRow("demo", MEASURED_CPU, name, {**setting, "concurrency": load}, metrics, "", self.record)
                )
        return found
