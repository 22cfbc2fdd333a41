"""Statistics of a draft out of its CUDA graph against those of the same draft, eager."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2 as eagle
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
from torch import Tensor

from c2t_plugin.engines.sglang.proof.made_up import MadeUp
from c2t_plugin.scorer import ChainScorer

REQUESTS = 8
# So many times what two eager drafts of the same requests differ by is no fault, nor is so much rounding of logits.
SLACK = 8.0


@dataclass(frozen=True)
class Drafts:
    """tokens: (n, steps). confidence: (n, steps) float32. path: (n,) float32, log probability of each whole draft."""

    tokens: Tensor
    confidence: Tensor
    path: Tensor

    def far(self, other: Drafts) -> tuple[float, float, int]:
        """Largest differences of confidence and path over requests with the same tokens in both, and how many they
        are. Not a number in one of the two is infinitely far."""
        same = (self.tokens == other.tokens).all(1)
        differences = []
        for mine, theirs in ((self.confidence, other.confidence), (self.path, other.path)):
            apart = (mine[same] - theirs[same]).abs().masked_fill(mine[same].isnan() & theirs[same].isnan(), 0.0)
            differences.append(float(apart.nan_to_num(nan=math.inf).max()) if len(apart) else 0.0)
        return *differences, int(same.sum())  # type: ignore[return-value]


def compare(worker: Any) -> tuple[str | None, int]:
    """What is wrong with the statistics of chains out of the draft's graph, None: nothing; and of how many drafts that
    is said, 0 for trees. Where there is no graph, eager passes are compared with themselves.

    worker: ours, whose graphs are captured. Raises whatever a draft of made-up requests may raise.
    """
    if not isinstance(worker.c2t.scorer, ChainScorer) or worker.speculative_num_steps < 1:
        return None, 0
    made, counts, classifier_s = MadeUp(worker, REQUESTS), worker.c2t.counts, worker.c2t.counts.classifier_s
    try:
        return differing(*_drafts(worker, made), dtype=worker._draft_worker.draft_runner.dtype), made.requests
    finally:
        counts.classifier_s = classifier_s
        made.close()


def differing(graph: Drafts, eager: Drafts, again: Drafts, *, dtype: torch.dtype) -> str | None:
    """again: eager as well, of the requests in another order, whose distance is no fault."""
    floor, found = again.far(eager), graph.far(eager)
    requests = len(eager.tokens)
    if found[2] < max(1, min(floor[2], requests // 2)):
        return f"a draft's graph gives other tokens than eager passes: {requests - found[2]} of {requests} requests"
    rounding = SLACK * torch.finfo(dtype).eps
    sizes = (1.0, max(1.0, float(eager.path.abs().nan_to_num(posinf=1.0).max())))
    for name, off, noise, size in zip(("confidence", "log probability"), found, floor, sizes, strict=False):
        allowed = SLACK * noise + rounding * size
        if not off <= allowed:
            return f"{name} of a draft's graph is off its eager passes' by {off:.2g}, allowed {allowed:.2g}"
    return None


def words_of(draft: Any) -> int:
    """How many words a draft worker's logits have, fewer than its configuration says under a token map."""
    words = getattr(draft, "hot_token_id", None)
    return draft.draft_runner.model_config.vocab_size if words is None else len(words)


def _drafts(worker: Any, made: MadeUp) -> Iterator[Drafts]:
    """Out of the graph, eager, and eager in another order."""
    draft, scorer = worker._draft_worker, worker.c2t.scorer
    slots, vocabulary = torch.arange(1, made.requests + 1, device=made.device), words_of(draft)
    generator = torch.Generator().manual_seed(1)
    scorer.write_seed(slots, 4 * torch.randn(made.requests, vocabulary, generator=generator).to(made.device))
    size, dtype = get_draft_recurrent_hidden_state_spec(draft.draft_runner)
    hidden = None if size is None else torch.randn(made.requests, size, generator=generator).to(made.device, dtype)
    first = torch.randint(vocabulary, (made.requests, 1), generator=generator).to(made.device)
    forward, backward = torch.arange(made.requests), torch.arange(made.requests).flip(0)
    try:
        # what a graph that is not run anew would still hold
        _draft(worker, made, backward, first, hidden)
        yield _draft(worker, made, forward, first, hidden)
        with _without_graphs(draft):
            yield _draft(worker, made, forward, first, hidden)
            again = _draft(worker, made, backward, first, hidden)
        yield Drafts(again.tokens.flip(0), again.confidence.flip(0), again.path.flip(0))
    finally:
        scorer.clear_seed(slots)


@contextmanager
def _without_graphs(draft: Any) -> Iterator[None]:
    graphs = draft.cuda_graph_runner
    draft.cuda_graph_runner = None
    try:
        yield
    finally:
        draft.cuda_graph_runner = graphs


def _draft(worker: Any, made: MadeUp, who: Tensor, first: Tensor, hidden: Tensor | None) -> Drafts:
    draft, scorer, there = worker._draft_worker, worker.c2t.scorer, who.to(made.device)
    batch = made.scheduled(who)
    batch.input_ids = first[there, 0]
    batch.spec_info = EagleDraftInput(
        topk_p=torch.ones(len(who), 1, device=made.device),
        topk_index=first[there],
        hidden_states=None if hidden is None else hidden[there],
        bonus_tokens=first[there, 0].int(),
    )
    # SGLang's own, in whose loop tokens are scored; nothing is decided. Experts of a draft as where it was captured
    with eagle.speculative_moe_backend_context(), eagle.speculative_moe_a2a_backend_context():
        made_input = eagle.EagleDraftWorker.draft(draft, batch)
    scorer.drafted(worker.speculative_num_steps)
    tokens = made_input.draft_token.view(len(who), -1)[:, 1:].clone()
    return Drafts(tokens, scorer.confidence(len(who)).clone(), scorer.joint_log_prob(len(who)).clone())
