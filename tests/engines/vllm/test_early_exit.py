"""Which engines may leave a draft loop early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.engines.vllm.early_exit import may_leave  # noqa: E402


@pytest.mark.parametrize(
    ("parallel", "adaptive", "may"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"tensor_parallel_size": 2}, False, False),
        ({"data_parallel_size": 2}, False, False),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, False, False),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, False, False),
        ({"enable_expert_parallel": True}, False, True),
    ],
    ids=["alone", "adaptive", "TP", "DP", "EP over TP", "EP over DP", "EP of one rank"],
)
def test_only_one_rank_alone_may_leave(parallel: dict[str, int | bool], adaptive: bool, may: bool):
    from vllm.config import ParallelConfig

    made = ParallelConfig(distributed_executor_backend="mp", **parallel)
    spec = SimpleNamespace(enable_adaptive_verification=adaptive)
    assert may_leave(SimpleNamespace(parallel_config=made, speculative_config=spec)) is may
