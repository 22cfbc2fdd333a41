"""Who may import whom, and who may read the environment: checked on the syntax tree, so lazy imports count too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("sglang", "vllm")
NEVER = ("tests", "benchmarks", "ahead_of_time")
NOT_CORE = ("c2t_plugin.engines", "c2t_plugin.lab")
SHARED = (
    *("checkpoints", "curve_cache", "figures", "host_chains", "host_scorer", "learned", "learning"),
    "served_traces",
)
FRONT_ENDS = ("c2t_plugin/cli.py", "c2t_plugin/doctor.py")

# path prefix -> top-level names or dotted prefixes that files below it must not import; the first match counts
FORBIDDEN = {
    "kernels/ahead_of_time/": ("tests", "benchmarks", *ENGINES, "c2t_plugin", "transformers"),
    "kernels/c2t_kernels/": (*NEVER, *ENGINES, "c2t_plugin", "transformers"),
    "c2t_plugin/engines/contract.py": (*NEVER, *ENGINES, "torch", "transformers"),
    **{f"c2t_plugin/engines/{shared}.py": (*NEVER, *ENGINES, "transformers", "c2t_plugin.lab") for shared in SHARED},
    "c2t_plugin/engines/sglang/": (*NEVER, "vllm", "c2t_plugin.lab", "c2t_plugin.engines.vllm"),
    "c2t_plugin/engines/vllm/": (*NEVER, "sglang", "c2t_plugin.lab", "c2t_plugin.engines.sglang"),
    "c2t_plugin/lab/": (*NEVER, *ENGINES, "c2t_plugin.engines"),
    **{path: (*NEVER, *ENGINES) for path in FRONT_ENDS},
    # decides on the host, by so few numbers that torch takes three times as long for them as numpy
    "c2t_plugin/planner/": (*NEVER, *ENGINES, "transformers", *NOT_CORE),
    "c2t_plugin/": (
        *NEVER,
        *ENGINES,
        "numpy",
        "transformers",
        *NOT_CORE,
    ),
    # plugins of SGLang
    "benchmarks/gpu/float32.py": ("tests", "vllm"),
    "benchmarks/cpu_engine/site/": ("tests", "vllm"),
    # what a step of either engine dispatches, the engine itself being a stub on vLLM
    "benchmarks/operations/vllm_steps.py": ("tests", *ENGINES, "c2t_plugin.engines.sglang"),
    "benchmarks/operations/": ("tests", "vllm", "c2t_plugin.engines.vllm"),
    # SGLang's own tests of a server
    "benchmarks/serving/kits_inside.py": ("tests", "vllm"),
    # vLLM writes the real target's own text
    "benchmarks/pairs/smollm2/own_text.py": ("tests", "sglang", "c2t_plugin.engines"),
    "benchmarks/pairs/": ("tests", *ENGINES, "c2t_plugin.engines"),
    "benchmarks/": ("tests", *ENGINES),
}


def source_files() -> list[str]:
    folders = ("kernels", "c2t_plugin", "benchmarks")
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: str, source: str) -> set[str]:
    """Dotted names that a file imports; relative ones are resolved against its place in the repository."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = Path(path).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *filter(None, [node.module])])
            names.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return names


def violations(path: str, source: str) -> list[str]:
    forbidden = next(names for prefix, names in FORBIDDEN.items() if path.startswith(prefix))
    return sorted(
        name for name in imported(path, source) for bad in forbidden if name == bad or name.startswith(f"{bad}.")
    )


def variable_reads(source: str) -> list[str]:
    """C2T_* names that are looked up somewhere: mapping[...], mapping.get(...), getenv(...), `... in mapping`."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            found.append(node.slice)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found.extend(node.args[:1] if name in ("get", "getenv", "pop", "setdefault") else [])
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            found.append(node.left)
    texts = (ast.unparse(node).lstrip("f").strip("'\"") for node in found)
    return [text for text in texts if text.startswith("C2T_")]


@pytest.mark.parametrize("path", source_files())
def test_imports_follow_the_direction(path: str) -> None:
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", [path for path in source_files() if path != "c2t_plugin/envs.py"])
def test_only_envs_reads_variables(path: str) -> None:
    assert variable_reads((ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("c2t_plugin/config.py", "import sglang.srt"),
        ("c2t_plugin/doctor.py", "def late():\n    from vllm import LLM"),
        ("c2t_plugin/classifier/file.py", "from c2t_plugin.engines import contract"),
        ("c2t_plugin/classifier/file.py", "from c2t_plugin import lab"),
        ("c2t_plugin/scorer.py", "import numpy as np"),
        ("c2t_plugin/lab/fit.py", "from benchmarks.pairs import toy"),
        ("kernels/c2t_kernels/stats/reference.py", "from c2t_plugin.classifier import FEATURES"),
        ("c2t_plugin/engines/contract.py", "import torch"),
        ("c2t_plugin/engines/sglang/worker.py", "import benchmarks.report.rows"),
        ("c2t_plugin/engines/vllm/v1.py", "from c2t_plugin.engines.sglang import layout"),
        ("c2t_plugin/engines/checkpoints.py", "import vllm"),
        ("c2t_plugin/lab/fit.py", "import sglang"),
        ("c2t_plugin/lab/fit.py", "from ..engines import contract"),
    ],
)
def test_a_planted_import_is_seen(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['C2T_BETA']",
        "import os\nos.environ.get('C2T_BETA', '0')",
        "from os import getenv\ngetenv('C2T_BETA')",
        "import os\n'C2T_BETA' in os.environ",
        "import os\nname = 'x'\nos.environ.get(f'C2T_{name}')",
    ],
)
def test_a_planted_variable_read_is_seen(source: str) -> None:
    assert variable_reads(source)


def test_writing_a_variable_for_a_child_is_allowed() -> None:
    assert variable_reads("env = {**env, 'C2T_PAIR': '1'}\nenv['C2T_BETA'] = '0'") == []


# where the code is that a folder of tests, by its first part, is of
CODE = {
    "core": "c2t_plugin",
    "lab": "c2t_plugin/lab",
    "engines": "c2t_plugin/engines",
    "kernels": "kernels/c2t_kernels",
    "benchmarks": "benchmarks",
}
# kernels of benchmarks/gpu/cases.py, which run in Triton's interpreter: a fixture of the whole folder
OF_ONE_FILE = {"benchmarks/gpu/kernels"}


def test_a_folder_of_tests_has_the_name_of_the_code_that_it_tests() -> None:
    tests = ROOT / "tests"
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")} - {Path(".")}
    assert len(folders) > 30
    missing = []
    for folder in sorted(folders):
        first, *rest = folder.parts
        if folder.as_posix() not in OF_ONE_FILE and not ROOT.joinpath(CODE[first], *rest).is_dir():
            missing.append(folder.as_posix())
    assert missing == []
