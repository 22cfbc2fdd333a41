"""The table of arms: every way to decode that benchmarks compare, and what each engine is told to do it.

An arm has one name on all engines, on a CPU, on a GPU and in the simulation, which adds how it replays the arm
(`benchmarks.simulation.replays`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from c2t_plugin.errors import C2TError

# kinds of drafts, and how vLLM calls them; SGLang has the same names in capitals
BASES = ("eagle3", "eagle", "standalone")
VLLM_METHODS = {"eagle3": "eagle3", "eagle": "eagle", "standalone": "draft_model"}
STATIC = (1, 2, 3, 4, 6)
# longer than C2T's own chains are here
LONG = 8
# of an arm that plans: it measures what its steps cost in the first two dozen of each size of batch
PLANNED_WARM_UPS = 3

Options = Mapping[str, object]


@dataclass(frozen=True)
class Tree:
    """Size of a tree.

    steps: layers. topk: nodes of a layer, in EAGLE-2's tree also children of a node. tokens: of the tree with its root,
    None for as many as its layers have.
    """

    steps: int
    topk: int
    tokens: int | None = None


EAGLE2 = Tree(6, 10, 60)
C2T_TOPK = 4


@dataclass(frozen=True)
class Speculation:
    """What fills in an arm's options; one that is None is left to the engine or to the classifier's file.

    draft: directory of the draft, as the engine loads it. base: its kind, one of BASES. d_max: C2T's longest chain, or
    layers of its tree. beta: C2T's threshold. classifier: file of the arms of C2T. threshold_classifier, closed_form:
    what `closed_forms.write_closed_forms` wrote. threshold: their beta. tree: size of a tree, where it is not the arm's
    own.
    """

    draft: Path
    base: str = BASES[0]
    d_max: int = 6
    beta: float | None = None
    classifier: Path | None = None
    threshold_classifier: Path | None = None
    closed_form: Path | None = None
    threshold: float | None = None
    tree: Tree | None = None

    def __post_init__(self) -> None:
        if self.base not in BASES:
            raise C2TError(f"a draft's base is one of {', '.join(BASES)}; got {self.base!r}")

    @property
    def algorithm(self) -> str:
        """SGLang's name of the base."""
        return self.base.upper()

    @property
    def method(self) -> str:
        """vLLM's name of the base."""
        return VLLM_METHODS[self.base]


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    name: in tables and rows. engines: by an engine's name, the options of speculation that make it decode so, or why it
    cannot; an engine that is not named has another arm in this one's place. bases: the only kinds of draft it is for,
    empty for all; on others SGLang starts without it and only logs so. concurrency: the only one it is meant for, None
    for all. c2t: C2T decides, so that a running server can be given another beta. planned: it measures its own steps.
    counted: the engine says how many tokens it verified. named: it runs only where it is asked for by its name.
    """

    name: str
    engines: Mapping[str, Callable[[Speculation], Options] | str]
    bases: tuple[str, ...] = ()
    concurrency: int | None = None
    c2t: bool = False
    planned: bool = False
    counted: bool = True
    named: bool = False

    def absent(self, engine: str) -> str:
        """Why this engine cannot, empty if it can."""
        how = self.engines[engine]
        return how if isinstance(how, str) else ""

    def options(self, engine: str, on: Speculation) -> Options:
        """What the engine is told. C2TError, in one line, where the engine or this draft cannot."""
        how = self.engines[engine]
        if isinstance(how, str):
            raise C2TError(f"not supported: {how}")
        if self.bases and on.base not in self.bases:
            bases = " or ".join(base.upper() for base in self.bases)
            raise C2TError(f"{self.name} drafts with {bases} only, not with {on.base.upper()}")
        return {name: value for name, value in how(on).items() if value is not None}

    @property
    def warm_ups(self) -> int:
        """Passes through a batch before one counts."""
        return PLANNED_WARM_UPS if self.planned else 1


def _nothing(on: Speculation) -> Options:
    return {}


def _sglang(on: Speculation, algorithm: str, steps: int, **more: object) -> Options:
    return {"algorithm": algorithm, "draft_model_path": on.draft, "num_steps": steps, **more}


def _sglang_chain(on: Speculation, algorithm: str, steps: int, **more: object) -> Options:
    return _sglang(on, algorithm, steps, eagle_topk=1, num_draft_tokens=steps + 1, **more)


def _sglang_c2t(on: Speculation, **more: object) -> Options:
    return _sglang_chain(on, "C2T", on.d_max, **more, c2t_classifier=on.classifier)


def _sglang_rule(on: Speculation, rule: Path | None) -> Options:
    """rule: a file of `closed_forms`, which takes the classifier's place."""
    own = {"c2t_classifier": _known(rule), "c2t_planner": "off", "c2t_beta": on.threshold}
    return _sglang_chain(on, "C2T", on.d_max, **own)


def _known(rule: Path | None) -> Path:
    """C2TError for None, with which the engine would take the draft's own classifier."""
    if rule is None:
        raise C2TError("this arm needs the file of its rule; `python -m benchmarks.serving.closed_forms` writes it")
    return rule


def _sglang_tree(on: Speculation, algorithm: str, tree: Tree, **more: object) -> Options:
    return _sglang(on, algorithm, tree.steps, eagle_topk=tree.topk, num_draft_tokens=tree.tokens, **more)


def _sglang_c2t_tree(on: Speculation, classifier: Path | None, **more: object) -> Options:
    tree = on.tree or Tree(on.d_max, C2T_TOPK)
    return _sglang_tree(on, "C2T", tree, c2t_mode="tree", **more, c2t_classifier=classifier)


