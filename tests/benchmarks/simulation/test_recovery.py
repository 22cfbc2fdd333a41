"""Recovering answers from traces: the attack works, and it is the statistics that it lives on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.simulation import recovery
from benchmarks.simulation.recovery import LABELS, Attack, Plan, Reader, recover

pytestmark = pytest.mark.slow

PLAN = Plan(prompts=1, new=8)


@torch.no_grad()
def test_an_answer_is_recovered_from_either_precision_and_not_without(tmp_path: Path):
    found = recover(PLAN, tmp_path)
    assert list(found) == ["exact", "coarse", LABELS]
    assert [found[arm]["whole_answers"] for arm in found] == [1, 1, 0]
    assert found["coarse"]["bytes"] < found["exact"]["bytes"]
    assert found[LABELS]["recovered_tokens"] < found["coarse"]["recovered_tokens"] == found["coarse"]["recorded_tokens"]


@torch.no_grad()
def test_statistics_of_another_draft_give_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chains, tops = Reader.chains, Reader.tops

    def other(self: Reader, last: torch.Tensor) -> recovery.Chains:
        found = chains(self, last)
        return found._replace(stats=found.stats.roll(1, 0))

    attacking = Attack.answer

    def attacked(self: Attack, *positional: object) -> list[int]:
        with monkeypatch.context() as patch:
            patch.setattr(Reader, "chains", other)
            patch.setattr(Reader, "tops", lambda self, last: tops(self, last).roll(1, 0))
            return attacking(self, *positional)  # type: ignore[arg-type]

    monkeypatch.setattr(Attack, "answer", attacked)
    found = recover(PLAN, tmp_path)
    assert found["exact"]["whole_answers"] == found["coarse"]["whole_answers"] == 0


@torch.no_grad()
def test_a_cached_text_reads_as_a_whole_one():
    from benchmarks.pairs.toy import held_out_prompts, pair_dir
    from c2t_plugin.lab.pairs import load_pair

    target, _ = load_pair(pair_dir(), "draft")
    text = held_out_prompts(1)[0][:20]
    reader = Reader(target, text)
    for _ in range(2):
        assert torch.allclose(reader.next(), target(torch.tensor([text])).logits[0, -1].log_softmax(-1), atol=1e-4)
    chain = reader.chains(torch.tensor([5, text[-1]]))
    drafted = target.generate(torch.tensor([text]), max_new_tokens=recovery.D_MAX, do_sample=False)[0, len(text) :]
    assert chain.tokens[1].tolist()[: len(drafted)] == drafted.tolist()
    words = torch.arange(recovery.TOGETHER + 3)
    tops, whole = reader.tops(words), reader.chains(words).stats[:, :1]
    assert torch.allclose(tops[..., [0, 1, 3]], whole[..., [0, 1, 3]], atol=1e-4)
