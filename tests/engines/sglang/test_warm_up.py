"""No kernel is left to be compiled while a server on a GPU serves."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.cpu_engine import SITE  # noqa: E402
from tests.support.sglang.in_interpreter import found_by  # noqa: E402

OF_TREES = {"build_tree": 1, "full_mask": 2, "pack_words": 2, "scatter_rows": 2, "scan": 1, "select": 1}
# by what is served: kernels that a step launches outside of graphs, and how many forms of each are needed
FORMS = {
    "sync": {"early_stop": 1, "pack_words": 2, "scatter_rows": 2, "scan": 1, "select": 1},
    "lagged": {"early_stop": 2, "pack_words": 2, "scatter_rows": 2, "scan": 1, "select": 1},
    "planned": {"early_stop": 2, "pack_words": 2, "scatter_rows": 2, "scan": 1, "select": 1},
    "planned, cut": {"early_stop": 2, "pack_words": 2, "scatter_rows": 2, "scan": 1, "select": 1},
    "trees": {"fill_spare_rows": 3, **OF_TREES},
    "trees, planned": {"clip_trees": 3, **OF_TREES},
}

# Whose first steps verify all that is drafted: it is packed where the graph has a row more, and nothing is put back.
WHOLE = {"early_stop": 2, "pack_words": 1, "scan": 1, "select": 1}
SERVED = FORMS | {"lagged": WHOLE, "planned": WHOLE}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    loaded: dict[str, Any] = found_by("tests.support.sglang.warm_up_program", tmp_path_factory.mktemp("warm_up"))
    return loaded


def numbers(forms: list[str]) -> dict[str, int]:
    names = [form.partition("_kernel(")[0] for form in forms]
    return {name: names.count(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("mode", FORMS)
def test_steps_of_any_number_of_requests_launch_what_was_launched_before(found: dict[str, Any], mode: str):
    assert found[mode]["cold"] == []
    # of 1, 5 and 17 requests, so that what is not launched would be seen
    assert numbers(found[mode]["served"]) == SERVED[mode]
    # compiled for nobody would be as many that start up for nothing
    assert numbers(found[mode]["warm"]) == FORMS[mode]


@pytest.mark.parametrize(("device", "warmed"), [("cuda", 1), ("cuda:1", 1), ("cpu", 0)])
def test_a_server_on_a_gpu_warms_up_behind_its_check(
    sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str, warmed: int
):
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.config import C2TConfig
    from c2t_plugin.engines.sglang import startup, warm_up

    seen: list[Any] = []
    monkeypatch.setattr(warm_up, "every_form", seen.append)
    worker = SimpleNamespace(device=device)
    startup.prove(worker, C2TConfig(self_check="off"), lambda: None)
    assert seen == [worker] * warmed


def test_what_does_not_run_is_said_and_no_more(
    sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang import warm_up

    warm_up.every_form(SimpleNamespace())
    assert "C2T: kernels are not compiled for every size before serving (AttributeError: " in caplog.text
