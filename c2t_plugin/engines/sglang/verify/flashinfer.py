"""SGLang's FlashInfer attention backend for verify forwards whose requests have different lengths.

FlashInfer plans for any number of rows per request: `qo_indptr` says whose they are. SGLang only fills it for one
length, and asks the verify input for it; here it asks one that knows the layout. Without a mask a request's rows are a
causal chain. With one (as in triton.py: flat, (rows of a request, prefix + rows) row-major, request after
request) they may be any tree, of a size of its own; FlashInfer packs it into bits.

Planning waits for the device, as it does in SGLang's own verify forwards on FlashInfer. Of chains in a captured graph
it waits once, for where rows begin, and not at all where each is verified whole: all else the host knows, and SGLang
has a plan that takes it from there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, fast_prefill_plan
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from torch import Tensor

from c2t_plugin.engines.patching import become, replaced
from c2t_plugin.engines.sglang.patches import PATCHES, PLAN_CAPTURED
from c2t_plugin.engines.sglang.step import step_of
from c2t_plugin.engines.sglang.verify.layout import packed_layout, padding_rows
from c2t_plugin.engines.sglang.verify.packing import whole_windows

# Of a row's list of keys and of its mask.
SPARE_ROOM = 512


class PackedFlashInferAttnBackend(FlashInferAttnBackend):
    """Packs rows where a verify input has a layout, and SGLang's own in everything else."""

    supports_ragged_verify_graph = True
    c2t_packing = "flashinfer"

    # Of the running verify forward, None where nothing is packed. Eager: rows that belong to requests.
    _used: int | None = None
    # Captured, of trees: (rows,) bool, True for padding.
    _padding: Tensor | None = None
    _captured_padding: Tensor
    # (requests,) on the host: tokens before the rows of the pass that is planned, None where only the device knows.
    _prefixes: Tensor | None = None
    # (requests + 1,) on the host: where these begin, where it knows.
    _begun: Tensor | None = None
    # By rows of the captured graph, of which several have as many requests; SGLang keeps them by requests.
    _captured_wrappers: dict[int, list[Any]]

    @classmethod
    def of(cls, stock: FlashInferAttnBackend) -> PackedFlashInferAttnBackend:
        """SGLang's backend made to pack rows. Its constructor checks the format of keys for its own class alone."""
        found: PackedFlashInferAttnBackend = become(stock, cls)
        return found

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *positional: Any, **keyword: Any) -> None:
        # A request's rows share its keys, and a mask is of bits; SGLang has room for each row's, and for bytes. Some
        # more is for rows' own keys, and for what each request's mask is rounded up by.
        room = math.ceil(self.max_context_len * max(max_bs / max_num_tokens, 1 / 8)) + SPARE_ROOM
        with replaced(self, "max_context_len", min(room, self.max_context_len)):
            super().init_cuda_graph_state(max_bs, max_num_tokens, *positional, **keyword)
        device = self.workspace_buffer.device
        self._captured_padding = torch.zeros(max_num_tokens, dtype=torch.bool, device=device)
        self._captured_wrappers = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        packed = _packed(forward_batch)
        super().init_forward_metadata(forward_batch if packed is None else packed)
        self._used = None if packed is None else int(packed.spec_info.starts[-1])
        self._padding = None

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        packed = _packed(forward_batch)
        self._used = self._padding = None
        if packed is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        rows, requests, chains = len(packed.input_ids), packed.batch_size, packed.spec_info.custom_mask is None
        if not in_capture:
            self.prefill_cuda_graph_metadata[requests] = self._captured_wrappers[rows]
        self._prefixes, self._begun = packed.seq_lens_cpu, _known_starts(forward_batch) if chains else None
        super().init_forward_metadata_out_graph(packed, in_capture)
        self._captured_wrappers[rows] = self.prefill_cuda_graph_metadata[requests]
        if in_capture and chains and self.prefill_backend == "fa2" and self.dispatch_reason is None:
            # FlashInfer's own plan of a capture makes what this one needs
            for wrapper in self._captured_wrappers[rows]:
                PATCHES.on(PLAN_CAPTURED, wrapper, functools.partial(self._planning, wrapper))
        # a graph's rows of chains are all given to somebody (packing.py)
        if not chains:
            self._padding = self._captured_padding[:rows]
            self._padding.copy_(padding_rows(rows, packed.spec_info.starts))

    def _planning(self, wrapper: Any, stock: Any) -> Any:
        return functools.partial(self._plan, wrapper, stock)

    def _plan(self, wrapper: Any, stock: Any, starts: Tensor, *positional: Any, **keyword: Any) -> None:
        """In place of FlashInfer's, which reads three tensors back and looks for the largest of each one by one.

        starts: (requests + 1,) int32, where rows begin. The rest: as SGLang gives it.
        """
        if self._prefixes is None:
            stock(starts, *positional, **keyword)
            return
        begun = starts.cpu() if self._begun is None else self._begun
        rows = begun.diff()
        keys = self._prefixes[: len(rows)].int() + rows
        fast_prefill_plan(
            wrapper,
            starts,
            *positional,
            **keyword,
            qo_indptr_host=begun,
            kv_indptr_host=torch.nn.functional.pad(keys.cumsum(0, dtype=torch.int32), (1, 0)),
            kv_lens_host=keys,
            max_q_len=int(rows.max()),
            max_kv_len=int(keys.max()),
        )

    def forward_extend(self, q: Tensor, *positional: Any, **keyword: Any) -> Tensor:
        # FlashInfer refuses rows that its plan gives to nobody. A captured graph runs without its asking.
        output: Tensor = super().forward_extend(q[: self._used], *positional, **keyword)
        if self._used is not None:
            return torch.nn.functional.pad(output, (0, 0, 0, len(q) - self._used))
        if self._padding is not None:
            # The kernel leaves them as they are. NaN there would reach slot 0 and an expert's router.
            output.masked_fill_(self._padding[:, None], 0)
        return output


