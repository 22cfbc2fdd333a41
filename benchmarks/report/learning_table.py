"""The tables of docs/learning.md on what is learnt without training, from rows of `benchmarks.simulation.learning` and
of `censoring` and `drifting` beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.report.command import ROOT
from benchmarks.report.page import write_page
from benchmarks.report.rows import BenchRow
from benchmarks.report.sections import source_line
from benchmarks.report.tables import filled, latest_blocks, load_of, table
from benchmarks.serving import learning as served_runs
from benchmarks.serving import learning_time as taken_runs
from benchmarks.simulation import censoring as cuts
from benchmarks.simulation import drifting as turns
from benchmarks.simulation.learning import LOADS, OFFLINE, RIVAL, SCENARIO

PAGE, KINDS = ROOT / "docs/learning.md", ("simulated", "functional")
STATES, AFTER = (0, 500, 2_000, 10_000, 50_000), 10_000
# after a turn
TURNED = (0, 100, *STATES[1:])
# the goals: better than vLLM's estimator from so many states on, and the share that a poisoned tenth may cost
FROM, POISON_GOAL = 500, 0.02


Figures = Mapping[tuple[str, int, int], Mapping[str, float | None]]


def learning(rows: Sequence[BenchRow]) -> str:
    """A line a stream and start: nats by states, then figures after AFTER, of a poisoned stream beside them; and what
    of the goals was met."""
    return f"{_table(rows)}\n\n{_nats(rows)}\n{_poison(rows)}"


def _table(rows: Sequence[BenchRow]) -> str:
    head = ["stream", "starts from", *(f"{states:,}" for states in STATES)]
    head += [f"ratio of verified tokens after {AFTER:,}", "a tenth poisoned"]
    head += [f"tokens/s at {load}" for load in LOADS] + ["a tenth poisoned, at worst"]
    return table(head, (line for block in _streams(rows) for line in _lines(block)))


def censoring(rows: Sequence[BenchRow]) -> str:
    """A line a stream, start and way to verify: nats by states, and draft tokens verified of a draft in the end."""
    head = ["stream", "starts from", "verified", *(f"{states:,}" for states in STATES), "verified of a draft"]
    lines = []
    for block in _streams(rows, cuts.SCENARIO):
        at = {(row.arm, row.setting["verified"], row.setting["states"]): row.metrics for row in block}
        # the ways of a start beside each other
        for arm in dict.fromkeys(row.arm for row in block):
            # older rows lack some
            for verified in (way for way in cuts.VERIFIED if (arm, way, STATES[0]) in at):
                nats = (_short(at[arm, verified, states]["nll"]) for states in STATES)
                tokens = at[arm, verified, STATES[-1]]["verified_per_draft"] or 0.0
                name = str(block[0].setting["stream"]), arm.removeprefix("from "), verified
                lines.append([*name, *nats, f"{tokens:.2f}"])
    return table(head, lines)


def drifting(rows: Sequence[BenchRow]) -> str:
    """A line a stream and start: nats by states after the turn, and those of who never saw what came before."""
    head = ["stream", "starts from", *(f"{states:,}" for states in TURNED), f"never turned, {STATES[-1]:,}"]
    steady = {str(block[0].setting["stream"]): _figures(block) for block in _streams(rows)}
    lines = []
    for block in _streams(rows, turns.SCENARIO):
        stream, at = str(block[0].setting["stream"]), _figures(block)
        for arm in dict.fromkeys(row.arm for row in block):
            nats = (_short(at[arm, states, 0]["nll"]) for states in TURNED)
            known = steady.get(stream, {}).get((arm, STATES[-1], 0), {})
            lines.append([stream, arm.removeprefix("from "), *nats, _short(known.get("nll"))])
    return table(head, lines)


def served(rows: Sequence[BenchRow]) -> str:
    """A line a server and mark: what it foretold, by its classifier alone and by what it had learnt; and how often a
    network that it had trained came in force."""
    head = [
        "pair",
        "server",
        "draft tokens verified",
        "nats, classifier",
        "nats, learnt",
        "AUC, classifier",
        "AUC, learnt",
        "networks in force",
    ]
    names = [f"{name}_{who}" for name in ("nll", "auc") for who in ("prior", "learnt")]
    found = _newest_served(rows)
    return table(
        head,
        (
            [_pair(row), row.arm, f"{row.setting['verified']:,}", *(_short(row.metrics[n]) for n in names), _swaps(row)]
            for row in found
        ),
    )


def taken(rows: Sequence[BenchRow]) -> str:
    """A line a way to learn: milliseconds of a step by the requests in it, and of what threads do beside it."""
    found = _newest_taken(rows)
    loads = list(dict.fromkeys(load_of(row) for row in found))
    head = ["learns", *(f"ms a step of {load}" for load in loads), "of one in 100 more than"]
    aside = {"fit_ms": "a fit, ms", "minibatch_ms": "a minibatch, ms"}
    lines = []
    for arm in dict.fromkeys(row.arm for row in found):
        mine = {load_of(row): row.metrics for row in found if row.arm == arm}
        worst = max(metrics["learning_p99_ms"] or 0.0 for metrics in mine.values())
        means = (f"{mine[load]['learning_ms'] or 0.0:.2f}" if load in mine else "" for load in loads)
        most = ([each for metrics in mine.values() if (each := metrics.get(name)) is not None] for name in aside)
        lines.append([arm, *means, f"{worst:.1f}", *(f"{max(each):.2f}" if each else "" for each in most)])
    return table([*head, *aside.values()], lines)


def _newest_taken(rows: Sequence[BenchRow]) -> list[BenchRow]:
    blocks = latest_blocks(row for row in rows if row.scenario == taken_runs.SCENARIO)
    return [row for block in blocks.values() for row in block]


def _swaps(row: BenchRow) -> str:
    found = row.metrics.get("networks_in_force")
    return "" if found is None else f"{found:.0f}"


def _newest_served(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Of each pair's newest run on each engine, without servers that failed."""
    found = [row for row in rows if row.scenario == served_runs.SCENARIO and not row.error]
    newest: dict[str, str] = {}
    for row in found:
        newest[_pair(row)] = max(newest.get(_pair(row), ""), row.run["utc"])
    return [row for row in found if row.run["utc"] == newest[_pair(row)]]


