"""Which arms benchmarks/gpu/serving.py compares, of what size, and how a GPU serves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.arms import ARMS as TABLE
from benchmarks.serving.arms import EAGLE2, Arm, Speculation, Tree
from benchmarks.serving.closed_forms import ON_P_FILE, beta_of
from benchmarks.serving.engines import Device
from benchmarks.serving.scenarios import CONCURRENCIES
from benchmarks.serving.server import Runner, Server

BASE = "eagle3"
# Packed verification pays for the next of these times the draft's width: with few of them a cut saves nothing.
GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
# Behind more tokens than these a GPU's memory holds the keys and values of few requests.
LONG_PREFIX = 4096
LONG_CONCURRENCIES = (1, 8, 32, 64)


@dataclass(frozen=True)
class Entry:
    """An arm of the table, of one size.

    name: in rows. arm: the table's name of it, where that is another. steps: draft steps, 0 for plain decoding. betas:
    thresholds to measure it with, None for its own. tree: size of a tree. more: further flags, which win.
    """

    name: str
    arm: str = ""
    steps: int = 0
    betas: tuple[float | None, ...] = (None,)
    tree: Tree | None = None
    more: tuple[str, ...] = ()
    concurrencies: tuple[int, ...] = CONCURRENCIES

    @property
    def in_table(self) -> Arm:
        """The arm itself."""
        return TABLE[self.arm or self.name]

    @property
    def controlled(self) -> bool:
        """Whether its running server is given thresholds: a planner has none."""
        return self.in_table.c2t and not self.in_table.planned

    def speculation(self, models: Path) -> Speculation:
        """What fills in the arm. models: folder of the inflated pair."""
        return Speculation(
            draft=models / BASE,
            base=BASE,
            d_max=self.steps or Speculation.d_max,
            threshold_classifier=models / ON_P_FILE,
            # of the arm threshold on P, which is measured with one beta
            threshold=self.betas[0],
            tree=self.tree,
        )

    def server(self, runner: Runner, models: Path) -> Server:
        """Its server, with a line in the log for every decode step: the speed of decoding is read from these."""
        more = ["--decode-log-interval", "1"]
        if runner.device is Device.GPU:
            most = max(self.concurrencies)
            sizes = [str(size) for size in GRAPH_SIZES if size <= most]
            more += ["--max-running-requests", str(most), "--cuda-graph-bs-decode", *sizes]
        return runner.server(f"server-{self.name}", self.in_table, self.speculation(models), *self.more, *more)


def _static(length: int) -> Entry:
    return Entry(f"static {length}", steps=length)


def _c2t(name: str, steps: int, *betas: float | None, **more: Any) -> Entry:
    return Entry(name, "C2T", steps, betas or (None,), **more)


# by what each tells: nine minutes may end after the first few
ARMS = (
    Entry("plain"),
    _static(4),
    _c2t("c2t, at most 4", 4, None, 0.0),
    Entry("c2t auto", "C2T auto", steps=6),
    _static(2),
    _static(1),
    _c2t("c2t, at most 6", 6),
    Entry("EAGLE-2 tree", steps=EAGLE2.steps, concurrencies=(1,)),
    Entry("SGLang adaptive", steps=3),
    Entry("threshold on P", steps=6, betas=(beta_of(0.3),)),
    _static(6),
    # against "c2t, at most 4": the kernel that verifies
    _c2t("c2t, stock attention", 4, more=("--speculative-c2t-attention", "stock")),
)


# Verified tokens, the root included -> draft steps and top-k of C2T's tree, whose layers have at most top-k nodes.
TREE_SIZES = {64: (8, 10), 32: (6, 8), 128: (8, 16), 16: (6, 4), 256: (16, 16)}
DRY_TREE = Tree(4, 4, 12)
TREE_BETAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
BATCHES = (2, 4, 8, 16, 32)
EAGLE_TREE, C2T_TREE, C2T_CHAIN = "EAGLE-2 tree", "C2T tree", "c2t, at most 6"


def _tree(arm: str, name: str, tree: Tree, batches: tuple[int, ...], *betas: float) -> Entry:
    return Entry(name, arm, tree.steps, betas or (None,), tree, concurrencies=batches)


def _trees(tokens: int, eagle_batches: tuple[int, ...] = (1,)) -> tuple[Entry, Entry]:
    """EAGLE-2's tree of a size, and C2T's with at most as many nodes at several betas, one request at a time."""
    eagle, ours = Tree(EAGLE2.steps, EAGLE2.topk, tokens), Tree(*TREE_SIZES[tokens], tokens)
    return (
        _tree(EAGLE_TREE, f"{EAGLE_TREE} of {tokens}", eagle, eagle_batches),
        _tree(C2T_TREE, f"{C2T_TREE} of {tokens}", ours, (1,), *TREE_BETAS),
    )


_FIRST, *_OTHERS = TREE_SIZES
TREE_ARMS = (
    Entry("plain", concurrencies=(1, *BATCHES)),
    *_trees(_FIRST, (1, *BATCHES)),
    _tree(C2T_TREE, f"{C2T_TREE} of {_FIRST}, batches", Tree(*TREE_SIZES[_FIRST], _FIRST), BATCHES),
    _c2t(C2T_CHAIN, 6, concurrencies=BATCHES),
    *(entry for tokens in _OTHERS for entry in _trees(tokens)),
)
DRY_ARMS = (Entry("plain"), _static(4), _c2t("c2t, at most 4", 4, None, 0.0))
DRY_TREE_ARMS = (
    Entry("plain"),
    _tree(EAGLE_TREE, f"{EAGLE_TREE} of {DRY_TREE.tokens}", DRY_TREE, CONCURRENCIES),
    _tree(C2T_TREE, f"{C2T_TREE} of {DRY_TREE.tokens}", DRY_TREE, CONCURRENCIES, 0.0, 0.1),
)
# by the name of the comparison: the arms, and those of a dry run
COMPARISONS = {"chains": (ARMS, DRY_ARMS), "trees": (TREE_ARMS, DRY_TREE_ARMS)}


def fitting(entries: Iterable[Entry], prefix: int, loads: Sequence[int] | None = None) -> list[Entry]:
    """The arms with the loads that are wanted (None: all) and fit, an arm without any left out.

    Behind a long prefix a GPU has room for few requests at once.
    """
    chosen = [
        replace(each, concurrencies=tuple(n for n in each.concurrencies if n in (loads or [n]))) for each in entries
    ]
    if prefix > LONG_PREFIX:
        chosen = [
            replace(each, concurrencies=tuple(n for n in each.concurrencies if n in LONG_CONCURRENCIES))
            for each in chosen
        ]
    return [each for each in chosen if each.concurrencies]
