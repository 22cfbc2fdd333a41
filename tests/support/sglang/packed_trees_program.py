"""The same as packed_program.py of trees on fa3: SGLang's two passes, with metadata that verify/fa3.py fills.

Usage: python packed_trees_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes, by
bench and case, how far the real rows are from attention as it is defined, with NaN in every key that no node
has written, and what rows of nobody hold.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import packed_program
import torch
from attention_twins import merge_state_v2
from packed_program import MOST, WIDTH, Fa3, LatentFa3, fa3
from packed_variants_program import FP8, BytesPool
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from torch import Tensor
from torch.nn.functional import pad

from c2t_kernels import pack_ragged
from c2t_plugin.engines.sglang.drafters.tree_input import _mask
from c2t_plugin.engines.sglang.verify.backends import packing_fa3
from c2t_plugin.engines.sglang.verify.fa3 import PackedFa3Backend

# nodes of each request's tree, rows of the pass (None: eager), prefixes
CASES: dict[str, tuple[list[int], int | None, list[int]]] = {
    "pad_slots": ([1, 7, 4], 28, [7, 60, 1]),
    "whole": ([7, 7, 7, 7, 7], 35, [5, 1, 40, 12, 30]),
    "spare_rows": ([1, 7, 4, 5, 2], 28, [5, 1, 40, 12, 30]),
    "roots_only": ([1, 1], 14, [9, 33]),
    "one_request": ([3], 14, [11]),
    "eager": ([1, 7, 4, 6], None, [7, 60, 1, 23]),
    "eager_of_all": ([2, 3, 1, 5, 7], None, [5, 1, 40, 12, 30]),
}
FAULTS = {
    "mask_offset_of_the_neighbour": "spare_rows",
    "nodes_of_the_row_above": "spare_rows",
    "a_stale_page_table": "pad_slots",
    "lengths_of_another_step": "spare_rows",
    "a_request_reads_slot_0": "pad_slots",
    "left_over_rows_to_the_last": "spare_rows",
    "mask_offset_of_the_neighbour_eager": "eager",
    "lengths_of_another_step_eager": "eager_of_all",
}


class Fa3Trees(Fa3):
    """FlashAttention 3 under trees of different sizes."""

    topk, fault = 4, ""

    def make(self) -> Any:
        fa3.merge_state_v2 = merge_state_v2
        stock = super().make
        self.runner.server_args = SimpleNamespace(_c2t={"mode": "tree"})
        made = packing_fa3(lambda _: stock())(self.runner)
        assert type(made) is PackedFa3Backend
        return made

    def metadata(self) -> Any:
        return self.backend.forward_metadata, self.backend.forward_metadata_spec_decode_expand

    def keep(self, metadata: Any) -> None:
        self.backend.forward_metadata, self.backend.forward_metadata_spec_decode_expand = metadata

    def tables(self, metadata: Any) -> Tensor:
        table: Tensor = metadata[0].page_table
        return table

    def tree(self, nodes: int) -> Tensor:
        """(nodes, nodes) bool: which nodes each node sees, itself and its ancestors."""
        seen = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            seen[node] |= seen[int(torch.randint(node, (1,), generator=self.generator))]
        return seen

    def mask(self, trees: list[Tensor], prefixes: list[int]) -> Tensor:
        """As the worker writes it, in the form that the backend asks for."""
        padded = torch.stack([pad(tree, (0, WIDTH - len(tree)) * 2) for tree in trees])
        counts = torch.tensor([len(tree) for tree in trees], dtype=torch.int32)
        layout: Any = SimpleNamespace(mask=padded, counts=counts, draft_tokens=torch.zeros(padded.shape[:2]))
        batch = SimpleNamespace(seq_lens=torch.tensor(prefixes), seq_lens_sum=sum(prefixes))
        return _mask(layout, batch, self.backend, TreeMaskMode.FULL_MASK, packed=True)[0]

    def of_trees(self, q: Tensor, trees: list[Tensor], prefixes: list[int]) -> Tensor:
        """(rows, heads * dim) attention by its definition, of real rows alone."""
        found, rows = [], iter(q.to(self.cache).float().view(len(q), packed_program.HEADS, -1))
        for request, (tree, prefix) in enumerate(zip(trees, prefixes, strict=True)):
            for seen in tree:
                nodes = prefix + seen.nonzero().flatten()
                k, v = self.keys(self.table[request + 1, torch.cat([torch.arange(prefix), nodes])].long())
                weights = torch.softmax(torch.einsum("hd,khd->hk", next(rows), k) * self.scale, -1)
                found.append(torch.einsum("hk,khd->hd", weights, v).flatten())
        return torch.stack(found)

    def verify(self, case: str, fault: str = "") -> tuple[float, float]:
        """Distance of the real rows, infinite where one of them is not a number; the largest value in the others."""
        self.fault = fault
        sizes, rows, prefixes = CASES[case]
        requests, graph = len(sizes), rows is not None
        if rows is None:
            # with spare ones, as steps before may have wanted more
            rows = min(sum(sizes) + 2, requests * WIDTH)
        trees = [self.tree(nodes) for nodes in sizes]
        words = torch.zeros(requests, WIDTH, dtype=torch.int64)
        kept = torch.tensor(sizes, dtype=torch.int32) - 1
        given = pack_ragged(kept, [words], capacity=rows, pads=(0,)).cu_seqlens.diff()
        mask = self.mask(trees, prefixes)
        if fault.startswith("mask_offset_of_the_neighbour"):
            mask = mask.roll(-(sizes[0] ** 2))
        elif fault.startswith("lengths_of_another_step"):
            given = given.flip(0)
        elif fault == "left_over_rows_to_the_last":
            given[-1] += rows - sum(sizes)
        layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=given, graph_num_tokens=rows)
        batch = self.view(layout, rows, prefixes, min(rows, MOST) if graph else requests)
        batch.spec_info.custom_mask = mask
        if fault == "a_request_reads_slot_0":
            batch.req_pool_indices[requests - 1] = 0
        before = self.pool.k.clone(), self.pool.v.clone()
        self.spoil(sizes, prefixes)
        q, named = self.queries(rows)
        out = (self.replayed if graph else self.eager)(batch, rows, q, named, fault).view(rows, -1)
        expected, real = self.of_trees(q, trees, prefixes), sum(sizes)
        self.pool.k.copy_(before[0])
        self.pool.v.copy_(before[1])
        far = float(torch.nan_to_num((out[:real] - expected).abs(), nan=torch.inf).max())
        return far, float(torch.nan_to_num(out[real:].abs(), nan=torch.inf).max()) if rows > real else 0.0

    def spoil(self, sizes: list[int], prefixes: list[int]) -> None:
        """NaN in all that the pass may not read, page 0 included."""
        hidden = torch.ones(len(self.pool.v), dtype=torch.bool)
        for request, (nodes, prefix) in enumerate(zip(sizes, prefixes, strict=True)):
            hidden[self.table[request + 1, : prefix + nodes].long()] = False
        self.pool.k[hidden], self.pool.v[hidden] = torch.nan, torch.nan

    def attend(self, q: Tensor, batch: Any, named: dict[str, Tensor]) -> Tensor:
        if self.fault == "nodes_of_the_row_above":
            table = self.metadata()[1].page_table
            table.copy_(table.roll(1, 0))
        return super().attend(q, batch, named)


class LatentTrees(Fa3Trees, LatentFa3):
    """The same of latent keys."""


class BytesTrees(Fa3Trees):
    """A cache of 8 bits, of a checkpoint of 8 bits that says nothing about keys: SGLang gives them scales of 1."""

    cache = FP8

    def filled(self, slots: int) -> BytesPool:
        return BytesPool(slots, False, self.generator)

    def make(self) -> Any:
        for name in "kv":
            setattr(self.layer, f"{name}_scale", torch.tensor(1.0))
            setattr(self.layer, f"{name}_scale_float", 1.0)
        self.runner.model.modules = lambda: [self.layer]
        return super().make()


def built() -> dict[str, str]:
    """What the factory makes of SGLang's backend, by what the server is."""
    stock = Fa3(1, 96).backend

    scaled, unscaled = (SimpleNamespace(k_scale=1.0, k_scale_float=s, v_scale_float=1.0) for s in (0.5, 1.0))
    bytes_of = {"kv_cache_dtype_str": "fp8_e4m3"}

    def of(changes: dict[str, Any], *layers: Any, **options: str) -> str:
        backend = copy.copy(stock)
        vars(backend).update({"topk": 4, **changes})
        runner = SimpleNamespace(server_args=SimpleNamespace(_c2t=options), is_draft_worker=False)
        runner.model = SimpleNamespace(modules=lambda: iter((SimpleNamespace(k_scale=None), *layers)))
        return type(packing_fa3(lambda _: backend)(runner)).__name__

    return {
        "trees": of({}, mode="tree"),
        "chains": of({}, mode="chain"),
        "trees_off": of({}, mode="tree", packing="off"),
        "top_k_of_1": of({"topk": 1}, mode="tree"),
        "latent": of({"use_mla": True}, mode="tree"),
        "latent_pages": of({"use_mla": True, "page_size": 64}, mode="tree"),
        "sliding": of({"has_swa": True}, mode="tree"),
        "fa4": of({"fa_impl_ver": 4}, mode="tree"),
        "fp8_checkpoint": of({}, scaled, mode="tree"),
        "fp8_cache": of(bytes_of, mode="tree"),
        "fp8_cache_and_checkpoint": of(bytes_of, unscaled, mode="tree"),
        "fp8_with_scales": of(bytes_of, unscaled, scaled, mode="tree"),
    }


# name: backend, tokens of a page
BENCHES: dict[str, tuple[type[Fa3Trees], int]] = {
    "pages_of_1": (Fa3Trees, 1),
    "pages_of_4": (Fa3Trees, 4),
    "latent": (LatentTrees, 1),
    "fp8": (BytesTrees, 4),
}


def main(output: Path) -> None:
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, (kind, page) in BENCHES.items():
        bench = kind(page, 96)
        # one after another on the same graphs: each replay finds what the one before has left
        found[name] = {case: bench.verify(case) for case in CASES}
        found[name] |= {fault: bench.verify(case, fault) for fault, case in FAULTS.items()}
    output.write_text(json.dumps({"found": found, "built": built()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
