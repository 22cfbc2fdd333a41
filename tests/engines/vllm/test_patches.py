"""The table of patches: every target is a name of the installed vLLM, and a process that applies them says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.engines.contract import broken_symbols, package_root  # noqa: E402
from c2t_plugin.engines.vllm.patches import CORE, CPU, DRAFTERS, ENGINE, LOAD, PATCHES, drafting_by  # noqa: E402
from tests.support.engines.drift import symbol_of  # noqa: E402
from tests.support.engines.undone import undone  # noqa: E402


def test_every_target_is_a_name_of_the_installed_release():
    root = package_root("vllm")
    assert root is not None
    assert broken_symbols(root, [symbol_of(patch.target) for patch in PATCHES.patches]) == []
    assert len(broken_symbols(root, [symbol_of("vllm.engine.arg_utils:EngineArgs.dream")])) == 1


def test_each_has_its_reason_and_its_end_and_stands_once():
    assert all(patch.why and patch.until for patch in PATCHES.patches)
    assert {patch.when for patch in PATCHES.patches} == {"", LOAD, ENGINE, CORE, CPU}
    targets = [patch.target for patch in PATCHES.patches]
    assert len(targets) == len(set(targets))


def test_every_handler_is_a_function_of_ours():
    handlers = [patch.handler for patch in PATCHES.patches if patch.ours]
    assert len(handlers) == len({patch for patch in PATCHES.patches if patch.when})
    assert all(inspect.isfunction(each) and each.__module__.startswith("c2t_plugin.") for each in handlers)


@pytest.fixture
def fresh() -> Iterator[None]:
    undone(PATCHES)
    yield
    undone(PATCHES)


def _value(patch: Any) -> Any:
    return vars(patch.owner)[patch.name]


def test_a_process_applies_them_once_and_tests_take_them_back(fresh: None):
    bound = [patch for patch in PATCHES.patches if patch.when]
    stock = {patch: _value(patch) for patch in bound}
    for _ in range(2):
        for when in (LOAD, ENGINE, CORE, CPU):
            PATCHES.apply(when)
    for patch in bound:
        ours = _value(patch)
        assert ours is not stock[patch]
        assert getattr(ours, "__func__", ours).__wrapped__ is getattr(stock[patch], "__func__", stock[patch])
    undone(PATCHES)
    assert {patch: _value(patch) for patch in bound} == stock


def test_drafters_are_ours_while_a_model_runner_is_made():
    from c2t_plugin.engines.vllm import v1

    patch = DRAFTERS["EagleProposer"]
    stock = _value(patch)
    with drafting_by(v1.DRAFTERS):
        assert _value(patch) is v1.C2TEagleProposer
    assert _value(patch) is stock
