"""How long the self-check takes, and what it times."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang


class Made:
    """A made-up batch of which each pass takes as long on a clock of its own; nothing is wrong with it."""

    seconds = 0.3
    requests = 9
    device = torch.device("cpu")

    def __init__(self, worker: Any, requests: int) -> None:
        self.worker, self.clock, self.asked = worker, 0.0, requests
        worker.made = self

    def window(self, who: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        self.clock += self.seconds
        return torch.arange(7.0).expand(len(who), self.worker.speculative_num_draft_tokens, 7)

    def packed(self, who: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, bool]:
        self.worker.c2t.packing.rows = int(kept.sum()) + len(kept)
        return self.window(who), True

    def poisons(self) -> tuple[float, ...]:
        return (math.nan,)

    def poison(self, value: float) -> bool:
        return True

    def close(self) -> None:
        pass


def proved(proof: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[Any, Any]:
    """Findings of a server with 3 graphs at each of 3 depths, and its worker."""
    served = SimpleNamespace(
        speculative_num_draft_tokens=5,
        c2t=SimpleNamespace(packing=SimpleNamespace(sizes=lambda: [5, 20, 45], rows=0)),
        adaptive_controller=SimpleNamespace(depths=(0, 1, 2, 4), switch=lambda _: None),
        target_worker=SimpleNamespace(
            model_runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=7), dtype=torch.float32)
        ),
    )
    monkeypatch.setattr(proof.packed, "MadeUp", Made)
    monkeypatch.setattr(proof.ranks, "agree_on", lambda number: number)
    return proof.packed.prove(served, lambda: served.made.clock if hasattr(served, "made") else 0.0, **how), served


def test_it_ends_in_its_time(proof: Any, monkeypatch: pytest.MonkeyPatch):
    found, served = proved(proof, monkeypatch)
    assert found.failures == [] and found.skipped == ""
    assert 0 < found.proved < found.tiers == 9
    # what has begun before is brought to an end: the floor and the poison of a depth are 6 passes at most
    assert found.seconds == served.made.clock <= proof.packed.BUDGET_S + 6 * Made.seconds
    # no more requests than the largest graph has
    assert served.made.asked == 9


def test_no_depth_begins_behind_its_time(proof: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Made, "seconds", 2.0)
    found, _ = proved(proof, monkeypatch)
    assert found.tiers == 9 and found.seconds <= proof.packed.BUDGET_S + 6 * Made.seconds
    monkeypatch.setattr(Made, "seconds", 1e-3)
    found, _ = proved(proof, monkeypatch)
    assert (found.proved, found.untried()) == (9, [])


def test_it_takes_the_time_that_all_sizes_need_where_all_are_asked_for(proof: Any, monkeypatch: pytest.MonkeyPatch):
    found, _ = proved(proof, monkeypatch, whole=True)
    assert (found.proved, found.untried()) == (9, []) and found.seconds > proof.packed.BUDGET_S


def test_packed_passes_and_windows_are_timed(proof: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Made, "device", torch.device("cuda"))
    monkeypatch.setattr(Made, "seconds", 1e-3)

    def timed(made: Made, who: torch.Tensor, kept: torch.Tensor) -> float:
        made.packed(who, kept)
        return float(made.worker.c2t.packing.rows)

    monkeypatch.setattr(proof.packed, "_timed", timed)
    monkeypatch.setattr(proof.packed, "_prove_tier", lambda *_: None)
    found, _ = proved(proof, monkeypatch)
    # at the full depth alone, and whole windows are of the same requests
    assert len(found.microseconds) == 3 and found.microseconds == {rows: float(rows) for rows in found.microseconds}
    assert found.window_microseconds.keys() == found.microseconds.keys()
    assert all(found.window_microseconds[rows] >= rows for rows in found.microseconds)
    assert all(each % 5 == 0 for each in found.window_microseconds.values())
