"""What the C2T experiments share: samples of the traces, small classifiers, and rules compared at equal tau.

gamma counts draft tokens, the root excluded, as everywhere in this project; N of EAGLE-2 counts the root, as the papers
do. tau excludes the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers.experiment import Bench
from c2t_plugin.classifier import NodeClassifier, load_classifier
from c2t_plugin.lab.curves import gamma_at, serve
from c2t_plugin.lab.fit import fit
from c2t_plugin.lab.grow import TreePolicy
from c2t_plugin.lab.plans import FitPlan
from c2t_plugin.lab.replay import replay
from c2t_plugin.lab.sweeps import Sweep, censored, eagle2_sweep, kept_nodes, threshold_sweep, thresholds, truncate
from c2t_plugin.lab.training import FINE_TUNING_SHARE, FIT_RECIPES, Epoch, FitRecipe
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {"eagle3": "EAGLE-3 head", "eagle1": "EAGLE-1 head", "draft": "stand-alone"}
# Of the recorded trees; the papers' is 15.
K = 10
HELD_OUT_PROMPTS = 64
TRAINING_PROMPTS = 40
# A fit splits one prompt off to choose its epoch by.
MIN_PROMPTS = 2
POINTS = 400
PAPER_FEATURES_FILE = "c2t_classifier_paper_features.safetensors"
# of ten, of the smallest beta that is looked for
LEAST_POWER = -5.0
# A prompt's first states that a replay starts from: one replay visits a small sample of the states.
STARTS = 8
# Confidences of so many trees at a time keep the hidden layer in memory.
TREES_AT_A_TIME = 250

PAPER_RECIPE = FIT_RECIPES["paper"]
# The shipped recipe on a sample of the negatives, which its prior undoes: as good on few prompts, and much faster.
OUR_RECIPE = replace(FIT_RECIPES["default"], negatives_per_positive=20.0, prior=True)
RECIPES = {"paper's": PAPER_RECIPE, "ours": OUR_RECIPE}
SAMPLED = f"At most {HELD_OUT_PROMPTS} held-out prompts."
FITTED = f"{SAMPLED} Classifiers fitted here see at most {TRAINING_PROMPTS} training prompts."

# Columns of a rule that is cut where it accepts what EAGLE-2 does; a setting is a threshold, or nodes.
AT_EQUAL_TAU = ("setting", "tau", "gamma / EAGLE-2", "missing")


def titles(bench: Bench) -> dict[str, str]:
    """Of the drafts that the pair has."""
    return {draft: title for draft, title in TITLES.items() if (bench.pair / draft).is_dir()}


def first_prompts(traces: Traces, count: int) -> Traces:
    """The states of the first `count` prompts."""
    numbers = traces.prompt.unique()
    return traces if len(numbers) <= count else traces[torch.isin(traces.prompt, numbers[:count])]


def held_out(bench: Bench, draft: str) -> Traces:
    """A sample of a draft's held-out traces."""
    return first_prompts(bench.traces(draft), HELD_OUT_PROMPTS)


def training(bench: Bench, draft: str) -> Traces:
    """A sample of a draft's training traces."""
    return first_prompts(bench.traces(draft, "train"), TRAINING_PROMPTS)


def tuning(bench: Bench, draft: str) -> Traces:
    """The tenth of a draft's training prompts that fine-tuning sees (C2T B.4)."""
    traces = bench.traces(draft, "train")
    return first_prompts(traces, max(MIN_PROMPTS, round(FINE_TUNING_SHARE * len(traces.prompt.unique()))))


def paper_features(bench: Bench, draft: str) -> NodeClassifier:
    """The shipped classifier of P, H and d alone; Bench.classifier() is the one that the project recommends."""
    return load_classifier(bench.read(bench.pair / draft / PAPER_FEATURES_FILE))


def small_fit(
    traces: Traces,
    recipe: FitRecipe,
    seed: int,
    init: NodeClassifier | None = None,
    learning_rate: float | None = None,
) -> tuple[NodeClassifier, list[Epoch]]:
    """`c2t fit` on a few prompts: ten epochs. init, learning_rate: of fine-tuning."""
    longest = min(FitPlan.d_max, traces.chain.layers)
    static = min(FitPlan.static, longest)
    plan = FitPlan(d_max=longest, static=static, seed=seed, learning_rate=learning_rate)
    classifier, epochs, _ = fit(traces, recipe, plan, init)
    return classifier, epochs


def by_trees(forest: Forest, score: Callable[[Forest], Tensor]) -> Tensor:
    """score(forest), computed for a few trees at a time."""
    return torch.cat([score(forest[rows]) for rows in torch.arange(len(forest)).split(TREES_AT_A_TIME)])


def confidence(classifier: NodeClassifier, forest: Forest) -> Tensor:
    """(trees, nodes) confidences of all nodes."""
    with torch.no_grad():
        return by_trees(forest, lambda part: classifier.confidence(part.stats()))


class HasTau(Protocol):
    """What a rule brings, in whatever form."""

    @property
    def tau(self) -> float:
        """Accepted draft tokens per verification, bonus excluded."""


Tau = TypeVar("Tau", bound=HasTau)


class Point(NamedTuple):
    """A rule at one setting. tau, gamma: per verification, bonus token and root excluded."""

    setting: float
    tau: float
    gamma: float

    @property
    def per_token(self) -> float:
        """Candidates per output token, bonus tokens being output: what the papers' totals over one output compare."""
        return self.gamma / (self.tau + 1.0)


