"""Which states trees are grown at: prompts, the target's text, where it ends, where it loops."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.pairs.toy import load_prompts
from c2t_plugin.errors import C2TError
from c2t_plugin.lab import texts as module
from c2t_plugin.lab.pairs import load_pair
from c2t_plugin.lab.texts import Texts, end_of_text, greedy_text, held_out_prompts, of_equal_length, training_prompts


def test_continuation_is_what_follows_each_root() -> None:
    texts = Texts(torch.tensor([0, 1]), torch.arange(20).view(2, 10), range(5, 8))
    assert texts.continuation(2).tolist() == [[6, 7], [7, 8], [8, 9], [16, 17], [17, 18], [18, 19]]


def test_states_from_the_end_token_on_are_left_out() -> None:
    tokens = torch.tensor([[9, 9, 5, 7, 5, 5], [9, 7, 5, 5, 7, 5]])
    texts = Texts(torch.tensor([0, 1]), tokens, range(2, 5))
    # an end token inside the prompt ends nothing
    assert texts.running([7]).tolist() == [True, False, False, True, True, False]
    assert texts.running([7, 5]).tolist() == [False] * 6
    assert texts.running([]).all()


def test_a_state_in_a_loop_is_not_novel() -> None:
    tokens = [*range(10), *range(10)]
    texts = Texts(torch.tensor([0]), torch.tensor([tokens]), range(8, 20))
    # the root 17 ends the first eight tokens that were there before
    assert texts.novel().tolist() == [root < 17 for root in range(8, 20)]


def test_greedy_texts_cover_all_prompts_once_and_are_greedy(tiny_pair) -> None:
    target, _ = load_pair(tiny_pair, "draft")
    prompts = {number + 5: prompt["ids"] for number, prompt in enumerate(load_prompts(tiny_pair))}
    batches = list(of_equal_length(prompts, 2))
    found = [greedy_text(target, {n: prompts[n] for n in numbers}, new=3, layers=2) for numbers in batches]
    assert sorted(int(number) for texts in found for number in texts.numbers) == sorted(prompts)
    for texts in found:
        assert len(texts.numbers) <= 2
        for number, row in zip(texts.numbers.tolist(), texts.token_ids.tolist(), strict=True):
            prompt = prompts[number]
            assert row[: len(prompt)] == prompt
            assert texts.roots == range(len(prompt), len(prompt) + 3)
            assert len(row) == len(prompt) + 5
            logits = target(input_ids=torch.tensor([row])).logits[0]
            assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == row[len(prompt) :]


def test_held_out_prompts_are_the_ones_shipped(tiny_pair) -> None:
    shipped = {tuple(prompt["ids"]) for prompt in load_prompts(tiny_pair)}
    assert {tuple(each.token_ids) for each in held_out_prompts(tiny_pair, 4, seed=1)} == shipped
    with pytest.raises(C2TError, match="7 held-out prompts are needed, the pair has 6"):
        held_out_prompts(tiny_pair, 7, seed=1)


@pytest.fixture
def library(tiny_pair, tmp_path, monkeypatch):
    """A small standard library beside the pair, held-out files included."""
    held_out = json.loads((tiny_pair / "held_out_files.json").read_text(encoding="utf-8"))
    for name in (*held_out, "one.py", "two.py"):
        word = "held" if name in held_out else name[:3]
        lines = [f"{word} = function_{word}(argument, {i}, other={word!r})  # {name}\n" for i in range(60)]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(module, "standard_library", lambda: tmp_path)
    return tiny_pair


def test_training_prompts_keep_away_from_the_held_out_files(library) -> None:
    from c2t_plugin.lab.pair_files import load_tokenizer

    prompts = training_prompts(library, 6, seed=3)
    texts = [load_tokenizer(library).decode(each.token_ids) for each in prompts]
    assert len(prompts) >= 6
    assert len({tuple(each.token_ids) for each in prompts}) == len(prompts)
    assert all(64 <= len(each.token_ids) <= 128 for each in prompts)
    assert all(each.source.removesuffix(".py") in text for each, text in zip(prompts, texts, strict=True))
    assert {"one" in text for text in texts} == {True, False}
    assert not any("held" in text for text in texts)
    assert prompts == training_prompts(library, 6, seed=3) != training_prompts(library, 6, seed=4)


def test_without_the_list_of_held_out_files_nothing_is_taken(tmp_path) -> None:
    with pytest.raises(C2TError, match="held_out_files"):
        training_prompts(tmp_path, 1, seed=0)


def test_a_target_may_have_several_end_tokens_or_none(tiny_pair) -> None:
    target, _ = load_pair(tiny_pair, "draft")
    assert end_of_text(target) == [json.loads((tiny_pair / "target" / "config.json").read_text())["eos_token_id"]]
    target.config.eos_token_id = 5
    target.generation_config.eos_token_id = [9, 5]
    assert end_of_text(target) == [5, 9]
    target.config.eos_token_id = target.generation_config.eos_token_id = None
    assert end_of_text(target) == []
