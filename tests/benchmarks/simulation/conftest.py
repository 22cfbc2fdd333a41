"""Fixtures of tests/support/lab, for every test below, and a stream of recorded states."""

from __future__ import annotations

import pytest

from benchmarks.simulation import learning
from c2t_plugin.traces.file import Traces
from tests.support.lab.toys import make_traces, tiny_pair, toy_bench, toy_draft, toy_logits

__all__ = ["make_traces", "tiny_pair", "toy_bench", "toy_draft", "toy_logits"]


@pytest.fixture
def traces(make_traces, monkeypatch: pytest.MonkeyPatch) -> Traces:
    """Of 20 prompts; replayed with chains of 4."""
    monkeypatch.setattr(learning, "D_MAX", 4)
    made: Traces = make_traces(prompts=20, steps=8, k=3)
    made.header["pair"]["kind"] = "eagle3"
    return made