@dataclass(frozen=True)
class Curve:
    """A rule at all of its settings. settings, tau, gamma: (settings,) each, see Point."""

    settings: np.ndarray
    tau: np.ndarray
    gamma: np.ndarray

    @classmethod
    def of(cls, traces: Traces, sweep: Sweep) -> Curve:
        """Serve the prompts at every setting."""
        return cls(sweep.settings.numpy(), *serve(traces, sweep, starts=STARTS).curve())

    def cheapest(self, tau: float) -> Point | None:
        """The setting of smallest gamma that accepts at least tau; None out of reach."""
        fitting = np.flatnonzero(self.tau >= tau - 1e-9)
        if not len(fitting):
            return None
        best = fitting[np.argmin(self.gamma[fitting])]
        return Point(float(self.settings[best]), float(self.tau[best]), float(self.gamma[best]))

    def gamma_at(self, tau: float) -> float | None:
        """Interpolated between settings; None out of reach."""
        found = float(gamma_at(self.tau, self.gamma, tau))
        return None if np.isnan(found) else found


@dataclass(frozen=True)
class Ground:
    """One draft's trees, down to some depth, and EAGLE-2 on them at every N; a setting of its curve is N - 1."""

    traces: Traces
    forest: Forest
    eagle2: Curve

    @classmethod
    def of(cls, traces: Traces, depth: int) -> Ground:
        """depth: of the deepest nodes; the recorded one where that is less."""
        forest = truncate(traces.tree, min(depth, traces.tree.layers))
        return cls(traces, forest, Curve.of(traces, eagle2_sweep(forest)))

    def eagle2_at(self, n: int) -> Point:
        """The paper's N, root included, or the whole recorded tree if that is smaller."""
        at = min(n - 1, len(self.eagle2.settings)) - 1
        return Point(*(float(part[at]) for part in (self.eagle2.settings, self.eagle2.tau, self.eagle2.gamma)))

    def threshold(self, score: Tensor) -> Curve:
        """Nodes of at least some score, without a second top-K; a setting is the threshold. score: (trees, nodes)."""
        return Curve.of(self.traces, threshold_sweep(self.forest, score, thresholds(score, POINTS)))

    def confidence(self, classifier: NodeClassifier) -> Tensor:
        """(trees, nodes) confidences of all nodes."""
        return confidence(classifier, self.forest)

    def cells(self, score: Tensor, curve: Curve, base: Point) -> dict[str, float | None]:
        """A threshold on the score, where it accepts what EAGLE-2 does at `base`: cells of a row, AT_EQUAL_TAU.

        curve: threshold(score). missing: share of the states where the tree might be accepted beyond the record.
        """
        found = curve.cheapest(base.tau)
        if found is None:
            return dict.fromkeys(AT_EQUAL_TAU)
        cut = censored(self.forest, kept_nodes(self.forest, score, found.setting)).states
        cells = found.setting, found.tau, found.per_token / base.per_token, cut
        return dict(zip(AT_EQUAL_TAU, cells, strict=True))

    def against(self, score: Tensor, base: Point) -> dict[str, float | None]:
        """cells() where one comparison is all that is wanted."""
        return self.cells(score, self.threshold(score), base)


class Brought(NamedTuple):
    """What a rule brings at one setting; see Point. missing: share of the states whose tree has a node below one that
    the record did not expand; tau and gamma are too small there."""

    tau: float
    gamma: float
    missing: float

    @property
    def per_token(self) -> float:
        """As Point.per_token."""
        return self.gamma / (self.tau + 1.0)


def at_setting(traces: Traces, sweep: Sweep, at: int = 0) -> Brought:
    """One setting of a sweep in which nothing is missing."""
    curve = Curve.of(traces, sweep)
    return Brought(float(curve.tau[at]), float(curve.gamma[at]), 0.0)


def served(traces: Traces, policy: TreePolicy) -> Brought:
    """A policy through the growth loop, on the recorded trees."""
    header = traces.header
    found = replay(traces.tree, policy, header["top_m"], header["pair"]["draft_vocab_size"])
    sweep = Sweep(torch.zeros(1), found.gamma[None].short(), found.accepted[None].short())
    return at_setting(traces, sweep)._replace(missing=float((found.missing > 0).float().mean()))


def beta_at(serve_at: Callable[[float], Tau], tau: float, rounds: int = 10) -> tuple[float, Tau]:
    """Bisect for the largest beta that accepts at least tau; beta 0, which may accept less, if none does.

    serve_at: beta -> what it brings; tau falls as beta rises. In powers of ten: most nodes have a tiny confidence.
    """
    low, high = LEAST_POWER, 0.0
    found = None
    for _ in range(rounds):
        middle = (low + high) / 2
        at = serve_at(10.0**middle)
        if at.tau >= tau:
            low, found = middle, at
        else:
            high = middle
    return (10.0**low, found) if found else (0.0, serve_at(0.0))


def listed(values: Sequence[float | None], digits: int = 2) -> str:
    """Smallest to largest, for a remark."""
    known = [value for value in values if value is not None]
    return f"{min(known):.{digits}f} to {max(known):.{digits}f}" if known else "nothing"


def curves_figure(pictures: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """gamma over tau, one panel per title, one line per rule; points alone for a name with `second` in it."""
    from c2t_plugin.lab.pictures import gamma_over_tau, panels

    figure, axes = panels(len(pictures), 7.0)
    for axis, (title, curves) in zip(axes, pictures.items(), strict=True):
        for name, curve in curves.items():
            style = "x" if "second" in name else "-"
            axis.plot(curve.tau, curve.gamma, style, label=name, linewidth=1.2, markersize=5)
        gamma_over_tau(axis, title, log=True)
    return figure


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are there; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def ratio(one: float | None, other: float | None) -> float | None:
    """one / other; None where one is not known or the other is 0."""
    return None if one is None or not other else one / other
