"""Servers of float32: SGLang finds the plugin, and norms of float32, and these alone, go past its kernels."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.cpu_engine import cpu_engine_env
from benchmarks.gpu.environment import plugin_environment

# on a CPU there is no kernel to go to
CHECK = """
import torch
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.layers import layernorm

layernorm.rmsnorm = lambda x, weight, epsilon: "kernel"
layernorm.fused_add_rmsnorm = lambda x, *others: x.fill_(7)
x, residual = torch.randn(2, 3, 8)
norm = layernorm.RMSNorm(8)
norm.weight.data.uniform_(generator=torch.Generator().manual_seed(0))
assert torch.equal(norm.forward_cuda(x), norm.forward_native(x))
for mine, theirs in zip(norm.forward_cuda(x, residual), norm.forward_native(x, residual), strict=True):
    assert torch.equal(mine, theirs)
assert torch.equal(norm.forward_cuda(x, residual=residual)[0], norm.forward_native(x, residual)[0])
half = x.bfloat16()
assert norm.forward_cuda(half) == "kernel"
assert (norm.forward_cuda(half, residual.bfloat16())[0] == 7).all()
print("both ways")
"""


def entry_points(scratch: Path, float32: bool) -> dict[str, str]:
    plugin_environment(scratch, float32)
    (ours,) = distributions(path=[str(scratch)])
    return {entry.name: entry.value for entry in ours.entry_points.select(group="sglang.srt.plugins")}


def test_only_a_server_of_float32_gets_the_plugin(tmp_path: Path):
    plain, both = entry_points(tmp_path / "plain", False), entry_points(tmp_path / "both", True)
    assert plain == {"c2t": "c2t_plugin.engines.sglang.plugin:register"}
    assert both == {**plain, "c2t-float32": "benchmarks.gpu.float32:register"}


def test_a_list_of_allowed_plugins_has_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "c2t,another")
    assert plugin_environment(tmp_path / "plain")["SGLANG_PLUGINS"] == "c2t,another"
    assert plugin_environment(tmp_path / "both", float32=True)["SGLANG_PLUGINS"] == "c2t,another,c2t-float32"


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("float32", [True, False])
def test_norms_of_float32_go_past_the_kernels(tmp_path: Path, float32: bool):
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    environment = cpu_engine_env(plugin_environment(tmp_path / "scratch", float32))
    environment.pop("SGLANG_PLUGINS", None)
    found = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    assert ("both ways" in found.stdout) == float32, found.stderr
