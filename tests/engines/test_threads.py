"""What threads of a server take of its processor: none has a team of OpenMP of its own, which slows down all others.

With more threads in teams than cores libgomp has all of them sleep between two operations. A fit in a thread that asked
torch for a product made a CPU server's steps 15% longer, for as long as that thread was there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from c2t_plugin.classifier import load_classifier

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts as Linux does")]

PROGRAM = """
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.pairs.toy import SHIPPED
from c2t_plugin.classifier import CALIBRATED_NAME, load_classifier
from c2t_plugin.engines.learned import LearnedFile
from c2t_plugin.planner.network_learner import NetworkLearner

D_MAX, ROWS = 4, 32


def threads():
    return len(os.listdir("/proc/self/task"))


def product(side=512):
    return torch.ones(side, side) @ torch.ones(side, side)


product()
found = {"alone": threads()}
classifier = load_classifier(SHIPPED / "eagle3" / CALIBRATED_NAME)
fits = ThreadPoolExecutor(1)
learner = NetworkLearner(classifier, D_MAX, background=False, thread=fits)
chance, rounds = torch.Generator().manual_seed(0), ThreadPoolExecutor(1)
for step in range(60):
    stats = torch.rand((ROWS, D_MAX, 3), generator=chance)
    stats[..., 0] = -stats[..., 0]
    accepted = torch.randint(0, D_MAX + 1, (ROWS,), generator=chance)
    learner.observe(stats, torch.full((ROWS,), D_MAX), accepted, [f"{step} {row}" for row in range(ROWS)])
    if learner.calibration._fitting is not None:
        learner.calibration._fitting.exception()
    if learner.due.is_set():
        rounds.submit(learner.train).result()
    learner.settle()
pair = {"target": "a", "draft": "b", "kind": "eagle3"}
file = LearnedFile(Path(sys.argv[1]), classifier, pair, lambda: learner.network)
file.close({"learnt": learner.state()})
found |= {"with three": threads(), "fits": learner.fits, "rounds": learner.batches, "failed": file.failed}
found["written"] = Path(sys.argv[1]).is_file()
# the fault: a product in a thread
other = ThreadPoolExecutor(1)
other.submit(product).result()
found["with a product in a fourth"] = threads()
print(json.dumps(found))
"""


def test_no_thread_of_a_server_that_learns_has_a_team_of_its_own(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "learned.safetensors")]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fits"] > 5 and found["rounds"] > 0 and found["written"] and not found["failed"], found
    assert found["with three"] == found["alone"] + 3, found
    assert found["with a product in a fourth"] > found["with three"] + 1, found


ENDS = """
import sys

import torch

from benchmarks.pairs.toy import SHIPPED
from c2t_plugin.classifier import CALIBRATED_NAME, load_classifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines import learning
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.step_planner import StepPlanner

classifier = load_classifier(SHIPPED / "eagle3" / CALIBRATED_NAME)
pair = {"target": "a", "draft": "b", "kind": "eagle3"}
learner = learning.calibration(C2TConfig(learn="calibrate"), classifier, 4, lambda: pair)
curve = CostCurve(verify=((1, 1.0), (24, 2.0)), draft=((1, 0.2), (24, 0.25)))
planner = StepPlanner(curve, None, steps=4, most=4, device=torch.device("cpu"), depths=(0, 4), calibration=learner)
learning.report(planner, sys.argv[1], classifier, lambda: pair)
# told of enough for a fit, which is due as it ends
for request in range(40):
    planner._outcomes.append((torch.full((1, 4, 2), 0.5), torch.tensor([4]), torch.tensor([2]), [request]))
"""


def test_the_file_has_what_was_learnt_until_the_end(tmp_path: Path) -> None:
    file = tmp_path / "learned.safetensors"
    subprocess.run([sys.executable, "-c", ENDS, str(file)], check=True)
    assert load_classifier(file).spec.training["learned"]["seen"] == 160
