"""Names of an engine that are bound anew: once, for a block, on one object, taken back, and where others did it too."""

from __future__ import annotations

import ast
import functools
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from c2t_plugin.engines.patching import ATTRIBUTE, Patch, Table, become, layers, replaced
from c2t_plugin.errors import ContractError
from tests.support.engines.undone import undone

ENGINE = """
class Scheduler:
    def step(self, batch):
        return f"step {batch}"

    @classmethod
    def of(cls, name):
        return f"{cls.__name__} of {name}"

BACKENDS = {"triton": lambda runner: "stock"}

def build(batch):
    return "built"
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("engine.parts")
    monkeypatch.setitem(sys.modules, "engine.parts", made)
    exec(ENGINE, vars(made))
    return made


def louder(stock: Any) -> Any:
    @functools.wraps(stock)
    def loud(*positional: Any, **keyword: Any) -> Any:
        return f"{stock(*positional, **keyword)}!"

    return loud


def patch(target: str, when: str = "start", **more: Any) -> Patch:
    ours = f"{__name__}:louder"
    return Patch(f"engine.parts:{target}", why="it is a test", until="its end", when=when, ours=ours, **more)


STEP, OF, TRITON, BUILD = patch("Scheduler.step"), patch("Scheduler.of"), patch("BACKENDS.triton"), patch("build", "")
EVERY = (STEP, OF, TRITON, BUILD)


@pytest.fixture
def table(engine: ModuleType) -> Iterator[Table]:
    made = Table("engine", logging.getLogger("c2t.test"), EVERY)
    yield made
    undone(made)


def answers(engine: Any) -> list[str]:
    return [engine.Scheduler().step(1), engine.Scheduler.of("a"), engine.BACKENDS["triton"](0), engine.build(1)]


STOCK = ["step 1", "Scheduler of a", "stock", "built"]
OURS = ["step 1!", "Scheduler of a!", "stock!", "built"]


def test_all_of_an_occasion_are_applied_once_and_taken_back(engine: ModuleType, table: Table):
    stock = dict(vars(engine.Scheduler))
    table.apply("another")
    assert answers(engine) == STOCK
    for _ in range(3):
        table.apply("start")
        assert answers(engine) == OURS
    undone(table)
    assert answers(engine) == STOCK
    assert dict(vars(engine.Scheduler)) == stock
    table.apply("start")
    assert answers(engine) == OURS


def test_a_block_ends_also_after_an_error(engine: ModuleType, table: Table):
    with pytest.raises(ZeroDivisionError), table.during(BUILD, lambda batch: "ours"):
        assert engine.build(1) == "ours"
        1 / 0  # noqa: B018
    assert engine.build(1) == "built"


def test_what_an_object_has_from_its_class_is_its_classs_again(engine: ModuleType, table: Table):
    one, other = engine.Scheduler(), engine.Scheduler()
    with table.during(STEP, lambda batch: "ours", owner=one):
        assert (one.step(1), other.step(1)) == ("ours", "step 1")
    assert vars(one) == {}
    one.step = lambda batch: "its own"
    with replaced(one, "step", lambda batch: "ours"):
        assert one.step(1) == "ours"
    assert one.step(1) == "its own"


def test_on_one_object_for_its_life(engine: ModuleType, table: Table):
    one, other = engine.Scheduler(), engine.Scheduler()
    table.on(STEP, one, louder)
    assert (one.step(1), other.step(1)) == ("step 1!", "step 1")


def test_an_object_becomes_ours_if_ours_is_its_own_and_more(engine: ModuleType):
    one = engine.Scheduler()
    ours = type("Ours", (engine.Scheduler,), {"step": lambda self, batch: "ours"})
    assert become(one, ours) is one and one.step(1) == "ours"
    with pytest.raises(ContractError, match="Ours stands for Scheduler, got module"):
        become(ModuleType("another"), ours)


def a_stranger(stock: Any) -> Any:
    """Another plugin's wrapper."""
    there: dict[str, Any] = {"__name__": "another.plugin", "wraps": functools.wraps, "stock": stock}
    exec("@wraps(stock)\ndef wrapper(*p, **k):\n    return stock(*p, **k) + '?'", there)
    return there["wrapper"]


def test_a_patch_of_somebody_else_before_ours_is_said_and_kept(
    engine: ModuleType, table: Table, caplog: pytest.LogCaptureFixture
):
    engine.Scheduler.step = a_stranger(engine.Scheduler.step)
    table.apply("start")
    assert engine.Scheduler().step(1) == "step 1?!"
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("C2T: engine.parts.Scheduler.step was bound by another.plugin before C2T binds it")
    undone(table)
    assert engine.Scheduler().step(1) == "step 1?"


def test_a_patch_of_somebody_else_after_ours_is_said_once_and_not_taken_back(
    engine: ModuleType, table: Table, caplog: pytest.LogCaptureFixture
):
    table.apply("start")
    engine.Scheduler.step = a_stranger(engine.Scheduler.step)
    for _ in range(2):
        table.apply("start")
        table.check()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("C2T: engine.parts.Scheduler.step, which C2T has bound, was bound again by another.plugin")
    assert engine.Scheduler().step(1) == "step 1!?", "ours is applied once"
    undone(table)
    assert engine.Scheduler().step(1) == "step 1!?", "another plugin's is left alone"
    assert engine.Scheduler.of("a") == "Scheduler of a"


