"""The same as packed_program.py of sliding windows, sinks and caches of 8 bits, latent ones too.

Usage: python packed_variants_program.py OUTPUT.json, in the CPU engine's environment with TRITON_INTERPRET=1. Writes,
per backend and case, how far the real rows are from attention as it is defined, and how far with a fault planted.

Keys of a layer with a window are in slots of their own, as SGLang's pools for such models have them. Keys of 8 bits are
read as they are written: the distance is that of sums, not of rounding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import packed_program
import torch
from packed_program import (
    CASES,
    DIM,
    HEADS,
    Bench,
    CuteDslMla,
    Fa3,
    FlashInferMla,
    FlashMla,
    LatentFa3,
    Pool,
    TrtllmMha,
    TrtllmMla,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

FP8 = torch.float8_e4m3fn
EVERY_KEY = 1 << 20


class WindowPool(Pool, SWAKVPool):
    """Of one layer with a window: what SGLang's tables name by a slot of all layers lies in another one."""

    swa_layer_nums = 1

    def __init__(self, slots: int, page: int, generator: torch.Generator) -> None:
        Pool.__init__(self, slots, 2, False, generator)
        # the layer's place among those with a window, and that it is one
        self.layers_mapping = {0: (0, True)}
        # page 0 is nobody's in both
        others = torch.randperm(slots // page - 1, generator=generator) + 1
        order = torch.cat([others.new_zeros(1), others])
        self.full_to_swa_index_mapping = (order[:, None] * page + torch.arange(page)).flatten()

    def translate_loc_from_full_to_swa(self, slots: Tensor) -> Tensor:
        return self.full_to_swa_index_mapping[slots.long()]

    def get_kv_buffer(self, _layer: int) -> tuple[Tensor, Tensor]:
        moved = torch.empty_like(self.k), torch.empty_like(self.v)
        for there, here in zip(moved, (self.k, self.v), strict=True):
            there[self.full_to_swa_index_mapping] = here
        return moved


class BytesPool(Pool):
    """Of keys and values in 8 bits, which is what is in them already."""

    def __init__(self, slots: int, latent: bool, generator: torch.Generator) -> None:
        super().__init__(slots, 2, latent, generator)
        self.k, self.v = (each.to(FP8).float() for each in (self.k, self.v))

    def get_kv_buffer(self, _layer: int) -> tuple[Tensor, Tensor]:
        return self.k.to(FP8), self.v.to(FP8)

    def get_key_buffer(self, _layer: int) -> Tensor:
        return self.k.to(FP8)


class Windowed(Bench):
    """A layer of gpt-oss: a window, and a sink for each head."""

    window = 9
    sinks = torch.linspace(-1.0, 2.0, HEADS)
    fault = ""

    def filled(self, slots: int) -> Pool:
        return WindowPool(slots, self.page, self.generator)

    def view(self, layout: Any, rows: int, prefixes: list[int], slots: int) -> Any:
        batch = super().view(layout, rows, prefixes, slots)
        # where keys are written in the slots of windows is asked of it
        batch.kv_loc_plan = self.translator.own_plan(batch)
        return batch

    def run(self, case: str, fault: str = "") -> float:
        self.fault = fault
        return super().run(case, fault)

    def attend(self, q: Tensor, batch: Any, named: dict[str, Tensor]) -> Tensor:
        self.layer.sliding_window_size = EVERY_KEY if self.fault == "a_window_of_every_key" else self.window
        metadata, sinks = self.backend.forward_metadata, self.sinks
        if self.fault == "slots_of_all_layers":
            metadata.swa_page_table.copy_(metadata.page_table)
        if self.fault == "sinks_left_out":
            # what is expected has them
            return self.backend.forward_extend(q, None, None, self.layer, batch, save_kv_cache=False)
        assert sinks is not None
        return super().attend(q, batch, named)


class Bytes(Bench):
    """A cache of 8 bits, of a checkpoint that has scales."""

    cache, scales = FP8, (0.5, 2.0)
    fault = ""

    def filled(self, slots: int) -> Pool:
        return BytesPool(slots, self.latent, self.generator)

    def run(self, case: str, fault: str = "") -> float:
        self.fault = fault
        return super().run(case, fault)

    def attend(self, q: Tensor, batch: Any, named: dict[str, Tensor]) -> Tensor:
        for name, scale in zip("kv", self.scales, strict=True):
            given = None if self.fault == f"scale_of_{name}_left_out" else scale
            setattr(self.layer, f"{name}_scale", None if given is None else torch.tensor(given))
            setattr(self.layer, f"{name}_scale_float", given)
        if self.fault == "scale_of_v_left_out" and self.layer.k_scale is not None:
            # one that has none of values alone is of no checkpoint: SGLang takes both or neither
            self.layer.v_scale = torch.tensor(1.0)
        return super().attend(q, batch, named)


class LatentBytes(Bytes):
    """The same of latent keys, which SGLang writes without scales: those of such checkpoints are 1."""

    scales = (1.0, 1.0)


class Fa3LatentBytes(LatentBytes, LatentFa3):
    """Heads as large as DeepSeek's: for these SGLang widens the keys, and leaves queries as they are."""

    asked = torch.float32

    def __init__(self, page: int, context: int) -> None:
        packed_program.RANK, rank = 256, packed_program.RANK
        super().__init__(page, context)
        self.rank, packed_program.RANK = packed_program.RANK, rank

    def run(self, case: str, fault: str = "") -> float:
        packed_program.RANK, rank = self.rank, packed_program.RANK
        try:
            return super().run(case, fault)
        finally:
            packed_program.RANK = rank


class TrtllmLatentBytes(LatentBytes, TrtllmMla):
    """SGLang rounds queries, and new keys, in the attention."""

    def attend(self, q: Tensor, batch: Any, named: dict[str, Tensor]) -> Tensor:
        nope, rope = (each.view(len(q), HEADS, -1) for each in (q, named["q_rope"]))
        written = {"k": nope[:, :1], "v": nope[:, :1], "k_rope": rope[:, :1]}
        found: Tensor = self.backend.forward_extend(
            nope, layer=self.layer, forward_batch=batch, save_kv_cache=False, q_rope=rope, **written
        )
        return found


class CuteDslLatentBytes(TrtllmLatentBytes, CuteDslMla):
    pass


class FlashInferLatentBytes(LatentBytes, FlashInferMla):
    """SGLang widens the keys there too."""

    asked = torch.float32


class FlashMlaBytes(LatentBytes, FlashMla):
    def make(self) -> Any:
        made = super().make()
        from sglang.srt.layers.attention import flashmla_backend as base

        base.scaled_fp8_quant = lambda q, scale: ((q / scale).to(FP8), scale)
        return made


class Fa3Windowed(Windowed, Fa3):
    pass


class TrtllmWindowed(Windowed, TrtllmMha):
    pass


class Fa3Bytes(Bytes, Fa3):
    pass


class TrtllmBytes(Bytes, TrtllmMha):
    pass


WINDOW_FAULTS = {
    "a_window_of_every_key": "pad_slots",
    "slots_of_all_layers": "spare_rows",
    "sinks_left_out": "spare_rows",
    "left_over_rows_to_the_last": "spare_rows",
}
BYTES_FAULTS = {
    "scale_of_k_left_out": "spare_rows",
    "scale_of_v_left_out": "pad_slots",
    "lengths_of_another_step": "spare_rows",
}
LATENT_FAULTS = {
    "lengths_of_another_step": "spare_rows",
    "a_stale_page_table": "pad_slots",
    "a_request_reads_slot_0": "pad_slots",
}
# name: backend, tokens of a page, of a request's longest context
BENCHES: dict[str, tuple[type[Bench], int, int, dict[str, str]]] = {
    "fa3_window": (Fa3Windowed, 1, 96, WINDOW_FAULTS),
    "fa3_window_pages_of_16": (Fa3Windowed, 16, 96, WINDOW_FAULTS),
    "trtllm_mha_window": (TrtllmWindowed, 16, 96, WINDOW_FAULTS),
    "fa3_fp8": (Fa3Bytes, 1, 96, BYTES_FAULTS),
    "trtllm_mha_fp8": (TrtllmBytes, 16, 96, BYTES_FAULTS),
    "fa3_latent_fp8": (Fa3LatentBytes, 16, 96, LATENT_FAULTS),
    "trtllm_mla_fp8": (TrtllmLatentBytes, 64, 128, LATENT_FAULTS),
    "cutedsl_mla_fp8": (CuteDslLatentBytes, 64, 128, LATENT_FAULTS),
    "flashinfer_mla_fp8": (FlashInferLatentBytes, 1, 96, LATENT_FAULTS),
    "flashmla_fp8": (FlashMlaBytes, 64, 128, LATENT_FAULTS),
}


def main(output: Path) -> None:
    assert DIM <= 256, "SGLang takes no scales there"
    found: dict[str, dict[str, float]] = {}
    for name, (kind, page, context, faults) in BENCHES.items():
        bench = kind(page, context)
        found[name] = {case: bench.run(case) for case in CASES}
        found[name] |= {fault: bench.run(case, fault) for fault, case in faults.items()}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
