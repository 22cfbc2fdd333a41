"""SGLang's own CPU engine on a machine without a GPU, for tests and demonstrations with small models.

SGLang 0.5.23 has a CPU engine but no published wheel of the kernels it calls. `site/` holds stubs in PyTorch, and
the plugin that SGLang finds with them. It is on no import path until `cpu_engine_env` puts it on a child's PYTHONPATH.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SITE = Path(__file__).resolve().parent / "site"


def cpu_engine_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` in which a child Python process runs SGLang on the CPU with the stub kernels.

    Unless they are set, OMP_NUM_THREADS becomes 1, since with small models more threads only wait for one another, and
    TORCH_COMPILE_DISABLE becomes 1: SGLang compiles its tree drafting with torch.compile, which on a CPU takes a C++
    compiler and minutes, for nothing.
    """
    path = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(SITE)]
    return {
        **env,
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"),
        "TORCH_COMPILE_DISABLE": env.get("TORCH_COMPILE_DISABLE", "1"),
        "PYTHONPATH": os.pathsep.join([str(SITE), *path]),
    }
