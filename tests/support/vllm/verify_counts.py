"""What vLLM says it drafted and accepted in each step of a request, and what a simulation of it says it should have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.engines.vllm.conftest import DRAFTS
from tests.support.sglang.simulate import (
    Draft,
    MtpDraft,
    Simulation,
    StandaloneDraft,
    Target,
    Text,
    load_draft,
    simulate,
)
from tests.support.sglang.verify_counts import MOST_DRAFTS, Remembered, Rule

if TYPE_CHECKING:
    from tests.support.vllm.grammar import Grammar


class WholeStandaloneDraft(StandaloneDraft):
    """vLLM's stand-alone draft sees the first token of the prompt, which SGLang's does not."""

    @torch.no_grad()
    def chain(self, tokens: Sequence[int], features: torch.Tensor | None, length: int) -> torch.Tensor:
        return super().chain([-1, *tokens], features, length)


class UnnormedMtpDraft(MtpDraft):
    """vLLM's MiMo hands its MTP layer what is before the target's final norm, SGLang's what is behind it."""

    def __init__(self, checkpoint: Path, target: Target) -> None:
        super().__init__(checkpoint, target)
        self.final_norm = target.model.model.norm.weight.detach()

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        # but for its length, which the layer's own norm takes away
        return states[-1] / self.final_norm


def as_told(tokens: Sequence[int], prompt_length: int, ends: Iterable[int]) -> list[int]:
    """A text as vLLM 0.32 tells it to a head, whose prompt it reads in chunks. ends: of those chunks but the last.

    At the last token of each of them, the head is told the prompt's last token in place of the next one
    (`prepare_next_token_ids_padded`). What is kept of that place is not computed again, nor where it is cached.
    """
    told = list(tokens)
    for end in ends:
        told[end] = tokens[prompt_length - 1]
    return told


class ReadInChunks:
    """A head whose prompt is read in chunks of one length."""

    def __init__(self, draft: Draft, prompt_length: int, chunk: int) -> None:
        self.features = draft.features
        self._draft, self._length, self._ends = draft, prompt_length, range(chunk, prompt_length, chunk)

    def chain(self, tokens: Sequence[int], features: torch.Tensor | None, length: int) -> torch.Tensor:
        return self._draft.chain(as_told(tokens, self._length, self._ends), features, length)


@dataclass(frozen=True)
class Steps:
    """Of one request: output, and (drafted, accepted) of every verify step that had drafts, in order.

    Steps without drafts are ordinary decoding to vLLM; their number follows from the length of the output.
    """

    output_ids: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of_output(cls, output: Any) -> Steps:
        """Of a request with one output."""
        return cls.of_text(output.outputs[0])

    @classmethod
    def of_text(cls, text: Any) -> Steps:
        """Of one output of a request; no steps as long as more may come."""
        found = text.spec_decode_metrics
        pairs = zip(found.per_step_drafted, found.per_step_accepted, strict=True) if found is not None else ()
        return cls(tuple(text.token_ids), tuple(pairs))

    @classmethod
    def of_simulation(cls, run: Simulation) -> Steps:
        pairs = zip(run.draft_lengths, run.accept_lengths, strict=True)
        return cls(tuple(run.output_ids), tuple(pair for pair in pairs if pair[0]))


def gamma_and_tau(steps: Mapping[int, float], accepted: float) -> tuple[float, float]:
    """As docs/requests.md has them, of verify steps by number of drafts and of accepted drafts; bonus excluded."""
    total = sum(steps.values())
    return sum(length * count for length, count in steps.items()) / total, accepted / total


class Oracle:
    """Simulated steps; None for a request where a confidence is too near to beta to say."""

    def __init__(self, pair: Path, target: Target) -> None:
        self.pair, self.target = pair, target
        self.drafts: dict[str, Draft] = {}
        self.texts: dict[tuple[tuple[int, ...], int, str | None], Text] = {}

    def draft(self, base: str) -> Draft:
        if base not in self.drafts:
            name = DRAFTS[base]
            whole = base == "draft_model"
            self.drafts[base] = Remembered(
                WholeStandaloneDraft(self.pair / name) if whole else load_draft(self.pair, name, self.target)
            )
        return self.drafts[base]

    def text(self, prompt: Sequence[int], new_tokens: int, grammar: Grammar | None = None) -> Text:
        """Plain decoding's, with room for the drafts behind its last token."""
        key = tuple(prompt), new_tokens, None if grammar is None else grammar.regex
        if key not in self.texts:
            target = self.target if grammar is None else grammar.bound(self.target, len(prompt))
            self.texts[key] = Text(target, prompt, new_tokens + MOST_DRAFTS)
        return self.texts[key]

    def steps(self, *given: Any, **named: Any) -> Steps | None:
        """What vLLM tells of `run`."""
        run = self.run(*given, **named)
        return None if run is None else Steps.of_simulation(run)

    def run(
        self,
        base: str,
        prompt: Sequence[int],
        new_tokens: int,
        d_max: int,
        classifier: Path | None,
        beta: float,
        chunk: int | None = None,
        grammar: Grammar | None = None,
    ) -> Simulation | None:
        """With the steps that had no draft. chunk: tokens of the prompt that a pass reads; None: all. grammar: which
        the output obeys, and drafts are cut by."""
        rule = None if classifier is None else Rule(classifier, beta)
        keep = None if rule is None else rule.keep_length
        draft = self.draft(base)
        if chunk is not None and base != "draft_model":
            draft = ReadInChunks(draft, len(prompt), chunk)
        valid = None if grammar is None else grammar.cut(len(prompt))
        run = simulate(self.text(prompt, new_tokens, grammar), draft, prompt, new_tokens, d_max, keep, valid)
        return None if rule is not None and rule.undecided else run
