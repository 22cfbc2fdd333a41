"""Traces of live requests: what a serving engine drafted, labelled by what the target then wrote.

A request's states are kept until it ends, since the label of a draft token is whether the text goes on with it and all
drafted before it: known then also for tokens that were cut and never verified. Of the text nothing is written: token
ids are -1 in the file.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from c2t_plugin.traces.file import STATES, SUFFIX, Traces, merge_traces, novel_tokens, save_traces
from c2t_plugin.traces.forest import DTYPES, Forest

logger = logging.getLogger(__name__)

STATES_PER_FILE = 20_000
STATES_PER_REQUEST = 1_000
# Requests followed at a time; the one followed longest is given up for a new one, so that none that never ends stays.
OPEN_REQUESTS = 512
WRITE_EVERY_S = 20.0


def is_chosen(request_id: str, share: float) -> bool:
    """Whether a request belongs to the share that is recorded: by a hash of its id, never by what it says."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


@dataclass
class _Open:
    """A request that runs. stats: (d_max, 4) each: joint log P, log P, entropy, margin."""

    steps: list[int] = field(default_factory=list)
    stats: list[Tensor] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)


class TraceRecorder:
    """Collects chains of chosen requests and writes them to numbered files, from a thread of its own.

    A file grows to STATES_PER_FILE states, at most WRITE_EVERY_S behind, each time written whole or not at all. Memory
    is bounded: what comes faster than it can be written is dropped, and counted.
    """

    def __init__(self, directory: Path, name: str, share: float, d_max: int, header: Mapping[str, Any]) -> None:
        """name: how file names start, unlike that of any other recorder. header: see traces.Traces."""
        self.directory, self.share = directory, share
        self.recorded = self.dropped = 0
        self._name, self._d_max, self._header = name, d_max, dict(header)
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting: list[Traces] = []
        # the states of the file that still grows
        self._file: list[Traces] = []
        self._number = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="c2t-traces", daemon=True)
        self._thread.start()

    def add(self, request_id: str, step: int, stats: Tensor, drafted: Sequence[int]) -> None:
        """One draft of a chosen request. step: new tokens before the root. stats: (d_max, 4) float32 on the CPU, as
        ChainScorer.stats has them. drafted: d_max token ids."""
        if step > torch.iinfo(STATES["step"]).max or not bool(stats[:, :3].isfinite().all()):
            return
        request = self._open.setdefault(request_id, _Open())
        if request.steps and step <= request.steps[-1]:
            return
        if len(self._open) > OPEN_REQUESTS:
            self.dropped += len(self._open.popitem(last=False)[1].steps)
        if len(request.steps) < STATES_PER_REQUEST:
            request.steps.append(step)
            request.stats.append(stats)
            request.drafted.append(list(drafted))

    def finish(self, request_id: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A chosen request has ended, with all its tokens; states whose label the text leaves open are left out."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        traces = _labelled(request, prompt, output, self._header)
        with self._lock:
            if sum(map(len, self._waiting)) >= STATES_PER_FILE:
                self.dropped += len(traces)
            elif len(traces):
                self.recorded += len(traces)
                self._waiting.append(traces)

    def close(self) -> None:
        """Write what ended requests have left, and end the thread. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _write_on(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(WRITE_EVERY_S)
            with self._lock:
                waiting, self._waiting = self._waiting, []
            if not waiting:
                continue
            file = merge_traces([*self._file, *waiting])
            path = self.directory / f"{self._name}-{self._number:05d}{SUFFIX}"
            try:
                save_traces(file, path)
            except (OSError, SafetensorError) as error:
                lost = sum(map(len, waiting))
                self.dropped += lost
                logger.error("C2T: %d recorded states are lost, %s cannot be written: %s", lost, path, error)
            else:
                self._file = [file]
            if self._file and len(self._file[0]) >= STATES_PER_FILE:
                self._file, self._number = [], self._number + 1


def _labelled(request: _Open, prompt: Sequence[int], output: Sequence[int], header: Mapping[str, Any]) -> Traces:
    stats, steps = torch.stack(request.stats), torch.tensor(request.steps)
    d_max = stats.shape[1]
    # no token is -1, so that what lies behind the end matches nothing
    text = torch.tensor([*output, *[-1] * (d_max + 1)])
    following = text[(steps[:, None] + 1 + torch.arange(d_max)).clamp(max=len(text) - 1)]
    accepted = (torch.tensor(request.drafted) == following).int().cumprod(1).bool()
    hits = accepted.sum(1)
    # a chain that the text ends within, and that agrees with it so far
    cut_off = (hits < d_max) & (following.gather(1, hits.clamp(max=d_max - 1)[:, None])[:, 0] == -1)
    nodes = torch.arange(d_max)
    tables = {
        "joint_log_prob": stats[..., 0],
        "log_prob": stats[..., 1],
        "entropy": stats[..., 2],
        "margin": stats[..., 3],
        "parent_ids": (nodes - 1).to(DTYPES["parent_ids"]).expand(len(steps), -1),
        "token_ids": torch.full((len(steps), d_max), -1, dtype=DTYPES["token_ids"]),
        "accepted": accepted,
    }
    chain = Forest(1, d_max, **tables)
    novel = torch.tensor(novel_tokens([*prompt, *output]))[len(prompt) + steps]
    whole = Traces(chain, chain, torch.zeros(len(steps), dtype=torch.int32), steps.short(), novel, header)
    return whole[~cut_off]
