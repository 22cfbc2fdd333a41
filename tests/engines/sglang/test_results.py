"""What is learnt from results on the host: which rows count, and when a recorded request is handed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from c2t_plugin.engines.sglang import results
from c2t_plugin.engines.sglang.metrics import Counts


class Recorder:
    """Notes what it is given."""

    share = 0.5

    def __init__(self) -> None:
        self.added: list[tuple[str, int, list[int]]] = []
        self.finished: list[tuple[str, list[int]]] = []

    def add(self, rid: str, step: int, stats: torch.Tensor, tokens: list[int]) -> None:
        self.added.append((rid, step, tokens))

    def finish(self, rid: str, prompt: list[int], output: list[int]) -> None:
        self.finished.append((rid, list(output)))


class Request:
    """As far as results look at it. chosen: whether it is recorded."""

    def __init__(self, rid: str, output: list[int], *, chosen: bool = True, ended: bool = False) -> None:
        self.rid, self.output_ids, self.origin_input_ids = rid, output, [1, 2]
        self.c2t_chosen, self.ended, self.is_retracted = chosen, ended, False

    def finished(self) -> bool:
        return self.ended


@pytest.fixture
def worker() -> SimpleNamespace:
    return SimpleNamespace(recorder=Recorder(), counts=Counts(2))


def process(worker: SimpleNamespace, reqs: list[Request], ends: set[str], **result: Any) -> None:
    def original(scheduler: Any, batch: Any, outcome: Any) -> str:
        for req in batch.reqs:
            req.output_ids += [9, 9]
            req.ended = req.ended or req.rid in ends
        return "settled"

    wrapped = results._settling(original)
    scheduler = SimpleNamespace(draft_worker=worker)
    assert wrapped(scheduler, SimpleNamespace(reqs=reqs), SimpleNamespace(**result)) == "settled"


def drafted(rows: int) -> results.Drafted:
    return results.Drafted(torch.zeros(rows, 2, 4), torch.arange(2 * rows).view(rows, 2))


def test_rows_of_ended_and_retracted_requests_mean_nothing(worker: SimpleNamespace):
    reqs = [
        Request("a", [5]),
        Request("b", [5, 6], ended=True),
        Request("c", [5, 6, 7]),
        Request("d", [5], chosen=False),
    ]
    reqs[2].is_retracted = True
    lens = {"cap_lens": torch.tensor([3, 3, 2, 1]), "accept_lens": torch.tensor([2, 1, 1, 1])}
    process(worker, reqs, set(), c2t_rows=9, c2t_depth=2, c2t_drafted=drafted(4), **lens)
    assert worker.counts.verified == [1, 0, 1]
    assert worker.counts.accepted == [1, 1, 0]
    assert (worker.counts.rows_computed, worker.counts.depths, worker.counts.clipped) == (9, {2: 1}, 2)
    # the root is the newest token before the step
    assert worker.recorder.added == [("a", 0, [0, 1])]


def test_a_request_that_ends_is_handed_over_with_all_its_text(worker: SimpleNamespace):
    lens = {"cap_lens": torch.tensor([3]), "accept_lens": torch.tensor([2])}
    process(worker, [Request("a", [5])], {"a"}, c2t_rows=3, c2t_depth=2, c2t_drafted=drafted(1), **lens)
    assert worker.recorder.finished == [("a", [5, 9, 9])]


def test_it_may_end_in_a_step_that_verifies_nothing(worker: SimpleNamespace):
    """With mixed chunks, or after a retraction, a request's last token comes from a prefill."""
    process(worker, [Request("a", [5]), Request("b", [5], chosen=False), Request("c", [5])], {"a", "b"})
    assert worker.recorder.finished == [("a", [5, 9, 9])]
    assert worker.counts.steps == 0


def test_without_a_recorder_nothing_is_kept(worker: SimpleNamespace):
    worker.recorder = None
    process(worker, [Request("a", [5])], {"a"})
    lens = {"cap_lens": torch.tensor([3]), "accept_lens": torch.tensor([2])}
    process(worker, [Request("b", [5])], {"b"}, c2t_rows=3, c2t_depth=2, c2t_drafted=None, **lens)
    assert worker.counts.steps == 1
