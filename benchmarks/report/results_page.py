"""docs/results.md and the pages that it leads to, from rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.report.kernel_rows import is_kernel_row, kernel_table, part_of
from benchmarks.report.rows import CURVE, MEASURED_CPU, MEMORY, BenchRow
from benchmarks.report.sections import picture, section, source_block
from benchmarks.report.simulated_page import simulated_sections
from benchmarks.report.tables import Block, latest_blocks, listing, losers, measured_blocks

FIRST, SERVED, SIMULATED, KERNELS = "results.md", "results-served.md", "results-simulated.md", "results-kernels.md"
READING = """## How to read the tables

Written by `make report` from the rows in `benchmarks/results`; do not edit. Every arm that ran is in its table, those
that lose too. Rows are of one of four kinds:

- **functional**: servers on a CPU, SGLang's on its CPU engine. Outputs and counts are real, times say nothing about a
  GPU.
- **simulated**: recorded drafts of the toy pair, or of the real one where a draft is `smollm2/eagle3`, with costs from
  data sheets. It compares arms and predicts no server: see [benchmarking](benchmarking.md#throughput-simulated) for
  what is assumed.
- **measured**: on a GPU.
- **measured-cpu**: a real model served on a CPU, measured on that CPU, which each table describes.
  [What it says of a GPU](benchmarking.md#from-a-cpu-to-a-gpu).

The recorded drafts are too large to keep here: [training](training.md) has the commands that record them again, from
fixed seeds. The tables of [classifiers](classifiers.md) are generated too, from evaluations beside the rows. Those of
the [pair](pair.md) are copied from what the commands beside them print; nothing on these pages is.

The accept length counts the bonus token, as both engines print it. [The papers' tables](reproduction.md) on the pair
have a page of their own; their tau leaves it out.
"""
STEP = """## One step

[One recorded decoding step](results/step.html) under four policies: what each of them verifies, cuts and misses, with
the numbers that the classifier sees. `c2t show` draws any other.
"""
# the anchors are those of sections that this page had
REST = f"""## Where the other tables are

| page | what is there |
| --- | --- |
| <a id="served"></a>[served]({SERVED}) | every arm of every server that ran: on this CPU, on a GPU, on both engines |
| <a id="throughput-by-batch-size-simulated"></a>[simulated]({SIMULATED}) | throughput by batch size, C2T's table 3 |
| <a id="kernels"></a>[kernels]({KERNELS}) | times of single operations on a GPU, beside their rivals' |
| [classifiers](classifiers.md) | what each classifier and each rule without one verifies |
| [the papers' tables](reproduction.md) | theirs beside ours |
| [several servers](distributed.md) | routers and replicas |
"""
READ_FIRST = f"Generated from rows; do not edit. [How to read the tables]({FIRST}#how-to-read-the-tables).\n"
SERVED_HEAD = f"""# Served

{READ_FIRST}
Lines of text in place of figures are arms that did not run, and why.
"""
SIMULATED_HEAD = f"# Simulated\n\n{READ_FIRST}"
FUNCTIONAL = "A functional check on a CPU: arms run, outputs and counts are right, times say nothing about a GPU."
KERNELS_HEAD = f"""# Times of kernels

{READ_FIRST}
By part of `benchmarks/gpu/command.py`. Every provider is checked against the reference before it is timed.
[What they compute](kernels.md).
"""
NO_GPU = "## On a GPU\n\nNo row yet: nothing here has been measured on a GPU.\n"


def pages(
    demo: str, rows: Sequence[BenchRow], vllm: str = "", claims: str = "", first_screen: str = ""
) -> Mapping[str, str]:
    """All pages by file name.

    demo: SGLang's table with its source line, empty without rows of the demo. vllm: vLLM's. claims: the section on what
    the papers claim. first_screen: what the first page begins with.
    """
    blocks, kernels = shown_blocks(rows)
    served = [found for block, found in blocks.items() if ("kind", "simulated") not in block]
    pictures = ["measured.png"] * bool(measured_blocks(rows))
    pictures += ["measured-cpu.png"] * bool(measured_blocks(rows, MEASURED_CPU))
    without = [] if any(row.kind == "measured" for row in rows) else [NO_GPU]
    of_kernels = [
        source_block(f"## {found[0].scenario}, {found[0].kind}", kernel_table(found), "", found)
        for found in kernels.values()
    ]
    parts = {
        FIRST: _first(demo, vllm, claims, first_screen),
        SERVED: [*(section(SERVED_HEAD, list(map(_served, served)), *pictures) or [SERVED_HEAD]), *without],
        SIMULATED: [SIMULATED_HEAD, *simulated_sections(blocks)],
        KERNELS: [KERNELS_HEAD, *of_kernels],
    }
    return {name: "\n".join(each) for name, each in parts.items()}


def _first(demo: str, vllm: str, claims: str, first_screen: str) -> list[str]:
    parts = ["# Results\n", *filter(None, [first_screen, claims]), READING]
    for title, table_of_demo, shown in (
        ("The demo, functional", demo, "tau-gamma.png"),
        ("The demo on vLLM, functional", vllm, "tau-gamma-vllm.png"),
    ):
        if table_of_demo:
            parts.append(f"## {title}\n\n{table_of_demo}\n\n{picture(shown)}\n")
    return [*parts, STEP, REST]


def shown_blocks(rows: Sequence[BenchRow]) -> tuple[dict[Block, list[BenchRow]], dict[Block, list[BenchRow]]]:
    """What the pages show of arms and of kernels: the newest row of each arm and setting."""
    arms = latest_blocks(row for row in rows if not is_kernel_row(row))
    return arms, latest_blocks([row for row in rows if is_kernel_row(row)], part_of)


def _served(rows: Sequence[BenchRow]) -> str:
    setting = ", ".join(f"{name} {value}" for name, value in rows[0].setting.items() if name != "concurrency")
    remark = FUNCTIONAL if rows[0].kind == "functional" else losers(rows)
    if rows[0].kind == MEASURED_CPU:
        remark = "\n\n".join(filter(None, [processor(rows), remark]))
    return source_block(f"## {rows[0].scenario}, {rows[0].kind}: {setting}", listing(rows), remark, rows)


def processor(rows: Sequence[BenchRow]) -> str:
    """What the newest of measured-cpu rows with figures says of its processor; empty without such a row."""
    newest = max((row for row in rows if not row.error), key=lambda row: row.run["utc"], default=None)
    if newest is None:
        return ""
    curve = ", ".join(f"{newest.metrics[f'target_ms_{tokens}']:.0f} ms for {tokens}" for tokens in CURVE)
    return f"Memory: {newest.metrics[MEMORY]:.1f} GB/s. A pass of the target by its tokens: {curve}."