def test_in_a_block_it_is_said_once(engine: ModuleType, table: Table, caplog: pytest.LogCaptureFixture):
    engine.build = a_stranger(engine.build)
    for _ in range(3):
        with table.during(BUILD, lambda batch: "ours"):
            pass
    assert len(caplog.records) == 1 and engine.build(1) == "built?"


def test_the_engines_own_decorators_are_no_strangers(
    engine: ModuleType, table: Table, caplog: pytest.LogCaptureFixture
):
    import torch

    engine.Scheduler.step = torch.no_grad()(engine.Scheduler.step)
    table.apply("start")
    assert layers(engine.Scheduler.step)[0] == __name__
    assert not caplog.records


def test_an_engines_own_registry_of_hooks_is_used_where_it_has_one(engine: ModuleType):
    hooked: list[str] = []
    made = Table(
        "engine",
        logging.getLogger("c2t.test"),
        [patch("build", hook="after")],
        hook=lambda each: hooked.append(each.dotted),
    )
    for _ in range(2):
        made.apply("start")
        made.check()
        assert hooked == ["engine.parts.build"] and engine.build(1) == "built"
    undone(made, lambda each: hooked.remove(each.dotted))
    assert hooked == []


def test_a_hook_of_somebody_else_beside_ours_is_said_once(engine: ModuleType, caplog: pytest.LogCaptureFixture):
    stock = engine.build

    def hooked(inner: Any, hook: Any) -> Any:
        return functools.wraps(inner)(lambda batch: hook(inner(batch)))

    def hook_of(module: str) -> Any:
        there: dict[str, Any] = {"__name__": module}
        exec("def hook(result):\n    return result + '!'", there)
        return there["hook"]

    ours = hook_of("c2t_plugin.test")
    made = Table(
        "engine",
        logging.getLogger("c2t.test"),
        [patch("build", hook="after")],
        hook=lambda each: setattr(engine, "build", hooked(stock, ours)),
    )
    made.apply("start")
    made.require()
    assert engine.build(1) == "built!" and not caplog.records
    engine.build = hooked(engine.build, hook_of("another.plugin"))
    for _ in range(2):
        made.require()
    (line,) = [record.message for record in caplog.records]
    assert line == "C2T: engine.parts.build, which C2T has hooked, was hooked by another.plugin too"
    engine.build = stock
    with pytest.raises(ContractError, match=r"has not put C2T's hook over engine\.parts\.build"):
        made.require()


# --- nothing of an adapter binds an engine's name beside the table


def bound_beside(engine: str, source: str) -> list[str]:
    """What a file assigns to, or deletes, of what it imports from the engine."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0] == engine
    }

    def root(node: ast.expr) -> str | None:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return node.id if isinstance(node, ast.Name) else None

    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets += [each for item in node.targets for each in getattr(item, "elts", [item])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            targets.append(ast.Attribute(node.args[0], "any"))
    stored = [each for each in targets if isinstance(each, ast.Attribute | ast.Subscript)]
    return [
        ast.unparse(each)
        for each in stored
        if root(each) in imported or (isinstance(each, ast.Attribute) and each.attr == "__class__")
    ]


ADAPTERS = Path(__file__).resolve().parents[2] / "c2t_plugin" / "engines"
FILES = [(engine, path) for engine in ("sglang", "vllm") for path in sorted((ADAPTERS / engine).rglob("*.py"))]


@pytest.mark.parametrize(("engine", "path"), FILES, ids=lambda value: getattr(value, "name", value))
def test_an_adapter_binds_names_by_its_table_alone(engine: str, path: Path):
    assert bound_beside(engine, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from sglang.srt import scheduler\nscheduler.Scheduler.step = 1",
        "def late():\n    from sglang.srt.scheduler import Scheduler as S\n    S.a, S.b = 1, 2",
        "import sglang.srt.registry\nsglang.srt.registry.BACKENDS['triton'] = None",
        "from sglang.srt.scheduler import Scheduler\nsetattr(Scheduler, 'step', 1)",
    ],
)
def test_a_planted_binding_is_seen(source: str):
    assert bound_beside("sglang", source)
    assert not bound_beside("vllm", source)


def test_a_planted_change_of_class_is_seen():
    assert bound_beside("sglang", "def of(stock):\n    stock.__class__ = Ours")


# --- nor sets an attribute on one of its objects but that which both adapters know


def set_on_objects(source: str) -> list[str]:
    """Attributes of ours, by their names, that a file sets on what is not its own `self`, which has a class here."""
    found, tree = [], ast.parse(source)
    own = {node for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            found.append(ast.unparse(node.args[1]).strip("'\""))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found += [node.attr] if ast.unparse(node.value) != "self" or node not in own else []
    return [name for name in found if re.match("_?c2t_", name)]


@pytest.mark.parametrize(("engine", "path"), FILES, ids=lambda value: getattr(value, "name", value))
def test_an_adapter_sets_one_attribute_on_its_engines_objects(engine: str, path: Path):
    source = path.read_text(encoding="utf-8")
    assert set_on_objects(source) == [] and f'"{ATTRIBUTE}"' not in source


@pytest.mark.parametrize("source", ["setattr(req, 'c2t_counts', 1)", "req._c2t_own, b = 1, 2", "self.c2t_rows = 1"])
def test_a_planted_attribute_is_seen(source: str):
    assert set_on_objects(source)
    assert not set_on_objects("class Ours:\n    def f(self): self.c2t_rows = 1; setattr(req, ATTRIBUTE, 1); worker.c2t")
