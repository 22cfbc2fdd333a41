"""Any causal LM of transformers that keeps a cache, as a stand-alone draft of trees.

Slower than `drafts.StandaloneDraft`, which knows how a Llama attends: here a branch reads all of its path again, after
a copy of the text's cache. So nothing is asked of the model but `past_key_values`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.grow import LogitDistributions


class CausalDraft:
    """A DraftModel. As in SGLang, it does not read a text's first token."""

    def __init__(self, model: Any) -> None:
        """model: from AutoModelForCausalLM, or of the same interface."""
        self.model = model

    def at(self, token_ids: Tensor, roots: range) -> CausalTexts:
        """As DraftModel.at. C2TError if the model keeps no cache."""
        return CausalTexts(self.model, token_ids, roots)


class CausalTexts:
    """Texts that a causal LM has read: one copy of its cache per state, because not every cache can be shortened."""

    def __init__(self, model: Any, token_ids: Tensor, roots: range) -> None:
        """Arguments as of DraftModel.at."""
        self.model, self.texts, self.roots = model, len(token_ids), roots
        self.caches: list[Any] = []
        logits, cache, step = [], None, token_ids[:, 1 : roots[0] + 1]
        for root in roots:
            out = model(input_ids=step, past_key_values=cache, use_cache=True)
            cache, step = out.past_key_values, token_ids[:, root + 1 : root + 2]
            if cache is None:
                raise C2TError(f"{type(model).__name__} keeps no past_key_values; trees need a model that does")
            self.caches.append(copy.deepcopy(cache))
            logits.append(out.logits[:, -1])
        self.logits = torch.stack(logits, dim=1).flatten(0, 1)[:, None]

    def start(self, layers: int) -> CausalGrowth:
        """As ReadTexts.start. C2TError if the model has no positions for nodes so deep."""
        check_positions(self.model, self.roots[-1] + layers)
        return CausalGrowth(self, layers)


class CausalGrowth:
    """One tree per state on its way: a Drafter."""

    def __init__(self, read: CausalTexts, layers: int) -> None:
        self.read = read
        states = len(read.logits)
        # Of the root and all nodes read so far: the tokens from below the root down to each, and how many these are.
        self.paths = torch.zeros(states, 1, layers, dtype=torch.int64)
        self.lengths = torch.zeros(states, 1, dtype=torch.int64)

    def root(self) -> LogitDistributions:
        return LogitDistributions(self.read.logits)

    def extend(self, token_ids: Tensor, parents: Tensor) -> LogitDistributions:
        paths = self.paths.take_along_dim(parents[..., None] + 1, dim=1)
        lengths = self.lengths.gather(1, parents + 1)
        if int(lengths.max()) == paths.shape[2]:
            raise C2TError("a node is deeper than the layers that the draft was started for; start it for more")
        paths.scatter_(2, lengths[..., None], token_ids[..., None])
        lengths = lengths + 1
        self.paths = torch.cat([self.paths, paths], dim=1)
        self.lengths = torch.cat([self.lengths, lengths], dim=1)
        return LogitDistributions(self._logits(paths[..., : int(lengths.max())], lengths))

    def _logits(self, paths: Tensor, lengths: Tensor) -> Tensor:
        """What follows each path: (states, branches, longest), (states, branches) int64 -> (states, branches, vocab).

        Shorter paths are padded on the right, where causal attention does not look.
        """
        shape = (self.read.texts, len(self.read.caches), *paths.shape[1:])
        found = []
        for cache, tokens, length in zip(
            self.read.caches, paths.view(shape).unbind(1), lengths.view(shape[:3]).unbind(1), strict=True
        ):
            own = copy.deepcopy(cache)
            own.batch_repeat_interleave(shape[2])
            logits = self.read.model(input_ids=tokens.flatten(0, 1), past_key_values=own, use_cache=True).logits
            last = (length.flatten() - 1)[:, None, None]
            found.append(logits.take_along_dim(last, dim=1).view(*length.shape, -1))
        return torch.stack(found, dim=1).flatten(0, 1)


def check_positions(model: Any, tokens: int) -> None:
    """C2TError if the model has no positions for so many tokens."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise C2TError(
            f"{type(model).__name__} has {limit} positions, {tokens} are needed; take shorter prompts or fewer layers"
        )
