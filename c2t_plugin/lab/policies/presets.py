"""The papers' settings by name, each with its source; the only place where their constants are written down.

v1, v2: C2T, first and second version. Dy: DySpec. S4: entropy-shaped trees (Gunjur and Waitz). An N of EAGLE-2's
counts the root (v1 B.1: 1011 = 1 + 10 + 10 * 100), our max_nodes does not; DySpec's tree sizes are taken as draft
nodes. Published betas hold for classifiers of the paper's recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.errors import ConfigError
from c2t_plugin.lab.grow import TreePolicy
from c2t_plugin.lab.policies.c2t import C2TTree
from c2t_plugin.lab.policies.chains import C2TChain, DyJoint, DyMax, EntropyStop, StaticChain
from c2t_plugin.lab.policies.dyspec import DySpecGreedy, DySpecThreshold
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.policies.entropy import DynamicWidth, DynamicWidthDepth, NaiveWidth
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import FixedBranching, RankPath, StaticTree

# EAGLE-1's 25 drafts: v1 appendix A gives the number only. The shape is that of the EAGLE-1 paper's appendix A as its
# authors' code has it (SafeAILab/EAGLE, model/choices.py at e98fc7c, "mc_sim_7b_63"). Ranks from the root, by layer.
EAGLE1_PATHS: tuple[RankPath, ...] = (
    *((rank,) for rank in range(4)),
    *((0, rank) for rank in range(3)),
    *((1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, rank) for rank in range(3)),
    *((0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, rank) for rank in range(3)),
    *((0, 0, 0, 0, rank) for rank in range(2)),
)


@dataclass(frozen=True)
class Preset:
    """A policy with a paper's settings. source: where they are printed. assumed: what the paper leaves open."""

    kind: type
    options: Mapping[str, Any]
    source: str
    assumed: tuple[str, ...] = ()

    @property
    def needs_classifier(self) -> bool:
        return self.kind in (C2TTree, C2TChain)

    def policy(self, classifier: NodeClassifier | None = None, **changes: Any) -> TreePolicy:
        """The policy; changes replace options, e.g. top_m of a record. C2T's presets need a classifier, others ignore
        it. Raises ConfigError without one."""
        options = {**self.options, **changes}
        if self.needs_classifier:
            if classifier is None:
                raise ConfigError(f"a preset of {self.kind.__name__} needs a classifier; load one and pass it")
            options["classifier"] = classifier
        return self.kind(**options)


def _eagle2(n: int, k: int, d_max: int, source: str) -> Preset:
    return Preset(Eagle2, {"max_nodes": n - 1, "k": k, "d_max": d_max}, source)


def _c2t(beta: float, first_k: int, second_k: int | None, d_max: int, source: str) -> Preset:
    return Preset(C2TTree, {"beta": beta, "first_k": first_k, "second_k": second_k, "d_max": d_max}, source)


def _dyspec(kind: type, max_nodes: int, source: str, **options: Any) -> Preset:
    # sampled, as algorithm 1 is; temperature: Dy 5.1, of the draft
    return Preset(kind, {"max_nodes": max_nodes, "temperature": 0.6, "sampled": True, **options}, source)


# model: EAGLE-2's N, C2T's beta, beta of the fine-tuned classifier
_TABLE_2 = {
    "llama2-7b": (290, 0.3, None),
    "llama2-13b": (300, 0.3, None),
    "llama2-70b": (260, 0.3, None),
    "vicuna-7b": (180, 0.35, 0.25),
    "vicuna-13b": (200, 0.35, 0.25),
    "vicuna-33b": (210, 0.3, 0.2),
}


