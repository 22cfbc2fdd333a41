"""The functions that a breakdown looks for, where SGLang and C2T have them: a renamed one would count as `other`."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from benchmarks.serving.spans import FUNCTIONS, PREFILL, STEP, phase_of

SGLANG_WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
FOUND = [
    (STEP, SGLANG_WORKER, "forward_batch_generation"),
    (PREFILL, SGLANG_WORKER, "_forward_prefill_batch"),
    ("draft", SGLANG_WORKER, "draft"),
    ("draft", SGLANG_WORKER, "_draft_extend_for_decode"),
    ("verify", SGLANG_WORKER, "verify"),
    ("rerank", "sglang/srt/speculative/spec_utils.py", "select_top_k_tokens"),
    ("rerank", "sglang/srt/speculative/eagle_utils.py", "organize_draft_results"),
    ("draft", "c2t_plugin/engines/sglang/worker.py", "draft"),
    ("draft", "c2t_plugin/engines/sglang/worker.py", "_draft_extend_for_decode"),
    ("rerank", "c2t_plugin/trees/nodes.py", "best"),
    ("statistics", "c2t_plugin/engines/host_scorer.py", "host_stats"),
    ("classifier", "c2t_plugin/engines/host_chains.py", "_add"),
    ("classifier", "c2t_plugin/classifier/network.py", "confidence"),
    ("classifier", "c2t_kernels/network/reference.py", "confidence_of"),
    *(
        (phase, f"c2t_kernels/{package}/{side}.py", name)
        for side in ("__init__", "reference", "kernel")
        for phase, package, name in (
            ("statistics", "stats", "draft_stats"),
            ("classifier", "score", "score_chain"),
            ("classifier", "stop", "early_stop"),
            ("rerank", "growth", "grow_layer"),
            ("rerank", "spare", "fill_spare_rows"),
            ("rerank", "tree_layout", "build_tree"),
            ("rerank", "masks", "full_mask"),
        )
    ),
]


@pytest.mark.parametrize(("phase", "path", "function"), FOUND, ids=[f"{path}-{name}" for _, path, name in FOUND])
def test_a_phases_function_is_where_the_breakdown_looks_for_it(phase: str, path: str, function: str):
    package = path.split("/")[0]
    if package == "sglang":
        pytest.importorskip("sglang")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parents[1] / path).read_text(encoding="utf-8")
    lines = [each.lineno for each in ast.walk(ast.parse(source)) if getattr(each, "name", "") == function]
    assert lines, f"{path} has no {function}"
    assert phase_of(FUNCTIONS, f"{path}({lines[0]}): {function}") == phase


def test_every_name_looked_for_is_checked_here():
    names = {name for _, pattern in FUNCTIONS for name in pattern.pattern.split(": ")[1].strip("(?:)$").split("|")}
    assert names == {name for _, _, name in FOUND}
