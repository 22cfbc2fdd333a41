"""vLLM's rejection sampler on what C2T hands it: drafts of unequal length, some empty, with the CPU repairs in place.

The ideas are those of vLLM's own tests of its sampler: exact outcomes by hand, one request's draws independent of the
others, and samples that have the target's distribution.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.engines.vllm import cpu_guard  # noqa: E402

VOCAB = 8
PLACEHOLDER = -1
DRAFTS = [[1, 2, 3], [], [4, 5], [], [6]]
SAMPLES = 20_000
# One run in a million fails.
ALPHA = 1e-6


def verify(
    drafts: list[list[int]],
    logits: torch.Tensor,
    bonus: list[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    seeds: dict[int, int] | None = None,
) -> list[list[int]]:
    """Tokens of each request. logits: (drafted tokens, VOCAB) of the target."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    CpuPlatform.register_triton_kernel_overrides()
    cpu_guard.install()
    rows, greedy, none = len(drafts), temperature == 0.0, torch.empty(0)
    sampling = SamplingMetadata(
        temperature=None if greedy else torch.full((rows,), temperature),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=None,
        top_k=None if top_k is None else torch.full((rows,), top_k),
        generators={row: torch.Generator().manual_seed(seed) for row, seed in (seeds or {}).items()},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in drafts],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    batch = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    found = rejection_sample(
        batch.draft_token_ids,
        batch.num_draft_tokens,
        batch.max_spec_len,
        batch.cu_num_draft_tokens,
        None,
        apply_sampling_constraints(logits.clone(), batch.cu_num_draft_tokens, sampling),
        torch.tensor(bonus, dtype=torch.int32)[:, None],
        sampling,
    )
    return [[token for token in row if token != PLACEHOLDER] for row in found.tolist()]


def certain(tokens: list[int]) -> torch.Tensor:
    """Logits whose argmax is each of these."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 10


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 0], [0], [4, 5, 0], [0], [6, 0]]),
        ([1, 7, 3, 7, 5, 7], [[1, 7], [0], [7], [0], [7]]),
        ([7, 2, 3, 4, 7, 6], [[7], [0], [4, 7], [0], [6, 0]]),
    ],
    ids=["all accepted", "mismatches", "some"],
)
def test_greedy_outcomes_of_unequal_drafts(choices: list[int], expected: list[list[int]]):
    assert verify(DRAFTS, certain(choices), [0] * len(DRAFTS)) == expected


def test_a_seeded_request_draws_the_same_whatever_the_others_drafted():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    others = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    seen = set()
    for seed in range(8):
        (alone,) = verify([[1, 2, 3]], logits, [0], temperature=1.0, seeds={0: seed})
        rows = torch.cat([others[:1], logits, others[1:]])
        beside = verify([[4], [1, 2, 3], [], [5, 6]], rows, [0] * 4, temperature=1.0, seeds={1: seed})
        assert beside[1] == alone
        seen.add(tuple(alone))
    assert len(seen) > 1


def first_tokens(drafted: int, logits: torch.Tensor, **sampling: Any) -> Counter[int]:
    """Of SAMPLES requests, each third with one draft, with none (its bonus token is left out) and with two."""
    kinds = ([drafted], [], [drafted, drafted])
    drafts = [kinds[number % 3] for number in range(SAMPLES)]
    rows = logits.expand(sum(map(len, drafts)), -1)
    found = verify(drafts, rows, [0] * SAMPLES, **sampling)
    return Counter(tokens[0] for tokens, draft in zip(found, drafts, strict=True) if draft)


def p_value(found: Counter[int], probs: torch.Tensor) -> float:
    likely = [token for token, p in enumerate(probs.tolist()) if p > 0]
    assert set(found) <= set(likely)
    observed = [found[token] for token in likely]
    return float(chisquare(observed, [probs[token].item() * sum(observed) for token in likely]).pvalue)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("drafted", [0, 1, 5])
def test_the_first_token_has_the_targets_distribution(drafted: int, top_k: int | None):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -9.0])
    scaled = logits.double() / 0.8
    if top_k is not None:
        scaled[top_k:] = -torch.inf
    found = first_tokens(drafted, logits, temperature=0.8, top_k=top_k)
    assert p_value(found, scaled.softmax(0)) >= ALPHA
    assert p_value(found, (scaled * 0.8 / 1.1).softmax(0)) < ALPHA, "another temperature would not be seen"
