"""Which servers begin with what an earlier one has measured: those whose steps cost the same, by their settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from c2t_plugin.config import C2TConfig  # noqa: E402
from c2t_plugin.engines.sglang import ranks, startup  # noqa: E402
from c2t_plugin.planner.step_planner import StepPlanner  # noqa: E402

SETTINGS = {
    **{"dtype": "bfloat16", "kv_cache_dtype": "auto", "page_size": 1, "attention_backend": "triton", "tp_size": 1},
    **{"max_running_requests": 48, "disable_cuda_graph": False, "speculative_num_steps": 4},
    **{"port": 1000, "api_key": "secret", "served_model_name": "m", "random_seed": 1, "log_level": "info"},
}
CONFIGURATION = {
    **{"base": "EAGLE3", "mode": "chain", "policy": "c2t", "attention": "stock", "packing": "triton", "rows": "lagged"},
    "verify_attention": "auto",
    **{"classifier": "/some/classifier", "learned": None},
}
# (size, length, round) of the passes of one request that were measured
KINDS = [(0, length, round) for round in range(4) for length in (0, 1, 2, 4)]
MEASURED = {part: [[1, 0.5, *kind] for kind in KINDS] for part in ("verify", "draft", "draft_extend")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("C2T_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ranks, "leads", lambda: True)
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"name": "{name}"}}')
    return tmp_path


def worker(folder: Path, curve: Path | None = None, **changes: Any) -> Any:
    """One that serves. changes: of its arguments, of what they came to, or of its attention."""
    shape: dict[str, Any] = {"steps": 4, "most": 4, "device": torch.device("cpu"), "depths": (0, 1, 2, 4)}
    configuration = {name: changes.pop(name, value) for name, value in CONFIGURATION.items()}
    backend = type(changes.pop("backend", "TritonAttnBackend"), (), {})()
    args = {"model_path": str(folder / "target"), "speculative_draft_model_path": str(folder / "draft")}
    made = SimpleNamespace(
        c2t=SimpleNamespace(planner=StepPlanner(None, None, **shape), configuration=configuration),
        server_args=SimpleNamespace(**{**args, **SETTINGS, **changes}),
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
        device="cpu",
    )
    startup.remember(made, C2TConfig(planner="on" if curve is None else str(curve)))
    return made


def measured(one: Any) -> bool:
    """Have a server keep what it has measured; whether it keeps something."""
    keeps = one.c2t.planner.keep_measured
    if keeps is not None:
        keeps(MEASURED)
    return keeps is not None


def begins(one: Any) -> bool:
    return one.c2t.planner.curve is not None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({name: "another"} for name in ("port", "api_key", "served_model_name", "random_seed", "log_level")),
        *({name: "another"} for name in ("classifier", "learned")),
    ],
    ids=lambda changes: next(iter(changes), "nothing"),
)
def test_a_server_that_differs_in_nothing_that_costs_begins_with_it(folder: Path, changes: dict[str, Any]):
    one = worker(folder)
    assert not begins(one) and measured(one)
    assert begins(worker(folder, **changes))
    (kept,) = (folder / "cache").rglob("*.json")
    assert "secret" not in kept.read_text()


@pytest.mark.parametrize(
    "changes",
    [
        *({name: "another"} for name in ("dtype", "kv_cache_dtype", "page_size", "attention_backend", "tp_size")),
        *({name: "another"} for name in ("max_running_requests", "disable_cuda_graph", "speculative_num_steps")),
        *(
            {name: "another"}
            for name in ("base", "mode", "policy", "attention", "packing", "rows", "verify_attention", "backend")
        ),
        # which this release may not have
        {"moe_runner_backend": "another"},
        {"model_path": "draft"},
        {"speculative_draft_model_path": "target"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_one_that_costs_something_else_does_not(folder: Path, changes: dict[str, Any]):
    assert measured(worker(folder))
    paths = {name: str(folder / value) if name.endswith("model_path") else value for name, value in changes.items()}
    assert not begins(worker(folder, **paths))


def test_one_whose_model_has_another_shape_does_not(folder: Path):
    assert measured(worker(folder))
    (folder / "draft" / "config.json").write_text('{"name": "draft", "layers": 2}')
    assert not begins(worker(folder))


def test_a_file_that_is_named_holds(folder: Path):
    assert measured(worker(folder))
    named = worker(folder, folder / "curve.json")
    assert not begins(named) and not measured(named)


def test_who_has_no_planner_asks_for_nothing(folder: Path):
    one = worker(folder)
    one.c2t.planner = None
    startup.remember(one, C2TConfig(planner="off"))


def test_a_rank_that_does_not_lead_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "leads", lambda: False)
    assert not measured(worker(folder))
    assert not (folder / "cache").exists()
