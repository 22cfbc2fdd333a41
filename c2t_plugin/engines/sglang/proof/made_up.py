"""A made-up batch for the self-check: requests whose keys are those of random tokens, in slots that are given back."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from torch import Tensor

from c2t_plugin.engines.sglang.drafters.tree_input import build_verify_input
from c2t_plugin.engines.sglang.proof import linear
from c2t_plugin.engines.sglang.step import Step, attach, step_of
from c2t_plugin.engines.sglang.verify.choice import verifier

# Tokens before the windows: few, so that one wrong key weighs, and more than a page of 16.
PREFIXES = (1, 2, 3, 5, 8, 13, 21, 34)
# Backends whose kernel gets a window of each request, however many of its places have a row.
WINDOWED = ("trtllm_mla", "cutedsl_mla", "flashmla")
# What stands in for NaN where that spreads from what is weighed with 0.
LOUD = 256.0
# In formats of 8 bits: NaN in both, and a large number, 128 or 8192.
NAN_BYTE, LOUD_BYTE = 0x7F, 0x70


class MadeUp:
    """Requests in rows 1, 2, ... of `req_to_token`, with keys and values in slots of the allocator, for one block.

    requests: at most so many; as many as there is memory for. `close` gives everything back and leaves zeros.
    """

    def __init__(self, worker: Any, requests: int) -> None:
        self._worker, self._target = worker, worker.target_worker
        self._runner = runner = worker.target_worker.model_runner
        if getattr(runner.token_to_kv_pool, "post_capture_active", False):
            raise MemoryError("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: there are no keys yet")
        self._allocator, self._table = runner.token_to_kv_pool_allocator, runner.req_to_token_pool.req_to_token
        if getattr(self._allocator, "swa_req_ring", False):
            raise MemoryError("keys of sliding windows are in a ring of each request, of which made-up ones have none")
        self.device, page = self._table.device, runner.page_size
        self._page = page
        length = -(-(PREFIXES[-1] + 2 * worker.speculative_num_draft_tokens) // page) * page
        length = min(length, self._table.shape[1] // page * page)
        most = min(len(self._table) - 1, runner.max_running_requests or len(self._table))
        most = linear.room(runner.req_to_token_pool, min(requests, most))
        self.requests = min(most, self._allocator.available_size() // length)
        if self.requests < 1 or length < PREFIXES[-1] + worker.speculative_num_draft_tokens:
            raise MemoryError("there is no room for a request of its own")
        self._linear = linear.LinearStates(runner.req_to_token_pool, self.requests)
        found = _alloc(self._allocator, self.requests * length)
        if found is None:
            self._linear.close()
            raise MemoryError(f"the allocator has no {self.requests * length} slots")
        self._slots = found.view(self.requests, length)
        self._table[1 : self.requests + 1, :length] = self._slots.int()
        generator = torch.Generator().manual_seed(0)
        vocabulary = runner.model_config.vocab_size
        self._tokens = torch.randint(vocabulary, (self.requests, length), generator=generator).to(self.device)
        self._generator = generator
        self.prefixes = torch.tensor([PREFIXES[i % len(PREFIXES)] for i in range(self.requests)])
        try:
            self._write(self._slots.flatten(), 0.0)
            self._compute_prefixes()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the server's memory as it was found."""
        self._write(torch.cat([self._slots.flatten(), self._nobody()]), 0.0)
        self._table[1 : self.requests + 1] = 0
        self._linear.close()
        self._allocator.free(self._slots.flatten())

    def _compute_prefixes(self) -> None:
        """Keys of the longest prefix for all, window after window; the first token's stay zeros."""
        width = self._worker.speculative_num_draft_tokens
        everyone = torch.arange(self.requests)
        kept = torch.full((self.requests,), width - 1, dtype=torch.int32)
        for begun in range(1, PREFIXES[-1], width):
            self._window_pass(everyone, kept, torch.full((self.requests,), begun))

    def scheduled(self, who: Tensor, prefixes: Tensor | None = None) -> Any:
        """The scheduler's batch of these requests at the start of a step, without an input. who: (n,) int64 on the
        host."""
        lengths = (self.prefixes if prefixes is None else prefixes)[who]
        made = ScheduleBatch(reqs=[])
        made.req_to_token_pool, made.token_to_kv_pool_allocator = self._runner.req_to_token_pool, self._allocator
        made.model_config, made.device = self._runner.model_config, str(self.device)
        made.spec_algorithm, made.forward_mode = self._runner.spec_algorithm, ForwardMode.DECODE
        made.seq_lens_cpu, made.seq_lens = lengths, lengths.to(self.device)
        made.seq_lens_sum, made.orig_seq_lens = int(lengths.sum()), made.seq_lens.int()
        made.req_pool_indices = (who + 1).to(self.device)
        made.multimodal_inputs, made.return_logprob = [None] * len(who), False
        return made

    def batch(self, who: Tensor, kept: Tensor, *, packed: bool = False, prefixes: Tensor | None = None) -> Any:
        """The scheduler's batch of these requests at the start of verification, with its Step.

        who: (n,) int64 on the host. kept: (n,) int32 on the host, draft tokens to verify.
        """
        made = self.scheduled(who, prefixes)
        lengths = made.seq_lens_cpu
        width = self._worker.speculative_num_draft_tokens
        at = lengths[:, None] + torch.arange(width)
        places = who[:, None].to(self.device), at.to(self.device)
        made.out_cache_loc = self._slots[places].flatten().long()
        made.spec_info = self._verify_input(made, self._tokens[places], kept.to(self.device), packed)
        made.input_ids, made.forward_mode = made.spec_info.draft_token, ForwardMode.TARGET_VERIFY
        made.spec_info.seq_lens_cpu, made.spec_info.seq_lens_sum = made.seq_lens_cpu, made.seq_lens_sum
        return made

    def _verify_input(self, batch: Any, tokens: Tensor, kept: Tensor, packed: bool) -> Any:
        """tokens: (n, width). A chain's, as SGLang builds it; of a tree mode a random tree's, as we do."""
        worker, (requests, width) = self._worker, tokens.shape
        draft_input = SimpleNamespace(bonus_tokens=tokens[:, 0].contiguous())
        shape = {"topk": worker.topk, "tree_mask_mode": worker._draft_worker.tree_mask_mode}
        if worker.topk > 1:
            places = torch.arange(width - 1, device=self.device)
            # the same tree for everybody, of branches and chains: each node hangs on the one before the last
            parents = (places - 2).expand(requests, -1).contiguous()
            trees = parents, places < kept[:, None], tokens[:, 1:].contiguous()
            backend, steps = self._runner.attn_backend, worker.speculative_num_steps
            return build_verify_input(
                batch, draft_input, trees, width, attn_backend=backend, num_steps=steps, packed=packed, **shape
            )
        parents = torch.arange(-1, (width - 1 if width > 2 else 0) - 1, device=self.device).repeat(requests, 1)
        nodes = torch.arange(width - 1, device=self.device).repeat(requests, 1)
        made = build_eagle_verify_input(
            batch,
            draft_input,
            parents,
            nodes,
            tokens[:, 1:].contiguous(),
            None,
            target_worker=self._target,
            num_steps=width - 1,
            num_draft_tokens=width,
            device=str(self.device),
            **shape,
        )
        attach(made, Step(kept))
        return made

    def uniform(self, batch: Any) -> Any:
        """SGLang's forward batch of the whole window."""
        standalone = self._runner.spec_algorithm.is_standalone()
        return ForwardBatch.init_new(
            batch,
            self._runner,
            capture_hidden_mode=CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )

    def forward(self, forward_batch: Any) -> Any:
        """The target's result."""
        self._linear.clear()
        return self._target.forward_batch_generation(None, forward_batch, is_verify=True)

    def _window_pass(self, who: Tensor, kept: Tensor, prefixes: Tensor | None = None) -> Tensor:
        """Logits of SGLang's own pass over the whole window."""
        backend = verifier(self._runner.attn_backend)
        own = getattr(backend, "_verify_mask", None)
        # ours has no columns of the prefix, which SGLang's kernel reads
        if getattr(backend, "c2t_nodes_alone", False):
            backend._verify_mask = None
        try:
            forward_batch = self.uniform(self.batch(who, kept, prefixes=prefixes))
            logits: Tensor = self.forward(forward_batch).logits_output.next_token_logits
        finally:
            if own is not None:
                backend._verify_mask = own
        return logits

    def window(self, who: Tensor, kept: Tensor | None = None) -> Tensor:
        """(n, width, vocabulary) float32 logits of the uniform window. kept: of a tree, which has so many nodes."""
        width = self._worker.speculative_num_draft_tokens
        logits = self._window_pass(who, torch.full((len(who),), width - 1, dtype=torch.int32) if kept is None else kept)
        return logits.view(len(who), width, -1).float().clone()

    def packed(self, who: Tensor, kept: Tensor) -> tuple[Tensor, bool]:
        """The same of packed rows; places behind a cut are anything. And whether a graph computed them."""
        batch, packing = self.batch(who, kept, packed=True), self._worker.c2t.packing
        forward_batch, starts = packing.pack(batch, step_of(batch.spec_info), self.uniform(batch))
        result = self.forward(forward_batch)
        packing.scatter(result.logits_output, starts, batch.spec_info.draft_token_num)
        logits = result.logits_output.next_token_logits
        return logits.view(len(who), -1, logits.shape[-1]).float().clone(), bool(result.can_run_cuda_graph)

    # --- poison

    def poisons(self) -> tuple[float, ...]:
        """Sharpest first. NaN shows what is read and weighed with 0 too, but a router makes any number of it."""
        routed = any("MoE" in type(module).__name__ for module in self._runner.model.modules())
        return (LOUD,) if routed else (torch.nan, LOUD)

    def poison(self, value: float) -> bool:
        """Spoil all that lies behind the prefixes, and page 0, which is nobody's; whether that could be done."""
        # of latent keys TensorRT-LLM's kernel reads a whole window, and weighs places without a row with 0
        window = self._worker.speculative_num_draft_tokens if self._worker.c2t.packing.backend in WINDOWED else 0
        behind = torch.arange(self._slots.shape[1]) >= self.prefixes[:, None] + window
        return self._write(torch.cat([self._slots[behind.to(self.device)], self._nobody()]), value)

    def _nobody(self) -> Tensor:
        return torch.arange(self._page, dtype=self._slots.dtype, device=self.device)

    def _write(self, slots: Tensor, value: float) -> bool:
        written = False
        for pool, own in self._pools(slots.long()):
            for name in ("k_buffer", "v_buffer", "kv_buffer"):
                # fewer are of another format
                for buffer in (each for each in getattr(pool, name, None) or () if each.shape[0] >= pool.size):
                    if buffer.dtype.itemsize > 1:
                        buffer[own] = value
                    else:
                        buffer.view(torch.uint8)[own] = {0.0: 0, LOUD: LOUD_BYTE}.get(value, NAN_BYTE)
                    written = True
        return written

    def _pools(self, slots: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Each pool of keys and values, and these slots as it counts them. Layers with sliding windows have one of
        their own, beside linear ones the others have."""
        pool = self._runner.token_to_kv_pool
        yield getattr(pool, "full_kv_pool", pool), slots
        sliding = getattr(pool, "swa_kv_pool", None)
        if sliding is not None:
            # of page 0, all but its first slot are no slot's there
            own = self._allocator.translate_loc_from_full_to_swa(slots)
            yield sliding, torch.cat([own, self._nobody().long()])


def _alloc(allocator: Any, tokens: int) -> Tensor | None:
    """Slots of whole pages, None: there are not so many. Pages of two pools SGLang gives to prefills alone."""
    sliding = getattr(allocator, "swa_attn_allocator", None)
    if sliding is None or allocator.page_size == 1:
        found: Tensor | None = allocator.alloc(tokens)
        return found
    found = allocator.full_attn_allocator.alloc(tokens)
    allocator.set_full_to_swa_mapping(found, sliding.alloc(tokens))
    return found
