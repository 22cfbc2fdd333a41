"""The papers' equations as a calculator: C2T v2 equations 1-5 and 9-12, C2T's cost counts, DySpec's latency model.

One file, because docs/fidelity.md names each of its functions and they are looked up by equation.
v1 and v2 are the two versions of C2T. `*_rows()` put what a paper prints beside what its own equation or table gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.papers import printed
from c2t_plugin.errors import C2TError
from c2t_plugin.traces.forest import node_count

Row = dict[str, Any]


def entropy_of_even_rest(top: float, tokens: int) -> float:
    """Equation 1, nats. The paper calls it the least entropy for this largest probability; it is the largest one."""
    rest = 1.0 - top
    _check_top(top, tokens)
    return -_x_log_x(top) - (rest * math.log(rest / (tokens - 1)) if rest > 0.0 else 0.0)


def least_entropy(top: float, tokens: int) -> float:
    """What equation 1 claims to be, nats: as many tokens of probability `top` as fit, one with the rest."""
    _check_top(top, tokens)
    full = min(math.floor(1.0 / top + 1e-12), tokens)
    return -full * _x_log_x(top) - _x_log_x(max(1.0 - full * top, 0.0))


def total_variation(draft: Tensor, target: Tensor) -> float:
    """Equation 2: half the L1 distance of two distributions, (tokens,) float64 each."""
    return float((draft - target).abs().sum() / 2)


def expected_acceptance(draft: Tensor, target: Tensor) -> float:
    """Equation 3: how probably one sampled draft token is accepted; 1 - total_variation. (tokens,) float64 each."""
    return float(torch.minimum(draft, target).sum())


def largest_variation_as_printed(top: float) -> float:
    """Equation 4: right for three tokens only."""
    return (top + 1.0) / 2


def largest_variation(top: float, tokens: int) -> float:
    """Of lemma 3's two distributions: one of the other tokens has all of the target's probability."""
    _check_top(top, tokens)
    return 1.0 - (1.0 - top) / (tokens - 1)


def bias_as_printed(top: float) -> float:
    """Equation 5: right for three tokens only; negative below 1/3, which no largest of three is."""
    return (3.0 * top - 1.0) / 2


def bias(top: float, tokens: int) -> float:
    """Lemma 3's bias, `top` less the least expected acceptance of an even rest: (tokens * top - 1) / (tokens - 1)."""
    return top - (1.0 - largest_variation(top, tokens))


@dataclass(frozen=True)
class Latencies:
    """Times of C2T v2 equations 9-12, in one unit.

    features: t_math1, C2T's top-M, entropy and second top-K. context: t_math2, EAGLE-2's top-K and joint probability.
    classify: t_cls. draft, verify: per token, of the draft and the target.
    """

    features: float
    context: float
    classify: float
    draft: float
    verify: float

    def __post_init__(self) -> None:
        if min(self.features, self.context, self.classify) < 0.0 or min(self.draft, self.verify) <= 0.0:
            raise C2TError(f"latencies must be at least 0, and above 0 for draft and verify, got {self}")


# C2T v2 equations 10 and 12, in units of the draft and of t_math1
THEORETICAL = {"7B/8B": Latencies(0, 0, 0, 1, 32), "70B": Latencies(0, 0, 0, 1, 80)}
MEASURED = {"7B/8B": Latencies(1, 1, 1, 5, 100), "70B": Latencies(1, 1, 1, 10, 400)}


def theoretical_speedup(times: Latencies, recall: float = 0.1, removed: float = 0.25) -> float:
    """Equation 9: drafting, too, shrinks with the candidates.

    recall: alpha, candidate tokens as a share of the drafted ones. removed: rho, share of them that C2T cuts.
    """
    cut = (times.draft + times.features + times.classify + times.verify) * (1.0 - removed) * recall
    return (times.draft + times.context + times.verify * recall) / cut


def actual_speedup(times: Latencies, recall: float = 0.1, removed: float = 0.25) -> float:
    """Equation 11: verification shrinks with the candidates, drafting does not."""
    cut = times.draft + times.features + times.classify + times.verify * (1.0 - removed) * recall
    return (times.draft + times.context + times.verify * recall) / cut


def relative_latency(accepted: float, draft_calls: int, cost_ratio: float) -> float:
    """DySpec's k = 1/e + N T_d / (e T_t): latency of a token over plain decoding's; 1/k is the acceleration (its 4.3).

    accepted: e, output tokens per verify step, bonus included. draft_calls: N, one per node in algorithm 1, one per
    layer in algorithm 2. cost_ratio: T_t / T_d.
    """
    if accepted <= 0.0 or draft_calls < 0 or cost_ratio <= 0.0:
        raise C2TError(
            f"the latency model needs accepted > 0, draft_calls >= 0 and cost_ratio > 0, "
            f"got {accepted}, {draft_calls} and {cost_ratio}"
        )
    return (1.0 + draft_calls / cost_ratio) / accepted


