"""The rungs of ladder.py: what each looks at, what it finds there, and why it does not hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.report.recomputed import STATISTICS, Comparison
from c2t_plugin.traces.file import Traces

if TYPE_CHECKING:
    # it imports openai, which whoever asks for the rungs' names may lack
    from benchmarks.serving.client import Pass

RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
# What a log has of a GPU that read or wrote where it must not, or of a scheduler that ended
CRASHED = re.compile(r"illegal memory access|illegal address|CUDA error|device-side assert|Scheduler hit an exception")
# Of the drafts, chains and trees.
STEPS = 4
TOPK = 4
# Below this probability of being so far off by chance a distribution is another one.
ALPHA = 1e-4
# Outcomes that are rarer are counted together.
MIN_EXPECTED = 5.0
# float32 sums over a vocabulary in another order
TOLERANCE = 2e-3
# Of recomputed states, where a draft's two best tokens are so near that rounding turns them
OFF = 0.02
# servers
CHAINS = ("plain", "kept", "window", "eager", "auto", "rough", "sync")
TREES = ("plain", "tree", "padded tree")


@dataclass(frozen=True)
class Found:
    """What one server did. uncut: a pass at beta 0. nothing: one without drafts. samples: of the first tokens.
    recomputed: what it recorded, beside a recomputation. aborted: requests stopped while they ran.
    gap_ms: from the draft's end to the verification's start, a step. loaded: passes of which each has other numbers of
    rows than the one before. faults: why traces, recomputed, gap_ms or loaded could not be had, by that name."""

    alone: Pass
    together: Pass
    samples: Counter[tuple[int, ...]]
    log: str
    uncut: Pass | None = None
    nothing: Pass | None = None
    state: Mapping[str, Any] | None = None
    traces: Traces | None = None
    recomputed: Comparison | None = None
    aborted: int = 0
    gap_ms: float | None = None
    loaded: tuple[Pass, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)


Verdict = tuple[dict[str, float | None], str]


def configured(found: Mapping[str, Found]) -> Verdict:
    """One rank, one plugin: each server states its configuration once, plain decoding never."""
    lines = {name: each.log.count("C2T: configuration {") for name, each in found.items()}
    wrong = [name for name, count in lines.items() if count != int(name != "plain")]
    return {"servers": len(lines)}, f"configuration stated {lines} times" if wrong else ""


def survives(found: Mapping[str, Found]) -> Verdict:
    """A server whose graphs of packed rows are replayed with ever other layouts lives, and its text stays plain
    decoding's."""
    (name,) = found.keys() - {"plain"}
    one, plain = found[name], found["plain"].alone
    crash = CRASHED.search(one.log)
    if crash is not None or not one.loaded:
        why = ([crash[0]] if crash else []) + [one.faults.get("loaded", "")]
        return {}, f"{name}: {' '.join(why)}".strip()
    least, of = min(each.n_identical(plain) for each in one.loaded), len(plain.completions)
    metrics: dict[str, float | None] = {"passes": len(one.loaded), "identical": least}
    metrics["steps"] = sum(each.verify_steps for each in one.loaded)
    return metrics, "" if least == of else f"{name}: of {of} outputs the same: {least}"


def recomputed(found: Mapping[str, Found]) -> Verdict:
    """Statistics are those of a recomputation, of requests alone and of those among aborted and retracted ones."""
    metrics: dict[str, float | None] = {}
    faults = []
    for name, each in found.items():
        if each.recomputed is None:
            faults.append(f"{name}: {each.faults.get('traces') or each.faults.get('recomputed')}")
            continue
        states, off = each.recomputed.states, each.recomputed.off
        metrics |= {f"states_{name}": states, f"off_{name}": off}
        metrics[f"largest_difference_{name}"] = each.recomputed.largest_difference
        if not states or off > OFF * states:
            faults.append(f"{name}: {off} of {states} states are not those of the recomputation")
    rough = found["rough"]
    events = {"aborted": rough.aborted, "retracted": sum(map(int, RETRACTED.findall(rough.log)))}
    faults += [f"nothing was {event}" for event, count in events.items() if not count]
    return {**metrics, **events}, "; ".join(faults)


def gaps(found: Mapping[str, Found]) -> Verdict:
    """What the GPU waits for between draft and verification: tells, and falls only where that cannot be told."""
    told = {f"gap_ms_{name}": each.gap_ms for name, each in found.items()}
    unknown = "no step has both phases in the trace"
    faults = [f"{name}: {each.faults.get('gap_ms', unknown)}" for name, each in found.items() if each.gap_ms is None]
    return told, "; ".join(faults)


def graphs_are_eager(found: Mapping[str, Found]) -> Verdict:
    """Statistics out of the draft's CUDA graph are those of the same draft without one."""
    graph, eager = found["kept"].traces, found["eager"].traces
    if graph is None or eager is None:
        lacking = [name for name, each in found.items() if each.traces is None]
        return {}, "; ".join(f"{name}: {found[name].faults.get('traces')}" for name in lacking)
    if not (torch.equal(graph.prompt, eager.prompt) and torch.equal(graph.step, eager.step)):
        return {}, f"the servers visited {len(graph)} and {len(eager)} states, which are not the same ones"
    off = max(float((getattr(graph.chain, n) - getattr(eager.chain, n)).abs().max()) for n in STATISTICS)
    return {"states": len(graph), "largest_difference": off}, "" if off < TOLERANCE else f"they differ by {off:.3g}"


def kept_is_window(found: Mapping[str, Found]) -> Verdict:
    """Packed whole chains are the window's: each request has as many steps, verified and accepted tokens."""
    taus = {f"tau_{name}": found[name].alone.tau for name in ("kept", "window")}
    return taus, _difference(found["kept"], found["window"])


