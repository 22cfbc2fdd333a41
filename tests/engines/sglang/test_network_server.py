"""`--speculative-c2t-learn network` through a real server: outputs stay, and drafts are cut by the network in force."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import FILE_NAME, NodeClassifier, load_classifier, save_classifier  # noqa: E402
from c2t_plugin.engines.learned import KEY, NETWORK, with_network, with_network_of  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.network import Network  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.planned_rule import D_MAX  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

# Drafts of one request that a window takes are few, so requests are many.
CONCURRENCY, ROUNDS = 8, 40
BETA = 0.4
# Drafts cost next to nothing, so there are some to learn from.
PAYS = CostCurve(verify=((1, 1.0), (64, 1.2)), draft=((1, 0.01), (64, 0.02)))


def state(running: CpuServer) -> dict[str, Any]:
    found: dict[str, Any] = running.request("/get_server_info")["internal_states"][0]["c2t"]
    return found


def blind(classifier: NodeClassifier, path: Path) -> Path:
    """With a network that is as sure of every token, from which much can be learnt."""
    network = Network.of(classifier)
    save_classifier(with_network(classifier, network._replace(out_weight=0 * network.out_weight)), path)
    return path


@pytest.mark.slow
def test_a_learnt_network_cuts_drafts_and_changes_no_output(tmp_path: Path):
    target = Target(pair_dir() / "target")
    prompts = [ids[: 30 + 6 * i] for i, ids in enumerate(held_out_prompts(CONCURRENCY, min_tokens=96, seed=21))]
    plain = [tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts]
    begun = blind(load_classifier(pair_dir() / "eagle3" / FILE_NAME), tmp_path / "blind.safetensors")
    PAYS.save(tmp_path / "curve.json")
    kept = tmp_path / "learned.safetensors"
    flags = (
        *("--speculative-algorithm", "C2T", "--speculative-c2t-base", "eagle3"),
        *("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS["eagle3"])),
        *("--speculative-num-steps", str(D_MAX), "--speculative-c2t-classifier", str(begun)),
        *("--speculative-c2t-planner", str(tmp_path / "curve.json")),
        *("--speculative-c2t-learn", "network", "--speculative-c2t-learned", str(kept)),
        *("--disable-radix-cache", "--skip-server-warmup"),
    )
    with CpuServer(pair_dir() / "target", *flags, log=tmp_path / "server.log") as running:
        assert state(running)["planner"]["learnt"]["network"]["swaps"] == 0
        for _ in range(ROUNDS):
            answers = vc.answers(running, prompts, concurrency=CONCURRENCY)
            assert [tuple(answer["output_ids"]) for answer in answers] == plain
            if state(running)["planner"]["learnt"]["network"]["swaps"]:
                break
            time.sleep(0.2)
        learnt = state(running)["planner"]["learnt"]
        assert learnt["network"]["swaps"] > 0, learnt
        # few enough drafts that no other network is tried to its end
        vc.control(running, beta=BETA)
        found = [vc.Counts.of_answer(answer) for answer in vc.answers(running, prompts[:3], concurrency=1)]
        assert state(running)["planner"]["learnt"]["network"]["swaps"] == learnt["network"]["swaps"]
    assert NETWORK in load_classifier(kept).spec.training[KEY]
    in_force = with_network_of(kept, load_classifier(begun))
    save_classifier(in_force, tmp_path / "in_force.safetensors")
    oracle = vc.Oracle(pair_dir(), target)
    ways = [
        [oracle.counts("eagle3", prompt, D_MAX, path, BETA) for prompt in prompts[:3]]
        for path in (tmp_path / "in_force.safetensors", begun)
    ]
    assert found == ways[0] != ways[1]
    assert [tuple(each.output_ids) for each in found] == plain[:3]
