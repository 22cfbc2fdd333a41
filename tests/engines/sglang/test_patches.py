"""The table of patches: every target is a name of both supported releases, and a process that applies them says so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.engines.contract import broken_symbols, package_root  # noqa: E402
from c2t_plugin.engines.sglang.patches import APART, LOAD, PACKING, PATCHES, PLAIN, WORKER  # noqa: E402
from c2t_plugin.errors import ContractError  # noqa: E402
from tests.support.engines.drift import drifted, needed, symbol_of  # noqa: E402
from tests.support.engines.undone import sglang_undone  # noqa: E402

WHEELS = Path(__file__).resolve().parents[3] / ".venv" / "wheels"
# FlashInfer's, which SGLang calls, comes without a release of SGLang
OTHERS = {"flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.begin_forward"}
TARGETS = [symbol_of(patch.target) for patch in PATCHES.patches if patch.target not in OTHERS]
# Where these are not, they are not bound: each plain step is read at once.
NEWER = [symbol_of(patch.target) for patch in PATCHES.patches if patch.when == PLAIN]


def test_every_target_is_a_name_of_the_installed_release():
    root = package_root("sglang")
    assert root is not None
    assert broken_symbols(root, TARGETS) == []
    gone = symbol_of("sglang.srt.managers.scheduler:Scheduler.dream")
    assert len(broken_symbols(root, [gone])) == 1


def test_every_target_is_a_name_of_the_oldest_release():
    wheels = sorted(WHEELS.glob("sglang-0.5.17-*.whl"))
    if not wheels:
        pytest.skip("the SGLang 0.5.17 wheel is not in .venv/wheels; `make test` downloads it")
    assert drifted(wheels[0], "sglang", [target for target in TARGETS if target not in NEWER]) == []
    assert len(drifted(wheels[0], "sglang", NEWER)) == 1


def test_each_has_its_reason_and_its_end_and_stands_once():
    assert all(patch.why and patch.until for patch in PATCHES.patches)
    assert {patch.target for patch in PATCHES.patches if not patch.target.startswith("sglang.")} == OTHERS
    assert {patch.when for patch in PATCHES.patches} == {"", LOAD, WORKER, PACKING, PLAIN, APART}
    targets = [patch.target for patch in PATCHES.patches]
    assert len(targets) == len(set(targets))


def test_every_handler_is_a_function_of_ours(applied: Any):
    handlers = [patch.handler for patch in PATCHES.patches if patch.ours]
    assert len(handlers) == len({patch for patch in PATCHES.patches if patch.when})
    assert all(inspect.isfunction(each) and each.__module__.startswith("c2t_plugin.") for each in handlers)


@pytest.fixture
def applied(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    yield
    sglang_undone()


def test_a_process_applies_them_once_and_tests_take_them_back(applied: Any, caplog: pytest.LogCaptureFixture):
    from sglang.srt.plugins.hook_registry import HookRegistry

    bound = [patch for patch in PATCHES.patches if patch.when and not patch.hook]
    stock = {patch: _value(patch) for patch in bound}
    for _ in range(2):
        for when in (LOAD, WORKER, PACKING, PLAIN, APART):
            PATCHES.apply(when)
    ours = {patch: _value(patch) for patch in bound}
    assert all(ours[patch] is not stock[patch] for patch in bound)
    assert all(ours[patch].__wrapped__ is stock[patch] for patch in bound)
    hooks = [patch for patch in PATCHES.patches if patch.hook]
    assert [sum(each[1] is patch.handler for each in HookRegistry._hooks[patch.dotted]) for patch in hooks] == [1] * 3
    assert not caplog.records, "nobody else has patched these"
    sglang_undone()
    assert {patch: _value(patch) for patch in bound} == stock
    assert not any(each[1] is patch.handler for patch in hooks for each in HookRegistry._hooks[patch.dotted])


@pytest.fixture
def registry(applied: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's hooks, of which nothing stays."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", set())
    hooks = [patch for patch in PATCHES.patches if patch.hook]
    stock = {patch: _value(patch) for patch in hooks}
    PATCHES.apply(LOAD)
    yield HookRegistry
    sglang_undone()
    for patch, value in stock.items():
        setattr(patch.owner, patch.name, value)


def test_hooks_that_are_in_place_are_found(registry: Any, caplog: pytest.LogCaptureFixture):
    from sglang.srt.plugins.hook_registry import HookType

    # behind those of others too
    target = "sglang.srt.server_args.ServerArgs.from_cli_args"
    others = lambda original, *args, **keyword: original(*args, **keyword)  # noqa: E731
    registry.register(target, others, HookType.AROUND)
    try:
        registry.apply_hooks()
        PATCHES.require()
        assert f"{target}, which C2T has hooked, was hooked by {__name__} too" in caplog.text
    finally:
        registry._hooks[target][:] = [each for each in registry._hooks[target] if each[1] is not others]


@pytest.mark.parametrize("patch", [patch for patch in PATCHES.patches if patch.hook], ids=lambda patch: patch.name)
def test_a_hook_that_sglang_swallowed_is_one_line(registry: Any, patch: Any, monkeypatch: pytest.MonkeyPatch):
    put = registry._apply_target.__func__

    def fail(cls: Any, target: str, hooks: list[Any]) -> None:
        if target == patch.dotted:
            raise RuntimeError("planted")
        put(cls, target, hooks)

    monkeypatch.setattr(registry, "_apply_target", classmethod(fail))
    registry.apply_hooks()
    with pytest.raises(
        ContractError, match=f"sglang has not put C2T's hook over {re.escape(patch.dotted)} .*"
    ) as error:
        PATCHES.require()
    assert "\n" not in str(error.value)


def test_a_target_that_another_plugin_had_hooked_before_is_noticed(registry: Any):
    """SGLang passes over what it has hooked once."""
    registry._patched.add(next(patch.dotted for patch in PATCHES.patches if patch.name == "_validate_one_request"))
    registry.apply_hooks()
    with pytest.raises(ContractError, match="_validate_one_request"):
        PATCHES.require()


def _value(patch: Any) -> Any:
    owner = patch.owner
    return owner[patch.name] if isinstance(owner, dict) else vars(owner)[patch.name]


def test_a_hook_of_another_plugin_is_noticed(applied: Any, caplog: pytest.LogCaptureFixture):
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    stock = Scheduler.get_internal_state
    Scheduler.get_internal_state = _wrap_fn(stock, lambda result, *_: result, HookType.AFTER)
    try:
        PATCHES.apply(WORKER)
    finally:
        sglang_undone()
        Scheduler.get_internal_state = stock
    assert "Scheduler.get_internal_state was bound by sglang.srt.plugins.hook_registry before" in caplog.text


def test_the_report_on_a_release_is_of_all_that_is_bound_too():
    symbols, notes = needed("sglang")
    assert {each for each in TARGETS if each not in NEWER} < set(symbols)
    assert set(NEWER) < set(notes) and not set(NEWER) & set(symbols)
