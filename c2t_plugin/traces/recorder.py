"""Traces of live requests: what a serving engine drafted, labelled by what the target then wrote.

A request's states are kept until it ends, since the label of a draft token is whether the text goes on with it and all
drafted before it: known then also for tokens that were cut and never verified. Of the text nothing is written: token
ids are -1 in the file.

The engine's own thread notes and hands over. Another one converts, labels and writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from c2t_plugin.traces.file import STATES, Traces, novel_mask
from c2t_plugin.traces.forest import DTYPES, Forest
from c2t_plugin.traces.served_files import ServedFiles

logger = logging.getLogger(__name__)

STATES_PER_REQUEST = 1_000
# Requests followed at a time; the one followed longest is given up for a new one, so that none that never ends stays.
OPEN_REQUESTS = 512
# Of ended requests that are not labelled yet.
STATES_WAITING = 20_000
TOKENS_WAITING = 4_000_000
WRITE_EVERY_S = 20.0
CLOSE_S = 10.0
# Tokens that are converted at a time, with Python's lock held: 1 ms.
PIECE = 8_192


@dataclass
class _Open:
    """A request that runs. stats: (d_max, 4) each: joint log P, log P, entropy, margin."""

    steps: list[int] = field(default_factory=list)
    stats: list[Tensor] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)


class _Ended(NamedTuple):
    request: _Open
    prompt: Sequence[int] | Tensor
    output: Sequence[int] | Tensor

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class TraceRecorder:
    """Collects chains of chosen requests and writes them to files, from a thread of its own.

    Engines call it under `guarding`, so that nothing of it ends a server. Memory is bounded: what comes faster than it
    can be written is dropped, and counted. Files are at most WRITE_EVERY_S behind.
    """

    def __init__(
        self,
        directory: Path,
        share: float,
        d_max: int,
        header: Mapping[str, Any],
        limit_mb: float,
        *,
        exact: bool = False,
    ) -> None:
        """share: of the requests, in (0, 1]. header: see traces.Traces. limit_mb, exact: see ServedFiles."""
        self.directory, self.failed = directory, 0
        self._share, self._d_max, self._header = share, d_max, dict(header)
        # Clients choose their requests' ids. Without this they would choose what is recorded.
        self._secret = secrets.token_bytes(32)
        self._files = ServedFiles(directory, limit_mb, exact=exact)
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._admitted = self._dropped = self._states = self._tokens = 0
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="c2t-traces", daemon=True)
        self._thread.start()

    @property
    def recorded(self) -> int:
        """States that are in files."""
        return self._files.recorded

    @property
    def dropped(self) -> int:
        """States that are lost: too many at a time, not writable, or of requests that were given up for others."""
        return self._dropped + self._files.dropped

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Nothing that happens within raises: a recording that fails is counted, and the first one is logged."""
        try:
            yield
        except Exception:
            self.failed += 1
            if self.failed == 1:
                logger.exception("C2T: recording a request has failed; requests are served as before")

    def admit(self, request_id: str) -> int:
        """The number to record a new request under, 0 if it is not chosen.

        A request that comes again under the same id is another one. Which are chosen follows from their ids and from a
        secret of this process.
        """
        digest = hashlib.blake2b(str(request_id).encode(errors="replace"), digest_size=8, key=self._secret).digest()
        if int.from_bytes(digest, "big") >= self._share * 2**64:
            return 0
        self._admitted += 1
        return self._admitted

    def add(self, number: int, step: int, stats: Tensor, drafted: Sequence[int]) -> None:
        """One draft of a request. step: new tokens before the root. stats: (d_max, 4) float32 on the CPU, as
        ChainScorer.stats has them; copied. drafted: d_max token ids."""
        if step > torch.iinfo(STATES["step"]).max or not bool(stats[:, :3].isfinite().all()):
            return
        request = self._open.setdefault(number, _Open())
        if request.steps and step <= request.steps[-1]:
            return
        if len(self._open) > OPEN_REQUESTS:
            self._dropped += len(self._open.popitem(last=False)[1].steps)
        if len(request.steps) < STATES_PER_REQUEST:
            request.steps.append(step)
            # as a view it would keep the whole batch's
            request.stats.append(stats.clone())
            request.drafted.append(list(drafted))

    def forget(self, number: int) -> None:
        """This request will not end: it was aborted before it ran again."""
        self._open.pop(number, None)

    def finish(self, number: int, prompt: Sequence[int] | Tensor, output: Sequence[int] | Tensor) -> None:
        """A request has ended, with all its tokens; states whose label the text leaves open are left out.

        prompt, output: sequences, or tensors on the CPU, of token ids.
        """
        request = self._open.pop(number, None)
        if request is None:
            return
        with self._lock:
            many = self._states >= STATES_WAITING or self._tokens + len(prompt) + len(output) > TOKENS_WAITING
            lost = many or not self._thread.is_alive()
            if not lost:
                # token by token they are looked at by the other thread
                self._hand_over(_Ended(request, prompt[:], output[:]))
        if not lost:
            return
        self._dropped += len(request.steps)
        if not many:
            self._see_death()

    def close(self, timeout: float = CLOSE_S) -> None:
        """Write what ended requests have left, and end the thread, for which no longer than `timeout` seconds are
        waited. Idempotent."""
        self._ended.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.error("C2T: traces are not written after %.0f s; what is left of them is lost", timeout)

    def _hand_over(self, ended: _Ended) -> None:
        self._states += len(ended.request.steps)
        self._tokens += ended.tokens
        self._ended.put(ended)

    def _see_death(self) -> None:
        """Count what was handed to a thread that has ended."""
        with self._lock:
            if self._states:
                logger.error("C2T: the thread that writes traces has ended; nothing more is recorded")
            self._dropped += self._states
            self._states = 0

    def _work(self) -> None:
        due, found = time.monotonic() + WRITE_EVERY_S, True
        while found:
            try:
                ended = self._ended.get(timeout=max(0.0, due - time.monotonic()))
                found = ended is not None
                if ended is not None:
                    self._label(ended)
            except queue.Empty:
                pass
            if not found or time.monotonic() >= due:
                self._files.write()
                due = time.monotonic() + WRITE_EVERY_S

    def _label(self, ended: _Ended) -> None:
        traces = None
        with self.guarding():
            traces = labelled(ended, self._header)
            self._files.take(traces)
        with self._lock:
            self._states -= len(ended.request.steps)
            self._tokens -= ended.tokens
            if traces is None:
                self._dropped += len(ended.request.steps)


def labelled(ended: _Ended, header: Mapping[str, Any]) -> Traces:
    """The states of a request whose text says whether its drafts were right."""
    request, output = ended.request, _tensor(ended.output)
    stats, steps = torch.stack(request.stats), torch.tensor(request.steps)
    d_max = stats.shape[1]
    # no token is -1, so that what lies behind the end matches nothing
    text = torch.cat([output, torch.full((d_max + 1,), -1)])
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
    novel = novel_mask(torch.cat([_tensor(ended.prompt), output]))[len(ended.prompt) + steps]
    whole = Traces(chain, chain, torch.zeros(len(steps), dtype=torch.int32), steps.short(), novel, header)
    return whole[~cut_off]


def _tensor(tokens: Sequence[int] | Tensor) -> Tensor:
    """(tokens,) int64. The engine's thread runs between two pieces."""
    pieces = [torch.zeros(0, dtype=torch.int64)]
    for start in range(0, len(tokens), PIECE):
        pieces.append(torch.as_tensor(tokens[start : start + PIECE], dtype=torch.int64))
        time.sleep(0)
    return torch.cat(pieces)
