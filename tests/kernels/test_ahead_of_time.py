"""Every shipped configuration of every kernel compiles for three GPU generations, without a spill.

On a machine with a GPU of one of them, for that one alone: the others are compiled where there is none.

Run as a program (`python test_ahead_of_time.py MODULE`) this file is its own compiler: a process of its own, since
Triton's interpreter, in which the other kernel tests run, cannot be switched off again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

KIB = 1024
# Shared memory that one block may ask for (CUDA C++ Programming Guide, technical specifications per capability).
SHARED_LIMIT = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
ONES = "_ones"
ROOT = Path(__file__).resolve().parents[2]


def capabilities() -> tuple[int, ...]:
    """What to compile for: the GPU's own capability where there is one, since minutes there are few."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor in SHARED_LIMIT:
            return (10 * major + minor,)
    return tuple(SHARED_LIMIT)


CAPABILITIES = capabilities()
# Hopper, or the one that there is
ONES_FOR = CAPABILITIES[len(CAPABILITIES) // 2 :][:1]
# parts of kernels that others inline
NOT_LAUNCHED = ("c2t_kernels.network.kernel", "c2t_kernels.stats.largest")


def kernel_modules() -> list[str]:
    """Every module of c2t_kernels that defines something for Triton, by its dotted name."""
    spec = importlib.util.find_spec("c2t_kernels")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found = [path for path in sorted(root.rglob("*.py")) if "\n@triton.jit" in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in found]


def resources(cubin: bytes) -> dict[str, int]:
    """What cuobjdump says of the one function in a compiled object: registers, bytes of stack and local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {word: int(number) for word, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    assert set(found) == {"REG", "STACK", "LOCAL"}, text
    return found


def compile_module(name: str) -> list[dict[str, Any]]:
    """Compile a module's CONFIGURATIONS for all CAPABILITIES: one row of resources each.

    A launch with an integer of 1 is compiled apart, with a constant in its place, which is no tensor and has no
    methods: each kernel is therefore compiled once more with all of them 1, for one capability.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows = []
    configurations = configurations_of(name)
    ones = {item.kernel: with_ones(item) for item in configurations}
    for item in (*configurations, *ones.values()):
        for capability in CAPABILITIES if item in configurations else ONES_FOR:
            source = ASTSource(item.kernel, dict(item.signature), dict(item.constexprs), item.attributes)
            options = {"num_warps": item.num_warps, "num_stages": item.num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            rows.append(
                {
                    "name": item.name,
                    "capability": capability,
                    "shared": compiled.metadata.shared,
                    **resources(compiled.asm["cubin"]),
                }
            )
    return rows


def configurations_of(name: str) -> tuple[Any, ...]:
    """What is written down for a module of c2t_kernels in kernels/ahead_of_time; of another, its own."""
    package, _, operation = name.partition(".")
    own = f"ahead_of_time.{operation.replace('.', '_')}" if package == "c2t_kernels" else name
    found: tuple[Any, ...] = getattr(importlib.import_module(own), "CONFIGURATIONS", ())
    return found


def with_ones(item: Any) -> Any:
    """The same launch with 1 for every integer that Triton may specialise."""
    free = {parameter.name for parameter in item.kernel.params if not parameter.do_not_specialize}
    integers = {name for name, kind in item.signature.items() if kind in ("i32", "i64") and name in free}
    signature = {name: "constexpr" if name in integers else kind for name, kind in item.signature.items()}
    constants = {**item.constexprs, **dict.fromkeys(integers, 1)}
    return replace(item, name=f"{item.name}{ONES}", signature=signature, constexprs=constants, aligned=())


def compiled_rows(module: str, path: str = "") -> list[dict[str, Any]]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # the lists are beside the package and not installed with it
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(ROOT / "kernels"), env.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, __file__, module], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def spilled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # A Triton kernel has no arrays of its own in memory: stack or local memory can only be spilled registers.
    return [row for row in rows if row["STACK"] or row["LOCAL"]]


def test_parts_that_are_never_launched_are_modules():
    assert set(NOT_LAUNCHED) < set(kernel_modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in kernel_modules() if name not in NOT_LAUNCHED])
def test_shipped_configurations_compile_without_a_spill(name: str):
    rows = compiled_rows(name)
    assert rows, f"{name} has no CONFIGURATIONS"
    names = {row["name"] for row in rows if not row["name"].endswith(ONES)}
    ones = {row["name"] for row in rows} - names
    assert ones and len(rows) == len(names) * len(CAPABILITIES) + len(ones), f"names are not unique: {sorted(names)}"
    table = "\n".join(map(str, rows))
    assert not spilled(rows), f"spills in {spilled(rows)}\nof\n{table}"
    large = [row for row in rows if row["shared"] > SHARED_LIMIT[row["capability"]]]
    assert not large, f"too much shared memory in {large}\nof\n{table}"


@pytest.mark.slow
def test_a_spill_would_be_seen(tmp_path: Path):
    (tmp_path / "spilling.py").write_text(SPILLING)
    rows = compiled_rows("spilling", str(tmp_path))
    # once more with ones
    assert len(rows) == len(CAPABILITIES) + 1
    assert spilled(rows) == rows


@pytest.mark.slow
def test_a_kernel_that_a_1_breaks_would_be_seen(tmp_path: Path):
    (tmp_path / "breaking.py").write_text(BREAKING)
    with pytest.raises(AssertionError, match="has no attribute 'to'"):
        compiled_rows("breaking", str(tmp_path))


# One warp keeps 512 numbers per thread until their sum is known; a thread has 255 registers.
SPILLING = """
import triton
import triton.language as tl
from ahead_of_time.configuration import Configuration


@triton.jit
def normalise(p_x, p_y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + at)
    tl.store(p_y + at, b_x / tl.sum(b_x))


SIGNATURE = {"p_x": "*fp32", "p_y": "*fp32", "BLOCK": "constexpr"}
CONFIGURATIONS = (Configuration(normalise, "normalise", SIGNATURE, {"BLOCK": 16384}, num_warps=1),)
"""

# In a launch with n = 1 Triton puts a constant for n, which cannot be converted.
BREAKING = """
import triton
import triton.language as tl
from ahead_of_time.configuration import Configuration


@triton.jit
def shift(p_x, n):
    tl.store(p_x, n.to(tl.float32))


CONFIGURATIONS = (Configuration(shift, "shift", {"p_x": "*fp32", "n": "i32"}, {}, num_warps=1),)
"""

if __name__ == "__main__":
    print(json.dumps(compile_module(sys.argv[1])))
