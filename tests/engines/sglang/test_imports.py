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

ROOT = Path(__file__).resolve().parents[3]

# Named: what a server on a GPU with packed rows on Triton loads when it needs it, which no process on a CPU would show.
PROGRAM = """
import importlib, json, sys
from c2t_plugin.engines.sglang import plugin
plugin.register()
for name in sys.argv[1:]:
    importlib.import_module(name)
from c2t_plugin.engines.sglang.patches import APART, PATCHES
handlers = [patch.handler for patch in PATCHES.patches if patch.ours and patch.when != APART]
ours = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0].startswith("c2t_")}
others = [name for name in ("benchmarks", "tests", "hypothesis", "matplotlib") if name in sys.modules]
print(json.dumps([ours, others]))
"""
MOST_LINES = 9_500
# of that which a server looks with once, at start, at its own kernels and its own target
MOST_LINES_OF_CHECKS = 1_445
CHECKS = (
    *("c2t_plugin.engines.sglang.verify.contest", "c2t_plugin.engines.sglang.verify.fitness"),
    *("c2t_plugin.engines.sglang.proof", "c2t_plugin.engines.sglang.warm_up", "c2t_plugin.kernel_checks"),
)
NEVER = (
    *("c2t_plugin.lab", "c2t_plugin.provenance", "c2t_plugin.doctor", "c2t_plugin.cli"),
    # a server that records loads what records
    *("c2t_plugin.traces", "c2t_plugin.engines.served_traces"),
    # one that verifies by another attention than the rest of it loads what does that
    "c2t_plugin.engines.sglang.verify.apart",
    # what looks once, at start: at arguments, in another process, at SGLang's names, at kernels
    *(f"c2t_plugin.engines.sglang.{name}" for name in ("validate", "contract", "checkpoints", "behind_refused")),
    *CHECKS,
)
ADAPTER = "c2t_plugin.engines.sglang"
VERIFY = tuple(f"{ADAPTER}.verify.{name}" for name in ("choice", "triton", "tree_attention"))


def kernels(*operations: str) -> tuple[str, ...]:
    return tuple(f"c2t_kernels.{name}.kernel" for name in ("stats", "pack", "attention", *operations))


# by the mode, what it serves with; chains with the planner that they have by default
MODES = {
    "chain": (
        *(f"{ADAPTER}.{name}" for name in ("worker", "drafters.chain", "drafters.depths", "behind", "verify.lagged")),
        *(f"c2t_plugin.engines.{name}" for name in ("learning", "figures", "curve_cache")),
        *("c2t_plugin.planner.readback", "c2t_plugin.planner.following"),
        *(*VERIFY, *kernels("score", "stop")),
    ),
    "tree": (
        *(f"{ADAPTER}.{name}" for name in ("worker", "drafters.tree", "drafters.segments")),
        *(*VERIFY, *kernels("growth", "spare", "tree_layout", "masks")),
    ),
}
DRAFTERS = {f"{ADAPTER}.drafters.{mode}" for mode in MODES}


@pytest.fixture(scope="module", params=MODES)
def imported(request: pytest.FixtureRequest) -> tuple[dict[str, str], list[str]]:
    program = [sys.executable, "-c", PROGRAM, *MODES[request.param]]
    done = subprocess.run(program, env=cpu_engine_env(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, others = json.loads(done.stdout.splitlines()[-1])
    return ours, others


def test_a_server_loads_few_lines(imported: tuple[dict[str, str], list[str]]) -> None:
    lines = {name: len(Path(file).read_text(encoding="utf-8").splitlines()) for name, file in imported[0].items()}
    largest = sorted(lines, key=lines.__getitem__)[-5:]
    assert sum(lines.values()) <= MOST_LINES, f"{sum(lines.values())} lines, most in {', '.join(largest)}"
    assert "c2t_kernels.pack.kernel" in lines
    assert len(DRAFTERS & lines.keys()) == 1


def test_what_looks_once_is_few_lines_too() -> None:
    places = [ROOT.joinpath(*name.split(".")) for name in CHECKS]
    files = [file for place in places for file in (*place.glob("*.py"), *place.parent.glob(f"{place.name}.py"))]
    lines = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert len(lines) >= len(CHECKS) and 0 < sum(lines.values()) <= MOST_LINES_OF_CHECKS, lines


def test_a_server_loads_nothing_of_lab_and_benchmarks(imported: tuple[dict[str, str], list[str]]) -> None:
    ours, others = imported
    assert [name for name in ours if name.startswith(NEVER)] == []
    assert others == []
