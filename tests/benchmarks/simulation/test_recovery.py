"""Recovering answers from traces: the attack works, and it is the statistics that it lives on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.pairs.toy import held_out_prompts, pair_dir
from benchmarks.simulation import reading, recovery
from benchmarks.simulation.reading import Guesses, next_token
from benchmarks.simulation.recovery import LABELS, Attack, Plan, recover, setting_of
from c2t_plugin.lab.pairs import load_pair

pytestmark = pytest.mark.slow

KINDS = ("draft", "eagle3", "eagle1", "mtp")


def plan_of(kind: str) -> Plan:
    return Plan(prompts=1, new=8, draft=kind)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_recovered_from_either_precision_and_not_without(tmp_path: Path, kind: str):
    found = recover(plan_of(kind), setting_of(plan_of(kind)), tmp_path)
    assert list(found) == ["exact", "coarse", LABELS]
    assert [found[arm]["whole_answers"] for arm in found] == [1, 1, 0]
    assert found["coarse"]["bytes"] < found["exact"]["bytes"]
    assert found[LABELS]["recovered_tokens"] < found["coarse"]["recovered_tokens"] == found["coarse"]["recorded_tokens"]


@torch.no_grad()
def test_what_is_known_of_an_answer_is_not_counted_and_what_is_not_is_found(tmp_path: Path):
    """A number in a known sentence, on the toy pair: of so few tries the labels alone may tell one, but not all."""
    plan = plan_of("eagle3")
    setting = setting_of(plan)
    known = [[token] for token in setting.prompts[0][-6:]]
    known[1:1] = [list(range(300, 310))] * 3
    found = recover(plan, setting._replace(known=known), tmp_path)
    assert found["exact"]["whole_answers"] == 1
    assert {each["recorded_tokens"] for each in found.values()} <= {2, 3}
    assert found[LABELS]["recovered_tokens"] < found["exact"]["recovered_tokens"] == found["exact"]["recorded_tokens"]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS[:2])
def test_statistics_of_another_draft_give_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    chains, tops = Guesses.chains, Guesses.tops

    def other(self: Guesses, guessed: torch.Tensor) -> reading.Chains:
        found = chains(self, guessed)
        return found._replace(stats=found.stats.roll(1, 0))

    attacking = Attack.answer

    def attacked(self: Attack, *positional: object) -> list[int]:
        with monkeypatch.context() as patch:
            patch.setattr(Guesses, "chains", other)
            patch.setattr(Guesses, "tops", lambda self, guessed: tops(self, guessed).roll(1, 0))
            return attacking(self, *positional)  # type: ignore[arg-type]

    monkeypatch.setattr(Attack, "answer", attacked)
    # nothing fits, so that every token would be tried at every state
    monkeypatch.setattr(recovery, "MOST", 512)
    found = recover(plan_of(kind), setting_of(plan_of(kind)), tmp_path)
    assert found["exact"]["whole_answers"] == found["coarse"]["whole_answers"] == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_guessed_token_is_read_as_one_of_the_text(kind: str):
    """Beside others that it does not see, and by a head with the target's state of the token before it."""
    target, draft = load_pair(pair_dir(), kind)
    text = held_out_prompts(1)[0][:20]
    whole = target(torch.tensor([text])).logits[0, -2].log_softmax(-1)
    assert torch.allclose(next_token(target, text[:-1]), whole, atol=1e-4)
    guesses = Guesses(draft, text[:-1])  # type: ignore[arg-type]
    found = guesses.chains(torch.tensor([5, text[-1], 7]))
    growth = draft.at(torch.tensor([text]), range(len(text) - 1, len(text))).start(reading.D_MAX)
    said, chain = growth.root().logits()[0, 0], []
    for depth in range(reading.D_MAX):
        best = said.log_softmax(-1).topk(2).values
        assert torch.allclose(found.stats[1, depth, [1, 3]], torch.stack([best[0], best[0] - best[1]]), atol=1e-4)
        chain.append(int(said.argmax()))
        said = growth.extend(torch.tensor([[chain[-1]]]), torch.tensor([[depth - 1]])).logits()[0, 0]
    assert found.tokens[1].tolist() == chain
    many = torch.arange(reading.TOGETHER + 3)
    tops, whole = guesses.tops(many), guesses.chains(many).stats[:, :1]
    assert torch.allclose(tops[..., [0, 1, 3]], whole[..., [0, 1, 3]], atol=1e-4)
