"""Greedy output is plain decoding's, and each request is cut exactly where an independent simulation cuts it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from tests.engines.vllm.conftest import DRAFTS, Engine  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.sglang.verify_counts import save_hand_made_classifier  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps  # noqa: E402

NEW_TOKENS = 24
BETA = 0.45
D_MAX = 6
LENGTHS = [1, 2, 5, 17, 33, 64, 95, 120]
CAP = 3


def generate(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def control(llm: Any, **values: float) -> dict[str, Any]:
    (state,) = llm.collective_rpc("c2t_control", kwargs=values)
    return state


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    target = Target(pair_dir() / "target")
    drawn = held_out_prompts(len(LENGTHS), min_tokens=96, seed=7)
    prompts = [ids[:n] for ids, n in zip(drawn, LENGTHS, strict=True)]
    return SimpleNamespace(
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, NEW_TOKENS)) for prompt in prompts],
        classifier=save_hand_made_classifier(tmp_path_factory.mktemp("counts") / "hand.safetensors"),
        oracle=Oracle(pair_dir(), target),
    )


@pytest.fixture(scope="module", params=DRAFTS)
def served(request: pytest.FixtureRequest, setting: SimpleNamespace, engine: Engine) -> Iterator[SimpleNamespace]:
    """All steps of one engine by mode, and its state after each."""
    base = request.param
    steps, states = {}, {}
    with engine(f"c2t:{base}", D_MAX, c2t_beta=BETA, c2t_classifier=str(setting.classifier)) as llm:

        def run(mode: str, prompts: list[list[int]]) -> None:
            steps[mode] = [Steps.of_output(output) for output in generate(llm, prompts)]
            states[mode] = control(llm)

        run("c2t", setting.prompts)
        before = control(llm)
        for prompt in setting.prompts[:4]:
            run("alone", [prompt])
            steps.setdefault("one by one", []).extend(steps.pop("alone"))
        states["one by one"] = {name: control(llm)[name] - before[name] for name in ("drafts", "draft_steps")}
        control(llm, max_depth=CAP)
        run("cap", setting.prompts)
        control(llm, beta=0.0, max_depth=D_MAX)
        run("static", setting.prompts)
        control(llm, max_depth=0)
        run("nothing", setting.prompts)
        with pytest.raises(ConfigError, match="beta must be a number"):
            control(llm, beta=2.0, max_depth=D_MAX)
        states["after a refusal"] = control(llm)
    yield SimpleNamespace(base=base, steps=steps, states=states)


@pytest.mark.parametrize("mode", ["c2t", "one by one", "cap", "static", "nothing"])
def test_output_is_plain_decodings(served: SimpleNamespace, setting: SimpleNamespace, mode: str):
    found = [each.output_ids for each in served.steps[mode]]
    assert found == setting.plain[: len(found)]


@pytest.mark.parametrize(
    ("mode", "d_max", "beta"), [("c2t", D_MAX, BETA), ("one by one", D_MAX, BETA), ("cap", CAP, BETA)]
)
def test_each_request_is_cut_where_the_classifier_says(
    served: SimpleNamespace, setting: SimpleNamespace, mode: str, d_max: int, beta: float
):
    found = served.steps[mode]
    expected = [
        setting.oracle.steps(served.base, prompt, NEW_TOKENS, d_max, setting.classifier, beta)
        for prompt in setting.prompts[: len(found)]
    ]
    decided = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs is not None]
    assert len(decided) >= len(found) - 1, "too many confidences lie at beta: choose another"
    assert [mine for mine, _ in decided] == [theirs for _, theirs in decided]
    lengths = {drafted for mine, _ in decided for drafted, _ in mine.steps}
    assert len(lengths) >= 2, f"only lengths {lengths}: beta cuts too little or too much to tell"


def test_beta_zero_is_the_static_chain(served: SimpleNamespace, setting: SimpleNamespace):
    expected = [setting.oracle.steps(served.base, prompt, NEW_TOKENS, D_MAX, None, 0.0) for prompt in setting.prompts]
    assert served.steps["static"] == expected


def test_nothing_is_verified_at_depth_zero(served: SimpleNamespace):
    assert [each.steps for each in served.steps["nothing"]] == [()] * len(LENGTHS)


def test_drafting_ends_when_no_request_is_alive(served: SimpleNamespace):
    """One request at a time: a chain of n kept tokens took n + 1 draft steps, or all of them if none was cut."""
    lengths = [drafted for each in served.steps["one by one"] for drafted, _ in each.steps]
    state = served.states["one by one"]
    # Drafts without a step: those cut at their first token, with one draft step each, and the one behind each request's
    # end, which nobody verifies and which may be of any length.
    unseen = state["drafts"] - len(lengths)
    seen_steps = sum(min(length + 1, D_MAX) for length in lengths)
    assert 0 <= state["draft_steps"] - seen_steps - unseen <= len(served.steps["one by one"]) * (D_MAX - 1)
    assert state["draft_steps"] < 0.8 * D_MAX * state["drafts"]


def test_control_changes_both_or_nothing(served: SimpleNamespace):
    assert {name: served.states["static"][name] for name in ("beta", "max_depth")} == {"beta": 0.0, "max_depth": D_MAX}
    assert served.states["after a refusal"]["max_depth"] == 0
    assert served.states["after a refusal"]["non_finite"] == 0
