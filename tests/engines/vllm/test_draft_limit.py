"""Near the longest text that the draft can read vLLM makes no draft and hands over zeros: none is verified."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.engines.vllm.test_network_learning import PAYS  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.sglang.verify_counts import save_hand_made_classifier  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps  # noqa: E402

D_MAX, BETA, NEW_TOKENS = 4, 0.45, 32
# tokens of the prompts, and of the longest text that the draft can read
LENGTHS, LIMIT = (40, 44, 48, 52), 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    drawn = held_out_prompts(len(LENGTHS), min_tokens=96, seed=7)
    return [ids[:length] for ids, length in zip(drawn, LENGTHS, strict=True)]


@pytest.fixture(scope="module", params=["off", "on"])
def served(
    request: pytest.FixtureRequest, engine: Engine, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """What became of requests, one at a time, and what a planner was taught: of each, tokens known and accepted."""
    from vllm import SamplingParams

    folder, taught = tmp_path_factory.mktemp("limit"), list[Any]()
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    write_curve(PAYS, folder / "curve.json")
    planned = {"c2t_planner": str(folder / "curve.json"), "c2t_learn": "calibrate"}
    how: dict[str, Any] = {"off": {"c2t_beta": BETA, "c2t_planner": "off"}, "on": planned}[request.param]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with engine("c2t:eagle3", D_MAX, max_model_len=LIMIT, c2t_classifier=str(classifier), **how) as llm:
        if request.param == "on":
            planning = llm.llm_engine.engine_core.engine_core.scheduler.planning
            planning.planner.learn = lambda *outcomes: taught.extend(outcomes)
        found = [llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0] for ids in prompts]
        if request.param == "on":
            planning.learn()
    yield SimpleNamespace(
        planner=request.param, classifier=classifier, steps=[Steps.of_output(each) for each in found], taught=taught
    )


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(pair_dir(), Target(pair_dir() / "target"))


def test_output_is_plain_decodings(served: SimpleNamespace, oracle: Oracle, prompts: list[list[int]]):
    assert [each.output_ids for each in served.steps] == [
        tuple(oracle.target.greedy(ids, NEW_TOKENS)) for ids in prompts
    ]


def test_only_drafts_that_were_made_are_verified(served: SimpleNamespace, oracle: Oracle, prompts: list[list[int]]):
    if served.planner == "on":
        pytest.skip("how deep a planner drafts hangs on its clock: see the next test")
    decided = 0
    for ids, found in zip(prompts, served.steps, strict=True):
        run = oracle.run("eagle3", ids, NEW_TOKENS, D_MAX, served.classifier, BETA)
        if run is not None:
            assert found.steps == made(len(ids), list(zip(run.draft_lengths, run.accept_lengths, strict=True)))
            decided += len(found.steps) > 0
    assert decided >= 2


def made(prompt: int, steps: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Of simulated steps, (drafted, accepted), those with a draft that vLLM asks for: of a text that leaves room."""
    found, text, read = list[tuple[int, int]](), prompt + 1, prompt
    for drafted, accepted in steps:
        if read + D_MAX > LIMIT:
            break
        found.append((drafted, accepted))
        read, text = text + drafted, text + accepted + 1
    return tuple(each for each in found if each[0])


def test_behind_the_limit_a_planner_verifies_nothing_and_is_taught_nothing(
    served: SimpleNamespace, prompts: list[list[int]]
):
    for ids, found in zip(prompts, served.steps, strict=True):
        drafted = 1 + sum(1 + accepted for _, accepted in found.steps)
        assert drafted > 1 and len(ids) + drafted <= LIMIT + 1 < len(ids) + NEW_TOKENS
    if served.planner == "on":
        known = sum(int((known > 0).sum()) for _, known, *_ in served.taught)
        assert 0 < known <= sum(len(each.steps) for each in served.steps)
