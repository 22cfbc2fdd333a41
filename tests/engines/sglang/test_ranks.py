"""Tensor parallelism: two processes over gloo agree on one cut, though each rounded the draft's logits its own way.

So do those whose planners learn, each from the confidences that it computed itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from benchmarks.cpu_engine import cpu_engine_env  # noqa: E402

Found = tuple[bool, list[dict[str, Any]]]
# What one rank would verify of each request, and the other.
MINE = ([3, 0, 2, 4], [3, 1, 2, 0])

PROGRAM = """
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.distributed import parallel_state

from c2t_kernels import early_stop
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.engines.sglang import ranks, worker
from c2t_plugin.engines.sglang.drafters import chain
from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.verify.lagged import PlannedRows
from c2t_plugin.engines.sglang.verify.predicted import LaggedRows
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.network import Network
from c2t_plugin.planner.network_learner import NetworkLearner, Trial
from c2t_plugin.planner.step_planner import StepPlanner

torch.manual_seed(0)
BEGUN = NodeClassifier(ClassifierSpec()).requires_grad_(False)
job = json.loads(sys.argv[1])
rank = job["rank"]
torch.distributed.init_process_group("gloo", init_method=f"file://{job['store']}", world_size=2, rank=rank)
group = parallel_state.init_model_parallel_group(
    [[0, 1]], rank, "gloo", use_pynccl=False, use_custom_allreduce=False, use_mscclpp=False,
    use_torch_symm_mem_allreduce=False, group_name="tp",
)
ranks.get_tp_group = lambda: group
kept = torch.tensor(job["kept"], dtype=torch.int32)
agreed = ranks.agree(kept)
planner = SimpleNamespace(begin=lambda requests, whole, own: job["depth"], plan_rows=lambda requests: job["rows"])
parts = Parts(scorer=SimpleNamespace(lower=False), counts=None, recorder=None, planner=planner, configuration={})
step = SimpleNamespace(c2t=parts, device="cpu")
depth = worker.StepMixin.planned_depth(step, [])
worker.StepMixin.plan_rows(step, 0)
assert planner.depth == depth
lagged = LaggedRows(tuple, "cpu", 4)
parts.scorer = SimpleNamespace(
    drafted=lambda steps: None,
    sure=lambda requests: None,
    end_within=lambda requests, budget, links: (
        kept, early_stop(torch.ones(requests, 4), 0.5, kept, budget=budget, links=links)
    ),
)
parts.planner, parts.lagged = None, lagged
requests = SimpleNamespace(reqs=[SimpleNamespace(rid=rid) for rid in "abcd"])
drafter, lagged_steps, cuts = ChainDrafter(SimpleNamespace(speculative_num_steps=4), parts), [], []
for _ in range(4):
    links = torch.arange(1, 6).repeat(4, 1)
    made = drafter._step(requests, SimpleNamespace(retrieve_next_token=links, draft_token=links))
    lagged_steps.append([made.kept.tolist(), made.rows])
    cuts.append([row.index(-1) for row in links.tolist()])


def seeded(*numbers):
    return torch.Generator().manual_seed(hash(numbers))


def drawn(number):
    '''(4, 4) confidences of a step's drafts as this rank computes them, and (4,) how many tokens are accepted.'''
    lowest = 0.6 if number // 75 % 2 == 0 else 0.1
    chance = lowest + 0.4 * torch.rand(4, 4, generator=seeded(number))
    # of two requests little is accepted, so that fewer rows than all pay at a depth that does
    chance[2:] *= 0.5
    accepted = (torch.rand(4, 4, generator=seeded(number, 1)) < chance).int().cumprod(1).sum(1)
    rounding = 0.1 * torch.rand(4, 4, generator=seeded(number, 2, rank))
    return (chance.cumprod(1).sqrt() - rounding).clamp(0.01, 0.99), accepted


