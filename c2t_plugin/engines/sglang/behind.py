"""Plain steps that cost what they cost without a draft: the draft reads what they gave in one pass, when it is needed.

SGLang's draft extend follows every step, that of depth 0 too. Here it is left out of plain steps. What it would have
read is kept: tokens, the target's hidden states, and of each request which steps it missed. Before the next draft, or
when no more can be kept, one pass of the form of a prefill reads all of it, a different number of tokens of each
request. It writes the same keys into the same slots, and gives the same seeds, as a pass after every step.

While a request is behind, nothing reads its seed or what SGLang relays of it. A text that ends behind leaves slots in
which the draft's keys are missing: those are freed, not kept for prompts that begin alike.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from c2t_plugin.engines.plain_steps import MOST_STEPS, room
from c2t_plugin.engines.sglang.patches import PATCHES, PLAIN
from c2t_plugin.engines.sglang.step import Missed, record_of

logger = logging.getLogger(__name__)

# What a draft begins with, as SGLang relays it from step to step.
_RELAYED = ("topk_p", "topk_index", "hidden_states")


class Late(NamedTuple):
    """Requests that are behind. batch: SGLang's, of them alone, as for a prefill. hidden: (tokens, size) of the target,
    None for drafts that read none. tails: (requests,) the newest token of each. rows: (requests,) int64 in the batch at
    hand, None where that is all of it."""

    batch: Any
    hidden: Tensor | None
    tails: Tensor
    rows: Tensor | None

    def put(self, found: Any, draft_input: Any) -> None:
        """Have the next draft begin with what the pass gave. Both are SGLang's draft inputs."""
        for name in _RELAYED:
            new, old = getattr(found, name), getattr(draft_input, name)
            if new is not None:
                new = new if self.rows is None else old.index_copy(0, self.rows, new.to(old.dtype))
                setattr(draft_input, name, new)


