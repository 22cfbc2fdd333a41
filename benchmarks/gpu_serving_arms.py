"""The servers that benchmarks/gpu_serving.py compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.arms import TREE, chain, threshold_beta

THRESHOLD = "threshold-on-p.safetensors"


@dataclass(frozen=True)
class Arm:
    """A server. steps: draft steps, 0 for plain decoding. betas: thresholds to measure it with, None for its own.

    planned: beta auto in place of a threshold. more: further flags, with {models} to be filled in; they win.
    concurrencies: None for all.
    """

    name: str
    steps: int = 0
    c2t: bool = False
    betas: tuple[float | None, ...] = (None,)
    planned: bool = False
    more: tuple[str, ...] = ()
    concurrencies: tuple[int, ...] | None = None

    def flags(self, models: Path) -> list[str]:
        """Of sglang.launch_server."""
        if not self.steps:
            return []
        auto = ("--speculative-c2t-beta", "auto") if self.planned else ()
        flags = chain("C2T" if self.c2t else "EAGLE3", self.steps, self.steps + 1, *auto, *self.more)
        return [flag.format(draft=models / "eagle3", models=models) for flag in flags]


_TREE = ("--speculative-eagle-topk", str(TREE["topk"]), "--speculative-num-draft-tokens", str(TREE["tokens"]))
# what has to agree first, then the rest by what it tells
ARMS = (
    Arm("plain"),
    Arm("static 4", steps=4),
    Arm("static 2", steps=2),
    Arm("static 1", steps=1),
    Arm("c2t, at most 4", steps=4, c2t=True, betas=(0.0, None)),
    Arm("c2t auto", steps=6, c2t=True, planned=True),
    Arm("c2t, at most 6", steps=6, c2t=True),
    Arm("EAGLE-2 tree", steps=TREE["steps"], more=_TREE, concurrencies=(1,)),
    Arm("SGLang adaptive", steps=3, more=("--speculative-adaptive",)),
    Arm(
        "threshold on P",
        steps=6,
        c2t=True,
        betas=(threshold_beta(0.3),),
        more=("--speculative-c2t-classifier", f"{{models}}/{THRESHOLD}"),
    ),
    Arm("static 6", steps=6),
    # against "c2t, at most 4": the kernel that verifies
    Arm("c2t, tree_attention", steps=4, c2t=True, more=("--speculative-c2t-attention", "tree")),
)


# Verified tokens, the root included -> draft steps and top-k of C2T's tree, whose layers have at most top-k nodes.
TREE_SIZES = {64: (8, 10), 32: (6, 8), 128: (8, 16), 16: (6, 4), 256: (16, 16)}
TREE_BETAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
BATCHES = (2, 4, 8, 16, 32)
EAGLE_TREE, C2T_TREE, C2T_CHAIN = "EAGLE-2 tree", "C2T tree", "c2t, at most 6"


def _eagle_tree(tokens: int, steps: int, topk: int, batches: tuple[int, ...] | None) -> Arm:
    shape = ("--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(tokens))
    return Arm(f"{EAGLE_TREE} of {tokens}", steps=steps, more=shape, concurrencies=batches)


def _c2t_tree(name: str, tokens: int, steps: int, topk: int, batches: tuple[int, ...] | None, *betas: float) -> Arm:
    shape = ("--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(tokens))
    mode = (*shape, "--speculative-c2t-mode", "tree")
    return Arm(name, steps=steps, c2t=True, betas=betas or (None,), more=mode, concurrencies=batches)


def _trees(tokens: int, eagle_batches: tuple[int, ...] = (1,)) -> tuple[Arm, Arm]:
    """EAGLE-2's tree of a size, and C2T's with at most as many nodes at several betas, one request at a time."""
    return (
        _eagle_tree(tokens, TREE["steps"], TREE["topk"], eagle_batches),
        _c2t_tree(f"{C2T_TREE} of {tokens}", tokens, *TREE_SIZES[tokens], (1,), *TREE_BETAS),
    )


_FIRST, *_OTHERS = TREE_SIZES
TREE_ARMS = (
    Arm("plain", concurrencies=(1, *BATCHES)),
    *_trees(_FIRST, (1, *BATCHES)),
    _c2t_tree(f"{C2T_TREE} of {_FIRST}, batches", _FIRST, *TREE_SIZES[_FIRST], BATCHES),
    Arm(C2T_CHAIN, steps=6, c2t=True, concurrencies=BATCHES),
    *(arm for tokens in _OTHERS for arm in _trees(tokens)),
)
DRY_TREE_ARMS = (
    Arm("plain"),
    _eagle_tree(12, 4, 4, None),
    _c2t_tree(f"{C2T_TREE} of 12", 12, 4, 4, None, 0.0, 0.1),
)
DRY_ARMS = (Arm("plain"), Arm("static 4", steps=4), Arm("c2t, at most 4", steps=4, c2t=True, betas=(0.0, None)))
# by the name of the comparison: the arms, and those of a dry run
COMPARISONS = {"chains": (ARMS, DRY_ARMS), "trees": (TREE_ARMS, DRY_TREE_ARMS)}
