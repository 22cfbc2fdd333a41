"""Cut chains on model runner V2 are decoded in whole CUDA graphs, where attention can replay such.

By vLLM's own manager of graphs. Nothing is captured here: what is asked is which graph it would replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils, model_runner  # noqa: E402

from c2t_plugin.engines.vllm.graphs import capture_any_lengths, takes_any_lengths  # noqa: E402
from c2t_plugin.engines.vllm.patches import PATCHES  # noqa: E402
from tests.support.engines.undone import undone  # noqa: E402

ALWAYS, UNIFORM, NEVER = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.NEVER
REQUESTS, WIDTH = 4, 5


def attention(support: AttentionCGSupport, bound: int | None = None) -> SimpleNamespace:
    """A group of layers. bound: tokens of a request that a graph can be replayed for, where that is not all."""
    builder = SimpleNamespace(
        get_cudagraph_support=lambda config, spec: support,
        get_varlen_cudagraph_max_query_len=lambda config, spec: bound,
    )
    return SimpleNamespace(get_metadata_builder=lambda _: builder, kv_cache_spec=None, backend=SimpleNamespace)


def configuration() -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        # as vLLM chooses them: some in small steps, and 1, 2 and all of the requests times K + 1
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4, 5, 8, 10, 16, 20, 24], max_cudagraph_capture_size=24
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
    )


class Runner:
    """vLLM's, as far as it makes its manager of graphs."""

    def __init__(self, *groups: SimpleNamespace, further: AttentionCGSupport = ALWAYS, split: bool = False) -> None:
        self.attn_groups, self.vllm_config = [list(groups)], configuration()
        self.model_state = SimpleNamespace(get_additional_cg_support=lambda: (further, None))
        self.decode_query_len, self.ubatch_runner = WIDTH, object() if split else None

    def initialize_kv_cache(self, adaptive: bool = False) -> None:
        self.graphs: Any = model_runner.ModelCudaGraphManager(
            self.vllm_config,
            None,
            CUDAGraphMode.FULL_AND_PIECEWISE,
            decode_query_len=self.decode_query_len,
            varlen_decode=adaptive,
        )
        # as if they had been
        self.graphs._graphs_captured = True

    def mode(self, *lengths: int, prompt: bool = False) -> CUDAGraphMode:
        """In which kind of graph so many tokens of each request would be decoded."""
        uniform = lengths[0] if len(set(lengths)) == 1 else None
        longest = None if prompt else max(lengths)
        found: CUDAGraphMode = self.graphs.dispatch(len(lengths), sum(lengths), uniform, 0, longest).cg_mode
        return found


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ranks = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: ranks)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    yield
    undone(PATCHES)


CUT = ((5, 2, 1), (1, 3), (4,), (2, 2, 2), (5, 5, 5, 4))


def test_cut_chains_are_decoded_in_whole_graphs():
    stock, ours = Runner(attention(ALWAYS)), Runner(attention(ALWAYS))
    capture_any_lengths(ours)
    for runner in (stock, ours):
        runner.initialize_kv_cache()
    assert {stock.mode(*lengths) for lengths in CUT} == {CUDAGraphMode.PIECEWISE}
    assert {ours.mode(*lengths) for lengths in CUT} == {CUDAGraphMode.FULL}
    # what was whole stays so, and prompts stay out
    for runner in (stock, ours):
        assert runner.mode(5, 5) == CUDAGraphMode.FULL
        assert runner.mode(5, 3, prompt=True) == CUDAGraphMode.PIECEWISE


def test_a_later_manager_of_the_same_runner_has_them_too_and_nobody_elses():
    """vLLM makes one while it profiles memory, and the one that it keeps."""
    ours, other = Runner(attention(ALWAYS)), Runner(attention(ALWAYS))
    capture_any_lengths(ours)
    for _ in range(2):
        ours.initialize_kv_cache()
        assert ours.graphs.varlen_decode
    other.initialize_kv_cache()
    assert not other.graphs.varlen_decode
    assert model_runner.ModelCudaGraphManager is cudagraph_utils.ModelCudaGraphManager


def test_attention_that_cannot_replay_them_keeps_equal_lengths():
    ours = Runner(attention(UNIFORM))
    capture_any_lengths(ours)
    ours.initialize_kv_cache()
    assert ours.mode(5, 2, 1) == CUDAGraphMode.PIECEWISE and ours.mode(5, 5) == CUDAGraphMode.FULL
    # but for adaptive verification, which asks for itself
    ours.initialize_kv_cache(adaptive=True)
    assert ours.mode(5, 2, 1) == CUDAGraphMode.FULL


@pytest.mark.parametrize(
    ("runner", "takes"),
    [
        (Runner(attention(ALWAYS), attention(ALWAYS)), True),
        (Runner(attention(ALWAYS), attention(UNIFORM)), False),
        (Runner(attention(UNIFORM, WIDTH)), True),
        (Runner(attention(UNIFORM, WIDTH - 1)), False),
        (Runner(attention(NEVER, WIDTH)), False),
        (Runner(attention(ALWAYS), further=UNIFORM), False),
        (Runner(attention(ALWAYS), split=True), False),
    ],
    ids=["all", "one does not", "up to K + 1", "up to less", "none at all", "layers elsewhere", "microbatches"],
)
def test_which_attention_takes_any_lengths(runner: Runner, takes: bool):
    assert takes_any_lengths(runner) is takes