class Behind:
    """What the draft has not read of the running requests: see `plain_steps` for how much at most."""

    def __init__(self, requests: int, reads_states: bool = True, chunk: int | None = None) -> None:
        """requests: of the largest batch. reads_states: whether the draft reads the target's hidden states, which are
        sometimes there for others. chunk: tokens of the longest prefill, which has memory; -1, None: of any."""
        self._requests, self._reads_states, self._chunk = requests, reads_states, chunk or -1
        # one tensor a step; on a GPU hidden states are in a graph's memory, which the next step overwrites
        self._tokens: list[Tensor] = []
        self._hidden: Tensor | None = None
        self._rows = self._room = self._log = 0
        self._relayed: Any = None

    def begin(self, draft_input: Any) -> None:
        """A plain step begins. draft_input: SGLang's, which it does not draft by."""
        self._relayed = draft_input

    def skip(self, batch: Any, result: Any) -> None:
        """Instead of the draft extend of that step. result: SGLang's, of its target pass."""
        hidden = result.logits_output.hidden_states if self._reads_states else None
        requests = len(batch.reqs)
        if not self._room:
            token_bytes = 0 if hidden is None else hidden[0].numel() * hidden.element_size()
            self._room = room(self._requests, token_bytes, self._chunk)
            if hidden is not None:
                self._hidden = hidden.new_empty((self._room, hidden.shape[1]))
        if self._hidden is not None and hidden is not None:
            self._hidden[self._rows : self._rows + requests] = hidden
        self._tokens.append(result.next_token_ids)
        for row, req in enumerate(batch.reqs, start=self._rows):
            record = record_of(req)
            if record.missed is None or record.missed.log != self._log:
                record.missed = Missed(self._log, [])
            record.missed.rows.append(row)
        self._rows += requests
        for name in _RELAYED:
            setattr(result.next_draft_input, name, getattr(self._relayed, name))

    @property
    def full(self) -> bool:
        """Whether one more step may not find room."""
        return len(self._tokens) >= MOST_STEPS or 0 < self._room < self._rows + self._requests

    def late(self, batch: Any, ended: bool) -> Late | None:
        """Those of a batch that are behind; None: nobody is. ended: whether the target's pass of its step is over, of
        which they have missed the token. What is kept is handed over: nothing is afterwards."""
        if not self._tokens:
            return None
        tokens, log = self._tokens, self._log
        self._tokens, self._rows, self._log = [], 0, log + 1
        missed = {}
        for row, req in enumerate(batch.reqs):
            record = record_of(req)
            if record.missed is not None and record.missed.log == log:
                missed[row] = record.missed.rows
            record.missed = None
        return self._prefill(batch, torch.cat(tokens), missed, int(ended)) if missed else None

    def _prefill(self, batch: Any, tokens: Tensor, missed: dict[int, list[int]], ended: int) -> Late:
        """missed: by row of the batch, rows of `tokens`, oldest first."""
        device, counts = tokens.device, [len(rows) for rows in missed.values()]
        of_token = [row for row, mine in missed.items() for _ in mine]
        back = [count - at for count in counts for at in range(count)]
        kept = [row for mine in missed.values() for row in mine]
        # SGLang moves a prompt's tokens by one and puts the newest behind them: the first one is dropped
        before = [row for mine in missed.values() for row in (mine[0], *mine[:-1])]
        picks = torch.tensor([of_token, back, kept, before]).to(device, non_blocking=True)
        last = torch.tensor([mine[-1] for mine in missed.values()]).to(device, non_blocking=True)
        here = torch.tensor(list(missed))
        rows = None if len(missed) == len(batch.reqs) else here.to(device, non_blocking=True)
        seq_lens = batch.seq_lens + ended
        # where SGLang needs them not, this is the one wait, of a step that catches up
        lens = batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        lens = lens[here] + ended
        places = batch.req_pool_indices[picks[0]], seq_lens[picks[0]] - picks[1]
        made = copy.copy(batch)
        own = {
            "reqs": [batch.reqs[row] for row in missed],
            "req_pool_indices": _of(batch.req_pool_indices, rows),
            "req_pool_indices_cpu": batch.req_pool_indices_cpu[here],
            "seq_lens": _of(seq_lens, rows),
            "seq_lens_cpu": lens,
            "seq_lens_sum": int(lens.sum()),
            "orig_seq_lens": _of(seq_lens, rows).int(),
            "prefix_lens": [length - count for length, count in zip(lens.tolist(), counts, strict=True)],
            "extend_lens": counts,
            "extend_num_tokens": len(kept),
            "input_ids": tokens[picks[3]].long(),
            "out_cache_loc": batch.req_to_token_pool.req_to_token[places].long(),
            "multimodal_inputs": [None] * len(counts),
            "sampling_info": copy.copy(batch.sampling_info),
            "forward_mode": ForwardMode.EXTEND,
        }
        for name, value in (own | _NOT_OF_A_PROMPT).items():
            setattr(made, name, value)
        return Late(made, None if self._hidden is None else self._hidden[picks[2]], tokens[last], rows)


# Of a batch that is prefilled, where it has no prompts.
_NOT_OF_A_PROMPT: dict[str, Any] = {"return_logprob": False, "has_grammar": False} | dict.fromkeys(
    (
        *("chunked_req", "chunked_req_next_prompt_token", "decoding_reqs", "extend_logprob_start_lens"),
        *("extend_input_logprob_token_ids", "input_embeds", "replace_embeds", "replace_positions"),
    )
)


def _of(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def start(worker: Any) -> Behind | None:
    """For a worker that has plain steps; None where each of them is read at once, which the log then says."""
    from sglang.srt.runtime_context import get_schedule

    from c2t_plugin.engines.sglang.behind_refused import why

    reason = why(worker.server_args, worker._draft_worker)
    if reason:
        logger.info("C2T: the draft reads every plain step at once: %s", reason)
        return None
    PATCHES.apply(PLAIN)
    reads_states, chunk = not worker.speculative_algorithm.is_standalone(), get_schedule().chunked_prefill_size
    return Behind(worker.req_to_token_pool.size, reads_states, chunk)
