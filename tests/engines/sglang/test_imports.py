"""What a server process imports of C2T: only what it serves with."""

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

# The worker of a mode, what chains have beside their drafter, what is bound to SGLang's names, the attention that packs
# rows on a GPU, and the kernels that a GPU loads when it first needs them, which a process on a CPU would never show.
PROGRAM = """
import importlib, json, pkgutil, sys
from c2t_plugin.engines.sglang import plugin
plugin.register()
for name in ("worker", "verify.triton", "verify.tree_attention"):
    importlib.import_module(f"c2t_plugin.engines.sglang.{name}")
from c2t_plugin.engines.sglang.drafters import drafter_class
drafter_class(sys.argv[1])
if sys.argv[1] == "chain":
    importlib.import_module("c2t_plugin.engines.sglang.behind")
from c2t_plugin.engines.sglang.patches import PATCHES
handlers = [patch.handler for patch in PATCHES.patches if patch.ours]
import c2t_kernels
for found in pkgutil.walk_packages(c2t_kernels.__path__, "c2t_kernels."):
    importlib.import_module(found.name)
ours = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0].startswith("c2t_")}
others = [name for name in ("benchmarks", "tests", "hypothesis", "matplotlib") if name in sys.modules]
print(json.dumps([ours, others]))
"""
MOST_LINES = 9_500
NEVER = (
    *("c2t_plugin.lab", "c2t_plugin.provenance", "c2t_plugin.doctor", "c2t_plugin.cli"),
    # a server that records loads what records, and one that proves itself what does that, once at start
    *("c2t_plugin.traces", "c2t_plugin.engines.served_traces"),
    *("c2t_plugin.engines.sglang.proof", "c2t_plugin.kernel_checks"),
)


DRAFTERS = {"chain": "c2t_plugin.engines.sglang.drafters.chain", "tree": "c2t_plugin.engines.sglang.drafters.tree"}


@pytest.fixture(scope="module", params=DRAFTERS)
def imported(request: pytest.FixtureRequest) -> tuple[dict[str, str], list[str]]:
    program = [sys.executable, "-c", PROGRAM, request.param]
    done = subprocess.run(program, env=cpu_engine_env(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, others = json.loads(done.stdout.splitlines()[-1])
    return ours, others


def test_a_server_loads_few_lines(imported: tuple[dict[str, str], list[str]]) -> None:
    lines = {name: len(Path(file).read_text(encoding="utf-8").splitlines()) for name, file in imported[0].items()}
    largest = sorted(lines, key=lines.__getitem__)[-5:]
    assert sum(lines.values()) <= MOST_LINES, f"{sum(lines.values())} lines, most in {', '.join(largest)}"
    assert "c2t_kernels.score.kernel" in lines
    assert len(set(DRAFTERS.values()) & lines.keys()) == 1


def test_a_server_loads_nothing_of_lab_and_benchmarks(imported: tuple[dict[str, str], list[str]]) -> None:
    ours, others = imported
    assert [name for name in ours if name.startswith(NEVER)] == []
    assert others == []
