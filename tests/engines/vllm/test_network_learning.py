"""`c2t_learn: network` on vLLM: the scheduler learns, its workers score by what it sends them, and outputs stay."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.pairs import smollm2  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import CALIBRATED_NAME, NodeClassifier, load_classifier  # noqa: E402
from c2t_plugin.engines.vllm.planning import Drafted  # noqa: E402
from c2t_plugin.planner import CostCurve, network_learner  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.engines.vllm.conftest import Engine  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.vllm.verify_counts import Steps  # noqa: E402

D_MAX, PROMPTS, ROUNDS, NEW_TOKENS = 4, 32, 30, 24
WRITTEN_S = 30.0
# Drafts cost next to nothing, so there are some to learn from.
PAYS = CostCurve(verify=((1, 1.0), (64, 1.2)), draft=((1, 0.01), (64, 0.02)))


def test_statistics_stand_behind_what_a_draft_is_sure_of():
    drafted = Drafted([[0.5], [0.25]], 0.1, 0.2, [[-1.0], [-2.0]], [[[1.5, 0.5]], [[2.5, 0.25]]])
    assert drafted.sure().tolist() == [[[0.5, -1.0]], [[0.25, -2.0]]]
    assert drafted.sure(stats=True).tolist() == [[[0.5, -1.0, 1.5, 0.5]], [[0.25, -2.0, 2.5, 0.25]]]
    # of a step that drafted nothing, and of a worker that tells none
    assert Drafted([[], []], 0.0, 0.1, [[], []], []).sure(stats=True).shape == (2, 0, 4)
    assert np.isnan(drafted._replace(stats=()).sure(stats=True)[..., 2:]).all()


def scored_by(worker: Any) -> list[list[float]]:
    return flat(worker.model_runner.drafter.scorer.network)


def flat(network: Any) -> list[list[float]]:
    return [each.flatten().tolist() for each in (network.hidden_weight, network.out_weight, network.out_bias)]


def read_when_written(path: Path) -> NodeClassifier:
    """What it learnt first a server writes at once; the file is there when it is whole."""
    deadline = time.monotonic() + WRITTEN_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return load_classifier(path)


def learnt_from(llm: Any, prompt: list[int], learn: bool) -> tuple[int, Steps]:
    """Draft tokens that the planner has learnt from one request, and its steps."""
    from vllm import SamplingParams

    planning = llm.llm_engine.engine_core.engine_core.scheduler.planning

    def seen() -> int:
        planning.learn()
        return planning.planner.state()["learnt"]["seen"]

    before, own = seen(), {"c2t_learn": learn}
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, extra_args=own)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return seen() - before, Steps.of_output(output)


@pytest.mark.slow
def test_drafts_are_scored_by_the_network_in_force(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vllm import SamplingParams

    # a hundredth of a core is too little for a network within the rounds where others want the core too
    monkeypatch.setattr(network_learner, "SHARE", 0.5)
    write_curve(PAYS, tmp_path / "curve.json")
    target = Target(pair_dir() / "target")
    prompts = [ids[:64] for ids in held_out_prompts(PROMPTS, min_tokens=96, seed=21)]
    plain = [list(target.greedy(prompt, NEW_TOKENS)) for prompt in prompts]
    options = {
        "c2t_planner": str(tmp_path / "curve.json"),
        "c2t_learn": "network",
        # of another pair
        "c2t_classifier": str(Path(smollm2.__file__).parent / "weights" / CALIBRATED_NAME),
        "c2t_learned": str(tmp_path / "learnt.safetensors"),
    }
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with engine("c2t:eagle3", D_MAX, **options) as llm:
        planning = llm.llm_engine.engine_core.engine_core.scheduler.planning
        learner, seen, kept = planning.planner._calibration, list[tuple[int, float]](), planning.kept

        def noted(drafted: Drafted, *rest: Any) -> list[int]:
            sure = torch.from_numpy(drafted.sure(stats=True))
            if sure.shape[1]:
                off = (sure[..., 0] - learner.confidence(sure[..., 1:])).abs().nan_to_num()
                seen.append((learner.swaps, float(off.max())))
            return kept(drafted, *rest)

        planning.kept = noted
        (begun,) = llm.collective_rpc(scored_by)
        for _ in range(ROUNDS):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in outputs] == plain
            if learner.swaps:
                break
        assert learner.swaps, str(learner.state())
        llm.generate([{"prompt_token_ids": prompts[0]}], sampling, use_tqdm=False)
        assert llm.collective_rpc(scored_by) == [flat(learner.network)] != [begun]
        unlearnt, learnt = (learnt_from(llm, prompts[1], learn) for learn in (False, True))
        seen_here = planning.planner.state()["learnt"]["seen"]
    kept = read_when_written(tmp_path / "learnt.safetensors").spec
    assert 0 < kept.training["learned"]["seen"] <= seen_here
    assert kept.pair["kind"] == "eagle3" and kept.pair["target"].startswith("LlamaForCausalLM sha256:")
    # the next engine goes on from there
    with engine("c2t:eagle3", D_MAX, **options) as llm:
        planner = llm.llm_engine.engine_core.engine_core.scheduler.planning.planner
        assert planner.state()["learnt"]["seen"] == kept.training["learned"]["seen"]
        outputs = llm.generate([{"prompt_token_ids": prompts[0]}], sampling, use_tqdm=False)
        assert list(outputs[0].outputs[0].token_ids) == plain[0]
    # of the last step what the text's end has cut off is not known
    *whole, last = learnt[1].steps
    assert unlearnt[0] == 0 and unlearnt[1].output_ids == learnt[1].output_ids == tuple(plain[1])
    least = sum(min(drafted, accepted + 1) for drafted, accepted in whole)
    assert 0 < least <= learnt[0] <= sum(drafted for drafted, _ in (*whole, last))
    assert {swaps > 0 for swaps, _ in seen} == {False, True}
    assert max(off for _, off in seen) < 1e-4
