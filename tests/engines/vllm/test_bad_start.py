"""A bad option ends the start of vLLM's server, by either command, with one line; so does a bad learned file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.serving.engines import ENGINES, Device  # noqa: E402
from benchmarks.serving.process import free_port  # noqa: E402
from benchmarks.serving.server import Server  # noqa: E402
from tests.support.vllm.command import vllm_command  # noqa: E402


def says_in_one_line(line: list[str], values: Mapping[str, str], said: str) -> None:
    """A command that is refused says why in its last line, without a traceback."""
    done = subprocess.run(line, capture_output=True, text=True, env=values, timeout=300)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith(f"C2T: {said}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("entry", ["module", "vllm serve"])
def test_a_bad_option_ends_the_start_with_one_line(layout: Path, entry: str, tmp_path: Path):
    draft = {"method": "c2t:eagle3", "model": str(layout / "eagle3"), "num_speculative_tokens": 6, "c2t_mode": "tree"}
    options = ["--speculative-config", json.dumps(draft)]
    launch = ENGINES["vllm"].launch(layout / "target", options, Device.CPU)
    module = Server(launch, log=tmp_path / "log")
    line, values = module.command(free_port()), module.environment()
    if entry == "vllm serve":
        command, values = vllm_command(tmp_path, launch.environment)
        line = [*command, "serve", str(layout / "target"), *options]
    says_in_one_line(line, values, "c2t_mode is 'tree': vLLM has no tree attention")


def test_a_damaged_file_of_what_was_learnt_ends_the_start_with_one_line(layout: Path, tmp_path: Path):
    path = tmp_path / "learnt.safetensors"
    path.write_bytes(b"not what a server has learnt")
    draft = {"method": "c2t:eagle3", "model": str(layout / "eagle3"), "num_speculative_tokens": 6}
    options = ["--speculative-config", json.dumps({**draft, "c2t_learned": str(path)})]
    module = Server(ENGINES["vllm"].launch(layout / "target", options, Device.CPU), log=tmp_path / "log")
    says_in_one_line(module.command(free_port()), module.environment(), f"{path} is not a readable safetensors file")
