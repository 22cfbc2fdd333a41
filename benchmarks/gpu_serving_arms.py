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
DRY_ARMS = (Arm("plain"), Arm("static 4", steps=4), Arm("c2t, at most 4", steps=4, c2t=True, betas=(0.0, None)))
