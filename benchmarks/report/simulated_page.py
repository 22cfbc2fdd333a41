"""docs/results-simulated.md from rows alone: what recorded drafts and a cost curve would bring."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report.rows import BenchRow
from benchmarks.report.sections import of_scenario, section, source_block
from benchmarks.report.tables import AUTO, SPEED, TREE_AUTO, Block, grid, listing, load_of, losers, table

TABLE3 = """## The paper's table 3, simulated

C2T v2 table 3: 240 requests, chains of at most 4. Ratio to plain decoding, the paper's in brackets; the lines of plain
decoding are seconds. The lengths of the outputs, which the paper does not give, are fitted to its three baseline
seconds on the L40; everything else follows from recorded acceptance and data sheets. The paper gives no beta.
"""
SIMULATED = """## Throughput by batch size, simulated

Output tokens/s, with the ratio to plain decoding in brackets, by the number of requests in flight.
"""
EVERY = """### C2T auto over the best of all other arms

Each figure is that of one setting and number of requests in flight. Every arm of the tables below is a rival: trees,
thresholds, fixed betas, and planners that go by other chances. Trees need an attention that takes masks.
"""
EITHER = """### C2T's planner, over chains or over trees, over the best of all other arms

The faster of two servers: one that comes as it is, and one with `--speculative-c2t-mode tree`. On a GPU no
server changes between them by itself yet.
"""
PROMISE = """### C2T auto over the best of plain decoding and every static chain