def reach_of_sibling(earlier: Sequence[float]) -> float:
    """DySpec equation 9, factor by factor: chance that all earlier siblings, drawn without replacement, are refused."""
    reach, used = 1.0, 0.0
    for probability in earlier:
        reach *= 1.0 - probability / (1.0 - used)
        used += probability
    return reach


class Shares(NamedTuple):
    """positive: accepted nodes. predicted: nodes that the method recalls. Both as a share of all nodes."""

    positive: float
    predicted: float


def implied_shares(accuracy: float, precision: float, recall: float) -> Shares:
    """The class shares that three scores of one confusion matrix leave open to nothing else."""
    predicted_per_positive = recall / precision
    wrong_per_positive = predicted_per_positive * (1.0 - precision) + 1.0 - recall
    positive = (1.0 - accuracy) / wrong_per_positive
    return Shares(positive, positive * predicted_per_positive)


def selection_flops(vocab: int, top_m: int, select: float = 3.0) -> tuple[float, float]:
    """C2T v1 appendix C, proof 3: F5, entropy first and then top-K; F6, top-M first, entropy and top-K of those.

    select: operations per element of a selection, C1 = C2 = C3; the paper has them above 2 and about equal.
    """
    return (2.0 + select) * vocab, select * vocab + (2.0 + select) * top_m


def overhead(k: int, layers: int, top_m: int, hidden: int) -> dict[str, int]:
    """C2T's extra operations per tree at worst (v1 E.2, v2 H): k distributions a layer, 5 * hidden per scored token.

    classifier_as_printed: k scored tokens a layer. classifier: what v1's proof 2 says, k children of each of k nodes.
    """
    return {
        "entropy": k * layers * top_m,
        "classifier_as_printed": k * layers * 5 * hidden,
        "classifier": node_count(k, layers) * 5 * hidden,
    }


def lemma_rows(tops: Sequence[float] = (0.1, 0.3, 0.5, 0.9), sizes: Sequence[int] = (3, 10, 32000)) -> list[Row]:
    """C2T v2 equations 1, 4 and 5 as printed and as they are, where a largest probability of `top` can be."""
    rows = []
    for top, n in ((top, n) for top in tops for n in sizes if top * n >= 1.0):
        at = f"p_max {top}, {n} words"
        rows += [
            _row(f"C2T v2 equation 1, least entropy at {at}", entropy_of_even_rest(top, n), least_entropy(top, n)),
            _row(
                f"C2T v2 equation 4, largest variation at {at}",
                largest_variation_as_printed(top),
                largest_variation(top, n),
            ),
            _row(f"C2T v2 equation 5, bias at {at}", bias_as_printed(top), bias(top, n)),
        ]
    return rows


def speedup_rows() -> list[Row]:
    """C2T v2's theoretical and actual speed-ups, and their distance from its best measured ones."""
    rows = []
    for size in THEORETICAL:
        paper = printed.SPEEDUPS[size]
        actual = actual_speedup(MEASURED[size])
        rows += [
            _row(f"C2T v2 equation 9, {size}", paper.theoretical, theoretical_speedup(THEORETICAL[size])),
            _row(f"C2T v2 equation 11, {size}", paper.actual, actual),
            _row(f"C2T v2 4.3, above the measured speed-up, {size}", 0.03, actual / paper.best_measured - 1.0),
        ]
    return rows


def table2_rows() -> list[Row]:
    """C2T v2 table 2: the gain in decoding speed from its own six columns, unrounded, and the candidates saved."""
    rows = []
    for entry in printed.V2_TABLE_2:
        gain = sum(entry.speeds_c2t) / sum(entry.speeds) - 1.0
        saved = 1.0 - sum(entry.gamma_c2t) / sum(entry.gamma)
        rows.append(_row(f"C2T v2 table 2, {entry.name}: speed gained", entry.gain, gain))
        rows.append(_row(f"C2T v2 table 2, {entry.name}: candidates saved", None, saved))
    return rows


def table4_rows() -> list[Row]:
    """C2T v1 and v2, table 4: verify steps behind gamma (whole if N is what was counted) and EAGLE-2's gain."""
    rows = []
    for method, nodes, gamma, tau in printed.TABLE_4:
        rows.append(_row(f"C2T v1 table 4, {method}, N = {nodes}: verify steps", None, gamma / nodes))
        rows.append(_row(f"C2T v1 table 4, {method}, N = {nodes}: output tokens", None, gamma / nodes * (tau + 1)))
    static, dynamic = printed.TABLE_4[0], printed.TABLE_4[1]
    return [
        *rows,
        _row("C2T v2 table 4, E-1, N = 25: verify steps", None, static.gamma / 25),
        _row("C2T v1 A, EAGLE-2's gain in tau, bonus excluded", 0.11, dynamic.tau / static.tau - 1),
        _row("C2T v2 B, EAGLE-2's gain in tau, bonus included", 0.08, (dynamic.tau + 1) / (static.tau + 1) - 1),
    ]


