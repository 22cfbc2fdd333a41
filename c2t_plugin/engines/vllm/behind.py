"""Plain steps without a draft pass on model runner V1: the draft reads what they gave in one pass, when it is needed.

vLLM's draft reads every token at once, also in steps that draft nothing. Here the tokens of such steps are kept, with
the target's hidden states. Before the next draft one pass of vLLM's own `propose` of depth 0 reads them all.

A block that is full may be found by prompts that begin alike, so the draft reads a request's tokens when they fill one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from c2t_plugin.engines.plain_steps import MOST_STEPS, room


class Plain(NamedTuple):
    """Tokens of plain steps, (tokens,) each: ids, positions, hidden states (tokens, size) of the target, and slots of
    the draft's keys."""

    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    slots: Tensor


class Late(NamedTuple):
    """What requests have missed, one request after the other. rows: of the requests in the batch. lengths: tokens of
    each. ends: the position that follows each. missed: (tokens, ...)."""

    rows: list[int]
    lengths: list[int]
    ends: list[int]
    missed: Plain

    def attention(self, batch: Any) -> Any:
        """vLLM's metadata of a pass over these tokens alone. batch: its metadata of the batch at hand."""
        starts = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        device = batch.query_start_loc.device
        return type(batch)(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.ends, dtype=torch.int32).to(device),
            seq_lens_cpu_upper_bound=torch.tensor(self.ends, dtype=torch.int32),
            num_reqs=len(self.rows),
            num_actual_tokens=sum(self.lengths),
            max_query_len=max(self.lengths),
            max_seq_len=max(self.ends),
            block_table_tensor=batch.block_table_tensor[torch.tensor(self.rows).to(device)],
            slot_mapping=self.missed.slots,
            causal=True,
        )


class Behind:
    """What the draft has not read of running requests."""

    def __init__(self, block_size: int | None, requests: int, most_tokens: int) -> None:
        """block_size: at whose end a request's tokens are read; None: no text is found by another's prompt. requests:
        of the largest batch. most_tokens: that one pass can read, no fewer."""
        self._block_size, self._requests, self._most_tokens = block_size, requests, most_tokens
        # vLLM overwrites its own in the next step; made by the first one, and filled up to `_rows`
        self._kept: Plain | None = None
        self._rows = self._steps = 0
        # of each request, the position of the first token that it has missed, and where the kept ones are
        self._missed: dict[str, tuple[int, list[int]]] = {}

    def keep(self, names: Sequence[str], starts: Iterable[int], step: Plain) -> list[str]:
        """A plain step's tokens, one of each request, in the place of reading them. starts: their positions. Returns
        whose are to be read now all the same."""
        if self._kept is None:
            token_bytes = step.hidden[0].numel() * step.hidden.element_size()
            tokens = room(self._requests, token_bytes, self._most_tokens)
            self._kept = Plain(*(each.new_empty((tokens, *each.shape[1:])) for each in step))
        filled = []
        for row, (name, start) in enumerate(zip(names, starts, strict=True), start=self._rows):
            first, rows = self._missed.get(name, (start, []))
            if first + len(rows) != start:
                # it was taken out of the batch, and what it had was read anew
                first, rows = start, []
            rows.append(row)
            self._missed[name] = first, rows
            if self._block_size and (start + 1) % self._block_size == 0:
                filled.append(name)
        for kept, new in zip(self._kept, step, strict=True):
            kept[self._rows : self._rows + len(names)] = new
        self._rows, self._steps = self._rows + len(names), self._steps + 1
        if self._steps < MOST_STEPS and self._rows + self._requests <= len(self._kept.tokens):
            return filled
        # of others, which were taken out of the batch, nothing could be kept any longer
        self._missed = {name: self._missed[name] for name in names}
        return list(names)

    def late(self, names: Sequence[str], following: Mapping[str, int]) -> Late | None:
        """What these requests of the batch have missed; None: nothing. It is forgotten here. following: position of
        the token that follows what each was given so far; one that is elsewhere has been read anew."""
        found = {}
        for row, name in enumerate(names):
            first, rows = self._missed.pop(name, (0, [])) if name in following else (0, [])
            if rows and first + len(rows) == following[name]:
                found[row] = rows, following[name]
        if not found:
            self._clear()
            return None
        assert self._kept is not None
        picks = torch.tensor([place for rows, _ in found.values() for place in rows]).to(self._kept.tokens.device)
        missed = Plain(*(each[picks] for each in self._kept))
        self._clear()
        lengths, ends = [len(rows) for rows, _ in found.values()], [end for _, end in found.values()]
        return Late(list(found), lengths, ends, missed)

    def forget(self, running: Mapping[str, Any]) -> None:
        """Of requests that run no more."""
        for name in [name for name in self._missed if name not in running]:
            del self._missed[name]
        self._clear()

    def _clear(self) -> None:
        if not self._missed:
            self._rows = self._steps = 0


def reads_later(vllm_config: Any) -> bool:
    """Whether drafts of this engine read plain steps later: heads of one rank on model runner V1."""
    parallel, spec, model = vllm_config.parallel_config, vllm_config.speculative_config, vllm_config.model_config
    return (
        parallel.data_parallel_size == 1
        and not vllm_config.use_v2_model_runner
        and not spec.enable_adaptive_verification
        # these take rows of their own besides, have positions of several axes, or hand the draft's keys on
        and spec.method != "draft_model"
        and not model.uses_mrope
        and not model.is_multimodal_model
        and vllm_config.kv_transfer_config is None
    )
