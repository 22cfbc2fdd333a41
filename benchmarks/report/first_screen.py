"""What docs/results.md begins with: three pictures, each with one sentence whose figures come from rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report.evaluations import Part, number, rule, with_interval
from benchmarks.report.rows import CURVE, MEASURED, MEASURED_CPU, BenchRow
from benchmarks.report.tables import RATIO, load_of, measured_blocks

SPEEDS, LENGTHS, STEPS = "first-speed.svg", "first-lengths.svg", "first-step.svg"
ALTERNATIVES = {
    SPEEDS: "output tokens/s of each arm by the number of requests at once, real model",
    LENGTHS: "accept length by draft tokens verified per step: static chains, a threshold on P, C2T",
    STEPS: "milliseconds of a pass of the target by the number of its tokens",
}
# as it comes: rows of before it had that name call it by what it does, and the demo has no other
OURS = ("C2T as it comes", "C2T auto", "C2T")
# scenario of a GPU's rows, all arms by turns
GPU = "gpu-matrix"
PLAIN = "plain"
# in an evaluation: static chains of so many tokens are the baseline, and these the rules beside them
BASELINE, ON_P, SHIPPED = "static", "P", "extended"
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True)
class Speeds:
    """Over plain decoding's tokens/s, by requests at once: of C2T, and of the best of all other arms with its name."""

    ours: Mapping[int, float]
    best: Mapping[int, tuple[float, str]]

    @property
    def ahead_of_plain(self) -> int:
        return sum(ratio > 1.0 for ratio in self.ours.values())

    @property
    def ahead_of_all(self) -> int:
        return sum(ratio > self.best[load][0] for load, ratio in self.ours.items())


def real_rows(rows: Sequence[BenchRow], kind: str = MEASURED_CPU) -> list[BenchRow]:
    """The greedy comparison of C2T with other arms on a real model that has most loads, of several the one that was
    measured last; empty without one. kind: of rows."""
    blocks = [
        found for found in measured_blocks(rows, kind) if not found[0].setting.get("temperature") and speeds(found).ours
    ]
    return max(blocks, key=lambda found: (len(speeds(found).ours), max(row.run["utc"] for row in found)), default=[])


def speeds(rows: Sequence[BenchRow]) -> Speeds:
    """rows: of `real_rows`. Only loads at which C2T and others than plain decoding ran."""
    arms = {row.arm for row in rows}
    name = next((each for each in OURS if each in arms), "")
    ours = {load_of(row): row.metrics[RATIO] or 0.0 for row in rows if row.arm == name}
    best: dict[int, tuple[float, str]] = {}
    for row in rows:
        ratio = row.metrics.get(RATIO)
        if row.arm not in (name, PLAIN) and ratio:
            best[load_of(row)] = max(best.get(load_of(row), (1.0, PLAIN)), (ratio, row.arm))
    return Speeds({load: ours[load] for load in sorted(ours) if load in best}, best)


def speed_sentence(rows: Sequence[BenchRow]) -> str:
    """How C2T and the best of all other arms compare with plain decoding, and how often C2T is ahead."""
    found, setting = speeds(rows), rows[0].setting
    best = [found.best[load] for load in found.ours]
    loads, ours, others = (
        _list(texts)
        for texts in (
            map(str, found.ours),
            (number(ratio, 2) for ratio in found.ours.values()),
            (f"{number(ratio, 2)} ({name})" for ratio, name in best),
        )
    )
    machine = f"{setting['cores']} cores" if "cores" in setting else str(rows[0].run["machine"]).rsplit(" x ")[-1]
    where = f"{setting.get('target')} on {engine_of(rows)}, {machine}"
    return (
        f"C2T makes {ours} of plain decoding's tokens/s at {loads} requests at once, the best other arm {others}: "
        f"it is ahead of plain decoding at {found.ahead_of_plain} of {len(found.ours)} loads and of every other arm "
        f"at {found.ahead_of_all} ({where}; [intervals](results-served.md))."
    )


def lengths_sentence(evaluation: Part) -> str:
    """What C2T and a threshold on P verify of what static chains verify at the same accept length."""
    chains = evaluation["chains"]
    ours, on_p = (rule(chains, name)["compared"][BASELINE] for name in (SHIPPED, ON_P))
    return (
        f"To be accepted as often as static chains of 1 to {len(chains['taus'])}, C2T verifies "
        f"{with_interval(ours['mean'], ours['mean_interval'])} of their draft tokens, and a threshold on the draft's "
        f"own probability {with_interval(on_p['mean'], on_p['mean_interval'])} "
        "([every rule](classifiers.md#on-a-real-language-model))."
    )


def step_sentence(rows: Sequence[BenchRow]) -> str:
    """What tokens of a pass cost on the processor of the rows."""
    cost = pass_ms(rows)
    least, some, most = 1, 16, CURVE[-1]
    return (
        f"A pass of the target takes {cost[least]:.0f} ms for one token, {cost[some] / cost[least]:.1f} times that for "
        f"{some} and {cost[most] / cost[least]:.1f} times for {most}: what is verified and rejected is paid for "
        "([what differs on a GPU](benchmarking.md#from-a-cpu-to-a-gpu))."
    )


def pass_ms(rows: Sequence[BenchRow]) -> dict[int, float]:
    """Milliseconds of a pass of the target by its tokens, as the newest of the rows has them."""
    newest = max((row for row in rows if not row.error), key=lambda row: row.run["utc"])
    return {tokens: newest.metrics[f"target_ms_{tokens}"] or 0.0 for tokens in CURVE}


def first_screen(rows: Sequence[BenchRow], evaluation: Part) -> str:
    """The pictures in one line, so that a wide screen has them beside each other, then their sentences. rows: all of
    them; empty where no real model was measured."""
    real = real_rows(rows)
    if not real:
        return ""
    shown = "\n".join(f"![{text}](results/{name})" for name, text in ALTERNATIVES.items())
    gpu = real_rows([row for row in rows if row.scenario == GPU], MEASURED)
    said = {
        **({"Tokens/s on a GPU": f"{speed_sentence(gpu)} [All days on one](gpu.md)."} if gpu else {}),
        **{f"Tokens/s on {engine_of(found)}": speed_sentence(found) for found in _by_engine(rows)},
        "Accept length": lengths_sentence(evaluation),
        "A step": step_sentence(real),
    }
    lines = "\n".join(f"- **{name}.** {text}" for name, text in said.items())
    return f"{shown}\n\n{lines}\n"


def engine_of(rows: Sequence[BenchRow]) -> str:
    """The name of the engine that all these rows are of."""
    found = str(rows[0].setting.get("engine"))
    return ENGINES.get(found, found)


def _by_engine(rows: Sequence[BenchRow]) -> Iterable[list[BenchRow]]:
    """`real_rows` of each engine."""
    for engine in dict.fromkeys(row.setting.get("engine") for row in rows):
        if found := real_rows([row for row in rows if row.setting.get("engine") == engine]):
            yield found


def _list(texts: Iterable[str]) -> str:
    """`1, 2 and 3`."""
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