Each figure is that of one setting and number of requests in flight; below 1 something simpler is faster.
[Why](benchmarking.md#where-c2t-auto-cannot-win). The static chains are those of the tables below.
"""
SOURCES = """### What the planner goes by

Output tokens/s of the same planner with other chances of acceptance, over C2T's: P itself, as D-Cut takes it, vLLM's
estimator, and [a rule without training](benchmarking.md#a-rule-without-training).
"""
PLANNER = """## The planner's two constants, simulated

Output tokens/s of the planner over the best of plain decoding and all static lengths, by the number of requests in
flight.
"""
PRECISION = """## Precision of recorded statistics

What a fit loses by statistics that are stored in so many levels, over the float32 fit of the same seed: verified tokens
at the same accept length, with the widest interval of any seed, and the largest difference in AUC.
"""


def simulated_sections(blocks: Mapping[Block, list[BenchRow]]) -> list[str]:
    """All sections that have rows."""
    parts = section(TABLE3, [_table3(found) for found in of_scenario(blocks, "c2t-v2-table3", "simulated")])
    simulated = of_scenario(blocks, "simulated", "simulated")
    tables = [
        *_every(simulated),
        *_either(simulated),
        *_promise(simulated),
        *_sources(simulated),
        *map(_simulated, simulated),
    ]
    parts += section(SIMULATED, tables, "throughput.png", "planner.png")
    parts += section(PLANNER, [_planner(found) for found in of_scenario(blocks, "planner", "simulated")])
    precision = of_scenario(blocks, "traces-precision", "simulated")
    return parts + section(PRECISION, [source_block("", listing(found), "", found) for found in precision])


def _table3(rows: Sequence[BenchRow]) -> str:
    first = rows[0].setting
    title = f"### {first['target']} on {first['column']}, acceptance of the draft `{first['draft']}`"
    tail = f"{how_far(rows)} Outputs of {first['mean_output']:g} tokens on average, spread {first['spread']:g}."
    return source_block(title, grid(rows, table3_cell), tail, rows)


def table3_cell(row: BenchRow) -> str:
    """ratio (the paper's); for plain decoding seconds (the paper's)."""
    name, shown = ("seconds", "paper_seconds") if row.arm == "plain" else ("ratio_to_plain", "paper_ratio")
    return f"{row.metrics[name]:.2f} ({row.metrics[shown]:.2f})"


def how_far(rows: Sequence[BenchRow]) -> str:
    """How far one column of table 3 is from the paper's: plain decoding's seconds, EAGLE's ratios, and what C2T gains
    over EAGLE."""
    by_arm: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=load_of):
        by_arm.setdefault(row.arm, []).append(row)
    static = [(row.metrics["ratio_to_plain"] or 0.0, row.metrics["paper_ratio"] or 0.0) for row in by_arm["static 4"]]
    seconds = [(row.metrics["seconds"] or 0.0) / (row.metrics["paper_seconds"] or 1.0) for row in by_arm["plain"]]
    betas = [found for arm, found in by_arm.items() if arm.startswith("C2T beta")]
    planned = next(found for arm, found in by_arm.items() if arm.startswith("C2T auto"))
    gains, choices, printed = [], [], []
    for place, (ours, papers) in enumerate(static):
        gains.append(max(found[place].metrics["ratio_to_plain"] or 0.0 for found in betas) / ours)
        choices.append((planned[place].metrics["ratio_to_plain"] or 0.0) / ours)
        printed.append((planned[place].metrics["paper_ratio"] or 0.0) / papers)
    off = _list(f"{ours - papers:+.2f}" for ours, papers in static)
    plain, gain, choice, paper = (_list(f"{x:.2f}" for x in each) for each in (seconds, gains, choices, printed))
    return (
        f"Plain decoding takes {plain} of the paper's seconds; static 4 is {off} off the paper's EAGLE. "
        f"Over it the best fixed beta gains {gain}, the planner {choice}, the paper's C2T {paper}."
    )


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def title_of(setting: Mapping[str, Any]) -> str:
    """A simulated setting in words, the load aside. Of a measured curve only the file's name is known."""
    if setting["target"] is None:
        return f"the measured curve `{setting['gpu']}`, acceptance of `{setting['draft']}`"
    gpus = setting["gpu"] if setting["tp"] == 1 else f"{setting['tp']} x {setting['gpu']}"
    return f"{setting['target']} on {gpus}, {setting['context']} tokens of context, acceptance of `{setting['draft']}`"


def simulated_cell(row: BenchRow) -> str:
    """tokens/s (ratio to plain), without the ratio where plain decoding was not priced."""
    if row.metrics["ratio_to_plain"] is None:
        return f"{row.metrics['output_tokens_per_s']:,.0f}"
    return f"{row.metrics['output_tokens_per_s']:,.0f} ({row.metrics['ratio_to_plain']:.2f})"


def _simulated(rows: Sequence[BenchRow]) -> str:
    return source_block(f"### {title_of(rows[0].setting)}", grid(rows, simulated_cell), losers(rows), rows)


def _promise(blocks: Sequence[Sequence[BenchRow]]) -> list[str]:
    """What C2T auto reaches of the best simpler arm; nothing without it."""
    found = {}
    for rows in blocks:
        ratios = {load_of(row): over_simpler(row, rows) for row in rows if row.arm == AUTO}
        found[title_of(rows[0].setting)] = {load: ratio for load, ratio in ratios.items() if ratio is not None}
    return [f"{PROMISE}\n{_by_load(found)}\n"] if any(found.values()) else []


def _every(blocks: Sequence[Sequence[BenchRow]]) -> list[str]:
    """What C2T auto reaches of the best of all other arms, and which those are; nothing without it."""
    return _compared(blocks, EVERY, (AUTO,))


def _either(blocks: Sequence[Sequence[BenchRow]]) -> list[str]:
    """The same of the faster of both modes, at loads where both were simulated."""
    both = []
    for rows in blocks:
        chains, trees = ({load_of(row) for row in rows if row.arm == arm} for arm in (AUTO, TREE_AUTO))
        both.append([row for row in rows if load_of(row) in chains & trees])
    return _compared([rows for rows in both if rows], EITHER, (AUTO, TREE_AUTO))


def _compared(blocks: Sequence[Sequence[BenchRow]], text: str, arms: Sequence[str]) -> list[str]:
    """The fastest of these arms over the fastest other one, one line a setting, one column a load; nothing without."""
    found: dict[str, dict[int, float]] = {}
    faster = Counter[str]()
    for rows in blocks:
        ratios = found[title_of(rows[0].setting)] = {}
        for load in sorted({load_of(row) for row in rows}):
            here = [row for row in rows if load_of(row) == load]
            mine, rival = (fastest(row for row in here if (row.arm in arms) == ours) for ours in (True, False))
            if mine is not None and rival is not None:
                ratios[load] = ratio = (mine.metrics[SPEED] or 0.0) / (rival.metrics[SPEED] or 1.0)
                faster[rival.arm] += ratio < 1.0
    if not any(found.values()):
        return []
    named = "; ".join(f"{arm} in {times}" for arm, times in faster.most_common() if times)
    return [f"{text}\n{_by_load(found)}{f' Faster: {named}.' if named else ''}\n"]


def _by_load(found: Mapping[str, Mapping[int, float]]) -> str:
    """One line a setting, one column a load, and how often at least 1."""
    loads = sorted({load for ratios in found.values() for load in ratios})
    lines = [
        [name, *(f"{ratios[load]:.3f}" if load in ratios else "" for load in loads)] for name, ratios in found.items()
    ]
    every = [ratio for ratios in found.values() for ratio in ratios.values()]
    mean = math.exp(statistics.fmean(map(math.log, every)))
    count = f"At least 1 in {sum(ratio >= 1.0 for ratio in every)} of {len(every)}"
    figures = f"{count}; the least is {min(every):.3f}, the mean {mean:.3f}."
    return f"{table(['setting', *map(str, loads)], lines)}\n\n{figures}"


def _sources(blocks: Sequence[Sequence[BenchRow]]) -> list[str]:
    """Every other planned arm over C2T auto, one line a setting and arm, one column a load; nothing without any."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for rows in blocks:
        ours = {load_of(row): row.metrics.get(SPEED) for row in rows if row.arm == AUTO}
        for row in rows:
            speed, auto = row.metrics.get(SPEED), ours.get(load_of(row))
            if row.arm.startswith("planned") and speed and auto:
                found.setdefault((title_of(row.setting), row.arm), {})[load_of(row)] = speed / auto
    if not found:
        return []
    loads = sorted({load for ratios in found.values() for load in ratios})
    lines = [
        [name, arm, *(f"{ratios[load]:.3f}" if load in ratios else "" for load in loads)]
        for (name, arm), ratios in found.items()
    ]
    return [f"{SOURCES}\n{table(['setting', 'arm', *map(str, loads)], lines)}\n"]


def over_simpler(row: BenchRow, rows: Sequence[BenchRow]) -> float | None:
    """The row's speed over the best of plain decoding and all static chains at its load; None if nobody knows.

    A row's own `ratio_to_best` leaves the longest chain out, so it only bounds the ratio from above.
    """
    speed, known = row.metrics.get("output_tokens_per_s"), row.metrics.get("ratio_to_best")
    if speed is None or known is None:
        return known
    simpler = [each for each in rows if each.arm.split()[0] in ("plain", "static") and load_of(each) == load_of(row)]
    best = max((each.metrics.get("output_tokens_per_s") or 0.0 for each in simpler), default=0.0)
    return min(known, speed / best) if best else known


def fastest(rows: Iterable[BenchRow]) -> BenchRow | None:
    """None if no speed is known of any."""
    known = [row for row in rows if row.metrics.get(SPEED)]
    return max(known, key=lambda row: row.metrics[SPEED] or 0.0, default=None)


def _planner(rows: Sequence[BenchRow]) -> str:
    shown = grid(rows, lambda row: f"{row.metrics['ratio_to_best']:.3f}")
    return source_block(f"### {title_of(rows[0].setting)}", shown, "", rows)
