"""Cases of the standing GPU run for chains: score_chain and early_stop, together what a draft step and its end cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Provider, fused_or_reference, largest_error, operation
from c2t_kernels import ChainState, ScoringNetwork

D_MAX = 6
HIDDEN = 48
FEATURES = ("joint_log_prob", "entropy", "depth")


def network_of(generator: torch.Generator, device: torch.device) -> ScoringNetwork:
    """The paper's 3-48-1 with random weights."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device) * 0.3

    ones = torch.ones(len(FEATURES), device=device)
    hidden, out = random(HIDDEN, len(FEATURES)), random(HIDDEN)
    return ScoringNetwork(FEATURES, 0 * ones, ones, hidden, random(HIDDEN), out, random(1), 1)


def chain_cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """One score_chain and one early_stop, which ends the drafts.

    The depth is 1, at which score_chain starts its state anew, so that every repetition computes the same.
    """
    for batch in (3,) if dry_run else (1, 8, 32, 64, 128, 256):

        def inputs(generator: torch.Generator, batch: int = batch) -> tuple[Any, ...]:
            def random(*shape: int) -> Tensor:
                return torch.rand(*shape, generator=generator, device=device)

            state = ChainState.create(batch, D_MAX, device)
            state.confidence.copy_(random(batch, D_MAX))
            stats = (-random(batch), 8 * random(batch), random(batch))
            beta = torch.full((batch,), 0.4, device=device)
            longest = torch.full((batch,), D_MAX, dtype=torch.int32, device=device)
            return state, network_of(generator, device), *stats, beta, longest

        def both(kind: str) -> Any:
            score, stop = operation(kind, "score", "score_chain"), operation(kind, "stop", "early_stop")

            def run(state: Any, network: Any, p: Any, h: Any, m: Any, beta: Any, longest: Any) -> Any:
                score(state, network, p, h, m, 1)
                return state.confidence, state.joint_log_prob, stop(state.confidence, beta, longest)

            return run

        # docs/kernels.md counts them: 24 a request for score_chain, the rest for early_stop, and the network once
        size = batch * (24 + 4 * D_MAX + 12) + 4 * (HIDDEN * (len(FEATURES) + 2) + 1)
        yield Case(
            shape={"bs": batch, "d_max": D_MAX, "hidden": HIDDEN},
            device=device,
            inputs=inputs,
            reference=both("reference"),
            error=largest_error,
            # sums of 48 products in another order
            tolerance=1e-4,
            bytes_moved=size,
            input_bytes=size,
            providers=(
                Provider("fused", both(fused_or_reference(device))),
                # its early_stop makes tensors of Python numbers, which a graph cannot hold
                Provider("torch", both("reference"), captures=False),
            ),
        )
