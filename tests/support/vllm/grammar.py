"""A grammar of a request, by the library that vLLM asks: what it leaves of a draft, and of the target's choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import torch
import xgrammar
from transformers import AutoTokenizer

from tests.support.sglang.simulate import Target


class Grammar:
    """Of outputs that match a regular expression as a whole. Ends of text are not foreseen: choose one without."""

    def __init__(self, checkpoint: Path, regex: str) -> None:
        self.regex = regex
        tokens = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(checkpoint))
        self._compiled = xgrammar.GrammarCompiler(tokens).compile_regex(regex)

    def bound(self, target: Target, prompt_length: int) -> Target:
        """A target that chooses the likeliest token of those that it allows, behind a prompt of so many tokens."""
        return Bound(target, self, prompt_length)

    def cut(self, prompt_length: int) -> Callable[[list[int], list[int]], list[int]]:
        """As `valid`, of a whole text."""
        return lambda text, drafted: self.valid(text[prompt_length:], drafted)

    def valid(self, output: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The front of a draft that it allows behind this output."""
        return list(takewhile(self._behind(output).accept_token, drafted))

    def refuse(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        """-inf what it refuses. logits: (tokens of the output + 1, V), before each of them and behind the last."""
        matcher, allowed = self._behind(()), xgrammar.allocate_token_bitmask(1, logits.shape[-1])
        for row, token in enumerate([*output, None]):
            matcher.fill_next_token_bitmask(allowed)
            xgrammar.apply_token_bitmask_inplace(logits[row : row + 1], allowed)
            assert token is None or matcher.accept_token(token)

    def _behind(self, output: Sequence[int]) -> xgrammar.GrammarMatcher:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        assert all(matcher.accept_token(token) for token in output)
        return matcher


class Bound(Target):
    """See Grammar.bound."""

    def __init__(self, target: Target, grammar: Grammar, prompt_length: int) -> None:
        self.model, self._grammar, self._prompt_length = target.model, grammar, prompt_length

    def scores(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits, states = super().scores(tokens)
        self._grammar.refuse(logits[self._prompt_length - 1 :], tokens[self._prompt_length :])
        return logits, states

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        text = list(prompt)
        while len(text) < len(prompt) + new_tokens:
            text.append(self.run(text)[0][-1])
        return text[len(prompt) :]