class PackedRows(EagleDraftExtendInput):
    """What SGLang asks where the rows and keys of a verify forward are.

    Of draft extend, since there too lengths count a request's rows, and no plan is made for rows of one width.
    starts: (requests + 1,) int32, where each request's rows begin, requests of padding included, which have none.
    """

    def __init__(self, verify_input: Any, requests: int) -> None:
        layout = verify_input.ragged_verify_layout
        begun: Tensor = layout.qo_indptr_device
        starts = torch.cat([begun, begun[-1:].expand(requests + 1 - len(begun))])
        # SGLang takes the number of requests from the one, and makes of the other a width that we do not use.
        super().__init__(num_correct_drafts=starts[1:], num_tokens_per_req=1)
        self.starts, self.custom_mask = starts, verify_input.custom_mask
        self._most = layout.graph_num_tokens

    def generate_attn_arg_prefill(self, *positional: Any, **keyword: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """kv_indices, kv_indptr, qo_indptr and mask."""
        generate = super().generate_attn_arg_prefill
        # Releases of SGLang name these arguments alike, but do not pass them alike.
        asked = inspect.signature(generate).bind(*positional, **keyword).arguments
        asked["paged_kernel_lens"] = asked["paged_kernel_lens"] + self.starts.diff()
        # The host knows no better; what lies behind the last key is not read.
        asked["paged_kernel_lens_sum"] += self._most
        kv_indices, kv_indptr, _, _ = generate(**asked)
        return kv_indices, kv_indptr, self.starts, self.custom_mask


def _known_starts(forward_batch: Any) -> Tensor | None:
    """Of chains that are verified whole, as far as C2T's step tells: see PackedVerify.pack."""
    step, width = step_of(forward_batch.spec_info), getattr(forward_batch.spec_info, "draft_token_num", 0)
    if step is None or len(forward_batch.input_ids) != len(step.kept) * width:
        return None
    return whole_windows(len(step.kept), width, forward_batch.batch_size, torch.device("cpu"))[0]


def _packed(forward_batch: Any) -> Any:
    """The batch with `PackedRows` to ask; None where nothing is packed."""
    if packed_layout(forward_batch) is None:
        return None
    packed = copy.copy(forward_batch)
    packed.spec_info = PackedRows(forward_batch.spec_info, forward_batch.batch_size)
    return packed
