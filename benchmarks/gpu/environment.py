"""What servers get on a GPU: flags of SGLang, and this repository's plugin whether it is installed or not."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# of entry points
SGLANG = "sglang.srt.plugins"
FLOAT32 = {"c2t-float32": "benchmarks.gpu.float32:register"}
# The Triton backend, bfloat16, nothing that a machine without a network would have to fetch or to compile for minutes
FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--dtype", "bfloat16"),
    *("--mm-feature-transport", "cpu", "--disable-flashinfer-autotune", "--disable-prefill-cuda-graph"),
    *("--disable-radix-cache", "--skip-server-warmup", "--mem-fraction-static", "0.7"),
)


def plugin_environment(scratch: Path, float32: bool = False) -> dict[str, str]:
    """This process's environment with the repository on Python's path, and the entry point of its plugin.

    scratch: where the entry point's metadata is written; SGLang finds plugins by installed metadata alone.
    float32: with what a SGLang server needs to compute in float32 on a GPU, see benchmarks/gpu/float32.py.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    added = FLOAT32 if float32 else {}
    project["entry-points"][SGLANG] |= added
    info = scratch / f"c2t_plugin-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    path = [str(ROOT), str(ROOT / "kernels"), str(scratch), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}
    if allowed := environment.get("SGLANG_PLUGINS"):
        # a list of the only plugins that SGLang loads
        environment["SGLANG_PLUGINS"] = ",".join([allowed, *added])
    return environment
