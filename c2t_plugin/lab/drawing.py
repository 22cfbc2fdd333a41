"""A decoding step as a tree on a terminal, and as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from c2t_plugin.lab.steps import ACCEPTED, CUT, MEANINGS, MISSED, REJECTED, Node, Path, Step
from c2t_plugin.provenance import RunRecord

# colour on a terminal, colour in HTML, sign
LOOKS = {
    ACCEPTED: ("bold green", "#1a7f37", "\u2713"),
    REJECTED: ("red", "#cf222e", "\u2717"),
    CUT: ("dim", "#8c959f", "\u00b7"),
    MISSED: ("bold yellow", "#bf8700", "!"),
}
TokenText = Callable[[int], str]


def numbers(node: Node) -> str:
    """What the classifier saw, and what it said."""
    return f"p {node.prob:.3f}  P {node.joint_prob:.3g}  H {node.entropy:.2f}  d {node.depth}  C {node.confidence:.3f}"


def print_step(step: Step, token_text: TokenText, cut_children: int, console: Console) -> None:
    """Draw it with one sign per policy before each token."""
    policies = list(step.gamma)
    root = Tree(Text(step.title, style="bold"))
    branches: dict[Path, Tree] = {(): root}
    for node in step.walk(cut_children):
        line = Text()
        for policy in policies:
            style, _, sign = LOOKS[node.verdicts[policy]]
            line.append(sign, style=style)
        line.append(f" {token_text(node.path[-1])!r}", style="bold" if ACCEPTED in node.verdicts.values() else "")
        line.append(f"  {numbers(node)}", style="dim")
        branches[node.path] = branches[node.path[:-1]].add(line)
    console.print(root)
    table = Table("sign", "policy", "gamma", "tau, no bonus")
    for place, policy in enumerate(policies):
        table.add_row(f"{place + 1}.", policy, str(step.gamma[policy]), str(step.tau[policy]))
    console.print(table)
    legend = Text("  ").join(
        Text(f"{LOOKS[each][2]} {meaning}", style=LOOKS[each][0]) for each, meaning in MEANINGS.items()
    )
    console.print(legend)


def html_page(step: Step, token_text: TokenText, cut_children: int, run: RunRecord) -> str:
    """The same as a page: nested lists, one coloured sign per policy, its name and verdict on hover; below, the run
    that drew it."""
    policies = list(step.gamma)
    items: list[str] = []
    depth = 0
    for node in step.walk(cut_children):
        items.append("<ul>" * (node.depth - depth) + "</li></ul>" * (depth - node.depth))
        if node.depth <= depth:
            items.append("</li>")
        depth = node.depth
        items.append(f"<li>{_signs(node, policies)} <code>{html.escape(repr(token_text(node.path[-1])))}</code> ")
        items.append(f"<small>{html.escape(numbers(node))}</small>")
    items.append("</li></ul>" * depth)
    rows = "".join(
        f"<tr><td>{place}.</td><td>{html.escape(policy)}</td><td>{step.gamma[policy]}</td><td>{step.tau[policy]}</td></tr>"
        for place, policy in enumerate(policies, start=1)
    )
    legend = " ".join(
        f'<span style="color:{LOOKS[v][1]}">{LOOKS[v][2]} {html.escape(m)}</span>' for v, m in MEANINGS.items()
    )
    title = html.escape(step.title)
    origin = html.escape(f"{run.command}; {run.commit}; {run.machine}; {run.utc}")
    return PAGE.format(title=title, rows=rows, legend=legend, tree="".join(items), origin=origin)


def _signs(node: Node, policies: list[str]) -> str:
    looks = [(policy, node.verdicts[policy]) for policy in policies]
    return "".join(
        f'<b style="color:{LOOKS[verdict][1]}" title="{html.escape(policy)}: {verdict}">{LOOKS[verdict][2]}</b>'
        for policy, verdict in looks
    )


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em; }}
ul {{ list-style: none; border-left: 1px solid #d0d7de; margin: 0 0 0 .6em; padding-left: 1em; }}
small {{ color: #57606a; }} table {{ border-collapse: collapse; }} td, th {{ padding: .1em .8em; text-align: left; }}
b {{ display: inline-block; width: 1em; text-align: center; }}
</style></head><body>
<h1>{title}</h1>
<p>{legend}</p>
<table><tr><th>sign</th><th>policy</th><th>gamma</th><th>tau, bonus excluded</th></tr>{rows}</table>
<p>p: the token's own draft probability; P: joint; H: entropy in nats of the distribution it came from; d: depth;
C: the classifier's confidence.</p>
{tree}
<footer><small>{origin}</small></footer>
</body></html>
"""