def _difference(mine: Found, theirs: Found) -> str:
    """Of passes at beta 0: what is cut leaves a packed graph spare rows, which get the next draft tokens."""
    assert mine.uncut is not None and theirs.uncut is not None
    both = zip(mine.uncut.completions, theirs.uncut.completions, strict=True)
    counts = [[(one.verify_steps, one.accepted, one.candidates) for one in pair] for pair in both]
    other = [pair for pair in counts if pair[0] != pair[1]]
    found = f"{len(other)} of {len(counts)} requests were verified or accepted otherwise"
    return f"{found}, such as {other[0]}" if other else ""


def trees(found: Mapping[str, Found]) -> Verdict:
    """At beta 0 a tree's pads change nothing, and each tree has all its nodes."""
    tree, padded = found["tree"], found["padded tree"]
    assert tree.uncut is not None
    nodes = sum(one.candidates for one in tree.uncut.completions) / tree.uncut.verify_steps
    metrics = {"tau": tree.alone.tau, "tau_padded": padded.alone.tau, "nodes_uncut": nodes}
    few = "" if nodes == STEPS * TOPK else f"at beta 0 trees have {nodes:.3g} nodes, not {STEPS * TOPK}"
    return metrics, _difference(tree, padded) or few


def greedy(found: Mapping[str, Found]) -> Verdict:
    """The servers' text is plain decoding's, one request at a time and many."""
    plain = found["plain"].alone
    passes = {name: (each.alone, each.together) for name, each in found.items()}
    least = {name: min(each.n_identical(plain) for each in both) for name, both in passes.items()}
    of = len(plain.completions)
    wrong = {name: count for name, count in least.items() if count != of}
    return {"identical": min(least.values()), "prompts": of}, f"of {of} outputs the same: {wrong}" if wrong else ""


def sampled(found: Mapping[str, Found]) -> Verdict:
    """Samples of the servers have plain decoding's distribution."""
    chances = {name: p_value(found["plain"].samples, each.samples) for name, each in found.items() if name != "plain"}
    least = min(chances.values())
    return {"samples": found["plain"].samples.total(), "least_p": least}, "" if least > ALPHA else f"chances {chances}"


def ends(found: Mapping[str, Found]) -> Verdict:
    """Beta 0 verifies whole chains, and with nothing verified each step has one token."""
    uncut, nothing = found["kept"].uncut, found["kept"].nothing
    assert uncut is not None and nothing is not None
    chains = sum(one.candidates for one in uncut.completions) / uncut.verify_steps
    steps = nothing.output_tokens - len(nothing.completions)
    wrong = chains != STEPS or nothing.verify_steps != steps
    metrics: dict[str, float | None] = {"gamma_uncut": chains, "steps": nothing.verify_steps, "tokens": steps}
    return metrics, "these are not the two ends" if wrong else ""


def planned(found: Mapping[str, Found]) -> Verdict:
    """Beta auto has a curve to decide by, and has decided."""
    state = found["auto"].state
    assert state is not None
    planner: Any = state["planner"]
    decided = planner["active"] and planner["curve"]
    depths = {f"steps_at_depth_{depth}": count for depth, count in state["depths"].items()}
    return depths, "" if decided else f"the planner is {planner}"


# name: check, and the servers it looks at
RUNGS: dict[str, tuple[Callable[[Mapping[str, Found]], Verdict], tuple[str, ...]]] = {
    "R1 configuration": (configured, CHAINS),
    "R2 SGLang 31023, 31455": (survives, ("plain", "kept")),
    "R3 SGLang 34384": (survives, ("plain", "slots")),
    "R4 recomputed": (recomputed, ("kept", "rough")),
    "R6 graph and eager": (graphs_are_eager, ("kept", "eager")),
    "R8 kept and window": (kept_is_window, ("kept", "window")),
    "R9 greedy": (greedy, CHAINS),
    "R9 sampled": (sampled, CHAINS),
    "R10 gap": (gaps, ("kept", "sync")),
    "R12 planner": (planned, ("auto",)),
    "R14 trees and pads": (trees, TREES),
    "R14 greedy": (greedy, TREES),
    "R14 sampled": (sampled, TREES),
    "R16 both ends": (ends, ("kept",)),
}


# checks of however many servers, plain decoding's beside them
OF_ANY = (configured, greedy, sampled)


def without(left_out: Sequence[str], numbers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Rungs of these numbers and the servers that each looks at, those left out aside: a check that needs one falls."""
    found = {}
    for rung, (check, needs) in RUNGS.items():
        kept = tuple(name for name in needs if name not in left_out)
        if number_of(rung) in numbers and (kept == needs or check in OF_ANY):
            found[rung] = kept
    return found


def number_of(rung: str) -> str:
    """R1 of "R1 configuration"."""
    return rung.split()[0]


NUMBERS = tuple(dict.fromkeys(map(number_of, RUNGS)))


def p_value(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """Chance that two samples of one distribution differ so much (chi-square, rare outcomes together).

    By torch alone, since a bare machine has no scipy.
    """
    smaller, both = min(first.total(), second.total()), first + second
    common = [key for key, count in both.items() if smaller * count / both.total() >= MIN_EXPECTED]
    table = torch.tensor([[float(counts[key]) for key in common] for counts in (first, second)]).view(2, -1)
    totals = torch.tensor([[float(first.total())], [float(second.total())]])
    table = torch.cat([table, totals - table.sum(1, keepdim=True)], dim=1)
    table = table[:, table.sum(0) > 0].double()
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    freedom = table.shape[1] - 1
    if not freedom:
        return 1.0
    statistic = ((table - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
