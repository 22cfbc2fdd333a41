"""What a target says after a text, and what a draft would say after each of many tokens that it may go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from c2t_kernels import draft_stats
from c2t_plugin.lab.drafts import BatchDraft, HeadDraft, TreeDraft
from c2t_plugin.lab.heads import head_features, hidden_states

D_MAX, TOP_M = 4, 1000
# Tokens that one pass reads side by side.
TOGETHER = 256


class Chains(NamedTuple):
    """Of n guessed tokens. stats: (n, D_MAX, 4), see ChainScorer.stats. tokens: (n, D_MAX) int64."""

    stats: Tensor
    tokens: Tensor


def next_token(target: Any, text: Sequence[int]) -> Tensor:
    """(vocabulary,) log probabilities of the token after the text."""
    found: Tensor = target(torch.tensor([list(text)]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
    return found


class Guesses:
    """A draft that has read a text and is told the next token, one of several: they are branches that do not see each
    other. Nothing of the target's is needed beyond the text, so who guesses a token can draft on from it."""

    def __init__(self, draft: TreeDraft, text: Sequence[int]) -> None:
        """text: two tokens at least, as SGLang's drafts do not read the first one."""
        known = torch.tensor([list(text)])
        self._read = BatchDraft(draft, known, range(len(text) - 1, len(text)))
        if isinstance(draft, HeadDraft):
            # A head reads the next token beside the target's state of the one before, and its own states below that.
            states = head_features(draft.head, hidden_states(draft.target, known))
            self._read.hidden = draft.head.start(states)[:, -1:, None]

    def chains(self, guessed: Tensor) -> Chains:
        """The greedy chains below these tokens, (n,)."""
        growth, count = self._read.start(D_MAX), len(guessed)
        found = growth.extend(guessed[None], torch.full((1, count), -1))
        stats, drafted, joint = [], [], torch.zeros(count)
        for depth in range(D_MAX):
            said = draft_stats(found.values[0], TOP_M)
            joint = joint + said.log_probs[:, 0]
            stats.append(torch.stack([joint, said.log_probs[:, 0], said.entropy, said.margin], dim=-1))
            drafted.append(said.token_ids[:, 0])
            if depth + 1 < D_MAX:
                found = growth.extend(drafted[-1][None], torch.arange(depth * count, (depth + 1) * count)[None])
        return Chains(torch.stack(stats, dim=1), torch.stack(drafted, dim=1))

    def tops(self, guessed: Tensor) -> Tensor:
        """(n, 1, 4) as the front of the chains' statistics, but for the entropies, which take longest: zeros."""
        best = torch.cat([self._best(some) for some in guessed.split(TOGETHER)])
        first, margin = best[:, 0], best[:, 0] - best[:, 1]
        return torch.stack([first, first, torch.zeros(len(guessed)), margin], dim=-1)[:, None]

    def _best(self, guessed: Tensor) -> Tensor:
        """(n, 2) log probabilities of the two likeliest tokens after each."""
        said = self._read.start(1).extend(guessed[None], torch.full((1, len(guessed)), -1)).values[0]
        return said.topk(2).values - said.logsumexp(-1, keepdim=True)
