"""Rows of measurements: one JSON object a line, appended and never rewritten."""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from c2t_plugin.errors import C2TError
from c2t_plugin.output import write_whole

ARMS = ("plain", "static", "c2t")
BASES = ("none", "standalone", "eagle", "eagle3")
SCENARIOS = ("demo", "sweep")
# simulated: arithmetic on recorded drafts. functional: a CPU run, whose times say nothing. measured: on a GPU.
# measured-cpu: on a CPU with a model that is large enough for its times to say something, about that CPU.
MEASURED, MEASURED_CPU = "measured", "measured-cpu"
KINDS = ("simulated", "functional", MEASURED, MEASURED_CPU)
# file of a kind's rows in benchmarks/results; those that are too many are kept compressed
PACKED = ("simulated", MEASURED, MEASURED_CPU)
FILE_OF = {kind: f"{kind}.jsonl.gz" if kind in PACKED else f"{kind}.jsonl" for kind in KINDS}
# tokens of a forward pass that a processor's row has the target's milliseconds of
CURVE = (1, 2, 4, 8, 16, 32, 64, 128)
MEMORY = "memory_gb_per_s"
# what a measured-cpu row has to say of its processor: in its setting, and in metrics that are measured at the run
PROCESSOR = ("processor", "cores", "threads")
PROCESSOR_METRICS = (MEMORY, *(f"target_ms_{tokens}" for tokens in CURVE))
PROVENANCE = ("command", "git_sha", "dirty", "versions", "machine", "seed", "utc")


def check_run(run: Mapping[str, Any]) -> None:
    """C2TError unless this is RunRecord.to_json() of some run."""
    missing = set(PROVENANCE) - set(run)
    if missing:
        raise C2TError(f"a row needs its provenance; missing: {', '.join(sorted(missing))}")


class JsonRow:
    """A frozen dataclass that is one JSON object."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of asdict. Raises C2TError on unknown or missing keys."""
        known = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        if set(values) != known:
            raise C2TError(f"a row has the keys {sorted(known)}, got {sorted(values)}")
        return cls(**values)


@dataclass(frozen=True)
class BenchRow(JsonRow):
    """What one arm did under one setting.

    scenario: the workload's name. kind: one of KINDS. arm: what the table calls the contestant.
    setting: all else that tells this row from others, e.g. gpu, target, concurrency.
    metrics: numbers by name; empty if the arm could not run, and `error` says in one line why.
    run: RunRecord.to_json() of the process that measured or simulated.
    """

    scenario: str
    kind: str
    arm: str
    setting: Mapping[str, str | int | float | None]
    metrics: Mapping[str, float | None]
    error: str
    run: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise C2TError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.scenario or not self.arm:
            raise C2TError(f"a row needs a scenario and an arm, got {self}")
        if bool(self.metrics) == bool(self.error) or "\n" in self.error:
            raise C2TError(f"a row has metrics, or an error of one line; got {self}")
        wrong = [name for name, value in self.metrics.items() if value is not None and not math.isfinite(value)]
        if wrong:
            raise C2TError(f"metrics must be finite, or None where there is none: {', '.join(wrong)} of {self}")
        check_run(self.run)
        if self.kind == "measured" and "no GPU" in self.run["machine"]:
            raise C2TError(f"{self.run['machine']} measures no GPU: the row must be functional or {MEASURED_CPU}")
        if self.kind == MEASURED_CPU:
            self._check_processor()

    def _check_processor(self) -> None:
        missing = [name for name in PROCESSOR if not self.setting.get(name)]
        missing += [name for name in PROCESSOR_METRICS if self.metrics and not (self.metrics.get(name) or 0.0) > 0]
        if missing:
            raise C2TError(f"a {MEASURED_CPU} row says what it was measured on; missing: {', '.join(missing)}")