def table5_rows() -> list[Row]:
    """C2T v2 table 5: the tree size behind top-60, and the share of accepted nodes by either method's scores."""
    eagle, c2t = printed.V2_TABLE_5["Total"]
    rows = [
        _row("C2T v2 table 5, nodes per tree, root included", 1011, 60 / implied_shares(*eagle).predicted),
        _row("C2T v2 table 5, C2T's candidates for EAGLE-2's 60", None, 60 * _ratio_of_predicted(c2t, eagle)),
    ]
    for bucket, (eagle, c2t) in printed.V2_TABLE_5.items():
        # both methods score the same nodes
        shares = implied_shares(*c2t).positive, implied_shares(*eagle).positive
        rows.append(_row(f"C2T v2 table 5, {bucket}: accepted share by C2T's, by EAGLE-2's scores", *shares))
    return rows


def cost_rows() -> list[Row]:
    """C2T v1 E.2 and appendix C: the overhead at the paper's setting, and what top-M first saves."""
    found = overhead(k=15, layers=10, top_m=1000, hidden=48)
    entropy_first, top_first = selection_flops(32000, 1000)
    return [
        _row("C2T v1 E.2, entropy", 150_000, found["entropy"]),
        _row("C2T v1 E.2, classifier, 15 tokens a layer", 36_000, found["classifier_as_printed"]),
        _row("C2T v1 proof 2, classifier, 15 x 15 tokens a layer", None, found["classifier"]),
        _row("C2T v1 proof 3, F5 - F6 above 0, per word of the vocabulary", None, 1 - top_first / entropy_first),
    ]


def dyspec_rows() -> list[Row]:
    """DySpec's headline figures, N / e and its latency model, from the tables that it prints."""
    best, warm = printed.DYSPEC[3][0], printed.DYSPEC[3][1]
    rows = [
        _row("DySpec abstract, throughput at T = 0: table 3's tokens per step", 9.1, best.accepted),
        _row("DySpec abstract, throughput at T = 0: table 3's latencies", 9.1, best.baseline / best.latency),
        _row("DySpec abstract, latency at T = 0: table 3's latencies", 9.4, best.baseline / best.latency),
        _row("DySpec abstract, throughput at T = .6: table 3's latencies", 6.21, warm.baseline / warm.latency),
        _row("DySpec 5.3, T_t / T_d from 5 s and 25 ms", 2000, 5 / 0.025),
        _row("DySpec C.1, ordered kernel at 2048 nodes, times faster", 2.1, 2.27148 / 1.02645),
        _row("DySpec C.1, fewer blocks at 2048 nodes, times", 5.9, 1654.5 / 278.7),
    ]
    for table, entries in printed.DYSPEC.items():
        nodes = 768 if table == 4 else 64
        for entry in entries:
            at = f"table {table}, {entry.dataset}, T = {entry.temperature}"
            claim = 70 if table == 4 else 10
            rows.append(_row(f"DySpec 4.3, N / e above, {at}", claim, nodes / entry.accepted))
            rows.append(
                _row(f"DySpec 5.3, tokens per step, Sequoia's and DySpec's, {at}", entry.sequoia, entry.accepted)
            )
            if table >= 3:
                for ratio in (2000, 200):
                    model = 1 / relative_latency(entry.accepted, nodes, ratio)
                    what = f"DySpec 4.3, acceleration 1 / k at T_t / T_d = {ratio}, {at}"
                    rows.append(_row(what, entry.baseline / entry.latency, model))
    return rows


ROWS = (lemma_rows, speedup_rows, table2_rows, table4_rows, table5_rows, cost_rows, dyspec_rows)


def _ratio_of_predicted(one: Sequence[float], other: Sequence[float]) -> float:
    return implied_shares(*one).predicted / implied_shares(*other).predicted


def _row(what: str, paper: float | None, ours: float) -> Row:
    return {"what": what, "paper": None if paper is None else round(paper, 4), "ours": round(ours, 4)}


def _x_log_x(x: float) -> float:
    return x * math.log(x) if x > 0.0 else 0.0


def _check_top(top: float, tokens: int) -> None:
    # a hair of slack: 1 / tokens itself is often no exact float
    if tokens < 2 or not (1.0 / tokens) * (1.0 - 1e-12) <= top <= 1.0:
        raise C2TError(f"the largest of {tokens} probabilities lies between 1/{tokens} and 1, got {top}; tokens >= 2")
