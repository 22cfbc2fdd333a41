"""The tables that `c2t evaluate` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from c2t_plugin.lab.curves import bootstrap_unit
from c2t_plugin.lab.judging import Evaluation, RuleResult
from c2t_plugin.lab.plans import EvaluatePlan
from c2t_plugin.traces.file import Traces


def _console() -> Console:
    """As wide as the tables if nobody is looking at a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _what(traces: Traces, plan: EvaluatePlan) -> str:
    visited = f"the states that a server visits from {plan.starts} starts each"
    states = "every recorded state" if plan.every_state else visited
    return (
        f"{len(traces.first)} prompts, {states}; intervals of 95%: bootstrap over {bootstrap_unit(traces)}, "
        f"{plan.replicates} replicates"
    )


def print_chains(found: Evaluation, traces: Traces, plan: EvaluatePlan) -> None:
    """Two tables: chance and calibration, then gamma at equal tau."""
    console = _console()
    console.print(f"\n[bold]chains of at most {plan.d_max}[/bold]: {_what(traces, plan)}")
    console.print(_score_table(found))
    title = (
        "gamma (draft tokens per verification) at the tau (accepted, no bonus) of static chains; in brackets, of static"
    )
    console.print(_curve_table(title, found, "static"))


def print_trees(found: Evaluation, traces: Traces, plan: EvaluatePlan) -> None:
    """Three tables: chance and calibration, gamma at equal tau, what the record does not hold."""
    console = _console()
    console.print(f"\n[bold]trees of at most {plan.tree_depth} layers[/bold]: {_what(traces, plan)}")
    console.print(_score_table(found))
    title = "gamma (draft tokens per verification) at equal tau (accepted, no bonus); in brackets, the ratio"
    console.print(_curve_table(title, found, "EAGLE-2"))
    middle = found.taus[len(found.taus) // 2]
    table = Table(title=f"where the record ends before the rule does, at tau {middle:.2f}; speed of the replay")
    last = ("kept nodes not expanded", "states whose acceptance may go on there", "M nodes/s")
    for name in ("rule", "threshold", *last):
        table.add_column(name, justify="right")
    for rule in found.rules:
        if rule.censored is not None:
            c = rule.censored
            speed = "" if rule.nodes_per_second is None else f"{rule.nodes_per_second / 1e6:.1f}"
            table.add_row(rule.name, f"{c['beta']:.4f}", f"{c['nodes']:.2%}", f"{c['states']:.2%}", speed)
    console.print(table)


def _score_table(found: Evaluation) -> Table:
    table = Table(title="nodes")
    for name in (
        "rule",
        "AUC",
        "gain" if found.reference is None else f"over {found.reference}",
        "ECE",
        "mean",
        "accepted",
    ):
        table.add_column(name, justify="right")
    for rule in found.rules:
        gain = ""
        if rule.auc_gain is not None and rule.auc_gain_interval is not None:
            gain = f"{rule.auc_gain:+.4f} {_around(rule.auc_gain_interval, 4)}"
        judged = ["", "", ""]
        if rule.calibration is not None:
            judged = [f"{rule.calibration[name]:.4f}" for name in ("error", "confidence", "accepted")]
        table.add_row(rule.name, f"{rule.auc:.4f}", gain, *judged)
    return table


def _curve_table(title: str, found: Evaluation, baseline: str) -> Table:
    table = Table(title=title)
    for name in ("rule", *(f"{tau:.2f}" for tau in found.taus), "mean ratio", "mean ratio to P"):
        table.add_column(name, justify="right")
    table.add_row(baseline, *(f"{gamma:.2f}" for gamma in found.baselines[baseline]), "1", "")
    for rule in found.rules:
        table.add_row(rule.name, *_cells(rule, baseline), _mean(rule, baseline), _mean(rule, "P"))
    return table


def _cells(rule: RuleResult, baseline: str) -> list[str]:
    c = rule.compared[baseline]
    rows = zip(c["gamma"], c["ratio"], c["ratio_interval"], strict=True)
    return [f"{gamma:.2f} ({ratio:.3f})\n{_around(around, 3)}" for gamma, ratio, around in rows]


def _mean(rule: RuleResult, baseline: str) -> str:
    c = rule.compared.get(baseline)
    return "" if c is None else f"{c['mean']:.3f}\n{_around(c['mean_interval'], 3)}"


def _around(interval: Sequence[float], digits: int) -> str:
    low, high = interval
    return f"{low:.{digits}f}..{high:.{digits}f}"
