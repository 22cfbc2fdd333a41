"""SGLang's FlashMLA backend for verify forwards whose requests have chains of different lengths.

Its kernel takes a window of each request, from the first token behind the prefix on. So queries are padded to one
around it, and its output is packed again. Keys are written packed: a place of the window without a row has the key that
was there before, which no row with an owner sees.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend
from torch import Tensor

from c2t_kernels import pack_ragged, scatter_ragged
from c2t_plugin.engines.sglang.verify.layout import packed_layout


class PackedFlashMLABackend(FlashMLABackend):
    """Packs chains where a verify input has a layout, and SGLang's own in everything else."""

    supports_ragged_verify_graph = True
    c2t_packing = "flashmla"

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *positional: Any, **keyword: Any
    ) -> Tensor:
        layout = packed_layout(forward_batch)
        if layout is None:
            attended: Tensor = super().forward_extend(q, k, v, layer, forward_batch, *positional, **keyword)
            return attended
        # of a captured graph, the layout that SGLang's runner renews in place: an entry for each of its requests
        starts, rows = layout.qo_indptr_device, q.shape[0]
        window = scatter_ragged(q.reshape(rows, -1), starts, self.num_draft_tokens, fill=0)
        attended = super().forward_extend(window, k, v, layer, forward_batch, *positional, **keyword)
        windows = attended.view(*window.shape[:2], -1)
        packed: Tensor = pack_ragged(starts.diff() - 1, [windows], capacity=rows, pads=(0,)).values[0]
        return packed
