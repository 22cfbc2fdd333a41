"""Temperature 0.8: what vLLM samples with C2T has the joint distribution of the target alone.

Greedy drafts are a function of the text so far. Sampled ones are not: there a rule that dropped a token for the token's
own probability would bias the output. C2T's looks at the largest probability instead; the fault is planted too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.support.engines.distribution import (  # noqa: E402
    ALPHA,
    SAMPLES,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    Outcome,
    most_varied_prompt,
    p_value,
)
from tests.support.sglang.verify_counts import save_hand_made_classifier  # noqa: E402

BETA = 0.45
D_MAX = 3
OPTIONS = {"max_num_seqs": 48, "seed": 20251}
# Of the planted fault: a drawn word is dropped for a probability below this.
DRAWN_BELOW = 0.5


@pytest.fixture(scope="module")
def enumerated() -> tuple[list[int], dict[Outcome, float]]:
    return most_varied_prompt()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_hand_made_classifier(tmp_path_factory.mktemp("sampled") / "hand.safetensors"))


def sample(llm: Any, prompt: list[int]) -> tuple[list[Outcome], Counter[int], int]:
    """SAMPLES outcomes, steps by number of drafts, and the drafts accepted."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, max_tokens=TOKENS, ignore_eos=True, n=SAMPLES)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    lengths, accepted = Counter[int](), 0
    for output in answer.outputs:
        if output.spec_decode_metrics is not None:
            lengths.update(output.spec_decode_metrics.per_step_drafted)
            accepted += sum(output.spec_decode_metrics.per_step_accepted)
    assert len(answer.outputs) == SAMPLES
    return [tuple(output.token_ids) for output in answer.outputs], lengths, accepted


def assert_right(llm: Any, enumerated: tuple[list[int], dict[Outcome, float]]) -> None:
    prompt, probs = enumerated
    found, lengths, accepted = sample(llm, prompt)
    cut_short = sum(steps for length, steps in lengths.items() if length < D_MAX)
    tried = sum(length * steps for length, steps in lengths.items())
    assert cut_short > SAMPLES / 10, "next to nothing is cut: the test would show stock verification only"
    assert SAMPLES / 10 < accepted < tried - SAMPLES / 10, "too few drafts are kept, or too few are refused"
    assert p_value(found, probs) >= ALPHA


def test_greedy_drafts(engine: Engine, enumerated: tuple[list[int], dict[Outcome, float]], classifier: str):
    with engine("c2t:eagle3", D_MAX, OPTIONS, c2t_classifier=classifier, c2t_beta=BETA) as llm:
        assert_right(llm, enumerated)


def test_sampled_drafts_and_the_planted_fault(
    engine: Engine,
    enumerated: tuple[list[int], dict[Outcome, float]],
    classifier: str,
    monkeypatch: pytest.MonkeyPatch,
):
    from c2t_plugin.engines.vllm import v1

    prompt, probs = enumerated
    options = {"c2t_classifier": classifier, "c2t_beta": BETA, "draft_sample_method": "probabilistic"}
    with engine("c2t:draft_model", D_MAX, OPTIONS, **options) as llm:
        assert_right(llm, enumerated)
        llm.collective_rpc("c2t_control", kwargs={"beta": 0.0})
        monkeypatch.setattr(v1.C2TDraftModelProposer, "propose", cut_by_the_drawn_word)
        found, _, accepted = sample(llm, prompt)
        assert accepted > SAMPLES / 10
        assert p_value(found, probs) < ALPHA


def cut_by_the_drawn_word(self: Any, *positional: Any, **keyword: Any) -> list[list[int]]:
    """The fault: a chain ends before the first drawn word that was improbable itself."""
    drafts = super(type(self), self).propose(*positional, **keyword)
    if self._last_draft_probs is None:
        return drafts
    drawn = self._last_draft_probs.gather(2, torch.tensor(drafts)[..., None])[..., 0]
    kept = (drawn >= DRAWN_BELOW).int().cumprod(dim=1).sum(dim=1).tolist()
    return [row[:length] for row, length in zip(drafts, kept, strict=True)]
