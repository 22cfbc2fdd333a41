"""Launches of c2t_kernels.pack.kernel that are compiled ahead of time."""

from __future__ import annotations

import triton

from ahead_of_time.configuration import Configuration
from c2t_kernels.pack.kernel import BLOCK_PAD, WORDS, pack_words_kernel


def _words(name: str, bs: int, width: int, fill: bool) -> Configuration:
    """Ids, positions and slots, int64 each, as the SGLang adapter packs them. fill: of chains."""
    integers = (
        "pad0",
        "pad1",
        "pad2",
        "stride0",
        "stride1",
        "stride2",
        "kept_stride",
        "bs",
        "slots",
        "capacity",
        "width",
    )
    pointers = [f"p_{kind}{i}" for kind in ("source", "packed") for i in range(WORDS)]
    sizes = {"BLOCK_B": bs, "BLOCK_W": triton.next_power_of_2(width), "BLOCK_PAD": BLOCK_PAD}
    blocks = {"FILL": fill, **sizes}
    signature = {
        **dict.fromkeys(("p_kept", "p_cu_seqlens", "p_lengths"), "*i32"),
        **dict.fromkeys(pointers, "*i64"),
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(blocks, "constexpr"),
    }
    return Configuration(pack_words_kernel, name, signature, blocks, num_warps=1)


CONFIGURATIONS = (
    _words("words_256", 256, 6, False),
    _words("words_512", 512, 17, False),
    _words("filled_256", 256, 7, True),
    _words("filled_512", 512, 17, True),
)
