"""Trees: a draft loop and a verify input of ours between SGLang's parts.

The loop of the stock worker cannot be kept, since it decides which nodes are drafted from; ours calls the same draft
model, attention backends and slots. It has the shapes of the stock one, `topk` places per layer, and returns its trees
through the same tuple, so that the stock runner of the draft's CUDA graph can capture it. Verification is stock.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative import eagle_draft_cuda_graph_runner
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from c2t_kernels import clip_trees, fill_spare_rows
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.patching import replaced
from c2t_plugin.engines.sglang import ranks
from c2t_plugin.engines.sglang.drafters.segments import EARLY_END_BATCH, divide
from c2t_plugin.engines.sglang.drafters.tree_input import TreeVerifyInput, build_verify_input
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.patches import BUILD_VERIFY_INPUT, PATCHES, RESOLVE_DRAFT_GRAPHS
from c2t_plugin.engines.sglang.ranks import agree
from c2t_plugin.engines.sglang.step import record_of
from c2t_plugin.engines.sglang.verify.layout import within_the_others
from c2t_plugin.errors import ConfigError
from c2t_plugin.trees.branches import inherit_branches
from c2t_plugin.trees.by_name import slot_policy
from c2t_plugin.trees.grower import TreeGrower
from c2t_plugin.trees.planning import plan

if TYPE_CHECKING:
    from c2t_plugin.planner.tree_planner import TreePlanner

logger = logging.getLogger(__name__)


# Of a draft, whose width is an attribute that it reads in each step.
_ANY_WIDTH = "IntelAMXMultiStepDraftBackend"


class Grown:
    """The trees of a batch, in the place of a verify input until it is decided what of them is verified.

    trees: parent_ids, keep, token_ids and key as TreeGrower.end gives them. What SGLang's `draft` notes on its verify
    input is carried over.
    """

    def __init__(self, draft_input: Any, trees: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self.draft_input, self.trees = draft_input, trees

    @classmethod
    def of(cls, batch: Any, draft_input: Any, *trees: Tensor, **_: Any) -> Grown:
        """With the arguments that SGLang builds a verify input of."""
        return cls(draft_input, trees)  # type: ignore[arg-type]

    def noted(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("draft_input", "trees")}


class TreeDrafter:
    """A Drafter. Seeds are relayed as those of chains are."""

    @staticmethod
    def scorer_of(worker: Any, classifier: NodeClassifier, beta: float, config: C2TConfig) -> TreeGrower:
        """worker: SGLang's draft worker, with its memory pools. Raises ConfigError for a pool that trees cannot use."""
        kv_buffers(worker.draft_runner.token_to_kv_pool)
        return TreeGrower(
            slot_policy(config.policy, classifier, worker.topk, worker.device),
            top_m=classifier.spec.top_m,
            slots=worker.req_to_token_pool.req_to_token.shape[0],
            max_depth=worker.speculative_num_steps,
            max_nodes=worker.speculative_num_draft_tokens - 1,
            beta=beta,
            device=worker.device,
            vocabulary=worker.hot_token_id,
            narrow=slot_policy(config.policy, classifier, 1, worker.device) if config.planned else None,
        )

    def __init__(self, worker: Any, parts: Parts) -> None:
        self._worker, self._parts = worker, parts
        self.scorer: TreeGrower = parts.scorer  # type: ignore[assignment]
        self._planner: TreePlanner | None = parts.planner  # type: ignore[assignment]
        # SGLang's own trees read each branch's own keys, whatever it grew from; to have the same trees is the point.
        self.inherits = parts.configuration["policy"] != "eagle2"
        self.may_end_early = False
        # of the captured graphs; None before the first step that asks
        self._sizes: Tensor | None = None

    def vary_shapes(self, packed: bool) -> None:
        """Have the planner choose each step's shape, where SGLang can draft any at once. Said in the log.

        To be called when the draft's attention exists. packed: whether the target computes each tree's own nodes.
        """
        assert self._planner is not None
        topk, steps = self._worker.topk, self._worker.speculative_num_steps
        obstacle = None
        if not packed:
            obstacle = "every node is verified"
        elif self._parts.lagged is not None:
            obstacle = "what is verified follows from earlier steps, whose trees are to be like it"
        elif not ranks.alone():
            obstacle = "ranks have to take the same steps"
        elif topk == 1 or steps == 1:
            obstacle = "no draft pass is wider than another"
        elif type(self._worker.draft_attn_backend).__name__ != _ANY_WIDTH:
            obstacle = "the draft's attention, and CUDA graphs where there are some, are laid out for one width"
        self._planner.vary(obstacle is None)
        if obstacle is None:
            text = "C2T: each step drafts chains, or trees %d wide, up to %d deep, as the planner says"
            logger.info(text, topk, steps)
        else:
            logger.info("C2T: every step drafts %d wide and %d deep: %s", topk, steps, obstacle)

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        # The loop is captured outside of here, and whole; ranks have to take the same steps.
        with contextlib.ExitStack() as held:
            held.enter_context(replaced(self, "may_end_early", ranks.alone()))
            held.enter_context(PATCHES.during(BUILD_VERIFY_INPUT, Grown.of))
            if self._planner is not None and self._planner.width != self._worker.topk:
                # By it a draft's slots, positions and attention are laid out. Verification goes by the target worker's.
                for owner in (self._worker, self._worker.draft_attn_backend):
                    held.enter_context(replaced(owner, "topk", self._planner.width))
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        resolve = eagle_draft_cuda_graph_runner.resolve_decode_backend
        # Ranks have to take the same steps, and may see an end at different times.
        divided = (lambda runner: divide(resolve(runner), self)) if ranks.alone() else resolve
        with PATCHES.during(RESOLVE_DRAFT_GRAPHS, divided):
            yield

    def loop(self, forward_batch: Any, stock: Callable[[Any], Any]) -> Any:
        worker, counts = self._worker, self._parts.counts
        slots = forward_batch.out_cache_loc.view(-1, worker.topk, worker.speculative_num_steps)
        buffers = kv_buffers(worker.draft_runner.token_to_kv_pool)
        hidden = forward_batch.spec_info.hidden_states
        with counts.classifying():
            layer = self.scorer.begin(forward_batch.req_pool_indices, worker.topk)
        for step in range(self._depth - 1):
            if self.may_end_early and len(slots) <= EARLY_END_BATCH and not self.scorer.alive:
                break
            self.between_layers()
            if self.inherits and worker.topk > 1:
                inherit_branches(buffers, slots, layer.parents, written=step)
            forward_batch.input_ids = layer.token_ids.flatten()
            forward_batch.out_cache_loc = slots[:, :, step].flatten()
            forward_batch.spec_info.hidden_states = _of_parents(hidden, layer.parents)
            with _attention_of(worker.draft_attn_backend.attn_backends[step], forward_batch):
                output = worker.draft_runner.forward(forward_batch).logits_output
            forward_batch.positions.add_(1)
            if _MOVES_AXES and worker.draft_runner.model_config.model_is_mrope:
                forward_batch.mrope_positions.add_(1)
            hidden = output.hidden_states
            with counts.classifying():
                layer = self.scorer.step(output.next_token_logits)
        self.between_layers()
        # What nodes go by takes the place of draft probabilities, which only rejection sampling has.
        return self.scorer.end()

    @property
    def _depth(self) -> int:
        """Layers of the step at hand. Attention and slots are laid out for all that there may be."""
        return int(self._worker.speculative_num_steps) if self._planner is None else self._planner.depth

    def between_layers(self) -> None:
        """Nothing, except while a graph of the loop is recorded in segments."""

    @property
    def waits(self) -> bool:
        """Whether the host waits for every draft anyway: it counts the rows that the target computes."""
        parts = self._parts
        return (parts.packing is not None and parts.lagged is None) or parts.windows is not None

    def decide(self, batch: Any, drafted: Any) -> TreeVerifyInput:
        worker = self._worker
        parent_ids, keep, token_ids, key = drafted.trees
        wanted = rows = None
        lagged = self._parts.lagged
        if lagged is not None:
            rows = lagged.rows([req.rid for req in batch.reqs], worker.speculative_num_draft_tokens)
            keep, wanted, surest = clip_trees(keep, key, self.scorer.max_nodes, rows - len(keep))
            lagged.note(wanted, surest)
        else:
            wanted = None if self._planner is None else keep.sum(1, dtype=torch.int32)
            keep = self._planned(parent_ids, keep, key, batch.reqs, batch.req_pool_indices)
        trees = (agree(parent_ids), agree(keep), agree(token_ids))
        made = build_verify_input(
            batch,
            drafted.draft_input,
            trees,
            self._width(trees[1]),
            attn_backend=worker.target_worker.model_runner.attn_backend,
            topk=worker.topk,
            num_steps=worker.speculative_num_steps,
            tree_mask_mode=worker.tree_mask_mode,
            packed=self._parts.packing is not None,
            wanted=wanted,
            depth=self._depth,
            rows=rows,
        )
        for name, value in drafted.noted().items():
            setattr(made, name, value)
        return made

    def _planned(self, parent_ids: Tensor, keep: Tensor, key: Tensor, reqs: Sequence[Any], slots: Tensor) -> Tensor:
        planner = self._planner
        if planner is None:
            own = self.scorer.owns(slots) if self.scorer.any_own else None
            return self.filled(self._narrowed(keep, key, reqs, slots), key, own)
        own = self.scorer.owns(slots)
        if planner.shapes is not None:
            from c2t_plugin.trees.worth import best_by_layers, chain_by_layers

            most, depth = self.scorer.max_nodes, planner.depth
            best = best_by_layers(keep, key, self.scorer.layers(key.device), depth, most)
            # as many as a draft of width 1 has columns
            chains = chain_by_layers(parent_ids, keep, key, planner.width, depth, min(most, self.scorer.d_max))
            planner.observe(best[~own], chains[~own])
        return plan(keep, key, self.scorer.max_nodes, lambda sizes, keys: planner.keep(sizes, own, keys))

    def _narrowed(self, keep: Tensor, key: Tensor, reqs: Sequence[Any], slots: Tensor) -> Tensor:
        """On a window, a threshold of one's own leaves no more nodes than the largest tree of the others has."""
        mixed = self._parts.windows is not None and self.scorer.policy.cuts
        if not mixed or len({record_of(req).own_beta for req in reqs}) < 2:
            return keep
        own = self.scorer.owns(slots)
        return plan(keep, key, self.scorer.max_nodes, lambda sizes, _: within_the_others(sizes, own))

    def filled(self, keep: Tensor, key: Tensor, own: Tensor | None) -> Tensor:
        """Rows that the captured graph has left are next-best nodes, but of no request with a threshold of its own."""
        packing = self._parts.packing
        sizes = () if packing is None or not self.scorer.policy.cuts else packing.sizes()
        if not len(sizes):
            return keep
        if self._sizes is None:
            self._sizes = torch.tensor(sizes, device=keep.device)
        return fill_spare_rows(keep, key, self.scorer.max_nodes, self._sizes, own)

    def _width(self, keep: Tensor) -> int:
        """Places per request, the root included, for the largest tree of this batch; that window is entered."""
        windows = self._parts.windows
        if windows is None:
            return int(self._worker.speculative_num_draft_tokens)
        width = windows.fitting(int(keep.sum(1).max()) + 1)
        windows.enter(width)
        return width


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
