"""`--speculative-c2t-learn network` through a real server: outputs stay, and drafts are cut by the network in force."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs import smollm2  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import CALIBRATED_NAME, load_classifier, save_classifier  # noqa: E402
from c2t_plugin.engines.learned import KEY, with_network_of  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.support.sglang import faults, learns_fast  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.planned_rule import D_MAX  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

PROMPTS, ROUNDS, TOLD = 48, 20, 6
BETA = 0.4
# Drafts cost next to nothing, so there are some to learn from.
PAYS = CostCurve(verify=((1, 1.0), (64, 1.2)), draft=((1, 0.01), (64, 0.02)))


def state(running: CpuServer) -> dict[str, Any]:
    found: dict[str, Any] = running.request("/get_server_info")["internal_states"][0]["c2t"]
    return found


def kept_swaps(path: Path) -> int:
    """Of the server that wrote this file, until then."""
    found: int = load_classifier(path).spec.training[KEY]["networks"]["swaps"] if path.exists() else 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["sync", "lagged"])
def test_a_learnt_network_cuts_drafts_and_changes_no_output(rows: str, tmp_path: Path):
    """lagged: as a GPU decides, by what came back of steps before."""
    target = Target(pair_dir() / "target")
    prompts = [ids[:64] for ids in held_out_prompts(PROMPTS, min_tokens=96, seed=21)]
    plain = [tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts]
    # of another pair
    begun = Path(smollm2.__file__).parent / "weights" / CALIBRATED_NAME
    write_curve(PAYS, tmp_path / "curve.json")
    kept = tmp_path / "learned.safetensors"
    flags = (
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", "eagle3"),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS["eagle3"])),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-classifier", str(begun)),
        *("--speculative-c2t-planner", str(tmp_path / "curve.json"), "--speculative-c2t-rows", rows),
        *("--speculative-c2t-learn", "network", "--speculative-c2t-learned", str(kept)),
        *("--disable-radix-cache", "--skip-server-warmup"),
    )
    # a hundredth of a core is too little for a network within the rounds where others want the core too
    (tmp_path / "plugins").mkdir()
    plugin = str(faults.install(tmp_path / "plugins", learns_fast.__file__))
    path = os.pathsep.join(filter(None, [plugin, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "BIAS": str(tmp_path / "bias")}
    with CpuServer(pair_dir() / "target", *flags, log=tmp_path / "server.log", env=env, grace=60.0) as running:
        assert state(running)["planner"]["learnt"]["network"]["swaps"] == 0
        for _ in range(ROUNDS):
            answers = vc.answers(running, prompts, concurrency=PROMPTS)
            assert [tuple(answer["output_ids"]) for answer in answers] == plain
            if state(running)["planner"]["learnt"]["network"]["swaps"]:
                break
        vc.control(running, beta=BETA)
        # of these nothing is learnt, so no other network is tried to its end
        own = {"max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True, "custom_params": {"c2t": {"learn": False}}}
        # one whose trial ended with the last round is in force from the next step on
        running.generate(prompts[0], **own)
        learnt = state(running)["planner"]["learnt"]
        assert learnt["network"]["swaps"] > 0, str(learnt)
        found = [vc.Counts.of_answer(running.generate(prompt, **own)) for prompt in prompts[:TOLD]]
        assert state(running)["planner"]["learnt"]["network"]["swaps"] == learnt["network"]["swaps"]
    # written when the server ended
    assert kept_swaps(kept) == learnt["network"]["swaps"]
    in_force = with_network_of(kept, load_classifier(begun))
    save_classifier(in_force, tmp_path / "in_force.safetensors")
    oracle = vc.Oracle(pair_dir(), target)
    ways = [
        [oracle.counts("eagle3", prompt, D_MAX, path, BETA) for prompt in prompts[:TOLD]]
        for path in (tmp_path / "in_force.safetensors", begun)
    ]
    # one whose confidence is as good as beta cannot be told
    told = [(mine, *each) for mine, *each in zip(found, *ways, strict=True) if None not in each]
    assert told and all(mine == now for mine, now, _ in told) and any(now != before for _, now, before in told)
    assert [tuple(each.output_ids) for each in found] == plain[:TOLD]
