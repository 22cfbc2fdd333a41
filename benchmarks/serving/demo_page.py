"""What the demo prints: its table, and where an answer differs from plain decoding's, by how little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile

from rich.table import Table

from benchmarks.report.results_page import processor
from benchmarks.report.rows import BenchRow
from benchmarks.report.tables import ACCEPT_LEN, VERIFIED, figure
from benchmarks.serving.client import Client, Prompts
from benchmarks.serving.host import Host
from benchmarks.serving.interleaved import same_as_plain
from benchmarks.serving.measuring import Outcome

BACKENDS = {"sglang": "SGLang's CPU engine", "vllm": "vLLM's CPU backend"}
COLUMNS = ("at once", "arm", "output tokens/s", "ratio to plain", ACCEPT_LEN, VERIFIED, "identical to plain")
# Of two logits, in float32: below it the order of additions, and so the size of a batch, decides which is larger.
TIE = 0.01
# each costs a request
EXPLAINED = 12
STREAMED = "\nOne answer as it came; the tokens that the draft contributed are set off:\n"

Found = Mapping[int, Mapping[str, Outcome]]


def table(rows: Sequence[BenchRow], found: Found, engine: str, host: Host) -> Table:
    """The demo's rows as the terminal shows them, with all passes' slowest and fastest speed, and 95% of the ratio."""
    title = f"SmolLM2-135M on {BACKENDS[engine]}: measured, on this {host.processor}, threads: {host.threads}"
    shown = Table(*COLUMNS, title=title, caption=processor(rows))
    before = None
    for row in rows:
        load, metrics = int(row.setting["concurrency"] or 0), row.metrics
        if before not in (None, load):
            shown.add_section()
        before = load
        low, high = metrics["output_tokens_per_s_low"], metrics["output_tokens_per_s_high"]
        same, of = same_as_plain(found[load], row.arm)
        shown.add_row(
            str(load),
            row.arm,
            f"{metrics['output_tokens_per_s']:.1f} ({low:.1f} to {high:.1f})",
            "" if row.arm == "plain" else figure(metrics, "ratio_to_plain"),
            figure(metrics, "tau"),
            "" if row.arm == "plain" else figure(metrics, "gamma_per_token"),
            "" if row.arm == "plain" else f"{same} of {of}",
        )
    return shown


def tie_lines(found: Found, asked: Callable[[int, int], Prompts], plain: Client) -> tuple[list[str], list[str]]:
    """Answers that differ from plain decoding's: lines on those where a tie decided, and on those where none did.

    asked: prompts of a concurrency's pass of that number. plain: its server says how far apart its two best logits were
    where an answer first differs. Only EXPLAINED answers are looked into.
    """
    ties: list[str] = []
    wrong: list[str] = []
    differing = [(load, name, *each) for load, arms in found.items() for name in arms for each in _differ(arms, name)]
    for load, name, number, answer, tokens in differing[:EXPLAINED]:
        gap = plain.top_two_gap([*asked(load, number)[answer], *tokens])
        place = len(tokens) + 1
        line = (
            f"{name}, {load} at once: an answer differs from token {place} on, where plain decoding's two best logits"
        )
        (ties if gap < TIE else wrong).append(f"{line} are {gap:.5f} apart: {'a tie' if gap < TIE else 'not a tie'}")
    if len(differing) > EXPLAINED:
        wrong.append(f"{len(differing)} answers differ, of which {EXPLAINED} were looked into")
    return ties, wrong


def _differ(arms: Mapping[str, Outcome], name: str) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Of every answer that differs: its pass, its place there, and the tokens before the first other one."""
    pairs = zip(arms[name].passes, arms["plain"].passes, strict=True)
    for number, (mine, plain) in enumerate(pairs):
        for answer, (one, other) in enumerate(zip(mine.completions, plain.completions, strict=True)):
            if one.token_ids != other.token_ids:
                same = takewhile(lambda pair: pair[0] == pair[1], zip(one.token_ids, other.token_ids, strict=True))
                yield number, answer, tuple(token for token, _ in same)
