"""Our way through model runner V1's sampler, against vLLM's rejection sampler."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.rejection_sampler import RejectionSampler  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

from benchmarks.pairs.toy import held_out_prompts  # noqa: E402
from c2t_plugin.engines.vllm import cpu_guard  # noqa: E402
from c2t_plugin.engines.vllm.sampling import accepted, only_largest, sampling  # noqa: E402

VOCAB = 24


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """Those of a worker on a CPU."""
    CpuPlatform.register_triton_kernel_overrides()
    cpu_guard.install()


def asked_by(requests: int, **changed: Any) -> SamplingMetadata:
    known: dict[str, Any] = {each.name: None for each in dataclasses.fields(SamplingMetadata)}
    none: dict[str, Any] = {
        "all_greedy": True,
        "all_random": False,
        "no_penalties": True,
        "generators": {},
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
        "output_token_ids": [[] for _ in range(requests)],
    }
    return SamplingMetadata(**{**known, **none, **changed})


def drafted(counts: list[int], seed: int) -> tuple[torch.Tensor, SpecDecodeMetadata]:
    """Logits, and drafts that agree with them as often as not."""
    torch.manual_seed(seed)
    logits = torch.randn(sum(counts) + len(counts), VOCAB)
    ends = np.cumsum([count + 1 for count in counts])
    targets = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count - 1, end - 1)]
    tokens = torch.where(
        torch.rand(len(targets)) < 0.75, logits[targets].argmax(-1), torch.randint(VOCAB, (len(targets),))
    )
    sizes = {
        "cu_num_draft_tokens": torch.tensor(np.cumsum(counts), dtype=torch.int32),
        "cu_num_sampled_tokens": torch.tensor(ends, dtype=torch.int32),
        "target_logits_indices": torch.tensor(targets, dtype=torch.int64),
        "bonus_logits_indices": torch.tensor(ends - 1, dtype=torch.int64),
        "logits_indices": torch.arange(len(logits)),
    }
    return logits, SpecDecodeMetadata(draft_token_ids=tokens.int(), num_draft_tokens=counts, **sizes)


class Runner:
    """Model runner V1 as far as its `_sample` goes; took: by which of its two samplers, or by ours."""

    def __init__(self, asked: SamplingMetadata) -> None:
        self.input_batch = SimpleNamespace(sampling_metadata=asked)
        self.sampler = Sampler()
        self.rejection_sampler = RejectionSampler(self.sampler)
        self.took = "ours"

    def _sample(self, logits: Any, metadata: Any) -> Any:
        asked = self.input_batch.sampling_metadata
        if metadata is None:
            self.took = "plain"
            return self.sampler(logits=logits, sampling_metadata=asked)
        self.took = "rejection"
        return self.rejection_sampler(metadata, None, logits, asked)


@pytest.mark.parametrize("counts", [[3, 0, 2, 1], [1], [0, 0, 0], [0, 6], [2, 2, 2, 2, 2]], ids=str)
def test_tokens_are_those_of_the_rejection_sampler(counts: list[int]):
    seen = set()
    for seed in range(100):
        logits, metadata = drafted(counts, seed)
        runner = Runner(asked_by(len(counts)))
        expected = runner._sample(logits.clone(), metadata).sampled_token_ids
        runner.took = "ours"
        found = sampling(runner, runner._sample)(logits.clone(), metadata).sampled_token_ids
        assert found.equal(expected) and found.dtype == expected.dtype
        assert runner.took == ("ours" if max(counts) else "plain")
        seen.update((found >= 0).sum(1).tolist())
    # drafts that were refused at once, on their way, and not at all
    assert seen == set(range(1, max(counts) + 2))


def test_the_token_behind_a_refused_one_is_the_targets():
    assert accepted([5, 6, 7, 8, 9], [5, 0, 8], [2, 1]).tolist() == [[5, 6, -1], [8, 9, -1]]
    assert accepted([5, 6, 7, 8, 9], [5, 6, 0], [2, 1]).tolist() == [[5, 6, 7], [8, -1, -1]]


def min_tokens(**known: Any) -> MinTokensLogitsProcessor:
    found = object.__new__(MinTokensLogitsProcessor)
    found.min_toks = known
    return found


BEYOND: dict[str, dict[str, Any]] = {
    "drawn": {"all_greedy": False, "all_random": True},
    "mixed": {"all_greedy": False},
    "logprobs": {"max_num_logprobs": 0},
    "logprobs of some tokens": {"logprob_token_ids": {0: [3]}},
    "penalties": {"no_penalties": False},
    "allowed tokens": {"allowed_token_ids_mask": torch.zeros(1, VOCAB, dtype=torch.bool)},
    "bad words": {"bad_words_token_ids": {0: [[1]]}},
    "least tokens": {"logitsprocs": SimpleNamespace(non_argmax_invariant=[min_tokens(a=1)])},
    "another processor": {"logitsprocs": SimpleNamespace(non_argmax_invariant=[object()])},
    "thinking": {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
}


@pytest.mark.parametrize("beyond", BEYOND)
def test_what_asks_for_more_goes_vllms_way(beyond: str):
    asked = asked_by(1, **BEYOND[beyond])
    runner: Any = SimpleNamespace(
        input_batch=SimpleNamespace(sampling_metadata=asked), rejection_sampler=SimpleNamespace(synthetic_mode=False)
    )
    assert not only_largest(runner.input_batch)
    logits, metadata = drafted([2], 0)
    called: list[Any] = []
    sampling(runner, lambda *given: called.append(given))(logits, metadata)
    assert called == [(logits, metadata)]


def test_what_asks_for_nothing_does_not():
    quiet = SimpleNamespace(has_tracked_requests=lambda: False)
    processors = SimpleNamespace(non_argmax_invariant=[min_tokens()])
    asked = asked_by(1, thinking_budget_state_holder=quiet, logitsprocs=processors)
    assert only_largest(SimpleNamespace(sampling_metadata=asked))


def test_acceptance_at_set_rates_goes_vllms_way():
    runner: Any = Runner(asked_by(1))
    runner.rejection_sampler.synthetic_mode = True
    called: list[Any] = []
    sampling(runner, lambda *given: called.append(given))(*drafted([2], 0))
    # as does a rank that has no logits
    sampling(runner, lambda *given: called.append(given))(None, None)
    assert len(called) == 2


def test_an_engine_samples_greedy_requests_without_the_rejection_sampler(engine: Any):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in held_out_prompts(2)]
    with engine("c2t:eagle3", 4, c2t_beta=0.0) as llm:
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        runner.rejection_sampler.forward = Mock(wraps=runner.rejection_sampler.forward)
        for more, called in (({}, False), ({"logprobs": 0}, True), ({"min_tokens": 12}, True)):
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, **more), use_tqdm=False)
            assert runner.rejection_sampler.forward.called == called, more
            runner.rejection_sampler.forward.reset_mock()
