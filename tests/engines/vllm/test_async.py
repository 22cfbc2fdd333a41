"""vLLM's asynchronous engine: exact counts of requests at once, behind an abort and a sleep, and of n > 1."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.sglang.verify_counts import save_hand_made_classifier  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps  # noqa: E402

NEW_TOKENS, D_MAX, BETA = 24, 6, 0.45
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
# vLLM refuses n > 1 of greedy requests; the most probable token alone is the same output
TWICE = GREEDY | {"temperature": 1.0, "top_k": 1, "n": 2}


async def last(engine: Any, ids: list[int], name: str, **sampling: Any) -> Any:
    """The whole answer to one request."""
    from vllm import SamplingParams

    async for output in engine.generate({"prompt_token_ids": ids}, SamplingParams(**sampling), request_id=name):
        found = output
    return found


async def aborted(engine: Any, ids: list[int]) -> int:
    """Tokens that had come when a request was aborted."""
    from vllm import SamplingParams

    sampling = SamplingParams(**GREEDY | {"max_tokens": 300})
    async for output in engine.generate({"prompt_token_ids": ids}, sampling, request_id="aborted"):
        if len(output.outputs[0].token_ids) > 2:
            break
    await engine.abort("aborted")
    return len(output.outputs[0].token_ids)


async def asleep(engine: Any, ids: list[int]) -> Any:
    """The last output of a request that ran when the engine was put to sleep. The engine is awake again."""
    from vllm import SamplingParams

    sampling = SamplingParams(**GREEDY | {"max_tokens": 300})
    async for output in engine.generate({"prompt_token_ids": ids}, sampling, request_id="asleep"):
        if len(output.outputs[0].token_ids) > 2 and not await engine.is_sleeping():
            await engine.sleep(1)
    await engine.wake_up()
    return output.outputs[0]


async def answers(options: dict[str, Any], prompts: list[list[int]]) -> SimpleNamespace:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    # else each answer of a stream has what is new of one output
    whole = RequestOutputKind.FINAL_ONLY
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    try:
        together = [last(engine, ids, f"r{row}", **GREEDY) for row, ids in enumerate(prompts)]
        found = await asyncio.gather(*together)
        ended = await aborted(engine, prompts[0])
        behind = [await last(engine, ids, f"b{row}", **GREEDY) for row, ids in enumerate(prompts[:2])]
        twice = await last(engine, prompts[1], "twice", output_kind=whole, **TWICE)
        slept = await asleep(engine, prompts[0])
        awake = [await last(engine, ids, f"a{row}", **GREEDY) for row, ids in enumerate(prompts[:2])]
    finally:
        engine.shutdown()
    return SimpleNamespace(
        together=[Steps.of_output(each) for each in found],
        ended=ended,
        behind=[Steps.of_output(each) for each in behind],
        slept=slept,
        awake=[Steps.of_output(each) for each in awake],
        twice=[Steps.of_output(SimpleNamespace(outputs=[each])) for each in twice.outputs],
    )


@pytest.fixture(scope="module")
def served(layout: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    classifier = save_hand_made_classifier(tmp_path_factory.mktemp("async") / "hand.safetensors")
    oracle = Oracle(pair_dir(), Target(pair_dir() / "target"))
    known = [
        (ids, steps)
        for ids in held_out_prompts(7, seed=5)
        if (steps := oracle.steps("eagle3", ids, NEW_TOKENS, D_MAX, classifier, BETA)) is not None
    ][:4]
    draft = {"method": "c2t:eagle3", "model": str(layout / "eagle3"), "num_speculative_tokens": D_MAX}
    options = {
        "model": str(layout / "target"),
        "speculative_config": {**draft, "c2t_classifier": str(classifier), "c2t_beta": BETA},
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**28,
        "per_request_spec_decode_metrics": "detailed",
    }
    found = asyncio.run(answers(options, [ids for ids, _ in known]))
    return SimpleNamespace(found=found, expected=[steps for _, steps in known])


def test_each_request_is_cut_where_the_classifier_says(served: SimpleNamespace):
    assert served.found.together == served.expected


def test_what_follows_an_aborted_request_is_cut_as_ever(served: SimpleNamespace):
    assert 2 < served.found.ended < 300
    assert served.found.behind == served.expected[:2]


def test_both_of_two_outputs_are_cut_as_one(served: SimpleNamespace):
    assert served.found.twice == [served.expected[1]] * 2


def test_what_follows_a_sleep_is_cut_as_ever(served: SimpleNamespace):
    """On a CPU vLLM aborts what runs and forgets cached prefixes; weights and keys stay where they are."""
    assert served.found.slept.finish_reason == "abort" and 2 < len(served.found.slept.token_ids) < 300
    assert served.found.awake == served.expected[:2]
