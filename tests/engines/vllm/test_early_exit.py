"""Which engines may leave a draft loop early, and what a GPU has to say to that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

import torch  # noqa: E402

from c2t_plugin.engines.vllm.early_exit import Ended, may_leave  # noqa: E402


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


class Told:
    """A GPU that is done with nothing until it is said to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = False
        event = SimpleNamespace(record=lambda: None, query=lambda: self.done)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        self._ended = Ended(4, torch.device("cpu"))
        # of how many tokens each chain's length was asked for
        self.asked: list[int] = []

    def after(self, steps: int, *lengths: int, done: bool = True) -> bool:
        def found() -> torch.Tensor:
            self.asked.append(steps)
            return torch.tensor(lengths, dtype=torch.int32)

        self.done = done
        return self._ended.after(steps, found)


def test_a_draft_ends_a_pass_after_its_last_chain(monkeypatch: pytest.MonkeyPatch):
    gpu = Told(monkeypatch)
    assert [gpu.after(1, 1, 0), gpu.after(2, 1, 0), gpu.after(3, 1, 0)] == [False, False, True]
    assert gpu.asked == [1, 2]


def test_what_is_not_known_yet_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    gpu = Told(monkeypatch)
    assert not gpu.after(1, 0, 0)
    assert not gpu.after(2, 0, 0, done=False) and not gpu.after(3, 0, 0, done=False)
    # nor asked for again
    assert gpu.asked == [1]
    assert gpu.after(4, 0, 0)


def test_a_draft_does_not_end_by_the_one_before(monkeypatch: pytest.MonkeyPatch):
    gpu = Told(monkeypatch)
    assert not gpu.after(1, 0, 0, 0)
    assert not gpu.after(1, 1) and not gpu.after(2, 2)
    assert not gpu.after(3, 2) and gpu.after(4, 2)


def test_rows_of_a_larger_batch_before_are_nobodys(monkeypatch: pytest.MonkeyPatch):
    gpu = Told(monkeypatch)
    assert not gpu.after(1, 1, 1, 1) and not gpu.after(2, 2, 2, 2)
    # the others' 2 is still there
    assert not gpu.after(1, 1) and not gpu.after(2, 1)
    assert gpu.after(3, 1)


def test_one_chain_that_grows_is_enough(monkeypatch: pytest.MonkeyPatch):
    gpu = Told(monkeypatch)
    assert [gpu.after(steps, 0, steps, 0) for steps in range(1, 6)] == [False] * 5
    assert gpu.asked == [1, 2, 3, 4, 5]
