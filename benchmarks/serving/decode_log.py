"""What the decode lines of SGLang's log say, of which `--decode-log-interval 1` writes one for every step."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from statistics import median

# A step that took so many times longer or shorter than the median stalled, or was over before its turn to be read.
ODD = 3.0
DECODING = ("decode_tokens_per_s", "decode_step_ms", "decode_steps", "graph_share")
_STEP = re.compile(
    r"Decode batch.*?#running-req: (\d+),(?:.*?accept len: ([\d.]+),)?"
    r".*? graph: (True|False), gen throughput \(token/s\): ([\d.]+)"
)


def logged(log: Path, start: int) -> str:
    """A server's log from byte `start` on."""
    with log.open("rb") as handle:
        handle.seek(start)
        return handle.read().decode(errors="replace")


def largest_batch(text: str) -> int | None:
    """The most requests that ran at a time, by the decode lines of a log."""
    return max((int(number) for number in re.findall(r"Decode batch.*?#running-req: (\d+)", text)), default=None)


def decoding(text: str) -> dict[str, float | None]:
    """Metrics of the decode steps of a log's largest batch, with a line for every step; None without such steps.

    A line's speed is that of the time since the decode line before it, so what ran in between must have been no
    prefill. Tokens and seconds are added up apart: the median of the lines' speeds would be that of few tokens a step.
    """
    full, steps = largest_batch(text), []
    for before, line in itertools.pairwise(re.findall(r"(?:Prefill|Decode) batch.*", text)):
        found = _STEP.search(line)
        if before.startswith("Decode") and found and int(found[1]) == full and float(found[4]):
            tokens = full * float(found[2] or 1)
            steps.append((tokens, tokens / float(found[4]), found[3] == "True"))
    if not steps:
        return dict.fromkeys(DECODING)
    usual = median(seconds for _, seconds, _ in steps)
    kept = [(tokens, seconds) for tokens, seconds, _ in steps if usual / ODD < seconds < usual * ODD]
    tokens, seconds = map(sum, zip(*kept, strict=True))
    graphs = sum(graph for *_, graph in steps) / len(steps)
    return dict(zip(DECODING, (tokens / seconds, 1e3 * seconds / len(kept), len(kept), graphs), strict=True))
