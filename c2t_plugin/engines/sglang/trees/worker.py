"""The workers of tree mode: SGLang's own, with a draft loop and a verify input of ours between their parts.

The loop of the stock worker cannot be kept, since it decides which nodes are drafted from; ours calls the same draft
model, attention backends and slots. It has the shapes of the stock one, `topk` places per layer, and returns its trees
through the same tuple, so that the stock runner of the draft's CUDA graph can capture it. Verification is stock.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative import eagle_draft_cuda_graph_runner, eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker, StandaloneWorkerV2
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.sglang.construction import replaced
from c2t_plugin.engines.sglang.trees.segments import EARLY_END_BATCH, divide
from c2t_plugin.engines.sglang.trees.verify_input import TreeVerifyInput, build_verify_input
from c2t_plugin.engines.sglang.worker import _DraftMixin, _VerifyMixin
from c2t_plugin.errors import ConfigError
from c2t_plugin.trees.branches import inherit_branches
from c2t_plugin.trees.grower import TreeGrower
from c2t_plugin.trees.planning import plan
from c2t_plugin.trees.policies import slot_policy


class _TreeDraftMixin(_DraftMixin):
    """Over a stock draft worker: grows a tree per request. Seeds are relayed as in chain mode."""

    # What both have is what `_DraftMixin` uses of it here: seeds and limits.
    scorer: TreeGrower  # type: ignore[assignment]
    # Whether the target computes no pads: `init_attention_backends` of the worker says so.
    packed = False
    _may_end_early = False
    _inherits = True

    def _make_scorer(self, classifier: NodeClassifier, beta: float, config: C2TConfig) -> TreeGrower:  # type: ignore[override]
        kv_buffers(self.draft_runner.token_to_kv_pool)
        # SGLang's own trees read each branch's own keys, whatever it grew from; to have the same trees is the point.
        self._inherits = config.policy != "eagle2"
        return TreeGrower(
            slot_policy(config.policy, classifier, self.topk, self.device),
            top_m=classifier.spec.top_m,
            slots=self.req_to_token_pool.req_to_token.shape[0],
            max_depth=self.speculative_num_steps,
            max_nodes=self.speculative_num_draft_tokens - 1,
            beta=beta,
            device=self.device,
            vocabulary=self.hot_token_id,
        )

    def draft_forward(self, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        slots = forward_batch.out_cache_loc.view(-1, self.topk, self.speculative_num_steps)
        buffers = kv_buffers(self.draft_runner.token_to_kv_pool)
        hidden = forward_batch.spec_info.hidden_states
        with self.counts.classifying():
            layer = self.scorer.begin(forward_batch.req_pool_indices)
        for step in range(self.speculative_num_steps - 1):
            if self._may_end_early and len(slots) <= EARLY_END_BATCH and not self.scorer.alive:
                break
            self.between_layers()
            if self._inherits:
                inherit_branches(buffers, slots, layer.parents, written=step)
            forward_batch.input_ids = layer.token_ids.flatten()
            forward_batch.out_cache_loc = slots[:, :, step].flatten()
            forward_batch.spec_info.hidden_states = _of_parents(hidden, layer.parents)
            backend = self.draft_attn_backend.attn_backends[step]
            with _attention_of(backend, forward_batch):
                output = self.draft_runner.forward(forward_batch).logits_output
            forward_batch.positions.add_(1)
            if _MOVES_AXES and self.draft_runner.model_config.model_is_mrope:
                forward_batch.mrope_positions.add_(1)
            hidden = output.hidden_states
            with self.counts.classifying():
                layer = self.scorer.step(output.next_token_logits)
        self.between_layers()
        # What nodes go by takes the place of draft probabilities, which only rejection sampling has.
        return self.scorer.end()

    def between_layers(self) -> None:
        """Nothing, except while a graph of the loop is recorded in segments."""

    @property
    def waits(self) -> bool:
        """Whether the host waits for every draft anyway: it counts the rows that the target computes."""
        return self.packed or self.windows is not None

    def _capture_cuda_graphs(self) -> None:
        resolve = eagle_draft_cuda_graph_runner.resolve_decode_backend
        # Ranks have to take the same steps, and may see an end at different times.
        alone = get_tp_group().world_size == 1
        divided = (lambda runner: divide(resolve(runner), self)) if alone else resolve
        with replaced(eagle_draft_cuda_graph_runner, "resolve_decode_backend", divided):
            super()._capture_cuda_graphs()

    def draft(self, batch: Any, *positional: Any, **keyword: Any) -> Any:
        if batch.forward_mode.is_idle():
            return super().draft(batch, *positional, **keyword)
        # The loop is captured outside of here, and whole; ranks have to take the same steps.
        with (
            replaced(self, "_may_end_early", get_tp_group().world_size == 1),
            replaced(eagle_worker_v2, "build_eagle_verify_input", self._build_verify_input),
        ):
            return super().draft(batch, *positional, **keyword)

    def _cut(self, batch: Any, verify_input: Any) -> None:
        """Nothing: trees are cut while they grow."""

    def _narrowed(self, batch: Any, verify_input: Any) -> Any:
        # built at its width
        return verify_input

    def _build_verify_input(
        self,
        batch: Any,
        draft_input: Any,
        parent_ids: Tensor,
        keep: Tensor,
        token_ids: Tensor,
        key: Tensor,
        **_: Any,
    ) -> TreeVerifyInput:
        wanted = None if self.planner is None else keep.sum(1, dtype=torch.int32)
        keep = self._planned(keep, key, batch.req_pool_indices)
        trees = (self._agree(parent_ids), self._agree(keep), self._agree(token_ids))
        width = self._width(trees[1])
        made = build_verify_input(
            batch,
            draft_input,
            trees,
            width,
            attn_backend=self.target_worker.model_runner.attn_backend,
            topk=self.topk,
            num_steps=self.speculative_num_steps,
            tree_mask_mode=self.tree_mask_mode,
            packed=self.packed,
        )
        made.c2t_wanted = wanted
        return made

    def _planned(self, keep: Tensor, key: Tensor, slots: Tensor) -> Tensor:
        planner = self.planner
        if planner is None:
            return keep
        own = self.scorer.own_beta(slots)
        return plan(keep, key, self.scorer.max_nodes, lambda sizes, keys: planner.keep(sizes, own, keys))

    def _width(self, keep: Tensor) -> int:
        """Places per request, the root included, for the largest tree of this batch; that window is entered."""
        if self.windows is None:
            return self.speculative_num_draft_tokens
        width = self.windows.fitting(int(keep.sum(1).max()) + 1)
        self.windows.enter(width)
        return width


class _TreeVerifyMixin(_VerifyMixin):
    """Over a stock worker: the window has as many places per request as the batch's bucket."""

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        self._draft_worker.packed = self.ragged is not None


