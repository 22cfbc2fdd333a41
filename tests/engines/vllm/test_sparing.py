"""Steps without scores on model runner V1: plain output, drafts verified whole, accepted as a simulation has it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.engines.vllm.planning import Planning  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.support.sglang import spared_log  # noqa: E402
from tests.support.sglang.logged_plan import LoggedPlan  # noqa: E402
from tests.support.sglang.simulate import Target, load_draft  # noqa: E402
from tests.support.sglang.verify_counts import Rule, save_hand_made_classifier  # noqa: E402
from tests.support.vllm.planned_counts import simulated  # noqa: E402
from tests.support.vllm.verify_counts import Steps  # noqa: E402

D_MAX, PROMPTS, NEW_TOKENS = 4, 4, 24
# Prompts until costs are measured and no draft has to be scored any more.
WARM_UPS = 8
NEAR = 1e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> SimpleNamespace:
    """Of each prompt, alone: what vLLM counted, and a plan of what was decided. Then of a worker with a fault."""
    from vllm import SamplingParams

    classifier = save_hand_made_classifier(tmp_path_factory.mktemp("sparing") / "hand.safetensors")
    prompts = [ids[: 30 + 6 * row] for row, ids in enumerate(held_out_prompts(PROMPTS, min_tokens=96, seed=21))]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    steps: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("C2T_CACHE_DIR", "off")
        spared_log.spare(patch.setattr)
        depth_of, kept_of = Planning.__getitem__, Planning.kept

        def depth(self: Any, requests: int) -> int:
            found = depth_of(self, requests)
            steps.append({"depth": 0, "scores": self.planner.scores, "confidence": [], "kept": [0]})
            return found

        def kept(self: Any, drafted: Any, *how: Any) -> list[int]:
            found = kept_of(self, drafted, *how)
            # as deep as it has become
            steps[-1] |= {"depth": len(drafted.confidence[0]), "confidence": drafted.confidence, "kept": found}
            return found

        patch.setattr(Planning, "__getitem__", depth)
        patch.setattr(Planning, "kept", kept)
        with engine("c2t:eagle3", D_MAX, c2t_classifier=str(classifier), c2t_planner="on", c2t_learn="auto") as llm:

            def asked(prompt: list[int]) -> tuple[Steps, LoggedPlan]:
                steps.clear()
                (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
                return Steps.of_output(output), LoggedPlan([*steps])

            for number in range(WARM_UPS):
                asked(prompts[number % PROMPTS])
            found = [asked(prompt) for prompt in prompts]
            llm.collective_rpc(cuts_all)
            faulty = [asked(prompt) for prompt in prompts]
            state = llm.llm_engine.engine_core.engine_core.scheduler.planning.planner.state()
    target = Target(pair_dir() / "target")
    draft, rule = load_draft(pair_dir(), "eagle3", target), Rule(classifier, 0.0)
    plain = [tuple(target.greedy(prompt, NEW_TOKENS)) for prompt in prompts]
    return SimpleNamespace(**locals())


def cuts_all(worker: Any) -> None:
    """The fault: a worker hands over one token less of a draft that it has not scored."""
    drafter = worker.model_runner.drafter
    propose = drafter._propose

    def proposed(*positional: Any, **keyword: Any) -> list[list[int]]:
        found: list[list[int]] = propose(*positional, **keyword)
        return [row[:-1] for row in found] if drafter._spared else found

    drafter._propose = proposed


def expected(served: SimpleNamespace, row: int, plan: LoggedPlan) -> Steps:
    group = [(served.prompts[row], NEW_TOKENS)]
    (request,) = simulated(served.target, served.draft, served.rule, group, plan)  # type: ignore[arg-type]
    return request.counts()


def test_output_is_plain_and_most_drafts_are_not_scored(served: SimpleNamespace):
    assert [counts.output_ids for counts, _ in served.found] == served.plain
    steps = [step for _, plan in served.found for step in plan.steps if step["depth"]]
    spared = [step for step in steps if not step["scores"]]
    assert len(spared) > len(steps) / 3 and len(spared) < len(steps)
    assert all(math.isnan(one) for step in spared for row in step["confidence"] for one in row)
    assert 0.3 < served.state["unscored"] < 1.0


def test_every_step_verifies_and_accepts_as_simulated(served: SimpleNamespace):
    for row, (counts, plan) in enumerate(served.found):
        assert counts == expected(served, row, plan)
        assert plan.off < NEAR
        # but for the last draft, which may be nobody's
        for step in plan.steps[:-1]:
            assert step["scores"] or step["kept"] == [step["depth"]]


def test_a_draft_without_scores_that_is_cut_all_the_same_is_noticed(served: SimpleNamespace):
    assert [counts.output_ids for counts, _ in served.faulty] == served.plain
    steps = [step for _, plan in served.faulty for step in plan.steps[:-1] if not step["scores"]]
    assert any(step["kept"] != [step["depth"]] for step in steps)
