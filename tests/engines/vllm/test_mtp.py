"""The shipped target with its MTP head as one MiMo checkpoint, its classifier beside it: cut as the simulation cuts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import FILE_NAME  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps, UnnormedMtpDraft  # noqa: E402

NEW_TOKENS = 24
D_MAX = 6
BETA = 0.45
# from 2 tokens on: the head's first entry, whose embedding is blanked, is then all it has
LENGTHS = (2, 3, 17, 33, 64, 100)


@pytest.fixture(scope="module")
def run(engine: Engine, mimo: Path) -> SimpleNamespace:
    from vllm import SamplingParams

    target = Target(pair_dir() / "target")
    drawn = held_out_prompts(len(LENGTHS), min_tokens=100, seed=7)
    prompts = [ids[:n] for ids, n in zip(drawn, LENGTHS, strict=True)]
    found = {}
    with engine("c2t:mtp", D_MAX, target=mimo, c2t_beta=BETA) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for mode in ("c2t", "static"):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
            found[mode] = [Steps.of_output(output) for output in outputs]
            llm.collective_rpc("c2t_control", kwargs={"beta": 0.0})
    oracle = Oracle(pair_dir(), target)
    oracle.drafts["mtp"] = UnnormedMtpDraft(mimo, target)
    return SimpleNamespace(found=found, prompts=prompts, target=target, oracle=oracle, classifier=mimo / FILE_NAME)


def test_output_is_plain_decodings(run: SimpleNamespace):
    plain = [tuple(run.target.greedy(ids, NEW_TOKENS)) for ids in run.prompts]
    for mode, steps in run.found.items():
        assert [each.output_ids for each in steps] == plain, mode


def test_the_static_chain_is_the_simulations(run: SimpleNamespace):
    expected = [run.oracle.steps("mtp", prompt, NEW_TOKENS, D_MAX, None, 0.0) for prompt in run.prompts]
    assert run.found["static"] == expected


def test_each_request_is_cut_where_the_classifier_says(run: SimpleNamespace):
    expected = [run.oracle.steps("mtp", prompt, NEW_TOKENS, D_MAX, run.classifier, BETA) for prompt in run.prompts]
    decided = [(mine, theirs) for mine, theirs in zip(run.found["c2t"], expected, strict=True) if theirs is not None]
    assert len(decided) >= len(LENGTHS) - 1, "too many confidences lie at beta: choose another"
    assert [mine for mine, _ in decided] == [theirs for _, theirs in decided]
    lengths = {drafted for mine, _ in decided for drafted, _ in mine.steps}
    assert len(lengths) >= 3, f"only lengths {lengths}: beta cuts too little or too much to tell"
