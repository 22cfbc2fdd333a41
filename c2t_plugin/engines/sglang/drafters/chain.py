"""Chains: SGLang's own draft loop, with each token scored as its logits pass, and each request's chain cut.

Two facts of the stock code decide the design. At top-k 1 its draft "probabilities" are all 1, so statistics are taken
from the logits here. And the draft loop returns a fixed tuple, so scores are kept in buffers beside it (ChainScorer).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import OFF, C2TConfig
from c2t_plugin.engines.learning import trains
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.patches import DRAFT_FORWARD, PATCHES
from c2t_plugin.engines.sglang.ranks import agree, alone
from c2t_plugin.engines.sglang.step import Drafted, Step, attach, record_of
from c2t_plugin.engines.sglang.verify.layout import cut_links, within_the_others
from c2t_plugin.scorer import ChainScorer

if TYPE_CHECKING:
    from c2t_plugin.engines.sglang.verify.lagged import PlannedRows
    from c2t_plugin.engines.sglang.verify.predicted import LaggedRows


class ChainDrafter:
    """A Drafter."""

    @staticmethod
    def scorer_of(worker: Any, classifier: NodeClassifier, beta: float, config: C2TConfig) -> ChainScorer:
        """worker: SGLang's draft worker, with its memory pools."""
        slots = worker.req_to_token_pool.req_to_token.shape[0]
        kind: type[ChainScorer] = ChainScorer
        device = torch.device(worker.device)
        if device.type == "cpu":
            # what a server on a GPU does not load
            from c2t_plugin.engines.host_chains import HostChainScorer as kind
        return kind(
            classifier,
            slots=slots,
            rows=slots,
            max_depth=worker.speculative_num_steps,
            beta=beta,
            device=worker.device,
            keep_stats=config.trace_dir is not None or trains(config),
            keep_log_prob=config.plans_chains and config.learn != OFF,
        )

    def __init__(self, worker: Any, parts: Parts) -> None:
        self._worker, self._parts = worker, parts
        self._scorer: ChainScorer = parts.scorer  # type: ignore[assignment]

    # SGLang prepares its loop and captures it as ever
    drafting = capturing = staticmethod(contextlib.nullcontext)

    def loop(self, forward_batch: Any, stock: Callable[[Any], Any]) -> Any:
        counts, runner, ends = self._parts.counts, self._worker.draft_runner, self._parts.ends
        forward = runner.forward

        @functools.wraps(forward)
        def scored(*positional: Any, **keyword: Any) -> Any:
            output = forward(*positional, **keyword)
            with counts.classifying():
                self._scorer.step(output.logits_output.next_token_logits)
            ends()
            return output

        # The first token was predicted by the draft's extend pass of the step before: its statistics are a seed.
        with counts.classifying():
            self._scorer.begin(forward_batch.req_pool_indices)
        if ends():
            # room for the keys of passes that it has none of
            forward_batch.out_cache_loc = forward_batch.out_cache_loc[: forward_batch.batch_size]
        with PATCHES.during(DRAFT_FORWARD, scored, owner=runner):
            return stock(forward_batch)

    def decide(self, batch: Any, drafted: Any) -> Any:
        with self._parts.counts.classifying():
            step = self._step(batch, drafted)
        attach(drafted, step)
        windows = self._parts.windows
        return drafted if windows is None else windows.narrow(batch, drafted)

    def _step(self, batch: Any, verify_input: Any) -> Step:
        """Acceptance never passes the cut: the links behind it are taken out."""
        parts, links = self._parts, verify_input.retrieve_next_token
        # A replayed graph does not count its steps.
        self._scorer.drafted(self._worker.speculative_num_steps)
        rows, sure = None, self._scorer.sure(len(batch.reqs))
        own = links if self.cuts_links else None
        if parts.lagged is None:
            wanted, kept = self._kept(batch.reqs, sure, own)
            kept = agree(kept)
        else:
            wanted, kept, rows = self._clipped(batch, links.shape[1], parts.lagged, own)
            wanted, sure = parts.lagged.note(wanted, sure)
            if parts.planner is not None and not self._scorer.cuts:
                # all that is drafted, for which no device has to be asked
                wanted = torch.full((len(wanted),), self._worker.speculative_num_steps, dtype=torch.int32)
        if own is None:
            cut_links(links, kept)
        return Step(kept, wanted, self._drafted(batch.reqs, verify_input), rows, sure=self._learnt_from(sure))

    @property
    def cuts_links(self) -> bool:
        """Whether the scorer does: nobody else has a say in what it keeps."""
        parts = self._parts
        return alone() and (parts.lagged is not None or (parts.planner is None and parts.windows is None))

    def _kept(self, reqs: Sequence[Any], sure: Tensor, links: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """What would be verified of each draft without a budget or a common window, if there is one, and what is.
        links: cut to what the scorer keeps."""
        requests = len(reqs)
        kept, planner, own = self._scorer.end(requests, links), self._parts.planner, self._scorer.own_beta
        if planner is not None:
            return kept, planner.keep(kept, own(requests), sure)
        if self._parts.windows is None or len({record_of(req).own_beta for req in reqs}) < 2:
            return None, kept
        return kept, within_the_others(kept, own(requests))

    def _clipped(
        self, batch: Any, width: int, plan: LaggedRows | PlannedRows, links: Tensor | None
    ) -> tuple[Tensor, Tensor, int]:
        """What would be verified of each request's draft, what is, and the rows that the target computes for that.
        links: see `_kept`."""
        requests = len(batch.reqs)
        rows = plan.rows([req.rid for req in batch.reqs], width)
        wanted, kept = self._scorer.end_within(requests, rows - requests, links)
        if not alone():
            # one broadcast of both
            wanted, kept = agree(torch.stack([wanted, kept]))
        return wanted, kept, rows

    def _learnt_from(self, sure: Tensor) -> Tensor | None:
        """sure: see ChainScorer.sure."""
        planner = self._parts.planner
        if planner is None or not planner.learns:
            return None
        # the next draft overwrites what a view is of
        return sure if sure.dim() == 3 else sure.clone()

    def _drafted(self, reqs: Sequence[Any], verify_input: Any) -> Drafted | None:
        """verify_input: of whole drafts."""
        stats, planner = None, self._parts.planner
        if self._parts.recorder is not None:
            from c2t_plugin.engines.sglang import recording

            stats = recording.stats(self._parts.recorder, self._scorer, reqs)
        if stats is None and not (planner is not None and planner.learns):
            return None
        return Drafted(verify_input.draft_token.view(verify_input.retrieve_next_token.shape), stats)
