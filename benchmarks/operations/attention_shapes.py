"""The shape of SGLang's extend kernel beside `tree_attention`'s, by tiles and bytes: arithmetic, no time.

python -m benchmarks.operations.attention_shapes      the table of docs/internals.md, on any machine with SGLang
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton

from c2t_kernels.attention.split import default_launch

# Of Llama 3.1 8B, in 16 bits: query heads, key/value heads, numbers of a head, bytes of a number
HEADS, KV_HEADS, DIM, SIZE = 32, 8, 128, 2
# requests, tokens before each one's rows, and those: a chain of 4 and its root, and a tree
BATCHES = ((1, 2048, 5), (64, 512, 5), (64, 2048, 5), (64, 2048, 64))
# compute capabilities, by which SGLang chooses its tile
CAPABILITIES = ((9, 0), (10, 0))


@dataclass(frozen=True)
class Shape:
    """One launch. programs: that have rows. tile: rows of one, of which `used` have work in the first of a request.
    keys: that all programs ask for, each with its value; `least`: each of a key/value head once."""

    kernel: str
    programs: int
    tile: int
    used: int
    keys: int
    least: int

    @property
    def megabytes(self) -> float:
        """Of keys and values that are asked for, some of them of L2."""
        return 2 * self.keys * DIM * SIZE / 1e6


def stock(capability: tuple[int, int], requests: int, prefix: int, nodes: int) -> Shape:
    """SGLang's: a program for each request, query head and tile of nodes."""
    from sglang.kernels.ops.attention import extend_attention

    there: dict[str, Any] = {"_is_cuda": True, "_is_hip": False, "CUDA_CAPABILITY": capability}
    with mock.patch.multiple(extend_attention, create=True, **there):
        *_, tile, _, _ = extend_attention._get_block_sizes_for_extend_attention(DIM, DIM)
    programs = requests * HEADS * triton.cdiv(nodes, tile)
    keys = prefix + nodes
    name = f"extend, {capability[0]}.{capability[1]}"
    return Shape(name, programs, tile, min(nodes, tile), programs * keys, requests * KV_HEADS * keys)


def ours(requests: int, prefix: int, nodes: int) -> Shape:
    """A program for each request, key/value head, tile of (node, query head) and share of the prefix."""
    launch = default_launch(requests, nodes, HEADS, KV_HEADS, DIM)
    rows = nodes * HEADS // KV_HEADS
    tiles = requests * KV_HEADS * triton.cdiv(rows, launch.block_rows)
    # as the kernel cuts it: a share is no shorter, and those behind the last key have nothing to do
    shortest = max(4 * launch.block_rows, 2 * launch.block_keys)
    share = max(triton.cdiv(triton.cdiv(prefix, launch.splits), launch.block_keys) * launch.block_keys, shortest)
    shares = min(launch.splits, triton.cdiv(prefix, share))
    keys = prefix + nodes
    used = min(rows, launch.block_rows)
    return Shape("tree_attention", tiles * shares, launch.block_rows, used, tiles * keys, requests * KV_HEADS * keys)


def printed() -> str:
    """As a table of Markdown."""
    columns = (
        *("requests x prefix, rows", "kernel", "programs"),
        *("rows of a tile", "used", "MB asked for", "times the least"),
    )
    rows: list[tuple[str, ...]] = [columns, ("---",) * len(columns)]
    for batch in BATCHES:
        requests, prefix, nodes = batch
        for each in (*(stock(capability, *batch) for capability in CAPABILITIES), ours(*batch)):
            shape = f"{each.programs:,}", str(each.tile), str(each.used)
            moved = f"{each.megabytes:,.0f}", f"{each.keys / each.least:.0f}"
            rows.append((f"{requests} x {prefix:,}, {nodes}", each.kernel, *shape, *moved))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(printed())
