"""SGLang's FlashAttention 3 backend for verify forwards whose requests have trees of different sizes.

SGLang verifies trees there in two passes that it merges: every row over its request's prefix, then every row over the
nodes that it sees, a table of their slots for each row. Neither pass asks for trees of one size; only SGLang's metadata
does. Here it is filled from the layout of the verify input and from a mask over the nodes alone, so that nobody writes
one over the prefix. Chains need none of this: SGLang's backend takes their lengths itself.

The eager passes and the captured graphs are filled by the same code, graphs in SGLang's own buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    build_trtllm_mha_page_table,
)
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from c2t_plugin.engines.patching import become
from c2t_plugin.engines.sglang.verify.layout import packed_layout, padding_rows


class PackedFa3Backend(FlashAttentionBackend):
    """Packs trees where a verify input has a layout, and SGLang's own in everything else."""

    c2t_packing = "fa3"
    # its masks have no columns of the prefix
    c2t_nodes_alone = True

    # (rows,) bool of the running verify forward, True for padding; None where nothing is packed.
    _padding: Tensor | None = None
    _captured_padding: Tensor
    _captured_starts: Tensor
    # By rows of the captured graph: the metadata of both passes.
    _captured: dict[int, tuple[Any, Any]]

    @classmethod
    def of(cls, stock: Any, model: Any) -> Any:
        """SGLang's backend made to pack trees; as it is where its metadata is not what this fills, or where the keys
        have scales. Of latent keys its pass over the nodes reads pages as slots, so those are of one token."""
        translator = getattr(stock, "kv_index_translator", None)
        odd = (
            type(stock) is not FlashAttentionBackend,
            getattr(stock, "fa_impl_ver", 3) != 3 or stock.topk <= 1,
            getattr(stock, "use_mla", False) and stock.page_size > 1,
            *(getattr(stock, name, False) for name in ("has_swa", "has_local_attention")),
            *(getattr(stock, name, False) for name in ("is_encoder_decoder", "kv_cache_is_mxfp8")),
            getattr(translator, "is_translating", False) or getattr(stock, "_kv_shard_pool", None) is not None,
            _scaled(stock, model),
        )
        if not any(odd):
            become(stock, cls)
            # without graphs nobody needs a buffer, but its form is asked for
            stock._verify_mask = stock._mask_buffer(0)
        return stock

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *positional: Any, **keyword: Any) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens, *positional, **keyword)
        # in the place of one over the longest prefix
        self._verify_mask = self._mask_buffer(max_bs)
        self._captured_padding = torch.zeros(max_num_tokens, dtype=torch.bool, device=self.device)
        self._captured_starts = torch.zeros(max_bs + 1, dtype=torch.int32, device=self.device)
        self._captured = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._padding = None
        if packed_layout(forward_batch) is None:
            super().init_forward_metadata(forward_batch)
            return
        rows, requests = len(forward_batch.input_ids), forward_batch.batch_size
        lengths = forward_batch.seq_lens_cpu
        longest = self.max_context_len if lengths is None or not len(lengths) else int(lengths.max())
        pages = -(-longest // self.page_size)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=self.device)

        width = self.speculative_num_draft_tokens
        prefix = _metadata(width, zeros(requests + 1), zeros(requests), zeros(requests, pages))
        every = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        nodes = _metadata(1, every, zeros(rows), zeros(rows, width))
        self._padding = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self._fill(prefix, nodes, self._padding, forward_batch, forward_batch.spec_info.custom_mask)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._padding = None
        if packed_layout(forward_batch) is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        rows = len(forward_batch.input_ids)
        if in_capture:
            self._captured[rows] = self._bind(rows, forward_batch.batch_size)
        self._padding = self._captured_padding[:rows]
        # what SGLang captures with is not of these trees
        mask = self._verify_mask.buffer if in_capture else forward_batch.spec_info.custom_mask
        self._fill(*self._captured[rows], self._padding, forward_batch, mask)

    def prepare_paged_mha_query(self, *positional: Any, **keyword: Any) -> tuple[Any, ...]:
        prepared: tuple[Any, ...] = super().prepare_paged_mha_query(*positional, **keyword)
        # shaped for requests, which rows of the pass over the nodes are not; and all 1 (see _scaled)
        return prepared if self._padding is None else (*prepared[:3], None, None)

    def forward_extend(self, *positional: Any, **keyword: Any) -> Tensor:
        output: Tensor = super().forward_extend(*positional, **keyword)
        if self._padding is not None:
            # The kernel leaves rows of nobody as they are. NaN there would reach slot 0 and an expert's router.
            output.masked_fill_(self._padding[:, None], 0)
        return output

    def _mask_buffer(self, requests: int) -> VerifyMask:
        elements = requests * self.speculative_num_draft_tokens**2
        buffer = torch.zeros(elements, dtype=torch.bool, device=self.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)

    def _bind(self, rows: int, requests: int) -> tuple[Any, Any]:
        """Metadata of a graph, in SGLang's buffers for trees; only where rows begin is constant in those."""
        prefix, nodes = self.target_verify_metadata_topk_normal, self.target_verify_metadata_topk_expand
        starts = self._captured_starts[: requests + 1]
        return (
            _metadata(
                self.speculative_num_draft_tokens,
                starts,
                prefix["cache_seqlens"][:requests],
                prefix["page_table"][:requests],
            ),
            _metadata(1, nodes["cu_seqlens_q"][: rows + 1], nodes["cache_seqlens"][:rows], nodes["page_table"][:rows]),
        )

    def _fill(self, prefix: Any, nodes: Any, padding: Tensor, forward_batch: Any, mask: Tensor) -> None:
        """Both passes' metadata, in place, and which rows are nobody's."""
        begun, requests = packed_layout(forward_batch).qo_indptr_device, forward_batch.batch_size
        starts, owners = prefix.cu_seqlens_q, forward_batch.req_pool_indices[:requests]
        lengths = forward_batch.seq_lens[:requests]
        # a graph's requests past the layout's are padding and have no rows
        starts[: len(begun)] = begun
        starts[len(begun) :] = begun[-1]
        prefix.cache_seqlens_int32.copy_(lengths)
        build_trtllm_mha_page_table(
            req_to_token=self.req_to_token,
            req_pool_indices=owners,
            cache_seqlens=prefix.cache_seqlens_int32,
            page_table=prefix.page_table,
            page_size=self.page_size,
        )
        padding.copy_(padding_rows(len(padding), starts))
        seen, owner = visible(mask, starts, padding, nodes.page_table.shape[1])
        places = lengths[owner, None] + torch.arange(seen.shape[1], device=seen.device)
        slots = self.req_to_token[owners[owner, None], places]
        # seen nodes first: as many as there are of them are read
        first = (~seen).int().argsort(dim=1, stable=True)
        nodes.page_table.copy_(slots.gather(1, first))
        nodes.cache_seqlens_int32.copy_(seen.sum(1))
        self.forward_metadata, self.forward_metadata_spec_decode_expand = prefix, nodes


def _scaled(stock: Any, model: Any) -> bool:
    """Whether keys and values of 8 bits have scales other than 1, which every fp8 checkpoint has. SGLang spreads them
    over requests, where its pass over the nodes takes them by row."""
    if getattr(stock, "kv_cache_dtype_str", "auto") == "auto":
        return False
    layers = [each for each in model.modules() if getattr(each, "k_scale", None) is not None]
    scales = {getattr(each, name) for each in layers for name in ("k_scale_float", "v_scale_float")}
    # 0.5.17 has no place at which they can be left out
    return bool(scales) and (scales != {1.0} or not hasattr(stock, "prepare_paged_mha_query"))


def visible(mask: Tensor, starts: Tensor, padding: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(rows, width) bool, the nodes of its own tree that each row sees, none for padding; (rows,) int64, its request.

    mask: flat, (nodes, nodes) row-major of each request, request after request. starts: (requests + 1,) int32, where
    each request's rows begin. padding: (rows,) bool.
    """
    sizes = starts.diff()
    rows = torch.arange(len(padding), dtype=torch.int32, device=starts.device)
    # a row of padding is given to the last request, and sees nothing
    owner = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=len(sizes) - 1)
    squares = sizes.long() ** 2
    begun, size = (squares.cumsum(0) - squares)[owner], sizes[owner]
    columns = torch.arange(width, device=starts.device)
    places = (begun + (rows - starts[owner]) * size)[:, None] + columns
    own = (columns < size[:, None]) & ~padding[:, None]
    return mask[places.clamp(0, len(mask) - 1)] & own, owner


def _metadata(most: int, starts: Tensor, lengths: Tensor, table: Tensor) -> Any:
    """Of one pass. most: rows of a request. cu_seqlens_k is of keys that are appended, which there are none of."""
    return FlashAttentionMetadata(
        cache_seqlens_int32=lengths, max_seq_len_q=most, cu_seqlens_q=starts, cu_seqlens_k=starts, page_table=table
    )
