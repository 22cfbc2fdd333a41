"""Cells of the matrix: an arm at a concurrency and a temperature, measured beside plain decoding in the same rounds."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.rows import MEASURED_CPU, BenchRow, append_rows, read_rows
from benchmarks.serving.arms import ARMS, Arm, Speculation
from benchmarks.serving.host import Host
from benchmarks.serving.interleaved import ArmError, Interleaved, paired_ratio, same_as_plain, turned
from benchmarks.serving.measuring import Condition, Outcome, checked, metrics_of, warm_up
from benchmarks.serving.real_command import drawing_client
from benchmarks.serving.real_pair import PARTS, ChatPrompts
from benchmarks.serving.server import Runner

SCENARIO = "matrix"
PLAIN = "plain"

Cell = tuple[str, Condition]


@dataclass(frozen=True)
class Matrix:
    """What all cells have in common.

    max_tokens: of an answer, in the mean; each has a length of its own. passes: rounds of a cell. slots: prompts of a
    pass for each request at once. least: prompts of a pass at least. setting: of every row, load and temperature aside.
    run: a RunRecord's JSON. host: the processor that was measured, None on a GPU. together: servers start at the same
    time. after: called when a condition's cells are measured, with the servers that are up.
    """

    runner: Runner
    on: Speculation
    prompts: ChatPrompts
    host: Host | None
    max_tokens: int
    passes: int
    slots: int
    least: int
    setting: Mapping[str, Any]
    run: Mapping[str, Any]
    scenario: str = SCENARIO
    kind: str = MEASURED_CPU
    together: bool = False
    after: Callable[[Interleaved, Condition], None] = lambda contest, condition: None

    def row(self, cell: Cell, metrics: Mapping[str, float | None], error: str = "") -> BenchRow:
        """A cell's row."""
        arm, (concurrency, temperature) = cell
        label = {**self.setting, "concurrency": concurrency, "temperature": temperature}
        return BenchRow(self.scenario, self.kind, arm, label, metrics, error, self.run)

    def is_done(self, cell: Cell, done: set[str]) -> bool:
        """Whether a row of the cell, with figures or with an error, is among `done`, which are keys."""
        return _key(self.row(cell, {}, "none")) in done

    def measured(self, arms: Sequence[Arm], todo: Sequence[Cell]) -> Iterator[list[BenchRow]]:
        """Rows of cells of a group of arms, a condition at a time. C2TError if plain decoding fails.

        Ends early after a server has died: all servers of the group start again for the cells that are left.
        """
        with Interleaved(drawing_client(self.runner.engine, self.max_tokens)) as contest:
            by_name = {arm.name: arm for arm in arms}
            start = contest.start_together if self.together else contest.start_all
            failed = start(by_name, lambda name: self.runner.server(name, by_name[name], self.on), PLAIN)
            yield [self.row(cell, {}, failed[cell[0]]) for cell in todo if cell[0] in failed]
            for condition in dict.fromkeys(at for _, at in todo):
                wanted = [name for name, at in todo if at == condition and name not in failed]
                try:
                    if wanted:
                        yield list(self._rows(contest, wanted, condition))
                        self.after(contest, condition)
                except ArmError as error:
                    if error.name == PLAIN:
                        raise
                    yield [self.row((error.name, condition), {}, str(error))]
                    return

    def _rows(self, contest: Interleaved, wanted: Sequence[str], condition: Condition) -> Iterator[BenchRow]:
        """Rows of some arms at a condition, each paired with plain decoding's passes."""
        concurrency, _ = condition
        names = list(dict.fromkeys([PLAIN, *wanted]))
        size = max(self.least, self.slots * concurrency)
        outcomes = {name: Outcome() for name in names}
        for name in names:
            with contest.turn(name) as client:
                batch = self.prompts.batch(self.passes, size)
                outcomes[name].warm_up = warm_up(client, batch, condition, ARMS[name].warm_ups)
        spent = self._spent(contest, names)
        for number in range(self.passes):
            batch = self.prompts.batch(number, size)
            for name, one in contest.round(batch, condition, turned(names, number), lambda: None).items():
                outcomes[name].passes.append(one)
            speeds = ", ".join(f"{name} {outcomes[name].speeds[-1]:.1f}" for name in names)
            print(f"pass {number + 1}, output tokens a second: {speeds}", flush=True)
        after = self._spent(contest, names)
        for name in wanted:
            error = checked(outcomes[name], concurrency).error
            # releases of SGLang before 0.5.23 count nothing where this asks
            counted = name == PLAIN or (ARMS[name].counted and outcomes[name].verifies)
            own = {} if self.host is None else self.host.metrics
            seconds = sum(each.seconds for each in outcomes[name].passes)
            shares = classifier_shares(spent[name], after[name], seconds) | came(after[name]) if name in after else {}
            found = {} if error else {**figures(outcomes, name, condition, counted), **shares, **own}
            yield self.row((name, condition), found, error)

    def _spent(self, contest: Interleaved, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """What each server of C2T says of its seconds, where it computes on a processor that was measured."""
        found: dict[str, Mapping[str, Any]] = {}
        if self.host is None:
            return found
        for name in (each for each in names if ARMS[each].c2t):
            with contest.turn(name) as client:
                found[name] = client.c2t_state()
        return found


def add_sizes(parser: argparse.ArgumentParser, *, max_tokens: int, least: int) -> None:
    """Options of commands that measure cells: what passes are made of. max_tokens, least: defaults."""
    parser.add_argument("--part", choices=PARTS, default=PARTS[0], help="of the prompts; frozen: final tables only")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="output tokens of an answer, in the mean")
    parser.add_argument("--passes", type=int, default=3, help="rounds of each cell")
    parser.add_argument("--slots", type=int, default=2, help="prompts of a pass for each request at once")
    parser.add_argument("--least", type=int, default=least, help="prompts of a pass at least")


def sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Of a Matrix."""
    return {name: getattr(options, name) for name in ("max_tokens", "passes", "slots", "least")}


def figures(outcomes: Mapping[str, Outcome], name: str, condition: Condition, counted: bool) -> dict[str, float | None]:
    """An arm's metrics beside plain decoding's, paired by rounds. counted: its server says what it verified."""
    outcome, plain = outcomes[name], outcomes[PLAIN]
    found = metrics_of(outcome, None, (), False, counted)
    found |= {"output_tokens_per_s_low": min(outcome.speeds), "output_tokens_per_s_high": max(outcome.speeds)}
    if condition[1] == 0.0:
        same, of = same_as_plain(outcomes, name)
        found["identical_share"] = same / of
    return found | paired_ratio("ratio_to_plain", outcome.passes, plain.passes)


def classifier_shares(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """What statistics, confidences and cuts took: of the passes' seconds, and of drafting where the engine counts its
    seconds. before, after: `classifier_s` and perhaps `draft_s`, of all steps so far."""
    took = {name: after[name] - before[name] for name in ("classifier_s", "draft_s") if after.get(name) is not None}
    if "classifier_s" not in took:
        return {}
    found = {"classifier_share": took["classifier_s"] / seconds}
    if took.get("draft_s"):
        found["classifier_share_of_draft"] = took["classifier_s"] / took["draft_s"]
    return found


def came(state: Mapping[str, Any]) -> dict[str, float]:
    """What came of the newest steps for what a planner expected of them, and the share of its drafts that were not
    scored. state: of a server of C2T."""
    planner = state.get("planner") or {}
    found = {f"{what}_per_expected": value for what, value in (planner.get("came") or {}).items()}
    found["unscored_share"] = planner.get("unscored")
    return {name: value for name, value in found.items() if value is not None}


def group(names: Sequence[str], at_once: int) -> list[Arm]:
    """The first arms that are up together, `at_once` of them with plain decoding, which is one each time."""
    rest = [name for name in dict.fromkeys(names) if name != PLAIN]
    return [ARMS[name] for name in (PLAIN, *rest[: at_once - 1])]


def fill(matrix: Matrix, cells: Sequence[Cell], at_once: int, path: Path) -> int:
    """Measure the cells that `path` lacks, appending each one's row when it is done. Returns how many failed.

    C2TError if plain decoding fails.
    """
    done = {_key(row) for row in read_rows(path, BenchRow)}
    todo = [cell for cell in cells if not matrix.is_done(cell, done)]
    print(f"{len(todo)} cells to measure of {len(cells)}; rows: {path}", flush=True)
    start, measured, errors = time.monotonic(), 0, 0
    while todo:
        arms = group([name for name, _ in todo], at_once)
        own = [cell for cell in todo if cell[0] in {arm.name for arm in arms}]
        for rows in matrix.measured(arms, own):
            append_rows(path, rows)
            todo = [cell for cell in todo if cell not in {cell_of(row) for row in rows}]
            measured, errors = measured + len(rows), errors + sum(bool(row.error) for row in rows)
            if rows:
                minutes = (time.monotonic() - start) / 60 / measured * len(todo)
                _, (concurrency, temperature) = cell_of(rows[0])
                where = f"{concurrency} at once, temperature {temperature:g}: {', '.join(row.arm for row in rows)}"
                print(f"{where}; about {minutes:.0f} min left", flush=True)
    return errors


def cell_of(row: BenchRow) -> Cell:
    """Which cell a row is of."""
    return row.arm, (int(row.setting["concurrency"] or 0), float(row.setting["temperature"] or 0.0))


def _key(row: BenchRow) -> str:
    return json.dumps([row.arm, dict(row.setting)], sort_keys=True)
