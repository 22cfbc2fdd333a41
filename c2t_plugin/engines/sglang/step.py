"""The two records of ours that ride on SGLang's objects: of one decoding step, and of one request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.engines.sglang.metrics import RequestCounts

if TYPE_CHECKING:
    from c2t_plugin.planner import OwnLimits
    from c2t_plugin.planner.following import Untold
    from c2t_plugin.request_options import RequestOptions


class Drafted(NamedTuple):
    """One draft of a batch. tokens: (rows, 1 + drafted) int64, the root's in front. stats: (rows, d_max, 4), see
    ChainScorer.stats, where a request of the batch is recorded."""

    tokens: Tensor
    stats: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """What belongs to one step of a batch. It travels on the verify input, then on the result of that.

    kept: (bs,) int32 draft tokens to verify of each request, root and pads not counted. wanted: (bs,) int32 what the
    threshold left of them, where a budget may have dropped more; else None. drafted: the drafts, where they are
    recorded or learnt from. rows: of the target's pass; before it those that are planned, None: as many as hold what is
    kept. depth: draft steps; None before the pass: the worker's. seconds: of the classifier, None where the host's
    clock does not know them. sure: see ChainScorer.sure, where a planner learns from what becomes of the drafts.
    """

    kept: Tensor
    wanted: Tensor | None = None
    drafted: Drafted | None = None
    rows: int | None = None
    depth: int | None = None
    seconds: float | None = None
    sure: Tensor | None = None

    def to_host(self) -> Step:
        """What is read on the host, with its copies started; the caller knows when they have ended."""
        drafted = None if self.drafted is None else Drafted(*map(_to_host, self.drafted))
        wanted, sure = map(_to_host, (self.wanted, self.sure))
        return dataclasses.replace(self, wanted=wanted, drafted=drafted, sure=sure)


def attach(holder: Any, step: Step) -> None:
    """Have a verify input or a result carry this step."""
    setattr(holder, ATTRIBUTE, step)


def step_of(holder: Any) -> Step | None:
    """The step that a verify input or a result carries; None for those of idle steps and of prefills."""
    return getattr(holder, ATTRIBUTE, None)


class Missed(NamedTuple):
    """What a request's draft has not read. log: which one keeps it. rows: in that, oldest first."""

    log: int
    rows: list[int]


@dataclasses.dataclass
class RequestRecord:
    """What belongs to one request, as long as SGLang has it. options: its own, None before they are read; limits: as a
    planner counts them. counts: of its steps, None before the first. trace: its number with the recorder, 0: it is not
    recorded, None: undecided. missed: None where its draft has read all. untold: drafts not told of in full."""

    options: RequestOptions | None = None
    limits: OwnLimits | None = None
    counts: RequestCounts | None = None
    trace: int | None = None
    missed: Missed | None = None
    untold: list[Untold] = dataclasses.field(default_factory=list)

    @property
    def own_beta(self) -> bool:
        """Whether it has a threshold of its own."""
        return self.options is not None and self.options.threshold is not None


def record_of(req: Any) -> RequestRecord:
    """The record of one of SGLang's requests, made when it is first asked for."""
    found: RequestRecord | None = getattr(req, ATTRIBUTE, None)
    if found is None:
        found = RequestRecord()
        setattr(req, ATTRIBUTE, found)
    return found


def _to_host(tensor: Tensor | None) -> Any:
    if tensor is not None and tensor.is_cuda:
        # SGLang copies on a stream of its own, of which the owner of this memory does not know.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return None if tensor is None else tensor.to("cpu", non_blocking=True)
