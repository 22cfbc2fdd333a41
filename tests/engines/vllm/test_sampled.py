"""Temperature 0.8: what vLLM samples with C2T has the joint distribution of the target alone.

Greedy drafts are a function of the text so far. Sampled ones are not: there a rule that dropped a token for the token's
own probability would bias the output. C2T's looks at the largest probability instead; the fault is planted too, and
so it is while a planner learns from what is sampled.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from c2t_plugin.planner import CostCurve, network_learner  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
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
from tests.support.sglang.verify_counts import save_hand_made_classifier, save_untaught_classifier  # noqa: E402

BETA = 0.45
D_MAX = 3
OPTIONS = {"max_num_seqs": 48, "seed": 20251}
# Of the planted fault: a drawn word is dropped for a probability below this.
DRAWN_BELOW = 0.5
# Tokens beside others cost something, drafting next to nothing: a planner drafts, and cuts.
CUTS = CostCurve(verify=((1, 1.0), (400, 3.5)), draft=((1, 0.01), (64, 0.02)))
# While a planner learns: samples of a call, calls, and calls that a change may take.
PART, PARTS, MOST_PARTS = 500, 3, 16


@pytest.fixture(scope="module")
def enumerated() -> tuple[list[int], dict[Outcome, float]]:
    return most_varied_prompt()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_hand_made_classifier(tmp_path_factory.mktemp("sampled") / "hand.safetensors"))


def sample(llm: Any, prompt: list[int], count: int = SAMPLES) -> tuple[list[Outcome], Counter[int], int]:
    """So many outcomes, steps by number of drafts, and the drafts accepted."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, max_tokens=TOKENS, ignore_eos=True, n=count)
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    lengths, accepted = Counter[int](), 0
    for output in answer.outputs:
        if output.spec_decode_metrics is not None:
            lengths.update(output.spec_decode_metrics.per_step_drafted)
            accepted += sum(output.spec_decode_metrics.per_step_accepted)
    assert len(answer.outputs) == count
    return [tuple(output.token_ids) for output in answer.outputs], lengths, accepted


def assert_right(llm: Any, enumerated: tuple[list[int], dict[Outcome, float]]) -> None:
    prompt, probs = enumerated
    found, lengths, accepted = sample(llm, prompt)
    assert_drafts_were_tried_and_cut(len(found), lengths, accepted)
    assert p_value(found, probs) >= ALPHA


def assert_drafts_were_tried_and_cut(samples: int, lengths: Counter[int], accepted: int) -> None:
    cut_short = sum(steps for length, steps in lengths.items() if length < D_MAX)
    tried = sum(length * steps for length, steps in lengths.items())
    assert cut_short > samples / 10, "next to nothing is cut: the test would show stock verification only"
    assert samples / 10 < accepted < tried - samples / 10, "too few drafts are kept, or too few are refused"


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


@pytest.mark.parametrize("learn", ["calibrate", "network"])
def test_a_planner_that_learns_from_them(
    learn: str,
    engine: Engine,
    enumerated: tuple[list[int], dict[Outcome, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from c2t_plugin.engines.vllm import v1

    monkeypatch.setattr(network_learner, "SHARE", 0.5)
    prompt, probs = enumerated
    write_curve(CUTS, tmp_path / "curve.json")
    begun = str(save_untaught_classifier(tmp_path / "untaught.safetensors"))
    rule = {"c2t_classifier": begun, "c2t_planner": str(tmp_path / "curve.json"), "c2t_learn": learn}
    with engine("c2t:draft_model", D_MAX, OPTIONS, **rule, draft_sample_method="probabilistic") as llm:
        learner = llm.llm_engine.engine_core.engine_core.scheduler.planning.planner._calibration

        def changes() -> int:
            return int(learner.swaps if learn == "network" else learner.in_force is not None)

        seen, found, lengths, accepted = [changes()], list[Outcome](), Counter[int](), 0
        # some before and some after, however long it takes
        while len(seen) <= PARTS or (not seen[-2] and len(seen) <= MOST_PARTS):
            part, of_length, hits = sample(llm, prompt, PART)
            found, lengths, accepted = found + part, lengths + of_length, accepted + hits
            seen.append(changes())
        assert seen[0] == 0 < seen[-2], f"nothing was learnt while it sampled: {learner.state()}"
        assert_drafts_were_tried_and_cut(len(found), lengths, accepted)
        assert p_value(found, probs) >= ALPHA
        if learn == "network":
            # either way of learning cuts drafts in the same place
            monkeypatch.setattr(v1.C2TDraftModelProposer, "propose", cut_by_the_drawn_word)
            found, _, accepted = sample(llm, prompt)
            assert accepted > len(found) / 10
            assert p_value(found, probs) < ALPHA


def cut_by_the_drawn_word(self: Any, *positional: Any, **keyword: Any) -> list[list[int]]:
    """The fault: a chain ends before the first drawn word that was improbable itself."""
    drafts = super(type(self), self).propose(*positional, **keyword)
    if self._last_draft_probs is None or not any(drafts):
        return drafts
    drawn = self._last_draft_probs.gather(2, torch.tensor(drafts)[..., None])[..., 0]
    kept = (drawn >= DRAWN_BELOW).int().cumprod(dim=1).sum(dim=1).tolist()
    return [row[:length] for row, length in zip(drafts, kept, strict=True)]