def _sglang_tree_ahead(on: Speculation) -> Options:
    own = {"c2t_mode": "tree", "c2t_planner": "on", "c2t_rows": "lagged", "c2t_classifier": on.classifier}
    return _sglang_tree(on, "C2T", on.tree or EAGLE2, **own)


def _vllm(on: Speculation, method: str, steps: int, **more: object) -> Options:
    return {"method": method, "model": on.draft, "num_speculative_tokens": steps, **more}


def _vllm_c2t(on: Speculation, beta: float | None, classifier: Path | None, **more: object) -> Options:
    return _vllm(on, f"c2t:{on.method}", on.d_max, c2t_beta=beta, **more, c2t_classifier=classifier)


def _vllm_rule(on: Speculation, rule: Path | None) -> Options:
    return _vllm_c2t(on, on.threshold, _known(rule), c2t_planner="off")


def _static(length: int, *, named: bool = False) -> Arm:
    return Arm(
        f"static {length}",
        {
            "sglang": lambda on: _sglang_chain(on, on.algorithm, length),
            "vllm": lambda on: _vllm(on, on.method, length),
        },
        named=named,
    )


def _as_it_comes(name: str, **own: object) -> Arm:
    """As a user types it: SGLang finds the classifiers beside the draft; vLLM is told of one, and of a length."""
    return Arm(
        name,
        {
            "sglang": lambda on: {"algorithm": "C2T", "draft_model_path": on.draft, **own},
            "vllm": lambda on: _vllm_c2t(on, None, on.classifier, **own),
        },
        c2t=True,
        planned=True,
        named=True,
    )


# vLLM's own dynamic arm is told by its user: [from, to, length of the chain] of requests at once
_SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 2], [9, 1024, 1]]}
_ADAPTIVE = {"enable_adaptive_verification": "true"}
_NO_TREES = "vLLM has no tree attention"

ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("plain", {"sglang": _nothing, "vllm": _nothing}),
        *map(_static, STATIC),
        _static(LONG, named=True),
        Arm(
            "SGLang adaptive",
            {"sglang": lambda on: _sglang_chain(on, on.algorithm, 3, adaptive=True)},
            bases=("eagle", "eagle3"),
            counted=False,  # as many drafts for every step as it was started with, however deep it went
        ),
        Arm("vLLM by batch size", {"vllm": lambda on: _vllm(on, on.method, 4, **_SCHEDULE)}, named=True),
        Arm("vLLM adaptive", {"vllm": lambda on: _vllm(on, on.method, on.d_max, **_ADAPTIVE)}),
        Arm(
            "EAGLE-2 tree",
            {"sglang": lambda on: _sglang_tree(on, on.algorithm, on.tree or EAGLE2), "vllm": _NO_TREES},
            concurrency=1,
        ),
        Arm(
            "threshold on P",
            {
                "sglang": lambda on: _sglang_rule(on, on.threshold_classifier),
                "vllm": lambda on: _vllm_rule(on, on.threshold_classifier),
            },
            c2t=True,
        ),
        Arm(
            "closed form",
            {
                "sglang": lambda on: _sglang_rule(on, on.closed_form),
                "vllm": lambda on: _vllm_rule(on, on.closed_form),
            },
            c2t=True,
        ),
        Arm(
            "C2T",
            {
                "sglang": lambda on: _sglang_c2t(on, c2t_planner="off", c2t_beta=on.beta),
                "vllm": lambda on: _vllm_c2t(on, on.beta, on.classifier, c2t_planner="off"),
            },
            c2t=True,
        ),
        _as_it_comes("C2T as it comes"),
        # without it no draft is spared its scores either
        _as_it_comes("C2T without learning", c2t_learn="off"),
        # its own threshold would cut before the manager does
        Arm("C2T adaptive", {"vllm": lambda on: _vllm_c2t(on, 0, on.classifier, **_ADAPTIVE)}, c2t=True),
        Arm(
            "C2T auto",
            {
                "sglang": lambda on: _sglang_c2t(on, c2t_planner="on"),
                "vllm": lambda on: _vllm_c2t(on, None, on.classifier, c2t_planner="on"),
            },
            c2t=True,
            planned=True,
        ),
        Arm(
            "C2T tree",
            {"sglang": lambda on: _sglang_c2t_tree(on, on.classifier, c2t_beta=on.beta), "vllm": _NO_TREES},
            c2t=True,
        ),
        Arm(
            "C2T tree auto",
            {"sglang": lambda on: _sglang_c2t_tree(on, on.classifier, c2t_planner="on"), "vllm": _NO_TREES},
            c2t=True,
            planned=True,
            named=True,
        ),
        # as large as EAGLE-2's, and no step waits for anything
        Arm("C2T tree ahead", {"sglang": _sglang_tree_ahead, "vllm": _NO_TREES}, c2t=True, planned=True, named=True),
        Arm(
            "closed form tree",
            {
                "sglang": lambda on: _sglang_c2t_tree(on, _known(on.closed_form), c2t_beta=on.threshold),
                "vllm": _NO_TREES,
            },
            c2t=True,
        ),
    )
}


def arms_of(engine: str) -> list[Arm]:
    """The table's arms that are for this engine, those that it cannot do and those to be named among them."""
    return [arm for arm in ARMS.values() if engine in arm.engines]


def chosen(engine: str, names: tuple[str, ...] | None) -> list[Arm]:
    """Arms of an engine by name, in the table's order; for None all that need not be named. C2TError for a name that
    there is not."""
    arms = arms_of(engine)
    unknown = set(names or ()) - {arm.name for arm in arms}
    if unknown:
        raise C2TError(f"{engine} has the arms {', '.join(arm.name for arm in arms)}; got {', '.join(sorted(unknown))}")
    return [arm for arm in arms if (not arm.named if names is None else arm.name in names)]
