"""SGLang's Triton attention backend for verify forwards whose requests have different lengths.

Its kernel takes them already: rows by `qo_indptr`, masks by `mask_indptr`. Only the two are filled for one length; here
they are filled from the layout that the verify input carries. Without a mask a request's rows are a causal chain. With
one (`custom_mask` of the verify input: flat, (rows of a request, prefix + rows) row-major, request after request) they
may be any tree, of a size of its own.

Where every verify forward is packed, nobody reads a mask of chains. Then SGLang gets no room for one over the prefix,
which it would fill anew in each step, all of it: megabytes for each request of a long context.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import ForwardMetadata, TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from c2t_plugin.engines.patching import replaced
from c2t_plugin.engines.sglang.verify.layout import packed_layout, padding_rows


class PackedTritonAttnBackend(TritonAttnBackend):
    """Packs rows where a verify input has a layout, and SGLang's own in everything else. nodes_alone: nobody reads a
    mask's columns of the prefix, so that SGLang is to write none."""

    supports_ragged_verify_graph = True
    c2t_packing = "triton"
    # which attention kernel verifies packed rows
    c2t_kernel = "stock"
    c2t_nodes_alone = False

    # Whether the running forward's rows are packed; (rows,) bool, True for padding, None where there can be none.
    _packed = False
    _padding: Tensor | None = None
    _captured_padding: Tensor
    _row_numbers: Tensor
    forward_metadata: ForwardMetadata

    def __init__(self, runner: Any, *, nodes_alone: bool = False) -> None:
        super().__init__(runner)
        self.c2t_nodes_alone = nodes_alone
        if nodes_alone:
            # without graphs nobody needs a buffer, but its form is asked for
            self._verify_mask = self._mask_buffer(0, 0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *positional: Any, **keyword: Any) -> None:
        verifies = max_num_tokens > max_bs
        if verifies and not positional and not keyword:
            # a request's rows share its keys; SGLang has room for each row's, gigabytes of it for long contexts
            room = max_bs * self.max_context_len
            keyword = {"kv_indices_buf": torch.zeros(room, dtype=torch.int64, device=self.device)}
        # of shares of keys, megabytes a row with latent keys, which decoding alone computes
        with replaced(self, "max_kv_splits", 1 if verifies else self.max_kv_splits):
            super().init_cuda_graph_state(max_bs, max_num_tokens, *positional, **keyword)
        if self.c2t_nodes_alone and self._verify_mask is not None:
            self._verify_mask = self._mask_buffer(max_bs, max_num_tokens)
        self._captured_padding = torch.zeros(max_num_tokens, dtype=torch.bool, device=self.device)
        self._row_numbers = torch.arange(max_num_tokens, dtype=torch.int32, device=self.device)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        layout = packed_layout(forward_batch)
        self._packed, self._padding = layout is not None, None
        if layout is not None:
            requests, rows = forward_batch.batch_size, forward_batch.input_ids.shape[0]
            self._fill(layout, requests, forward_batch)
            self._padding = padding_rows(rows, layout.qo_indptr_device)
            starts, masks = (each[: requests + 1] for each in (self.qo_indptr, self.mask_indptr))
            self.forward_metadata = dataclasses.replace(self.forward_metadata, qo_indptr=starts, mask_indptr=masks)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        layout = packed_layout(forward_batch)
        self._packed, self._padding = layout is not None, None
        if layout is None:
            return
        self._fill(layout, forward_batch.batch_size, forward_batch)
        # a graph's rows of chains are all given to somebody (packing.py)
        if forward_batch.spec_info.custom_mask is not None:
            self._padding = self._captured_padding[: len(forward_batch.input_ids)]
            torch.ge(self._row_numbers[: len(self._padding)], layout.qo_indptr_device[-1], out=self._padding)

    def forward_extend(self, *positional: Any, **keyword: Any) -> Tensor:
        output: Tensor = super().forward_extend(*positional, **keyword)
        if self._padding is not None:
            # The kernel leaves rows of nobody as they are. NaN there would reach slot 0 and an expert's router.
            output.view(len(output), -1).masked_fill_(self._padding[:, None], 0)
        return output

    def _fill(self, layout: Any, requests: int, forward_batch: Any) -> None:
        """Write where each request's rows and mask begin; requests past the layout's are padding and have no rows."""
        real = layout.verify_lens.shape[0]
        starts = self.qo_indptr[: requests + 1]
        starts[: real + 1] = layout.qo_indptr_device
        if real < requests:
            starts[real + 1 :] = layout.qo_indptr_device[-1]
        spec_info = forward_batch.spec_info
        if spec_info.custom_mask is None:
            # no kernel asks where one begins
            return
        counted = getattr(spec_info, "mask_starts", None)
        if counted is None:
            # a batch of SGLang's own to capture a graph with
            rows = starts.diff()
            elements = rows * self._mask_columns(forward_batch.seq_lens[:requests], rows)
            self.mask_indptr[1 : requests + 1] = torch.cumsum(elements, dim=0)
            return
        self.mask_indptr[1 : real + 1] = counted[1:]
        if real < requests:
            self.mask_indptr[real + 1 : requests + 1] = counted[-1]

    def _mask_buffer(self, requests: int, rows: int) -> VerifyMask:
        width = self.num_draft_tokens
        # SGLang captures with a mask over a prefix of one token for each request, which has to fit as well
        elements = (requests + max(rows, requests * width)) * width
        buffer = torch.zeros(elements, dtype=torch.uint8, device=self.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)

    def _mask_columns(self, prefix: Tensor, rows: Tensor) -> Tensor:
        """(requests,) how many elements of the mask each row of a request has."""
        return prefix + rows