@dataclass(frozen=True)
class ServingRow(JsonRow):
    """One pass of all prompts through one server at one concurrency, greedy.

    scenario: demo is a row of the table, sweep a point of the picture.
    arm: plain decoding, the engine's own static chain, or C2T. base: the algorithm that drafts and verifies.
    d_max: longest draft chain, 0 for plain. beta: threshold of C2T, None for other arms.
    n_identical: prompts whose output tokens equal plain decoding's at concurrency 1.
    tau: accepted draft tokens per verify step, bonus token excluded; None for plain.
    gamma_per_token: draft tokens verified per output token, root excluded; 0 for plain.
    verify_steps: verify steps of all requests, summed; 0 for plain.
    output_tokens_per_s: output tokens of all requests over the wall-clock seconds of the pass.
    run: RunRecord.to_json() of the process that measured.
    """

    scenario: str
    arm: str
    base: str
    d_max: int
    beta: float | None
    concurrency: int
    n_prompts: int
    n_identical: int
    output_tokens: int
    tau: float | None
    gamma_per_token: float
    verify_steps: int
    output_tokens_per_s: float
    run: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        for name, known in (("scenario", SCENARIOS), ("arm", ARMS), ("base", BASES)):
            if getattr(self, name) not in known:
                raise C2TError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if (self.arm == "plain") != (self.base == "none") or (self.arm == "plain") != (self.tau is None):
            raise C2TError(f"a plain row has no base and no tau, every other has both; got {self}")
        if (self.arm == "c2t") != (self.beta is not None):
            raise C2TError(f"a c2t row has a beta and no other has one; got {self}")
        if not 0 <= self.n_identical <= self.n_prompts or self.n_prompts < 1 or self.concurrency < 1:
            raise C2TError(f"counts do not fit together: {self}")
        numbers = (self.gamma_per_token, self.output_tokens_per_s, self.tau or 0.0, self.beta or 0.0)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise C2TError(f"measured values must be finite and not negative: {self}")
        check_run(self.run)


Row = TypeVar("Row", BenchRow, ServingRow)


def append_rows(path: Path, rows: Iterable[BenchRow | ServingRow]) -> None:
    """Append rows to a JSONL file, which is made if it is missing and there are any. See `read_lines` for .gz."""
    append_lines(path, [json.dumps(asdict(row), sort_keys=True) + "\n" for row in rows])


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines to a JSONL file, which is made if it is missing and there are any."""
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as handle:
        handle.write(_packed(path, lines))


def read_lines(path: Path) -> list[str]:
    """Lines of a JSONL file, with their ends; none if it does not exist.

    A path that ends in .gz or .xz is compressed. Each `append_rows` adds a member, and all of them read as one text.
    Raises C2TError on a damaged file.
    """
    if not path.is_file():
        return []
    found = path.read_bytes()
    try:
        return _unpacked(path, found).decode().splitlines(keepends=True)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise C2TError(f"{path.name} is damaged: {error}") from error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a JSONL file by these lines, whole or not at all."""
    write_whole(path, lambda part: part.write_bytes(_packed(path, lines)))


# By the end of a file's name: how its text is packed, and read again.
_PACKED = {
    ".gz": (functools.partial(gzip.compress, mtime=0), gzip.decompress),
    ".xz": (functools.partial(lzma.compress, preset=9), lzma.decompress),
}


def _packed(path: Path, lines: Iterable[str]) -> bytes:
    pack, _ = _PACKED.get(path.suffix, (bytes, bytes))
    return pack("".join(lines).encode())


def _unpacked(path: Path, found: bytes) -> bytes:
    _, unpack = _PACKED.get(path.suffix, (bytes, bytes))
    return unpack(found)


def read_rows(path: Path, row: type[Row]) -> list[Row]:
    """All rows of a JSONL file in their order; none if the file does not exist. Raises C2TError on a bad line."""
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            rows.append(row.from_json(json.loads(line)))
        except (json.JSONDecodeError, TypeError, C2TError) as error:
            raise C2TError(f"{path.name}, line {number}: {error}") from error
    return rows
