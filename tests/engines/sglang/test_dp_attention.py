"""DP attention: two processes over gloo, each with requests and a planner of its own, take every step alike.

Loads are drawn, with idle ranks and prefills among them, by SGLang's rules of who takes part. Graphs are numbers, and
so is time: a pass takes what its tokens say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from benchmarks.cpu_engine import SITE, cpu_engine_env  # noqa: E402

STEPS = 600
# Of captured graphs, in requests.
SIZES = (1, 2, 4, 8)
# Seconds after which a rank that waits for another gives up.
PATIENCE_S = 120

PROGRAM = """
import json
import random
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch

from c2t_plugin.engines.sglang.dp_attention import Together
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.verify.one_tier import OneTier
from c2t_plugin.engines.sglang.worker import StepMixin
from c2t_plugin.planner.step_planner import StepPlanner

job = json.loads(sys.argv[1])
rank = job["rank"]
torch.distributed.init_process_group("gloo", init_method=f"file://{job['store']}", world_size=2, rank=rank,
    timeout=timedelta(seconds=job["patience_s"]))


class Worker:
    device = "cpu"
    activate_step_by_batch = StepMixin.activate_step_by_batch

    def __init__(self):
        # SGLang's, of up to 8 requests, as far as it is asked
        self.graphs = SimpleNamespace(ragged_verify_mode=True, _ragged_capture_slots=lambda rows: min(rows, 8))
        runner = SimpleNamespace(decode_cuda_graph_runner=self.graphs)
        self.target_worker = SimpleNamespace(model_runner=runner)
        self.adaptive_controller = self

    def planned_depth(self, reqs):
        self.wanted = StepMixin.planned_depth(self, reqs)
        return self.wanted

    def switch(self, depth):
        self.depth, self.graphs.capture_num_tokens = depth, [size * (depth + 1) for size in (1, 2, 4, 8)]


class Alone(Together):
    '''The fault: a rank drafts as deep and verifies as many rows as it would by itself.'''

    def gather(self, step, one, other=0):
        super().gather(step, one, other)
        return [one] * 2, [other] * 2


class Skipping(Together):
    '''The fault: a rank without requests does not ask.'''

    def begin(self, worker, reqs):
        return super().begin(worker, reqs) if reqs else None


def served(kind, steps, seed, packed=False):
    '''Of each step what the ranks had to do; of this rank also what it wanted, depth and rows, and what it got.'''
    script, own, made = random.Random(seed), torch.Generator().manual_seed(rank), Worker()
    now, own_pace = [0.0], random.Random(rank)
    planner = StepPlanner(None, None, steps=4, most=4, device=torch.device("cpu"), depths=(0, 1, 2, 4),
        clock=lambda: now[0])
    packing = OneTier(made.target_worker) if packed else None
    made.c2t = Parts(SimpleNamespace(lower=False), None, None, planner, {}, packing=packing,
        together=kind(torch.distributed.group.WORLD, packing))
    if packed:
        planner.packed, planner.sizes = True, packing.sizes
        planner.wait_for_nothing(9, "cpu")
        plan_rows = planner.plan_rows
        planner.plan_rows = lambda requests: setattr(made, "rows", plan_rows(requests)) or made.rows
    found, loads = [], [3, 3]
    for made.steps in range(steps):
        # SGLang's rules: where one rank prefills nobody drafts; where one decodes all take part
        prefills = [script.random() < 0.15 for _ in loads]
        loads = [max(0, min(9, load + script.choice((-2, -1, 0, 0, 1)) + 3 * news))
            for load, news in zip(loads, prefills)]
        if any(prefills) or not any(loads):
            planner.interrupt()
            found.append([prefills, loads, None, None])
            continue
        made._reqs = [SimpleNamespace(rid=f"{rank} {each}") for each in range(loads[rank])]
        made.wanted = made.depth = made.rows = None
        made.activate_step_by_batch(loads[rank])
        depth, requests = made.depth, loads[rank]
        if not requests or depth is None:
            planner.interrupt()
        else:
            rows = requests * (depth + 1)
            for part, seconds in (("draft", 4e-4 * depth), ("verify", 4e-3 + 1e-4 * rows), ("draft_extend", 1e-3)):
                with planner.timed(part, lambda: rows if part == "verify" else requests):
                    now[0] += seconds * own_pace.uniform(0.9, 1.1)
            if depth:
                sure = torch.rand(requests, depth, generator=own).cumprod(1)
                if packed:
                    planner.note(sure)
                else:
                    planner.keep(torch.full((requests,), depth), torch.zeros(requests, dtype=torch.bool), sure)
        tier = packing.tier if packed else None
        found.append([prefills, loads, [made.wanted, made.rows], [depth, tier]])
    return {"steps": found, "curve": planner.curve is not None}


found = {}
for name, packed in (("windows", False), ("rows", True)):
    found[name] = served(Together, job["steps"], 0, packed)
    found[f"{name} alone"] = served((Together, Alone)[rank], 99, 1, packed)
try:
    served((Together, Skipping)[rank], 99, 2)
except Exception as failure:
    found["skipped"] = f"{type(failure).__name__}: {failure}"
