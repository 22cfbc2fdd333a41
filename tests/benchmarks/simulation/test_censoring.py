"""What is learnt where what was learnt says what is verified: on a stream whose truth is known, and by the command."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.simulation import censoring, learning
from benchmarks.simulation.censoring import (
    ALL,
    ALL_PROBED,
    AS_CUT,
    PROBED,
    TOLD,
    TOLD_PROBED,
    VERIFIED,
    WHOLE,
    Cut,
    main,
    pessimist,
)
from benchmarks.simulation.learning import Told, learnt
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.planner import CostCurve
from c2t_plugin.traces.file import Traces, save_traces

D_MAX, STATES = 4, 12_000
# Of eight requests a token has to be accepted in two of five cases to be worth its row.
CURVE = CostCurve(verify=((1, 1.0), (40, 4.0)), draft=((1, 0.05), (40, 0.1)))


@pytest.fixture(autouse=True)
def short_replays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learning, "D_MAX", D_MAX)
    monkeypatch.setattr(learning, "MARKS", (0, STATES))


def drawn(states: int, seed: int) -> tuple[Tensor, Tensor]:
    """(states, D_MAX) chance of each token if those before it are accepted, and (states,) how many are."""
    generator = torch.Generator().manual_seed(seed)
    chance = 0.6 + 0.38 * torch.rand(states, D_MAX, generator=generator)
    return chance, (torch.rand(states, D_MAX, generator=generator) < chance).long().cumprod(1).sum(1)


@functools.cache
def replayed(verified: str, logits: float) -> tuple[float, float, float]:
    """Nats a token of whole drafts of other states, at first and in the end, and tokens verified of each draft. logits:
    by how much confidences are off."""
    (chance, accepted), (other, hits) = drawn(STATES, 0), drawn(4_000, 1)
    hit = torch.arange(D_MAX) < hits[:, None]

    def figures(survival: Tensor) -> dict[str, float]:
        sure = survival.clamp(1e-6, 1 - 1e-6)
        return {"nll": float(-torch.where(hit, sure, 1 - sure).log().mean())}

    told = tuple(torch.sigmoid(torch.logit(each) + logits).cumprod(1) for each in (chance, other))
    chains: Any = tuple(SimpleNamespace(log_prob=torch.full_like(each, -0.7)) for each in (chance, other))
    judge: Any = SimpleNamespace(figures=figures)
    cut = Cut(CURVE, D_MAX, verified)
    # eight requests at a time, of eight states each
    stream = Told(accepted, torch.arange(STATES) // 64 * 8 + torch.arange(STATES) % 8, list(range(STATES)))
    first, last = learnt(told, chains, stream, judge, cut)  # type: ignore[arg-type]
    assert cut.drafts == STATES
    return first["nll"], last["nll"], cut.tokens / cut.drafts


@pytest.mark.slow
@pytest.mark.parametrize("logits", [-3.0, 0.0, 2.0], ids=["from a pessimist", "from the truth", "from an optimist"])
def test_with_probes_a_cut_ends_where_whole_drafts_end(logits: float):
    _, uncensored, most = replayed(WHOLE, logits)
    _, cut, tokens = replayed(PROBED, logits)
    assert most == D_MAX and tokens < 0.95 * D_MAX, "nothing is cut"
    assert cut < uncensored + 0.01


def test_without_probes_a_pessimist_sees_nothing_and_stays_one():
    first, last, tokens = replayed(AS_CUT, -3.0)
    assert tokens < 0.01 and last == first > replayed(PROBED, -3.0)[1] + 0.5


def test_where_the_text_tells_a_pessimist_comes_half_the_way_without_probes():
    """It has to draft at first, and of those drafts the text tells one token each; of deeper ones nothing does."""
    first, last, tokens = replayed(TOLD, -3.0)
    assert tokens > 0.5 and replayed(PROBED, -3.0)[1] + 0.2 < last < first - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("logits", [-3.0, 0.0, 2.0], ids=["from a pessimist", "from the truth", "from an optimist"])
def test_where_it_tells_all_with_probes_it_ends_where_whole_drafts_end(logits: float):
    assert replayed(ALL_PROBED, logits)[1] < replayed(WHOLE, logits)[1] + 0.01


def test_where_it_tells_all_a_pessimist_gets_further_without_probes():
    """As far as it drafts: what is not drafted nothing tells."""
    assert replayed(ALL, -3.0)[1] <= replayed(TOLD, -3.0)[1]


def test_a_text_that_tells_all_tells_of_whole_drafts():
    cut = Cut(CURVE, D_MAX, ALL_PROBED)
    assert cut(torch.tensor([[0.9, 0.8, 0.1, 0.05]] * 8)).tolist() == [D_MAX] * 8
    assert cut.tokens == 16


def test_a_text_tells_of_one_token_that_was_cut():
    told, kept = Cut(CURVE, D_MAX, TOLD_PROBED), Cut(CURVE, D_MAX, PROBED)
    chance = torch.tensor([[0.9, 0.8, 0.1, 0.05]] * 8)
    assert told(chance).tolist() == [3] * 8
    assert kept(chance).tolist() == [2] * 8 and told.tokens == kept.tokens == 16
    assert Cut(CURVE, D_MAX, TOLD_PROBED)(torch.tensor([[0.9] * D_MAX])).tolist() == [D_MAX]


@pytest.mark.slow
@pytest.mark.parametrize("logits", [0.0, 2.0], ids=["from the truth", "from an optimist"])
def test_without_probes_others_end_nearly_there(logits: float):
    """Who expects too much verifies that and sees it. Of what lies deeper than it ends up verifying it sees no more."""
    assert replayed(AS_CUT, logits)[1] < replayed(WHOLE, logits)[1] + 0.02


def test_a_pessimist_ranks_as_the_classifier_does():
    torch.manual_seed(0)
    classifier = NodeClassifier(ClassifierSpec(top_m=4)).requires_grad_(False)
    features = torch.rand(50, len(classifier.spec.features))
    assert torch.allclose(pessimist(classifier)(features), classifier(features) + censoring.LOGITS)


@pytest.mark.slow
def test_the_command_writes_every_start_verified_in_each_way(
    make_traces: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(learning, "MARKS", (0, 100, 300))
    torch.manual_seed(0)
    traces: Traces = make_traces(prompts=20, steps=8, k=3)
    traces.header["pair"]["kind"] = "eagle3"
    save_classifier(NodeClassifier(ClassifierSpec(top_m=4)), tmp_path / "c.safetensors")
    save_traces(traces, tmp_path / "t.traces")
    files = ("--learn", str(tmp_path / "t.traces"), "--judge", str(tmp_path / "t.traces"))
    out = tmp_path / "rows.jsonl"
    offline = ("--offline", str(tmp_path / "c.safetensors"))
    assert main([*files, *offline, "--name", "toy", "--out", str(out)]) == 0
    rows = read_rows(out, BenchRow)
    arms = {"from offline fit", "from a pessimist", "from nothing"}
    arms |= {"from offline fit, auto", "from offline fit, network", "from a pessimist, network"}
    assert {(row.scenario, row.arm, row.setting["states"], row.setting["verified"]) for row in rows} == set(
        itertools.product(("censoring",), arms, (0, 100, 300), VERIFIED)
    )
    whole = [row for row in rows if row.setting["verified"] == WHOLE and row.setting["states"]]
    assert {row.metrics["verified_per_draft"] for row in whole} == {float(D_MAX)}
    # of a start nothing has been verified yet
    begun = {(row.arm, row.metrics["nll"]) for row in rows if not row.setting["states"]}
    assert {arm for arm, _ in begun} == arms and len(begun) == len(arms)
    assert "| from a pessimist | as cut, with probes |" in capsys.readouterr().out
