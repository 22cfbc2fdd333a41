"""What a V1 drafter counts as time of the classifier, by a clock that passes as it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier  # noqa: E402
from c2t_plugin.engines.host_scorer import HostScorer  # noqa: E402
from c2t_plugin.engines.vllm import v1  # noqa: E402
from c2t_plugin.engines.vllm.ending import Ending  # noqa: E402
from c2t_plugin.engines.vllm.requests import OwnSettings  # noqa: E402

ROWS, DEPTH = 2, 3
# seconds: of the draft's own pass, and of each thing that is computed for C2T
PASS, LIMIT, SCORE, ASK, CUT = 1.0, 0.25, 0.5, 0.125, 0.0625


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def after(self, seconds: float, call: Any) -> Any:
        """`call`, which takes so long."""

        def lasting(*positional: Any, **keyword: Any) -> Any:
            self.now += seconds
            return call(*positional, **keyword)

        return lasting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(v1, "time", made)
    return made


@pytest.fixture
def drafter(clock: Clock) -> Any:
    """A proposer around a draft model of which nothing but its logits is asked."""
    scorer = HostScorer(NodeClassifier(ClassifierSpec()), rows=ROWS, max_depth=DEPTH, beta=0.0)
    for name, seconds in (("limit", LIMIT), ("score", SCORE), ("any_alive", ASK), ("end", CUT)):
        setattr(scorer, name, clock.after(seconds, getattr(scorer, name)))
    made: Any = object.__new__(v1.C2TEagleProposer)
    batch = SimpleNamespace(req_ids=[f"r{row}" for row in range(ROWS)])
    made.__dict__ |= {
        "scorer": scorer,
        "num_speculative_tokens": DEPTH,
        "own": OwnSettings("all", ROWS),
        "ending": Ending(),
        "drafted": None,
        "traces": None,
        "classifier_s": 0.0,
        "draft_s": 0.0,
        "drafts": 0,
        "draft_steps": 0,
        "_runner": SimpleNamespace(input_batch=batch, requests={}),
        "_may_leave": True,
        "_planned": True,
        "_tells_stats": False,
        "_vocabulary": None,
        "_chosen": None,
    }
    passes = clock.after(PASS, lambda: torch.randn(ROWS, 8))

    def propose(depth: int) -> torch.Tensor:
        for _ in range(depth):
            made._score(passes())
            made._sampled.append((made._chosen, None))
            assert len(made._sampled) == depth or not made._ends()
        return torch.stack([tokens for tokens, _ in made._sampled], dim=1)

    made._drafted = propose
    return made


def test_a_draft_says_how_much_of_it_was_the_classifiers(drafter: Any) -> None:
    drafter.propose(DEPTH)
    own = LIMIT + DEPTH * SCORE + (DEPTH - 1) * ASK + CUT
    assert drafter.classifier_s == drafter.drafted.classifier_s == own
    assert drafter.draft_s == drafter.drafted.seconds == own + DEPTH * PASS
    drafter.propose(1)
    assert drafter.drafted.classifier_s == LIMIT + SCORE + CUT
    assert drafter.classifier_s == own + LIMIT + SCORE + CUT


def test_where_the_host_has_no_clock_for_it_nothing_is_counted(drafter: Any) -> None:
    drafter.classifier_s = None
    drafter.propose(DEPTH)
    assert drafter.classifier_s is None and drafter.drafted.classifier_s == 0.0