def _pair(row: BenchRow) -> str:
    # older rows are all of one
    name = str(row.setting.get("stream", "toy, EAGLE-3"))
    return f"{name}, vLLM" if row.setting.get("engine") == "vllm" else name


def _streams(rows: Sequence[BenchRow], scenario: str = SCENARIO) -> list[list[BenchRow]]:
    """Newest rows by stream, those of poisoned streams too."""
    mine = [row for row in rows if row.scenario == scenario]
    return list(latest_blocks(mine, lambda row: (("stream", row.setting["stream"]),)).values())


def _figures(block: Sequence[BenchRow]) -> Figures:
    """By arm, states and whether the stream was poisoned."""
    return {(row.arm, int(row.setting["states"] or 0), int(row.setting["poisoned"] or 0)): row.metrics for row in block}


def _share(mine: Mapping[str, float | None], of: Mapping[str, float | None], load: int) -> float | None:
    found, best = (each.get(f"tokens_per_s_{load}") for each in (mine, of))
    return found / best if found and best else None


def _worst(at: Figures, arm: str) -> tuple[float, int] | None:
    """What a poisoned stream leaves of the arm's own tokens/s after AFTER states where it costs most, and that load."""
    shares = [(_share(at[arm, AFTER, 1], at[arm, AFTER, 0], load), load) for load in LOADS]
    return min(((share, load) for share, load in shares if share is not None), default=None)


def _lines(block: Sequence[BenchRow]) -> list[list[str]]:
    at = _figures(block)
    # a planner with the offline fit as it was at first
    goal = at[f"from {OFFLINE}", 0, 0]

    def share(arm: str, load: int) -> str:
        found = _share(at[arm, AFTER, 0], goal, load)
        return "" if found is None else f"{found:.3f}"

    def worst(arm: str) -> str:
        found = _worst(at, arm)
        return "" if found is None else f"{found[0]:.3f}"

    return [
        [
            str(block[0].setting["stream"]),
            arm.removeprefix("from "),
            *(_short(at[arm, states, 0]["nll"]) for states in STATES),
            *(_short(at[arm, AFTER, poisoned]["gamma_ratio"]) for poisoned in (0, 1)),
            *(share(arm, load) for load in LOADS),
            worst(arm),
        ]
        for arm in dict.fromkeys(row.arm for row in block)
    ]


def _nats(rows: Sequence[BenchRow]) -> str:
    """How often what is learnt foretells better than vLLM's estimator, and where not."""
    count, behind = 0, []
    for block in _streams(rows):
        at = _figures(block)
        for arm, states, poisoned in at:
            if arm == RIVAL or poisoned or states < FROM:
                continue
            count += 1
            worse = (at[arm, states, 0]["nll"] or 0.0) - (at[RIVAL, states, 0]["nll"] or 0.0)
            if worse >= 0.0:
                start = arm.removeprefix("from ")
                behind.append(f"{block[0].setting['stream']} from {start} after {states:,}, by {worse:.4f} nats")
    better = f"{count - len(behind)} of {count} figures are better than vLLM's estimator's on the same stream"
    line = f"- From {FROM} states on, {better}"
    return f"{line}. Not: {'; '.join(behind)}." if behind else f"{line}."


def _poison(rows: Sequence[BenchRow]) -> str:
    """Where a poisoned tenth costs more than the goal."""
    found = []
    for block in _streams(rows):
        at = _figures(block)
        for arm in dict.fromkeys(row.arm for row in block):
            worst = _worst(at, arm)
            if worst is not None and worst[0] < 1.0 - POISON_GOAL:
                found.append((worst, f"{block[0].setting['stream']} from {arm.removeprefix('from ')}"))
    line = f"- A poisoned tenth is to cost at most {POISON_GOAL:.0%} of the same arm's tokens/s after {AFTER:,} states"
    missed = "; ".join(f"{name} {1.0 - share:.1%} at {load}" for (share, load), name in sorted(found))
    return f"{line}. Missed: {missed}." if found else f"{line}, and does."


def _short(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3f}".removeprefix("0")


def sources(blocks: Sequence[Sequence[BenchRow]]) -> str:
    """The runs that these rows come from."""
    runs = {row.run["utc"]: row.run for block in blocks for row in block}
    return "\n\n".join(source_line(run) for run in runs.values())


def render(page: str, rows: Sequence[BenchRow]) -> str:
    """The page with its tables and their sources made anew. C2TError without their markers."""
    made = {
        SCENARIO: (learning, _streams(rows)),
        cuts.SCENARIO: (censoring, _streams(rows, cuts.SCENARIO)),
        turns.SCENARIO: (drifting, _streams(rows, turns.SCENARIO)),
        served_runs.SCENARIO: (served, [_newest_served(rows)]),
        taken_runs.SCENARIO: (taken, [_newest_taken(rows)]),
    }
    for name, (text_of, blocks) in made.items():
        for marker, text in ((name, text_of(rows)), (f"{name}-sources", sources(blocks))):
            page = filled(page, marker, f"\n\n{text}\n\n", PAGE.name)
    return page


def main(argv: list[str]) -> int:
    """Write the tables of docs/learning.md anew."""
    return write_page("learning_table", argv, PAGE, render, KINDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
