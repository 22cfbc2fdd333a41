"""Packed verification: the target computes each request's root and kept draft tokens, and nothing behind a cut.

The rows of all requests are packed end to end for the target's forward pass alone. Logits and hidden states are then
put back at their places in the uniform window, so that sampling, grammar, logprobs and the draft model's extend pass
are SGLang's own and see what they always see. Nothing of SGLang's batch is changed, so nothing has to be restored.

Chains that are verified whole are in their places already: then nothing is packed and nothing put back.

Rows that are spare, since a pass has as many as a captured graph or as steps before wanted, go to each request's own
next draft tokens, then to the graph's slots without a request: nobody gets more rows than a window has, and no row that
a kernel computes is beyond what SGLang has reserved slots for. Links stay cut, so nothing of that is accepted.

A tree packs as a chain does, since its pads stand behind its nodes, with a mask besides (drafters/tree_input.py). Its
spare rows are its next-best nodes, which are verified as others are (drafters/tree.py), and then nobody's.

SGLang has the parts of this for another algorithm (srt/speculative/ragged_verify.py); the attention backend has to
take requests of different lengths, which choice.py decides.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from c2t_kernels import Packed, pack_ragged, scatter_ragged
from c2t_plugin.engines.sglang.patches import PATCHES, TARGET_FORWARD
from c2t_plugin.engines.sglang.step import Step
from c2t_plugin.engines.sglang.verify.layout import rows_to_compute

# Where a verify forward has one row per token, whatever its request.
PER_ROW = ("next_token_logits", "hidden_states")


@dataclass
class PackedVerify:
    """Packs the target's verify forwards of one server process.

    masked: whether the rows of a request are a tree, whose verify input has a mask for packed rows. backend: which
    attention.
    rows: that the target computed in the last one, padding to the next tier included. ran_graph: whether from a graph.
    """

    target_worker: Any
    masked: bool = False
    backend: str = ""
    rows: int = 0
    ran_graph: bool = False

    @contextlib.contextmanager
    def verifying(self, batch: Any, step: Step) -> Iterator[None]:
        """Within it the target's forward of this batch computes the rows of this step only."""
        forward, whole = self.target_worker.forward_batch_generation, batch

        def packed_forward(batch: Any = None, forward_batch: Any = None, **keyword: Any) -> Any:
            packed, cu_seqlens = self.pack(whole, step, forward_batch)
            result = forward(None, packed, **keyword)
            self.ran_graph = result.can_run_cuda_graph
            self.scatter(result.logits_output, cu_seqlens, whole.spec_info.draft_token_num)
            return result

        with PATCHES.during(TARGET_FORWARD, packed_forward, owner=self.target_worker):
            yield

    def pack(self, batch: Any, step: Step, uniform: Any) -> tuple[Any, Tensor]:
        """The forward batch of the packed rows, and where each request's begin: (bs + 1,) int32.

        batch: the scheduler's, prepared for the uniform window and left as it is. uniform: its forward batch.
        """
        window: Any = batch.spec_info
        kept, width = step.kept, window.draft_token_num
        requests = len(kept)
        self.rows = rows = self._rows(kept) if step.rows is None else step.rows
        own = copy.copy(window)
        if not self.masked:
            own.custom_mask = None
        # What SGLang worked out for the uniform window, where this version does so.
        own.prepared_out_cache_loc = own.prepared_mrope_positions = own.kv_loc_plan = None
        if rows == requests * width and not self.masked:
            # each chain gets all of its spare rows: packed they would be what they are
            starts, lengths = whole_windows(requests, width, self._slots(requests, rows), kept.device)
            packed = copy.copy(uniform)
            packed.spec_info = own
        else:
            packed, starts, lengths = self._packed(batch, kept, own, uniform)
        own.ragged_verify_layout = layout_of(lengths, starts, rows, None if self.masked else width)
        if len(starts) > requests + 1 and not self._graphs().can_run_graph(packed):
            # outside of a graph there are no slots without a request
            own.ragged_verify_layout = layout_of(lengths[:requests], starts[: requests + 1], rows)
        return packed, starts[: requests + 1]

    def _packed(self, batch: Any, kept: Tensor, own: Any, uniform: Any) -> tuple[Any, Tensor, Tensor]:
        """See `pack`. own: its verify input."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        width = own.draft_token_num
        # of models with positions of three axes
        axes = () if uniform.mrope_positions is None else uniform.mrope_positions[:, : len(kept) * width]
        sources = (own.draft_token, own.positions, batch.out_cache_loc, *axes)
        (tokens, positions, slots, *axes), starts, lengths = self.packed_words(
            kept, [part.view(-1, width) for part in sources], self.rows
        )
        own.draft_token, own.positions = tokens, positions
        packed_batch = copy.copy(batch)
        packed_batch.input_ids, packed_batch.out_cache_loc, packed_batch.spec_info = tokens, slots, own
        packed = ForwardBatch.init_new(
            packed_batch,
            self.target_worker.model_runner,
            capture_hidden_mode=uniform.capture_hidden_mode,
            return_hidden_states_before_norm=False,
            **({"spec_mrope_positions": torch.stack(axes)} if axes else {}),
        )
        return packed, starts, lengths

    def packed_words(self, kept: Tensor, sources: list[Tensor], rows: int) -> Packed:
        """See c2t_kernels.pack_ragged; of each source (requests, width)."""
        # A row of nobody is token 0 at position 0, written to slot 0, which no request owns.
        slots = None if self.masked else self._slots(len(kept), rows)
        return pack_ragged(kept, sources, capacity=rows, pads=(0,) * len(sources), slots=slots)

    def _slots(self, requests: int, rows: int) -> int:
        """Requests that the graph of so many rows has room for; where there is none, those that there are."""
        graphs = self._graphs()
        if graphs is None or rows not in self.sizes():
            return requests
        return max(requests, graphs._ragged_capture_slots(rows))

    def _rows(self, kept: Tensor) -> int:
        # The one wait of a step: the host chooses the graph. SGLang's preparation ran while the draft was computed.
        return rows_to_compute(int(kept.sum()) + len(kept), self.sizes())

    def scatter(self, output: Any, cu_seqlens: Tensor, width: int) -> None:
        """Put the packed rows of the target's output back into the uniform window; rows that were not computed are 0.

        Nothing reads those: acceptance ends at the cut, and the draft's extend pass selects the last accepted row.
        """
        whole = (len(cu_seqlens) - 1) * width
        for name in PER_ROW:
            packed = getattr(output, name)
            if packed is None:
                continue
            # chains have got all of their spare rows, so that each is in its place
            in_place = len(packed) >= whole and not self.masked
            window = packed[:whole] if in_place else scatter_ragged(packed, cu_seqlens, width, fill=0).flatten(0, 1)
            setattr(output, name, window)

    def sizes(self) -> list[int]:
        """Token counts of the captured graphs, rising."""
        runner = self._graphs()
        return runner.capture_num_tokens if getattr(runner, "ragged_verify_mode", False) else []

    def _graphs(self) -> Any:
        return self.target_worker.model_runner.decode_cuda_graph_runner


@functools.lru_cache(maxsize=1024)
def whole_windows(requests: int, width: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(slots + 1,) and (slots,) int32: where whole windows begin, and how long they are. Not to be written to."""
    starts = torch.arange(slots + 1, dtype=torch.int32, device=device).clamp_(max=requests).mul_(width)
    return starts, starts.diff()


def layout_of(lengths: Tensor, starts: Tensor, rows: int, most: int | None = None) -> Any:
    """SGLang's layout of a pass of so many rows. lengths: (requests,) int32. starts: (requests + 1,) int32. most: of
    any length, where no row is left over: then SGLang does not share them out anew for a graph of as many requests."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    return RaggedVerifyLayout(
        verify_lens=lengths, graph_num_tokens=rows, extend_start_loc=starts[:-1], qo_indptr_device=starts, cap=most
    )