def learnt(steps, network=False):
    '''What a planner that learns decides in each step, and what it has learnt then. network: the classifier too.'''
    calibration = NetworkLearner(BEGUN, 4, background=False) if network else Calibration(4)
    curve = CostCurve(verify=((1, 1.0), (24, 2.0)), draft=((1, 0.2), (24, 0.25)))
    planner = parts.planner = StepPlanner(curve, None, steps=4, most=4, device=torch.device("cpu"),
        depths=(0, 1, 2, 4), calibration=calibration)
    planner.packed, parts.lagged, parts.scorer = True, None, SimpleNamespace(lower=False)
    if job["rows"] is not None:
        planner.wait_for_nothing(4, "cpu")
        parts.lagged = PlannedRows(planner)
    drafter, decided = ChainDrafter(SimpleNamespace(speculative_num_steps=4), parts), []
    for number in range(steps):
        depth = worker.StepMixin.planned_depth(step, requests.reqs)
        worker.StepMixin.plan_rows(step, 4)
        sure, accepted = drawn(number)
        sure, whole = sure[:, :depth], torch.full((4,), depth, dtype=torch.int32)
        if network:
            stats = torch.stack([sure.log(), 2 - 2 * sure, sure], dim=-1)
            sure = torch.cat([calibration.confidence(stats)[..., None], stats], dim=-1)
        parts.scorer = SimpleNamespace(
            lower=False,
            cuts=False,
            drafted=lambda steps: None,
            sure=lambda requests: sure,
            own_beta=lambda requests: torch.zeros(requests, dtype=torch.bool),
            end=lambda requests, links: whole,
            end_within=lambda requests, budget, links: (
                whole, early_stop(sure[..., 0].contiguous() if network else sure, 0.0, whole, budget=budget)
            ),
        )
        drafter._scorer = parts.scorer
        if not depth:
            decided.append([0, planner.rows, None, []])
            continue
        links = torch.arange(1, depth + 2).repeat(4, 1)
        made = drafter._step(requests, SimpleNamespace(retrieve_next_token=links, draft_token=links))
        verified = made.kept.long()
        planner.learn((made.sure, verified, accepted.minimum(verified), [f"{number // 8} {row}" for row in range(4)]))
        decided.append([depth, planner.rows, made.rows, verified.tolist()])
        if network and number == steps // 3 and ranks.leads():
            # as if a candidate had proved better
            other = Network(*(2 * each for each in calibration.network))
            calibration._settled = Trial(other, calibration.calibration, 0)
    if network:
        return {"decided": decided, "swaps": calibration.swaps, "weights": calibration.network.out_weight.tolist()}
    return {"decided": decided, "fits": calibration.fits, "offsets": calibration.learnt.offsets.tolist()}


together, networks = learnt(300), learnt(300, network=True)
# the fault: nobody tells the others
ranks.agree = chain.agree = ranks.agree_on = lambda mine: mine
apart = learnt(300)
Path(job["out"]).write_text(json.dumps({"agreed": agreed.tolist(), "depth": depth, "rows": planner.rows,
    "lagged": lagged_steps, "cuts": cuts, "leads": ranks.leads(), "together": together, "networks": networks,
    "apart": apart, "begun": Network.of(BEGUN).out_weight.tolist()}))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[True, False], ids=["waits", "waits for nothing"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Whether steps wait for their number of rows, and what each rank wrote."""
    waits, folder = request.param, tmp_path_factory.mktemp("ranks")
    program = folder / "rank.py"
    program.write_text(PROGRAM)
    ranks = []
    for rank, kept in enumerate(MINE):
        job = {
            "rank": rank,
            "kept": kept,
            "depth": (2, 4)[rank],
            "rows": None if waits else (7, 12)[rank],
            "store": str(folder / "store"),
            "out": str(folder / f"{rank}.json"),
        }
        command = [sys.executable, program, json.dumps(job)]
        with (folder / f"{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=cpu_engine_env(os.environ), stdout=log, stderr=log))
    codes = [process.wait(timeout=300) for process in ranks]
    assert codes == [0, 0], "".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    return waits, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_take_the_first_ones_cut_depth_and_rows(found: Found):
    waits, ranks = found
    assert [each["agreed"] for each in ranks] == [MINE[0], MINE[0]]
    assert [each["depth"] for each in ranks] == [2, 2]
    assert [each["rows"] for each in ranks] == [None if waits else 7] * 2
    # the window, until the first one's numbers are known: 4 roots and 9 draft tokens
    assert [each["lagged"] for each in ranks] == [[[MINE[0], rows] for rows in (20, 20, 13, 13)]] * 2
    assert [each["cuts"] for each in ranks] == [[MINE[0]] * 4] * 2
    assert [each["leads"] for each in ranks] == [True, False]


def decided_alike(waits: bool, mine: dict[str, Any], others: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `learnt` gave on each rank, where they took the same steps and there was something to decide."""
    assert mine["decided"] == others["decided"]
    depths, rows, _, kept = zip(*mine["decided"], strict=True)
    assert len(set(depths)) > 1 and any(min(each) < depth for depth, each in zip(depths, kept, strict=True) if depth)
    assert all((each is None) == waits for each in rows)
    return mine, others


def test_ranks_that_learn_apart_decide_alike(found: Found):
    waits, ranks = found
    mine, others = decided_alike(waits, *(each["together"] for each in ranks))
    # each learnt from confidences of its own
    assert min(mine["fits"], others["fits"]) > 3 and mine["offsets"] != others["offsets"]
    # the first one's decisions are what it decides by itself; the other one's are not
    assert ranks[0]["apart"] == mine
    assert ranks[1]["apart"]["decided"] != mine["decided"]


def test_the_first_ones_network_decides_for_all(found: Found):
    waits, ranks = found
    mine, others = decided_alike(waits, *(each["networks"] for each in ranks))
    # nobody else has another
    assert (mine["swaps"], others["swaps"]) == (1, 0)
    assert mine["weights"] != ranks[0]["begun"] == others["weights"]