def _table_2() -> dict[str, Preset]:
    found = {}
    for model, (n, beta, tuned) in _TABLE_2.items():
        found[f"eagle2-{model}"] = _eagle2(n, 15, 10, "v1 table 2; K and d_max from section 5")
        found[f"c2t-{model}"] = _c2t(beta, 15, None, 10, "v1 table 2, without the second top-K")
        if tuned is not None:
            found[f"c2t-tuned-{model}"] = _c2t(tuned, 15, None, 10, "v1 table 2, C2T*, without the second top-K")
    return found


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        # trees
        "eagle1": Preset(StaticTree, {"paths": EAGLE1_PATHS}, "EAGLE-1 appendix A; v1 appendix A and table 4"),
        "eagle2": _eagle2(60, 10, 6, "EAGLE-2's own; v1 table 4"),
        "eagle2-26": _eagle2(26, 10, 6, "v1 table 4, as large as EAGLE-1's tree"),
        "eagle2-100": _eagle2(100, 15, 10, "v1 table 1"),
        "training-tree": _eagle2(1011, 10, 11, "v1 B.1: the whole tree, nothing reranked away"),
        "c2t": _c2t(0.5, 15, 15, 10, "v2 4.1 for beta, v1 5 and B.6 for K and d_max"),
        "c2t-no-second-k": _c2t(0.5, 15, None, 10, "v1 table 5, the rows without second pruning"),
        "c2t-small": _c2t(0.85, 10, 10, 6, "v1 table 4"),
        "c2t-large": _c2t(0.65, 10, 10, 6, "v1 table 4"),
        "c2t-without-depth": _c2t(0.42, 15, 15, 10, "v1 table 1, a classifier of P and H"),
        "c2t-without-entropy": _c2t(0.7, 15, 15, 10, "v1 table 1, a classifier of P and d"),
        "c2t-without-prob": _c2t(0.5, 15, 15, 10, "v1 table 1, a classifier of H and d"),
        "c2t-on-eagle2": _c2t(0.5, 10, 10, 8, "v2 5.1: EAGLE-2's own depth plus two, beta 0.5"),
        **_table_2(),
        "dyspec-64": _dyspec(DySpecGreedy, 64, "Dy tables 1 to 3"),
        "dyspec-768": _dyspec(DySpecGreedy, 768, "Dy table 4's size; the paper itself had to build it by threshold"),
        "dyspec-threshold": _dyspec(DySpecThreshold, 768, "Dy table 4 and figure 5, mean size 551.79", threshold=0.001),
        "specinfer": Preset(SpecInfer, {"branches": (1, 1, 3, 1, 1, 1, 1, 1)}, "SpecInfer (arXiv 2305.09781) 6.1"),
        "static-width": Preset(FixedBranching, {"width": 2, "depth": 4}, "S4 4, the static tree"),
        "naive-width": Preset(NaiveWidth, {"k": 4, "max_entropy": 1.0, "d_max": 4}, "S4 3.1", ("k",)),
        "dynamic-width": Preset(DynamicWidth, {"d_max": 4}, "S4 4"),
        "dynamic-width-depth": Preset(
            DynamicWidthDepth, {"d_max": 4, "max_entropy": 1.0}, "S4 3.2", ("d_max", "max_entropy")
        ),
        # chains
        **{f"chain-{n}": Preset(StaticChain, {"d_max": n}, "v1 table 3, v2 table 7") for n in range(5, 10)},
        "chain-4": Preset(StaticChain, {"d_max": 4}, "S4 4, the baseline; v2 table 3, the longest draft"),
        "dymax": Preset(DyMax, {"threshold": 0.3, "d_max": 10}, "v1 table 3", ("keep_failing",)),
        "dyjoint": Preset(DyJoint, {"threshold": 0.08, "d_max": 10}, "v1 table 3", ("keep_failing",)),
        "entropy-stop": Preset(EntropyStop, {"max_entropy": 1.0, "d_max": 4}, "S4 3.1", ("keep_failing", "d_max")),
        "c2t-chain": Preset(C2TChain, {"beta": 0.85, "d_max": 10}, "v1 table 3"),
        "c2t-chain-serving": Preset(C2TChain, {"beta": 0.5, "d_max": 4}, "v2 5.4 and table 3", ("beta",)),
    }
)


def preset(name: str) -> Preset:
    """A preset by name. Raises ConfigError for another name."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
