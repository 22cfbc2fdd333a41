"""Every preset holds what its paper prints: written down here a second time, from the papers, not from the presets."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module

import pytest

from c2t_plugin.lab import policies
from c2t_plugin.lab.policies.base import LayerPolicy
from c2t_plugin.lab.policies.c2t import C2TTree
from c2t_plugin.lab.policies.chains import C2TChain, DyJoint, DyMax, EntropyStop, StaticChain
from c2t_plugin.lab.policies.dyspec import DySpec, DySpecGreedy, DySpecThreshold
from c2t_plugin.lab.policies.eagle2 import Eagle2
from c2t_plugin.lab.policies.entropy import DynamicWidth, DynamicWidthDepth, NaiveWidth
from c2t_plugin.lab.policies.presets import EAGLE1_PATHS, PRESETS, preset
from c2t_plugin.lab.policies.specinfer import SpecInfer
from c2t_plugin.lab.policies.static import FixedBranching, StaticTree

# EAGLE-1 appendix A, node by node: children of the root, of 0, of 1, ...
EAGLE1_CHILDREN = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}
# model: N of EAGLE-2 with the root, beta of C2T, of its fine-tuned classifier (v1 table 2)
TABLE_2 = {
    "llama2-7b": (290, 0.3, None),
    "llama2-13b": (300, 0.3, None),
    "llama2-70b": (260, 0.3, None),
    "vicuna-7b": (180, 0.35, 0.25),
    "vicuna-13b": (200, 0.35, 0.25),
    "vicuna-33b": (210, 0.3, 0.20),
}


def eagle2(n: int, k: int, d_max: int) -> tuple[type, dict[str, object]]:
    """N counts the root (v1 B.1), max_nodes does not."""
    return Eagle2, {"max_nodes": n - 1, "k": k, "d_max": d_max}


def c2t(beta: float, k: int, second_k: int | None, d_max: int) -> tuple[type, dict[str, object]]:
    return C2TTree, {"beta": beta, "first_k": k, "second_k": second_k, "d_max": d_max}


DRAWN = {"temperature": 0.6, "sampled": True}  # Dy 5.1 and algorithm 1
PRINTED = {
    "eagle1": (StaticTree, {"paths": EAGLE1_PATHS}),
    "eagle2": eagle2(60, 10, 6),  # EAGLE-2's own; v1 table 4
    "eagle2-26": eagle2(26, 10, 6),  # v1 table 4
    "eagle2-100": eagle2(100, 15, 10),  # v1 table 1
    "training-tree": eagle2(1 + 10 + 10 * 100, 10, 11),  # v1 B.1
    "c2t": c2t(0.5, 15, 15, 10),  # v2 4.1; v1 5
    "c2t-no-second-k": c2t(0.5, 15, None, 10),  # v1 table 5
    "c2t-small": c2t(0.85, 10, 10, 6),  # v1 table 4
    "c2t-large": c2t(0.65, 10, 10, 6),  # v1 table 4
    "c2t-without-depth": c2t(0.42, 15, 15, 10),  # v1 table 1
    "c2t-without-entropy": c2t(0.7, 15, 15, 10),  # v1 table 1
    "c2t-without-prob": c2t(0.5, 15, 15, 10),  # v1 table 1
    "c2t-on-eagle2": c2t(0.5, 10, 10, 6 + 2),  # v2 5.1
    **{f"eagle2-{model}": eagle2(n, 15, 10) for model, (n, _, _) in TABLE_2.items()},
    **{f"c2t-{model}": c2t(beta, 15, None, 10) for model, (_, beta, _) in TABLE_2.items()},
    **{f"c2t-tuned-{model}": c2t(beta, 15, None, 10) for model, (_, _, beta) in TABLE_2.items() if beta is not None},
    "dyspec-64": (DySpecGreedy, {"max_nodes": 64, **DRAWN}),  # Dy tables 1 to 3
    "dyspec-768": (DySpecGreedy, {"max_nodes": 768, **DRAWN}),  # Dy table 4
    "dyspec-threshold": (DySpecThreshold, {"max_nodes": 768, "threshold": 0.001, **DRAWN}),  # Dy table 4, figure 5
    "specinfer": (SpecInfer, {"branches": (1, 1, 3, 1, 1, 1, 1, 1)}),  # SpecInfer 6.1
    "static-width": (FixedBranching, {"width": 2, "depth": 4}),  # S4 4
    "naive-width": (NaiveWidth, {"k": 4, "max_entropy": 1.0, "d_max": 4}),  # S4 3.1; k is ours
    "dynamic-width": (DynamicWidth, {"d_max": 4}),  # S4 4
    "dynamic-width-depth": (DynamicWidthDepth, {"d_max": 4, "max_entropy": 1.0}),  # S4 3.2
    **{f"chain-{n}": (StaticChain, {"d_max": n}) for n in (4, 5, 6, 7, 8, 9)},  # S4 4; v1 table 3
    "dymax": (DyMax, {"threshold": 0.3, "d_max": 10}),  # v1 table 3
    "dyjoint": (DyJoint, {"threshold": 0.08, "d_max": 10}),  # v1 table 3
    "entropy-stop": (EntropyStop, {"max_entropy": 1.0, "d_max": 4}),  # S4 3.1
    "c2t-chain": (C2TChain, {"beta": 0.85, "d_max": 10}),  # v1 table 3
    "c2t-chain-serving": (C2TChain, {"beta": 0.5, "d_max": 4}),  # v2 table 3: max draft 4
}


def test_every_preset_is_written_down_here() -> None:
    assert set(PRESETS) == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_a_preset_holds_what_the_paper_prints(name: str) -> None:
    kind, options = PRINTED[name]
    assert PRESETS[name].kind is kind
    assert dict(PRESETS[name].options) == options
    assert PRESETS[name].source


def test_eagle1s_tree_is_its_papers() -> None:
    expected = {(*node, rank) for node, children in EAGLE1_CHILDREN.items() for rank in range(children)}
    assert set(EAGLE1_PATHS) == expected
    assert len(EAGLE1_PATHS) == 25


def test_the_defaults_that_presets_leave_are_the_papers() -> None:
    """S4 4: B(H) is 1 below .02, 2 to 1, then min(ceil(4 H), 7). C2T 4.1: H is over the 1,000 largest."""
    policy = preset("dynamic-width").policy()
    assert isinstance(policy, DynamicWidth)
    assert (policy.sure, policy.unsure, policy.factor, policy.widest) == (0.02, 1.0, 4.0, 7)
    assert policy.top_m == 1000
    for name in ("dymax", "dyjoint", "entropy-stop", "dynamic-width-depth"):
        assert preset(name).policy().keep_failing is False  # type: ignore[attr-defined]


# paper, then a section, table, figure, algorithm or appendix
CITED = re.compile(r"(C2T|S4|DySpec|EAGLE-[123]|SpecInfer|Sequoia|entropy-shaped trees)\b[^.;]*?\b(\d|appendix)")


def policy_classes() -> list[type]:
    """All of the package but the two bases that only share code."""
    for module in pkgutil.iter_modules(policies.__path__):
        import_module(f"{policies.__name__}.{module.name}")
    found: list[type] = []
    waiting: list[type] = [LayerPolicy, DySpec]
    while waiting:
        subclasses = [each for each in waiting.pop().__subclasses__() if each.__module__.startswith(policies.__name__)]
        found += subclasses
        waiting += subclasses
    return sorted(set(found), key=lambda each: each.__name__)


@pytest.mark.parametrize("policy", policy_classes(), ids=lambda policy: policy.__name__)
def test_a_policy_says_where_it_is_from(policy: type) -> None:
    text = policy.__doc__ or ""
    assert CITED.search(inspect.cleandoc(text)), f"{policy.__name__}: {text}"