# SGLang 0.5.17 reads the backend alone from there
_TAKES_BATCH = "forward_batch" in inspect.signature(forward_context).parameters
# That release's loop leaves positions of three axes as they are; its graphs would go on from those of the last replay.
_MOVES_AXES = "mrope_positions" in inspect.getsource(EagleDraftWorker.draft_forward)


def _attention_of(backend: Any, forward_batch: Any) -> Any:
    """The context of one draft forward."""
    context = ForwardContext(attn_backend=backend)
    return forward_context(context, forward_batch=forward_batch) if _TAKES_BATCH else forward_context(context)


def _of_parents(hidden: Tensor | None, parents: Tensor) -> Tensor | None:
    """The draft's hidden state above every branch: (bs * slots, size) -> (bs * branches, size)."""
    if hidden is None:
        return None
    bs = len(parents)
    rows = parents.clamp_min(0).long()[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.view(bs, -1, hidden.shape[-1]).gather(1, rows).flatten(0, 1)


def kv_buffers(pool: Any) -> list[Tensor]:
    """Every layer's keys and values of the draft's pool, one row per slot."""
    if type(pool) is MHATokenToKVPool:
        return [*pool.k_buffer, *pool.v_buffer]
    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    raise ConfigError(
        f"the draft keeps its keys in a {type(pool).__name__}, whose slots tree mode cannot move: use "
        "--speculative-c2t-mode chain"
    )


class C2TEagleTreeDraftWorker(_TreeDraftMixin, EagleDraftWorker):
    """EAGLE and EAGLE-3 heads."""


class C2TStandaloneTreeDraftWorker(_TreeDraftMixin, StandaloneDraftWorker):
    """Stand-alone draft models."""


class C2TEagleTreeWorker(_TreeVerifyMixin, EAGLEWorkerV2):
    """EAGLE and EAGLE-3 with C2T's trees."""

    _draft_class = C2TEagleTreeDraftWorker


class C2TStandaloneTreeWorker(_TreeVerifyMixin, StandaloneWorkerV2):
    """Stand-alone drafts with C2T's trees."""

    _draft_class = C2TStandaloneTreeDraftWorker


def worker_class(base: str) -> type:
    """The worker for EAGLE, EAGLE3 or STANDALONE."""
    return C2TStandaloneTreeWorker if base == "STANDALONE" else C2TEagleTreeWorker
