"""`c2t tune`: choose the beta of a classifier, on recorded traces, for a wanted accept length."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.lab.plans import check_seed
from c2t_plugin.output import check_file

if TYPE_CHECKING:
    from c2t_plugin.classifier import NodeClassifier
    from c2t_plugin.lab.sweeps import Sweep
    from c2t_plugin.lab.unfinished import Unfinished
    from c2t_plugin.traces.file import Traces
    from c2t_plugin.traces.forest import Forest

STEPS = 100
# Rows printed on each side of the chosen beta, and how far apart they are.
NEIGHBOURS, STRIDE = 4, 5
STATES_AT_A_TIME = 250


@dataclass(frozen=True)
class TunePlan:
    """tau: wanted accept length, bonus token excluded; None for that of static chains of `static`. tree: trees instead
    of chains. depth: longest chain or deepest node. replicates, seed: of the bootstrap."""

    tau: float | None = None
    static: int = 4
    tree: bool = False
    depth: int = 6
    replicates: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.tau is not None and not self.tau > 0.0:
            raise ConfigError(f"tau must be a positive number, got {self.tau}")
        if not 1 <= self.static <= self.depth:
            raise ConfigError(f"1 <= static <= depth must hold, got static {self.static} and depth {self.depth}")
        if self.replicates < 1:
            raise ConfigError(f"replicates must be at least 1, got {self.replicates}")


@dataclass(frozen=True)
class Tuned:
    """beta: the largest of 0.01, 0.02 ... 0.99 that is accepted for `wanted`. betas, tau, gamma: all of them and what
    they bring. tau_interval, gamma_interval: at beta, 95%."""

    wanted: float
    beta: float
    betas: list[float]
    tau: list[float]
    gamma: list[float]
    tau_interval: tuple[float, float]
    gamma_interval: tuple[float, float]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t tune", description=__doc__)
    parser.add_argument("classifier", type=Path, help="classifier file")
    parser.add_argument("traces", type=Path, help="trace file, from `c2t collect`")
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--tau", type=float, default=TunePlan.tau, help="wanted accept length, bonus token excluded")
    wanted.add_argument("--static", type=int, default=TunePlan.static, help="or that of static chains of this length")
    parser.add_argument("--tree", action="store_true", help="cut trees instead of chains")
    parser.add_argument("--depth", type=int, default=TunePlan.depth, help="longest chain, or deepest node of a tree")
    parser.add_argument("--replicates", type=int, default=TunePlan.replicates, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=TunePlan.seed, help="of the bootstrap")
    parser.add_argument("--out", type=Path, help="write a copy of the classifier that suggests this beta")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.out:
        check_file(arguments.out)
    names = ("tau", "static", "tree", "depth", "replicates", "seed")
    plan = TunePlan(**{name: getattr(arguments, name) for name in names})
    from c2t_plugin.classifier import load_classifier, save_classifier
    from c2t_plugin.lab.unfinished import Unfinished, checksum
    from c2t_plugin.traces.file import load_traces

    classifier, traces = load_classifier(arguments.classifier), load_traces(arguments.traces)
    unfinished = None
    if arguments.out:
        inputs = {"classifier": checksum(arguments.classifier), "traces": checksum(arguments.traces)}
        unfinished = Unfinished.of(arguments.out, {"plan": asdict(plan), **inputs}, plan.seed)
    found = tune(classifier, traces, plan, unfinished)
    _print(found, plan, traces)
    if unfinished is not None:
        how = f"{'trees' if plan.tree else 'chains'} of depth {plan.depth} accepted for {found.wanted:.3f}"
        tuned = {"run": dict(unfinished.run), "traces": traces.header}
        training = {**classifier.spec.training, "suggested_beta": how, "tuned": tuned}
        classifier.spec = replace(classifier.spec, suggested_beta=found.beta, training=training)
        save_classifier(classifier, arguments.out)
        unfinished.finish()
        print(f"{arguments.out}: suggested beta {found.beta:.2f}")
    return 0


def tune(classifier: NodeClassifier, traces: Traces, plan: TunePlan, unfinished: Unfinished | None = None) -> Tuned:
    """The largest, so cheapest, threshold that reaches the wanted tau. C2TError, with what is reached, if none does.

    unfinished: where scored states are kept and, after an interruption, taken from.
    """
    from c2t_plugin.lab.curves import bootstrap_weights, interval, serve
    from c2t_plugin.lab.sweeps import static_sweep, truncate

    traces.check_top_m(classifier)
    chain = truncate(traces.chain, plan.depth)
    wanted = plan.tau
    if wanted is None:
        wanted = float(serve(traces, static_sweep(chain)).curve()[0][plan.static - 1])
    forest = truncate(traces.tree, plan.depth) if plan.tree else chain
    betas = [step / STEPS for step in range(1, STEPS)]
    served = serve(traces, _swept(classifier, forest, betas, unfinished))
    tau, gamma = served.curve()
    fitting = [index for index, reached in enumerate(tau) if reached >= wanted]
    if not fitting:
        raise C2TError(f"tau {wanted:.3f} is out of reach: beta {betas[0]} is accepted for {tau[0]:.3f}; ask for less")
    chosen = max(fitting)
    weights = bootstrap_weights(traces.groups, plan.replicates, plan.seed)
    drawn = [part[:, chosen] for part in served.curve(weights)]
    return Tuned(wanted, betas[chosen], betas, tau.tolist(), gamma.tolist(), interval(drawn[0]), interval(drawn[1]))


def _swept(classifier: NodeClassifier, forest: Forest, betas: list[float], unfinished: Unfinished | None) -> Sweep:
    """Every state at every beta, with a progress bar; a few at a time: the hidden layer of all takes gigabytes."""
    import torch
    from rich.progress import track
    from safetensors.torch import load_file, save_file

    from c2t_plugin.lab.sweeps import Sweep, threshold_sweep

    levels = torch.tensor(betas)
    chunks = torch.arange(len(forest)).split(STATES_AT_A_TIME)
    parts = []
    for number, rows in enumerate(track(chunks, "scoring")):
        name = f"{number:05d}.safetensors"
        if unfinished is not None and unfinished.file(name).is_file():
            parts.append(load_file(unfinished.file(name)))
            continue
        part = forest[rows]
        swept = threshold_sweep(part, classifier.confidence(part.stats()), levels)
        parts.append({"gamma": swept.gamma.contiguous(), "tau": swept.tau.contiguous()})
        if unfinished is not None:
            unfinished.keep(name, partial(save_file, parts[-1]))
    gamma, tau = (torch.cat([part[name] for part in parts], dim=1) for name in ("gamma", "tau"))
    return Sweep(levels, gamma, tau)


def _print(found: Tuned, plan: TunePlan, traces: Traces) -> None:
    from rich.console import Console
    from rich.table import Table

    from c2t_plugin.lab.curves import bootstrap_unit

    table = Table(title=f"{'trees' if plan.tree else 'chains'} of depth {plan.depth}, {len(traces.first)} prompts")
    for name in ("beta", "tau, no bonus", "gamma", ""):
        table.add_column(name, justify="right")
    chosen = found.betas.index(found.beta)
    for index in range(chosen - NEIGHBOURS * STRIDE, chosen + NEIGHBOURS * STRIDE + 1, STRIDE):
        if 0 <= index < len(found.betas):
            mark = "chosen" if index == chosen else ""
            table.add_row(f"{found.betas[index]:.2f}", f"{found.tau[index]:.3f}", f"{found.gamma[index]:.3f}", mark)
    console = Console()
    console.print(table)
    unit = bootstrap_unit(traces)
    tau, gamma = (f"{low:.3f}..{high:.3f}" for low, high in (found.tau_interval, found.gamma_interval))
    console.print(
        f"beta {found.beta:.2f} for tau {found.wanted:.3f}: accepted {found.tau[chosen]:.3f} ({tau}) of "
        f"{found.gamma[chosen]:.3f} ({gamma}) verified, no bonus; 95%, bootstrap over {unit}"
    )
