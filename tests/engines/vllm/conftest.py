"""vLLM in this process: engines that tests build, run and shut down."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pairs.toy import pair_dir
from benchmarks.pairs.toy.export import export, write_mimo
from benchmarks.pairs.toy.vllm_layout import write_vllm_layout
from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.engines.vllm.planning import Planning
from c2t_plugin.planner import CostCurve
from tests.support.sglang.planned_rule import CURVE, D_MAX
from tests.support.sglang.verify_counts import save_hand_made_classifier

DRAFTS = {"draft_model": "draft", "eagle": "eagle1", "eagle3": "eagle3"}
VARIABLES = ("CONFIG", "BETA", "BASE", "MODE", "CLASSIFIER", "TOP_M")


@pytest.fixture(scope="session", autouse=True)
def vllm_in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        for name in VARIABLES:
            patch.delenv(f"C2T_{name}", raising=False)
        yield


@pytest.fixture(scope="module", autouse=True)
def plugin_of_this_process() -> None:
    """vLLM loads plugins once a process, and another file's tests may have taken back what ours has bound."""
    if importlib.util.find_spec("vllm") is not None:
        from c2t_plugin.engines.vllm.plugin import register

        register()


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair as vLLM loads it."""
    return write_vllm_layout(pair_dir(), tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with its MTP head, one checkpoint, and a classifier made by hand beside them."""
    folder = tmp_path_factory.mktemp("mtp") / "mimo"
    export(write_mimo, pair_dir(), folder)
    save_hand_made_classifier(folder / FILE_NAME)
    return folder


def plan_anew(llm: Any, curve: CostCurve = CURVE) -> None:
    """Give a planned engine a planner that has seen nothing yet and decides in the same ways, with a curve that no
    clock changes."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.planning.planner
    ways = {"ends": before.draft_end is not None, "skips": before.skips}
    scheduler.planning = scheduler.dynamic_sd_lookup = Planning(curve, None, D_MAX, **ways)
    scheduler.planning.own = scheduler._own_limits


Engine = Callable[..., Any]


@pytest.fixture(scope="session")
def engine(layout: Path) -> Engine:
    """A context manager: `with engine("c2t:eagle3", 6, c2t_beta=0.4) as llm`; method None is plain decoding."""

    @contextmanager
    def run(
        method: str | None,
        steps: int = 6,
        options: dict[str, Any] | None = None,
        target: Path | None = None,
        **speculative: Any,
    ) -> Any:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        spec = None
        if method is not None:
            spec = {"method": method, "num_speculative_tokens": steps, **speculative}
            if draft := DRAFTS.get(method.removeprefix("c2t:")):
                spec["model"] = str(layout / draft)
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**28,
            "seed": 0,
            "per_request_spec_decode_metrics": "detailed" if spec else "none",
        }
        llm = LLM(str(target or layout / "target"), speculative_config=spec, **{**settings, **(options or {})})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()

    return run
