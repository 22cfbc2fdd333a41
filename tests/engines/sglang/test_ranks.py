"""Tensor parallelism: two processes over gloo agree on one cut, though each rounded the draft's logits its own way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from benchmarks.cpu_engine import cpu_engine_env  # noqa: E402

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
from c2t_plugin.engines.sglang import ranks, worker
from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.verify.lagged import LaggedRows

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
    made = drafter._step(requests, SimpleNamespace(retrieve_next_token=links))
    lagged_steps.append([made.kept.tolist(), made.rows])
    cuts.append([row.index(-1) for row in links.tolist()])
Path(job["out"]).write_text(json.dumps({"agreed": agreed.tolist(), "depth": depth, "rows": planner.rows,
    "lagged": lagged_steps, "cuts": cuts, "leads": ranks.leads()}))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("waits", [True, False])
def test_all_ranks_take_the_first_ones_cut_depth_and_rows(tmp_path: Path, waits: bool):
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    ranks = []
    for rank, kept in enumerate(MINE):
        job = {
            "rank": rank,
            "kept": kept,
            "depth": (2, 4)[rank],
            "rows": None if waits else (7, 12)[rank],
            "store": str(tmp_path / "store"),
            "out": str(tmp_path / f"{rank}.json"),
        }
        command = [sys.executable, program, json.dumps(job)]
        with (tmp_path / f"{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=cpu_engine_env(os.environ), stdout=log, stderr=log))
    codes = [process.wait(timeout=300) for process in ranks]
    assert codes == [0, 0], "".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [each["agreed"] for each in found] == [MINE[0], MINE[0]]
    assert [each["depth"] for each in found] == [2, 2]
    assert [each["rows"] for each in found] == [None if waits else 7] * 2
    # the window, until the first one's numbers are known: 4 roots and 9 draft tokens
    assert [each["lagged"] for each in found] == [[[MINE[0], rows] for rows in (20, 20, 13, 13)]] * 2
    assert [each["cuts"] for each in found] == [[MINE[0]] * 4] * 2
    assert [each["leads"] for each in found] == [True, False]
