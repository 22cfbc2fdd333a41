"""Cases of the standing GPU run for draft_stats: against torch, compiled torch, FlashInfer, and the top-k alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Provider, fused_or_reference, largest_error, needs, operation
from benchmarks.gpu.rivals import built_once
from c2t_kernels import DraftStats
from c2t_kernels.stats import reference

TOP_M, TOP_K = 1000, 10
# one compilation for each vocabulary and dtype, and one more for a batch of 1
COMPILATIONS = 64


def stats_cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """Every vocabulary, dtype and batch; the ones that matter most first, since time may run out."""
    kind = fused_or_reference(device)
    ours = operation(kind, "stats", "draft_stats")
    providers = (
        Provider("fused", lambda logits, buffers: ours(logits, TOP_M, TOP_K, **buffers)),
        Provider("torch", _torch),
        Provider("torch.topk alone", lambda logits, _: logits.topk(TOP_M).values, judge=leading_error),
        Provider("torch.compile", _compiled(dry_run), prepare=_any_batch),
        needs("flashinfer", Provider("flashinfer", flashinfer_stats)),
        needs("flashinfer", Provider("flashinfer.top_k alone", _flashinfer_top_k, judge=leading_error)),
    )
    batches, vocabs = ((1, 3), (1500,)) if dry_run else ((64, 256, 1, 8, 32, 128), (128_256, 151_936, 32_000))
    for vocab in vocabs:
        for dtype in (torch.bfloat16, torch.float32):
            for batch in batches:
                size = batch * vocab * dtype.itemsize
                yield Case(
                    shape={"bs": batch, "V": vocab, "dtype": str(dtype).removeprefix("torch.")},
                    device=device,
                    inputs=_logits(batch, vocab, dtype, device, kind),
                    reference=_torch,
                    error=stats_error,
                    # float32 sums of up to 151,936 terms in another order
                    tolerance=2e-4,
                    bytes_moved=size,
                    input_bytes=size,
                    providers=providers,
                )


def _logits(
    batch: int, vocab: int, dtype: torch.dtype, device: torch.device, kind: str
) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Logits, and the buffers that the kernel writes into."""

    def make(generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        logits = (torch.randn(batch, vocab, generator=generator, device=device) * 3).to(dtype)
        if kind == "reference":
            return logits, {}
        ids = torch.full((batch, TOP_K), -77, device=device)
        out = DraftStats(ids, ids.float(), *torch.full((2, batch), -77.0, device=device))
        workspace = operation(kind, "stats", "DraftStatsWorkspace").create(batch, device)
        return logits, {"out": out, "workspace": workspace}

    return make


def _torch(logits: Tensor, _: Any) -> DraftStats:
    return reference.draft_stats(logits, TOP_M, TOP_K)


def _compiled(dry_run: bool) -> Callable[..., DraftStats]:
    """torch.compile of the reference as one graph; a dry run traces it and compiles nothing."""
    torch._dynamo.config.recompile_limit = COMPILATIONS
    return torch.compile(_torch, fullgraph=True, backend="eager" if dry_run else "inductor")


def _any_batch(logits: Tensor, buffers: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """One compilation for all batches."""
    torch._dynamo.maybe_mark_dynamic(logits, 0)
    return logits, {}


def flashinfer_stats(logits: Tensor, _: Any) -> DraftStats:
    """FlashInfer's top-k and softmax, and torch for what is left."""
    ids = _top_k(logits)[1]
    largest = _softmax(logits.float()).gather(1, ids)
    log_probs = largest[:, :TOP_K].log()
    entropy = torch.special.entr(largest).sum(dim=-1)
    return DraftStats(ids[:, :TOP_K], log_probs, entropy, log_probs[:, 0] - log_probs[:, 1])


def _flashinfer_top_k(logits: Tensor, _: Any) -> Tensor:
    return _top_k(logits)[0]


@built_once
def _top_k(logits: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = import_module("flashinfer").top_k(logits, TOP_M, sorted=True)
    return found


@built_once
def _softmax(logits: Tensor) -> Tensor:
    probs: Tensor = import_module("flashinfer").sampling.softmax(logits)
    return probs


def stats_error(expected: DraftStats, found: DraftStats) -> float:
    """Largest difference of a float field; infinite if an id differs that no equal logit could have replaced."""
    step = expected.log_probs.diff(dim=1) < 0
    alone = torch.cat([step[:, :1], step[:, 1:] & step[:, :-1]], dim=1)
    same = expected.token_ids[:, :-1][alone] == found.token_ids[:, :-1][alone]
    return largest_error(expected[1:], found[1:]) if bool(same.all()) else math.inf


def leading_error(expected: DraftStats, values: Tensor) -> float:
    """Of a top-k alone: how far each of the first logits lies below the largest, against the log probabilities."""
    leading = values[:, :TOP_K].float()
    below = expected.log_probs - expected.log_probs[:, :1]
    return float((below - (leading - leading[:, :1])).abs().max())
