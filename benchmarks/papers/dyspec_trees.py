"""DySpec's tables 1 to 4: tokens per verify step, rule against rule, drafted live with the stand-alone draft.

The draft draws at temperature 0.6. DySpec's, Sequoia's and SpecInfer's trees are sampled and verified by rejection, as
their papers do; EAGLE-2's and the last row's hold most probable tokens and are verified by the target's own draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.papers import live, printed
from benchmarks.papers.experiment import Bench, Cell, Experiment, Findings
from benchmarks.papers.sequoia import Sequoia
from c2t_plugin.lab.curves import bootstrap_weights, interval
from c2t_plugin.lab.grow import TreePolicy, grow_tree
from c2t_plugin.lab.policies.dyspec import DySpecGreedy, DySpecThreshold
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import StaticTree
from c2t_plugin.lab.replay import Outcomes, concatenate, visited
from c2t_plugin.lab.verify import Sampler, Verification

DRAFT, DRAFT_TEMPERATURE = "draft", 0.6
TEMPERATURES = (0.0, 0.6)
SMALL, LARGE = 64, 768
# Draft tokens that Sequoia's acceptance by rank is measured on, per state; other prompts than the tables'.
RANK_PROMPTS, RANK_NEW = 6, 40
# Serving is replayed from so many of a prompt's first states: one replay visits few of them.
STARTS = 8

GREEDY, THRESHOLD, SEQUOIA = "DySpec greedy", "DySpec threshold 1/n", "Sequoia"
SEQUENCES, BRANCHES = "SpecInfer, sequences", "SpecInfer, branches"
# Beside the paper's 1 / n, which is not the best on this pair (DySpec figure 5 here).
LIMITS = (0.1, 0.03, 0.01)
EAGLE2, TOP_TOKENS = "EAGLE-2", "DySpec greedy, most probable words"
# SpecInfer's tokens per step by table, as printed; the rows of printed.DYSPEC. Table 4's are Sequoia's paper's.
SPECINFER = {
    1: (3.32, 3.44, 2.54, 2.97, 2.58, 3.06),
    2: (3.14, 3.15, 2.44, 2.75, 2.52, 2.84),
    3: (4.67, 5.75, 4.83, 5.46, 4.83, 5.75),
    4: (8.66, 6.93, 7.36, 6.18, 7.87, 6.24),
}


@dataclass(frozen=True)
class Setting:
    """Trees of one size. nodes: draft nodes, the root excluded. depth: none is deeper. prompts, new: states measured.

    sequences, branches: SpecInfer's shapes, at most `nodes` nodes; DySpec prints none. k: EAGLE-2's. ranks: of
    Sequoia's acceptance vector. together: texts at once, for the memory of large trees' logits.
    """

    nodes: int
    depth: int
    prompts: int
    new: int
    sequences: tuple[int, ...]
    branches: tuple[int, ...]
    k: int
    ranks: int
    together: int


# DySpec 4.3: depth typically below 10 at 64 nodes, usually below 30 at 768.
SETTINGS = {
    SMALL: Setting(SMALL, 16, 16, 30, (8,) + (1,) * 7, (2, 2, 2, 2, 2), 10, 16, 4),
    LARGE: Setting(LARGE, 30, 8, 6, (25,) + (1,) * 29, (4, 4, 3, 2, 2, 1, 1), 15, 32, 1),
}
QUICK = Setting(8, 4, 2, 3, (2, 1, 1, 1), (2, 2), 3, 3, 2)


@dataclass(frozen=True)
class Rule:
    """A policy and its verification by rejection; None for a target that draws without looking at the draft."""

    policy: TreePolicy
    rejection: Verification | None


def rules(setting: Setting, acceptance: Tensor) -> dict[str, Rule]:
    """By name. acceptance: (ranks,) as acceptance_by_draw, for Sequoia."""
    nodes, depth, heat = setting.nodes, setting.depth, DRAFT_TEMPERATURE
    sequoia = Sequoia.plan(acceptance.tolist(), nodes, depth, heat)
    greedy = DySpecGreedy(max_nodes=nodes, d_max=depth, temperature=heat, sampled=True)
    threshold = DySpecThreshold(threshold=1 / nodes, max_nodes=nodes, d_max=depth, temperature=heat, sampled=True)
    others = {
        f"DySpec threshold {limit:g}": Rule(replace(threshold, threshold=limit), Verification.WITHOUT_REPLACEMENT)
        for limit in LIMITS
    }
    most_probable = DySpecGreedy(max_nodes=nodes, d_max=depth, temperature=heat, reading="joint")
    # a draft pass a node, which takes longer at 768 of them than all the rest, and is in no table of the paper
    more = {TOP_TOKENS: Rule(most_probable, None)} if nodes < LARGE else {}
    return {
        GREEDY: Rule(greedy, Verification.WITHOUT_REPLACEMENT),
        THRESHOLD: Rule(threshold, Verification.WITHOUT_REPLACEMENT),
        **others,
        SEQUOIA: Rule(sequoia, Verification.WITHOUT_REPLACEMENT),
        SEQUENCES: Rule(SpecInfer(branches=setting.sequences, temperature=heat), Verification.MULTI_ROUND),
        BRANCHES: Rule(SpecInfer(branches=setting.branches, temperature=heat), Verification.MULTI_ROUND),
        EAGLE2: Rule(Eagle2(max_nodes=nodes, k=setting.k, d_max=min(depth, 10)), None),
        **more,
    }


def acceptance_by_draw(bench: Bench, temperature: float, ranks: int, skip: int) -> Tensor:
    """How often the first, second, ... draw without replacement is the accepted one: (ranks,) float64.

    What Sequoia plans its tree by, measured below the roots of other prompts. temperature: of the target.
    """
    star = StaticTree(paths=tuple((rank,) for rank in range(ranks)), temperature=DRAFT_TEMPERATURE)
    prompts, new = (2, 4) if bench.quick else (RANK_PROMPTS, RANK_NEW)
    plan = live.Plan(prompts, new, 1, temperature, seed=bench.seed, skip=skip)
    generator = torch.Generator().manual_seed(bench.seed)
    counts, states = torch.zeros(ranks, dtype=torch.float64), 0
    with torch.inference_mode():
        for site in live.sites(bench.live(DRAFT), DRAFT, plan):
            grown = grow_tree(site.drafter(), star, generator)
            chosen = live.accepted_children(
                grown,
                site.judge().root(),
                Verification.WITHOUT_REPLACEMENT,
                DRAFT_TEMPERATURE,
                temperature,
                Sampler(generator),
            )[site.running]
            counts += chosen[chosen >= 0].bincount(minlength=ranks)
            states += len(chosen)
    return counts / states


@dataclass(frozen=True)
class Measured:
    """Of one rule. steps, tokens: verifications and output tokens of each prompt, (prompts,) float64, bonus included.
    gamma, passes: nodes and draft passes per tree, over all states."""

    steps: Tensor
    tokens: Tensor
    gamma: float
    passes: float

    @classmethod
    def of(cls, outcomes: Outcomes, prompt: Tensor) -> Measured:
        """prompt: (states,) as in replay.visited. Serving is replayed STARTS times, from other states on."""
        numbers, owner, counts = prompt.unique_consecutive(return_inverse=True, return_counts=True)
        place = torch.arange(len(prompt)) - (counts.cumsum(0) - counts)[owner]
        steps, tokens = torch.zeros(2, len(numbers), dtype=torch.float64)
        for start in range(STARTS):
            rest = (place >= start).nonzero().flatten()
            at = rest[visited(prompt[rest], outcomes.accepted[rest])] if len(rest) else rest
            steps += owner[at].bincount(minlength=len(numbers))
            tokens += owner[at].bincount(outcomes.accepted[at].double() + 1, minlength=len(numbers))
        return cls(steps, tokens, float(outcomes.gamma.double().mean()), float(outcomes.passes.double().mean()))

    @property
    def per_step(self) -> float:
        return float(self.tokens.sum() / self.steps.sum())

    def bounds(self) -> tuple[float, float]:
        """95% interval of per_step over prompts."""
        weights = torch.from_numpy(bootstrap_weights(torch.arange(len(self.steps))))
        return interval(((weights @ self.tokens) / (weights @ self.steps)).numpy())


def measure(bench: Bench, setting: Setting, temperature: float) -> dict[str, Measured]:
    """What every rule brings at one target temperature, at the same states."""
    acceptance = acceptance_by_draw(bench, temperature, setting.ranks, setting.prompts)
    chosen = rules(setting, acceptance)
    generators = {name: torch.Generator().manual_seed(bench.seed) for name in chosen}
    plan = live.Plan(setting.prompts, setting.new, setting.depth, temperature, setting.together, bench.seed)
    prompt: list[Tensor] = []
    found: dict[str, list[Outcomes]] = {name: [] for name in chosen}
    with torch.inference_mode():
        for site in live.sites(bench.live(DRAFT), DRAFT, plan):
            prompt.append(site.prompt[site.running])
            for name, rule in chosen.items():
                outcomes = _at(site, rule, temperature, generators[name])
                found[name].append(outcomes[site.running])
    return {name: Measured.of(concatenate(parts), torch.cat(prompt)) for name, parts in found.items()}


def _at(site: live.Site, rule: Rule, temperature: float, generator: torch.Generator) -> Outcomes:
    # at temperature 0 rejection accepts what the text goes on with, and nothing else
    if rule.rejection is None or temperature == 0:
        return site.by_text(rule.policy, generator)
    return live.by_rejection(site, rule.policy, rule.rejection, DRAFT_TEMPERATURE, temperature, generator)


def printed_tokens(table: int, temperature: float, name: str) -> dict[str, float]:
    """dataset -> the paper's tokens per step; nothing for rules that it does not have.

    Which of its two constructions DySpec used is said for table 4 only: the threshold.
    """
    ours = THRESHOLD if table == 4 else GREEDY
    found = {}
    for run, specinfer in zip(printed.DYSPEC[table], SPECINFER[table], strict=True):
        of = {ours: run.accepted, SEQUOIA: run.sequoia, SEQUENCES: specinfer}
        if run.temperature == temperature and name in of:
            found[run.dataset] = of[name]
    return found


def table(nodes: int, paper: Callable[[float, str], Mapping[str, Cell]]) -> Callable[[Bench], Findings]:
    """An experiment's `run`. paper: temperature, rule -> the paper's cells of the row."""

    def run(bench: Bench) -> Findings:
        setting = QUICK if bench.quick else SETTINGS[nodes]
        found = {temperature: measure(bench, setting, temperature) for temperature in TEMPERATURES}
        rows = [
            {
                "target temperature": temperature,
                "rule": name,
                **paper(temperature, name),
                "tokens per step": measured.per_step,
                **dict(zip(("low", "high"), measured.bounds(), strict=True)),
                "nodes per tree": measured.gamma,
                "draft passes": measured.passes,
            }
            for temperature, name, measured in _flat(found)
        ]
        return Findings(rows, remark(found, setting))

    return run


def _flat(found: Mapping[float, Mapping[str, Measured]]) -> Iterator[tuple[float, str, Measured]]:
    for temperature, by_name in found.items():
        for name, measured in by_name.items():
            yield temperature, name, measured


def remark(found: Mapping[float, Mapping[str, Measured]], setting: Setting) -> str:
    """Who accepts most, and DySpec's greedy trees against Sequoia's."""
    parts = []
    for temperature, by_name in found.items():
        order = sorted(by_name, key=lambda name: -by_name[name].per_step)
        ratio = by_name[GREEDY].per_step / by_name[SEQUOIA].per_step
        parts.append(
            f"target temperature {temperature:g}: most tokens per step: {order[0]}, fewest: {order[-1]}, "
            f"DySpec greedy {ratio:.2f}x of Sequoia"
        )
    return (
        f"At {'; at '.join(parts)}. {setting.prompts * setting.new} states of {setting.prompts} held-out prompts per "
        f"temperature, serving replayed from {min(STARTS, setting.new)} of each; 95% intervals over prompts; draft "
        f"temperature {DRAFT_TEMPERATURE}. Mean over the paper's datasets where it has one column."
    )


def _means(temperature: float, name: str) -> dict[str, Cell]:
    """Of tables 1 to 3."""
    cells: dict[str, Cell] = {}
    for number in (1, 2, 3):
        tokens = printed_tokens(number, temperature, name)
        cells[f"paper table {number}"] = sum(tokens.values()) / len(tokens) if tokens else None
    return cells


def _datasets(temperature: float, name: str) -> dict[str, Cell]:
    """Of table 4."""
    tokens = printed_tokens(4, temperature, name)
    return {f"paper {dataset}": tokens.get(dataset) for dataset in ("C4", "OWT", "CNN")}


def _columns(*paper: str) -> tuple[str, ...]:
    ours = ("tokens per step", "low", "high", "nodes per tree", "draft passes")
    return ("target temperature", "rule", *paper, *ours)


EXPERIMENTS = (
    Experiment(
        name="dyspec-tables-1-3",
        title=f"Tokens per verify step (bonus included) at {SMALL} nodes",
        source="DySpec tables 1 to 3",
        columns=_columns("paper table 1", "paper table 2", "paper table 3"),
        run=table(SMALL, _means),
    ),
    Experiment(
        name="dyspec-table-4",
        title=f"Tokens per verify step (bonus included) at {LARGE} nodes",
        source="DySpec table 4",
        columns=_columns("paper C4", "paper OWT", "paper CNN"),
        run=table(LARGE, _datasets),
    ),
)