Path(job["out"]).write_text(json.dumps(found))
# else its threads may outlive Python, which ends them by a signal
torch.distributed.destroy_process_group()
"""

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    program, ranks = folder / "rank.py", []
    program.write_text(PROGRAM)
    for rank in range(2):
        job = {"rank": rank, "store": str(folder / "store"), "out": str(folder / f"{rank}.json")}
        command = [sys.executable, program, json.dumps(job | {"steps": STEPS, "patience_s": PATIENCE_S})]
        with (folder / f"{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=cpu_engine_env(os.environ), stdout=log, stderr=log))
    codes = [process.wait(timeout=300) for process in ranks]
    assert codes == [0, 0], "".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def steps_of(found: Found, name: str) -> list[tuple[list[int], Any, Any]]:
    """Of each step in which somebody drafts: requests, what each rank wanted, and what each got."""
    steps = []
    for mine, others in zip(found[0][name]["steps"], found[1][name]["steps"], strict=True):
        assert mine[:2] == others[:2], "the ranks had other work than the script says"
        assert (mine[3] is None) == (others[3] is None) == (any(mine[0]) or not any(mine[1]))
        if mine[3] is not None:
            steps.append((mine[1], (mine[2], others[2]), (mine[3], others[3])))
    return steps


def disagreements(steps: list[tuple[list[int], Any, Any]]) -> list[str]:
    """What is wrong with steps of two ranks, a line for each of them."""
    lines = []
    for loads, wanted, ((depth, tier), other) in steps:
        rows = [each for _, each in wanted if each is not None]
        fitting = [size * (depth + 1) for size in SIZES if size * (depth + 1) >= max(rows, default=0)]
        if [depth, tier] != other:
            lines.append(f"{loads}: {depth, tier} and {other}")
        elif depth != wanted[loads.index(max(loads))][0]:
            lines.append(f"{loads}: depth {depth}, wanted {wanted}")
        elif rows and tier != (None if max(loads) > SIZES[-1] else fitting[0]):
            lines.append(f"{loads}: {tier} rows, wanted {wanted}")
    return lines


@pytest.mark.parametrize("name", ["windows", "rows"])
def test_every_step_is_as_deep_as_the_rank_with_the_most_requests_plans(found: Found, name: str):
    taken = steps_of(found, name)
    assert disagreements(taken) == []
    # there was something to agree on: both decided, against the other's wish too, and each waited for the other
    assert len(taken) > STEPS / 3 and len({got[0][0] for *_, got in taken}) == 4
    for rank in range(2):
        assert sum(loads[rank] == 0 for loads, *_ in taken) > 9
        overruled = [wanted for loads, wanted, _ in taken if loads[rank] > loads[1 - rank] > 0]
        assert sum(mine != others for (mine, _), (others, _) in overruled) > 9
    # nobody's first steps were lost for measuring
    assert all(each[name]["curve"] for each in found)


def test_all_ranks_verify_as_many_rows_as_one_of_them_wants(found: Found):
    taken = steps_of(found, "rows")
    tiers = [got[0][1] for *_, got in taken]
    # batches that no graph has room for among them
    assert tiers.count(None) > 3 and len(set(tiers)) > 6
    packed = [(tier, loads, got[0][0]) for tier, (loads, _, got) in zip(tiers, taken, strict=True) if tier is not None]
    # fewer rows than the larger batch's windows, also beside an idle rank
    assert sum(tier < max(loads) * (depth + 1) for tier, loads, depth in packed) > 9
    assert sum(0 in loads for _, loads, _ in packed) > 9


@pytest.mark.parametrize("name", ["windows alone", "rows alone"])
def test_a_rank_that_goes_by_itself_is_found(found: Found, name: str):
    assert len(disagreements(steps_of(found, name))) > 9


@pytest.mark.parametrize(("apart", "expected"), [(True, (True, "attention")), (False, (False, "all"))])
def test_what_is_said_of_a_request_is_agreed_on_by_those_that_have_it(
    sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, apart: bool, expected: tuple[bool, str]
):
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang import ranks

    def group(name: str, place: int, size: int = 2) -> SimpleNamespace:
        return SimpleNamespace(world_size=size, rank_in_group=place, broadcast=lambda tensor, src: name)

    monkeypatch.setattr(ranks, "apart", lambda: apart)
    # the third of four ranks: the first of the second group
    monkeypatch.setattr(ranks, "get_tp_group", lambda: group("all", 2, 4))
    monkeypatch.setattr(ranks, "get_attn_tp_group", lambda: group("attention", 0))
    assert (ranks.leads(), ranks.agree(torch.zeros(1))) == expected
    # one rank in a group is not the only one of its server
    monkeypatch.setattr(ranks, "get_attn_tp_group", lambda: group("attention", 0, 1))
    assert not ranks.alone() and isinstance(ranks.agree(torch.zeros(1)), torch.Tensor) == apart


def test_a_rank_that_does_not_take_part_ends_both_with_one_line(found: Found):
    for each in found:
        assert each["skipped"].startswith("C2TError: ranks are at steps ")
        assert "\n" not in each["skipped"]
