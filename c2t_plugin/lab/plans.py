"""What `c2t collect`, `fit` and `evaluate` are asked to do: frozen, checked, each default in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from c2t_plugin.errors import ConfigError

DRAFTS = ("draft", "eagle3", "eagle1", "mtp")
PROMPT_SOURCES = ("train", "held-out", "docstrings", "tests", "arithmetic", "dialogue")
PROMPT_FILE = ".jsonl"
RECIPES = ("default", "paper", "extended")
CALIBRATIONS = ("none", "tree", "chain")


def _at_least_one(plan: object, *names: str) -> None:
    for name in names:
        if getattr(plan, name) < 1:
            raise ConfigError(f"{name.replace('_', '-')} must be at least 1, got {getattr(plan, name)}")


def check_seed(seed: int) -> None:
    """ConfigError for one that some generator does not take."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be from 0 to {2**63 - 1}, got {seed}")


@dataclass(frozen=True)
class TreeShape:
    """Whole trees; the defaults are the paper's 1,011 nodes with the root (C2T B.1).

    k: children of every expanded node, and expanded nodes per layer. layers: depth of the deepest nodes; a root's child
    has depth 1. top_m: how many of the largest probabilities the entropy sums over.
    """

    k: int = 10
    layers: int = 11
    top_m: int = 1000

    def __post_init__(self) -> None:
        _at_least_one(self, "k", "layers", "top_m")


@dataclass(frozen=True)
class CollectPlan:
    """draft: which of the pair's drafts. trees: at least so many; prompts are used whole. prompts: where they come
    from, see corpora.SOURCES, or the path of a prompt file (corpora.file_prompts). new_tokens: greedy tokens per
    prompt, each the root of one tree. seed: choice of prompts."""

    draft: str
    shape: TreeShape = field(default_factory=TreeShape)
    trees: int = 10_000
    prompts: str = "train"
    new_tokens: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_one(self, "trees", "new_tokens")
        check_seed(self.seed)
        if self.draft not in DRAFTS:
            raise ConfigError(f"draft must be one of {', '.join(DRAFTS)}, got {self.draft!r}")
        if self.prompts not in PROMPT_SOURCES and not self.prompts.endswith(PROMPT_FILE):
            known = ", ".join(PROMPT_SOURCES)
            raise ConfigError(f"prompts must be one of {known} or a file *{PROMPT_FILE}, got {self.prompts!r}")


@dataclass(frozen=True)
class FitPlan:
    """What a fit needs besides its recipe.

    depth_origin: depth of a root's child. d_max: longest chain in the report and for the suggested beta.
    static: the suggested beta accepts what static chains of this length do. beta: suggested instead of that one.
    seed: split, negatives, weights at the start, order of rows. share: of the training prompts that are used.
    learning_rate: of Adam at the start, None for the paper's. calibrate: on which of the training nodes the output is
    made a probability afterwards.
    """

    depth_origin: int = 1
    d_max: int = 6
    static: int = 4
    beta: float | None = None
    seed: int = 0
    share: float = 1.0
    learning_rate: float | None = None
    calibrate: str = CALIBRATIONS[0]

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.depth_origin not in (0, 1):
            raise ConfigError(f"depth-origin must be 0 or 1, got {self.depth_origin}")
        if not 1 <= self.static <= self.d_max:
            raise ConfigError(f"1 <= static <= d-max must hold, got static {self.static} and d-max {self.d_max}")
        if self.beta is not None and not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"beta must be a number in [0, 1], got {self.beta}")
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"share must be a number in (0, 1], got {self.share}")
        if self.calibrate not in CALIBRATIONS:
            raise ConfigError(f"calibrate must be one of {', '.join(CALIBRATIONS)}, got {self.calibrate!r}")
        if self.learning_rate is not None and not 0.0 < self.learning_rate < 1.0:
            raise ConfigError(f"learning-rate must be a number in (0, 1), got {self.learning_rate}")


@dataclass(frozen=True)
class EvaluatePlan:
    """d_max: longest chain. tree_depth: deepest node of a tree. taus: accept lengths (bonus excluded) to compare trees
    at, None for eight between a fifth and nine tenths of what all reach. second_top_k: also C2T's trees with at most so
    many nodes kept per layer. starts: replay each prompt from so many of its first states. every_state: instead,
    count each recorded state once. replicates, seed: of the bootstrap."""

    d_max: int = 6
    tree_depth: int = 6
    taus: tuple[float, ...] | None = None
    second_top_k: int | None = None
    starts: int = 8
    every_state: bool = False
    replicates: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tree_depth", "replicates", "starts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        check_seed(self.seed)
        if self.d_max < 2:
            raise ConfigError(f"d-max must be at least 2, got {self.d_max}")
        if self.second_top_k is not None and self.second_top_k < 1:
            raise ConfigError(f"second-top-k must be at least 1, got {self.second_top_k}")
        if self.taus is not None and not (self.taus and all(0.0 < tau < math.inf for tau in self.taus)):
            raise ConfigError(f"taus must be positive numbers, got {self.taus}")
