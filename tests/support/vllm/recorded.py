"""Recorded drafts against what the models themselves say of the text up to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.pairs.toy import pair_dir
from c2t_plugin.classifier import load_classifier
from c2t_plugin.traces.file import Traces
from tests.support.sglang.simulate import Target
from tests.support.vllm.verify_counts import Oracle

# float32 sums of another order, through a target and a draft
TOLERANCE = 1e-4


class Models:
    """What target and draft say: `states` of a request, by step."""

    def __init__(self, base: str, classifier: Path, d_max: int) -> None:
        self.target, self.d_max = Target(pair_dir() / "target"), d_max
        self.draft = Oracle(pair_dir(), self.target).draft(base)
        self.top_m = load_classifier(classifier).spec.top_m

    def states(self, prompt: Sequence[int], output: Sequence[int]) -> dict[int, tuple[torch.Tensor, list[bool]]]:
        """By step: joint log P, log P, entropy and margin [4, d_max] of the greedy chain, and what the text accepts."""
        found = {}
        for step in range(len(output) - self.d_max):
            committed = [*prompt, *output[: step + 1]]
            _, states = self.target.run(committed)
            features = self.draft.features([state[:-1] for state in states])
            logits = self.draft.chain(committed, features, self.d_max).double()
            log_probs = logits.log_softmax(-1).sort(descending=True).values
            entropy = torch.special.entr(log_probs[:, : self.top_m].exp()).sum(-1)
            own, margin = log_probs[:, 0], log_probs[:, 0] - log_probs[:, 1]
            matches = logits.argmax(-1) == torch.tensor(output[step + 1 : step + 1 + self.d_max])
            stats = torch.stack([own.cumsum(0), own, entropy, margin]).float()
            found[step] = stats, matches.int().cumprod(0).bool().tolist()
        return found


def assert_states_are_the_models(
    traces: Traces, models: Models, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> None:
    """Every recorded state of these requests has the models' statistics and labels, and enough were recorded."""
    assert len(traces.prompt.unique()) == len(prompts)
    unmatched = {int(each): traces[traces.prompt == each] for each in traces.prompt.unique()}
    seen = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = models.states(prompt, output)
        # requests end in an order of their own: known by their first entropy
        key = min(unmatched, key=lambda each: abs(float(unmatched[each].chain.entropy[0, 0] - wanted[0][0][2, 0])))
        mine = unmatched.pop(key)
        assert mine.step[0] == 0, "a request's first draft is the one behind its first token"
        for row, step in enumerate(mine.step.tolist()):
            if step not in wanted:
                continue
            stats, labels = wanted[step]
            chain = mine.chain[torch.tensor([row])]
            found = torch.cat([chain.joint_log_prob, chain.log_prob, chain.entropy, chain.margin])
            assert (found - stats).abs().max() < TOLERANCE
            assert chain.accepted[0].tolist() == labels
            seen += 1
    assert seen > sum(map(len, outputs)) / (models.d_max + 1) / 2
