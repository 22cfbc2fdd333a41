"""SGLang's FlashInfer backend for latent keys, for verify forwards whose requests have chains of different lengths.

SGLang plans such passes for another algorithm's verify input, by its layout; EAGLE's own gives one length. So the
backend is shown that input in EAGLE's place. Its plans are made on the host, which waits for the device.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from c2t_plugin.engines.sglang.verify.layout import packed_layout


class PackedFlashInferMLABackend(FlashInferMLAAttnBackend):
    """Packs chains where a verify input has a layout, and SGLang's own in everything else."""

    c2t_packing = "flashinfer"

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(_shown(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(_shown(forward_batch), in_capture)


def _shown(forward_batch: Any) -> Any:
    """The batch with a verify input whose lengths SGLang reads; itself where nothing is packed."""
    layout = packed_layout(forward_batch)
    if layout is None:
        return forward_batch
    shown = copy.copy(forward_batch)
    shown.spec_info = DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=forward_batch.spec_info.draft_token_num,
        # every row is somebody's: chains are packed so (packing.py)
        ragged_verify_layout=msgspec.structs.replace(layout, total_verify_tokens=layout.graph_num_tokens),
    )
    return shown
