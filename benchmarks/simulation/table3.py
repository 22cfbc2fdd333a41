"""The paper's table 3 (C2T v2 5.4), simulated: 240 requests through SGLang with chains of at most 4.

What the paper does not say is assumed: prompt lengths are typical of the three data sets, and the outputs' lengths are
log-normal with the mean and spread that fit the three baseline seconds of the 8B column best. The two other rows of
that column, and all of the 70B one, are then predictions.

Prefill is counted, of the draft too where there is one, as one pass over all prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report.rows import BenchRow
from benchmarks.report.simulated_page import how_far, table3_cell
from benchmarks.report.tables import AUTO
from benchmarks.simulation.recorded import Replay, play, requests_of
from benchmarks.simulation.replays import BETAS, chain_arms
from benchmarks.simulation.roofline import GPUS, MODELS, Machine, Model, eagle1_head
from benchmarks.simulation.setting import Setting

SCENARIO = "c2t-v2-table3"
BATCHES = (64, 128, 256)
LONGEST_CHAIN = 4
ARMS = ("plain", "static 4", *(f"C2T beta {beta:g}" for beta in BETAS), AUTO)
REQUESTS_EACH = 80
# Tokens of a prompt, about: CNN/DailyMail articles, GSM8K questions, Alpaca instructions.
PROMPTS = {"CNN/DailyMail": 900, "GSM8K": 110, "Alpaca": 40}
LONGEST_OUTPUT = 1024
MEANS, SPREADS = range(80, 201, 20), (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
COLUMNS = {
    "1 x L40": ("llama-3.1-8b", Machine(GPUS["L40"])),
    "4 x A100": ("llama-3-70b", Machine(GPUS["A100"], tp=4)),
}
# seconds of the baseline; ratios of EAGLE and of C2T
PRINTED = {
    "1 x L40": {"plain": (38.05, 34.90, 32.17), "EAGLE": (1.13, 1.01, 0.98), "C2T": (1.19, 1.12, 1.10)},
    "4 x A100": {"plain": (126.22, 99.93, 98.84), "EAGLE": (1.40, 1.23, 1.22), "C2T": (1.49, 1.39, 1.37)},
}


def output_lengths(mean: float, spread: float) -> list[int]:
    """Lengths of the 240 outputs: the quantiles of a log-normal distribution, in an order that is always the same."""
    count = REQUESTS_EACH * len(PROMPTS)
    normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    raw = np.exp(spread * np.array(normal))
    lengths = np.clip(raw / raw.mean() * mean, 1, LONGEST_OUTPUT).astype(int)
    np.random.default_rng(0).shuffle(lengths)
    return [int(length) for length in lengths]


def plain_seconds(lengths: Sequence[int], machine: Machine, target: str, batch: int) -> float:
    """Seconds of plain decoding, prefill included: each place of the batch takes the next request when it is free."""
    model = MODELS[target]
    waiting, running = list(reversed(lengths)), list[int]()
    seconds, host = prefill_seconds(machine, model), machine.assumed.host
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        steps = min(running)
        step_s = machine.pass_s(model, len(running)) + machine.cache_s(model, len(running)) + host
        seconds += steps * step_s
        running = [left - steps for left in running if left > steps]
    return seconds


def prefill_seconds(machine: Machine, model: Model) -> float:
    """Seconds of reading all prompts, at the speed of a very long pass. Only a prompt's last token has logits."""
    return machine.pass_s(model, REQUESTS_EACH * sum(PROMPTS.values()), REQUESTS_EACH * len(PROMPTS))


def fitted_lengths() -> tuple[float, float]:
    """Mean and spread of the outputs' lengths that fit the baseline of the 8B column best, over MEANS and SPREADS."""
    target, machine = COLUMNS["1 x L40"]
    wanted = PRINTED["1 x L40"]["plain"]

    def error(mean: float, spread: float) -> float:
        lengths = output_lengths(mean, spread)
        found = [plain_seconds(lengths, machine, target, batch) for batch in BATCHES]
        return fmean(math.log(a / b) ** 2 for a, b in zip(found, wanted, strict=True))

    return min(((float(mean), spread) for mean in MEANS for spread in SPREADS), key=lambda pair: error(*pair))


def table3(replay: Replay, run: Mapping[str, Any]) -> Iterator[BenchRow]:
    """All arms of both columns at the three batch sizes."""
    mean, spread = fitted_lengths()
    rows, request = requests_of(replay.traces, output_lengths(mean, spread))
    for column, (target, machine) in COLUMNS.items():
        model = MODELS[target]
        head = eagle1_head(model)
        prefill = prefill_seconds(machine, model)
        drafting_prefill = prefill + prefill_seconds(machine, head)
        for place, batch in enumerate(BATCHES):
            setting = Setting(machine, model, head, batch, LONGEST_CHAIN)
            label: dict[str, str | int | float | None]
            label = {"column": column, "target": target, "requests_in_flight": batch, "draft": replay.kind}
            label |= {"mean_output": mean, "spread": spread}
            plain = 0.0
            for entrant in chain_arms(replay, setting):
                if entrant.name not in ARMS:
                    continue
                served = play(entrant, replay.chains(), rows, request, setting)
                seconds = served.seconds + (prefill if entrant.name == "plain" else drafting_prefill)
                plain = plain or seconds
                metrics = {"seconds": seconds, "ratio_to_plain": plain / seconds, "tau": served.tau}
                metrics |= {"gamma_per_step": served.gamma, **printed(column, entrant.name, place)}
                yield BenchRow(SCENARIO, "simulated", entrant.name, label, metrics, "", run)


def printed(column: str, arm: str, place: int) -> dict[str, float]:
    """What the paper prints for this arm; beta is not given there, so every C2T arm stands beside the same figure."""
    figures = PRINTED[column]
    if arm == "plain":
        return {"paper_seconds": figures["plain"][place], "paper_ratio": 1.0}
    return {"paper_ratio": figures["C2T" if arm.startswith("C2T") else "EAGLE"][place]}


def show_table(rows: Sequence[BenchRow], console: Console) -> None:
    """Ratios beside the paper's, and the seconds of plain decoding that the outputs' lengths were fitted to."""
    table = Table(title=f"table 3 of C2T v2, simulated with the {rows[0].setting['draft']} draft's acceptance")
    for name in ("GPUs", "arm", *(f"batch {batch}" for batch in BATCHES)):
        table.add_column(name)
    for column in COLUMNS:
        for arm in ARMS:
            line = [row for row in rows if (row.setting["column"], row.arm) == (column, arm)]
            table.add_row(column, arm, *map(table3_cell, line))
    console.print(table)
    for column in COLUMNS:
        console.print(f"{column}: {how_far([row for row in rows if row.setting['column'] == column])}")
