"""What a kernel's source may refer to, and where a path is summed: read from the syntax trees, without a compiler."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
FILES = {str(path.relative_to(KERNELS)): path.read_text("utf-8") for path in sorted(KERNELS.rglob("*.py"))}
LANGUAGE = "triton.language"


def taken_at_compile_time(path: str, files: Mapping[str, str]) -> list[str]:
    """What the kernels of a file refer to that is neither Triton's language, a kernel nor a tl.constexpr.

    A Python function is called while a kernel is compiled, and means what it means there: SGLang puts one of its own in
    the place of triton.next_power_of_2, which then does not compile.
    """
    tree = ast.parse(files[path])
    allowed = _allowed(tree, files)
    found = []
    for kernel in filter(_is_kernel, ast.walk(tree)):
        assert isinstance(kernel, ast.FunctionDef)
        for name in _taken(kernel):
            if name not in allowed and not hasattr(builtins, name):
                found.append(f"{kernel.name}: {name}")
    return found


def _taken(kernel: ast.FunctionDef) -> Iterator[str]:
    """Names that the kernel has from its module. Its decorators and annotations are not compiled."""
    nodes = [node for statement in kernel.body for node in ast.walk(statement)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {argument.arg for argument in ast.walk(kernel.args) if isinstance(argument, ast.arg)}
    own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    yield from sorted({node.id for node in names} - own)


def _allowed(tree: ast.Module, files: Mapping[str, str]) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == LANGUAGE and alias.asname}
        elif isinstance(node, ast.FunctionDef) and _is_kernel(node):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and _is_constexpr(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("c2t_kernels."):
            there = files.get(f"{node.module}".replace(".", "/") + ".py", "")
            names |= {alias.asname or alias.name for alias in node.names if alias.name in _allowed_in(there, files)}
    return names


def _allowed_in(text: str, files: Mapping[str, str]) -> set[str]:
    return _allowed(ast.parse(text), files)


def _is_kernel(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(getattr(each, "func", each)) == "triton.jit" for each in decorators)


def _is_constexpr(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr"


@pytest.mark.parametrize("path", [path for path, text in FILES.items() if "triton.jit" in text])
def test_a_kernel_takes_nothing_from_python(path: str) -> None:
    assert taken_at_compile_time(path, FILES) == []


HEAD = "import triton\nimport triton.language as tl\n"
KERNEL = "@triton.jit(do_not_specialize=['n'])\ndef kernel(n, N: tl.constexpr):\n    WIDTH: tl.constexpr = "


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (f"{HEAD}{KERNEL}triton.next_power_of_2(N)", "triton"),
        (f"{HEAD}from triton import cdiv\n{KERNEL}cdiv(N, 2)", "cdiv"),
        (f"{HEAD}def half(n):\n    return n // 2\n{KERNEL}half(N)", "half"),
        (f"{HEAD}MOST = 4\n{KERNEL}min(N, MOST)", "MOST"),
        (f"{HEAD}from c2t_kernels.checks import check_int\n{KERNEL}check_int(N)", "check_int"),
    ],
)
def test_a_planted_reference_is_seen(text: str, seen: str) -> None:
    assert taken_at_compile_time("planted.py", {**FILES, "planted.py": text}) == [f"kernel: {seen}"]


def test_constants_kernels_and_the_language_are_allowed() -> None:
    above = "from c2t_kernels.network.kernel import feature as f\nMOST = tl.constexpr(4)\n"
    text = f"{HEAD}{above}{KERNEL}f(tl.cdiv(N, MOST))"
    assert taken_at_compile_time("planted.py", {**FILES, "planted.py": text}) == []


# --- one place sums along a path in torch (features.extend_path), one in Triton (network/kernel.py, node_stats)

SUMS = ("joint_log_prob", "joint_log_probs", "path_entropy")
SUMMED_IN = "kernels/c2t_kernels/network/features.py"


def sums_by_hand(text: str) -> list[str]:
    """Additions to a path's sums."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            sides = [node.target, node.value]
        else:
            continue
        inside = (inner for side in sides for inner in ast.walk(side))
        if any(getattr(inner, "attr", getattr(inner, "id", "")) in SUMS for inner in inside):
            found.append(ast.unparse(node))
    return found


def test_a_path_is_summed_in_one_place() -> None:
    folders = (ROOT / name for name in ("c2t_plugin", "kernels", "benchmarks"))
    by_hand = {
        str(path.relative_to(ROOT)): sums
        for folder in folders
        for path in folder.rglob("*.py")
        if (sums := sums_by_hand(path.read_text(encoding="utf-8")))
    }
    assert list(by_hand) == [SUMMED_IN], by_hand
    assert sums_by_hand("joint = frontier.joint_log_prob[..., None] + log_prob")
    assert sums_by_hand("path_entropy += stats.entropy")


# Launched outside of graphs, in steps of which each has other numbers of requests, rows and draft tokens.
EACH_STEP = ("stop/kernel.py", "pack/kernel.py", "pack/rows.py", "pack/wide.py", "masks/kernel.py", "step/kernel.py")
VARIES = {"bs", "rows", "slots", "capacity", "width", "d_max", "room"}


def compiled_apart(text: str) -> set[str]:
    """Of the kernels in a text the arguments of VARIES that Triton compiles apart by their value: it does so for 1, for
    multiples of 16 and for constants."""
    tree = ast.parse(text)
    known = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = set()
    for node in filter(_is_kernel, ast.walk(tree)):
        assert isinstance(node, ast.FunctionDef)
        given = {each.arg: each.value for one in node.decorator_list for each in getattr(one, "keywords", ())}
        listed = given.get("do_not_specialize", ast.Tuple([]))
        listed = known[listed.id] if isinstance(listed, ast.Name) else listed
        left_alone = set(ast.literal_eval(listed))
        found |= {each.arg for each in node.args.args if each.arg.lower() in VARIES and each.arg not in left_alone}
    return found


@pytest.mark.parametrize("path", EACH_STEP)
def test_what_changes_from_step_to_step_is_not_compiled_apart(path: str) -> None:
    """A compilation takes some tenths of a second, in which the server stands still."""
    (text,) = (text for name, text in FILES.items() if name.endswith(path))
    assert "_kernel(" in text and compiled_apart(text) == set()


def test_a_kernel_that_is_compiled_apart_would_be_seen() -> None:
    kernel = "def some_kernel(p, bs, room, WIDTH: tl.constexpr):\n    pass\n"
    assert compiled_apart(f"@triton.jit\n{kernel}") == {"bs", "room", "WIDTH"}
    assert compiled_apart(f"@triton.jit(do_not_specialize=['room'])\n{kernel}") == {"bs", "WIDTH"}
    assert compiled_apart(f"ALL = ('bs', 'room')\n@triton.jit(do_not_specialize=ALL)\n{kernel}") == {"WIDTH"}
