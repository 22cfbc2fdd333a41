"""Uniform windows of a few widths: which there are, when each is entered, and what SGLang then verifies."""

from __future__ import annotations

import dataclasses
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState  # noqa: E402

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.config import C2TConfig  # noqa: E402
from c2t_plugin.engines.sglang.step import Step, attach, step_of  # noqa: E402

D_MAX = 6
WIDTH = D_MAX + 1
SEQ_LENS = [3, 5, 4]
EVERY = [field.name for field in dataclasses.fields(SpecRuntimeState)]


@pytest.fixture
def windows(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang.verify import windows

    return windows


# --- which there are


@pytest.mark.parametrize(
    ("widest", "mode", "expected"),
    [
        (2, "chain", (1, 2)),
        (4, "chain", (1, 2, 3, 4)),
        (7, "chain", (1, 2, 3, 5, 7)),
        (9, "chain", (1, 2, 3, 5, 9)),
        (1, "tree", (1,)),
        (2, "tree", (2,)),
        (5, "tree", (2, 3, 5)),
        (21, "tree", (3, 6, 11, 21)),
        (64, "tree", (8, 16, 32, 64)),
    ],
)
def test_widths(windows: Any, widest: int, mode: str, expected: tuple[int, ...]):
    assert windows.widths(widest, mode) == expected


@pytest.mark.parametrize(("places", "width"), [(1, 1), (2, 2), (3, 3), (4, 5), (5, 5), (6, 7), (7, 7)])
def test_the_narrowest_that_holds_all(windows: Any, places: int, width: int):
    assert windows.Windows(None, (1, 2, 3, 5, 7)).fitting(places) == width


def worker_of(topk: int = 1, device: str = "cpu", widest: int = WIDTH) -> SimpleNamespace:
    return SimpleNamespace(topk=topk, device=device, speculative_num_draft_tokens=widest)


@pytest.mark.parametrize(
    ("options", "server_args", "worker", "said"),
    [
        ({}, {}, worker_of(), "uniform window in widths 1, 2, 3, 5, 7"),
        ({"packing": "off"}, {}, worker_of(device="cuda"), "uniform window in widths 1, 2, 3, 5, 7"),
        ({"mode": "tree"}, {}, worker_of(4, widest=17), "uniform window in widths 3, 5, 9, 17"),
        ({"packing": "full"}, {}, worker_of(), "uniform window of 7 in every step (as asked for)"),
        ({"mode": "tree"}, {}, worker_of(), "uniform window of 7 in every step (at top-k 1 SGLang's draft fixes it)"),
        ({"mode": "tree"}, {}, worker_of(2, widest=2), "uniform window of 2 in every step (there is no narrower one)"),
        ({}, {}, worker_of(device="npu"), "window of 7 in every step (narrower ones have not been tried on npu)"),
        ({}, {"disaggregation_mode": "prefill"}, worker_of(), "in every step (a prefill server verifies nothing)"),
        ({}, {"enable_deterministic_inference": True}, worker_of(), "in every step (enable_deterministic_inference: "),
        ({}, {"enable_torch_compile": True}, worker_of(), "in every step (the CPU's compiled graphs have one width)"),
        ({}, {"enable_torch_compile": True}, worker_of(device="cuda"), "uniform window in widths 1, 2, 3, 5, 7"),
    ],
)
def test_the_log_says_which_and_why(
    windows: Any, caplog: pytest.LogCaptureFixture, options: Any, server_args: Any, worker: Any, said: str
):
    with caplog.at_level(logging.INFO):
        found = windows.start(C2TConfig(**options), SimpleNamespace(**server_args), worker, packed=False)
    assert said in caplog.text
    assert (found is None) == ("in every step" in said)


def test_ranks_with_requests_of_their_own_have_one_width(
    windows: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(windows.ranks, "apart", lambda: True)
    with caplog.at_level(logging.INFO):
        assert windows.start(C2TConfig(), SimpleNamespace(), worker_of(), packed=False) is None
    assert "uniform window of 7 in every step (DP attention: " in caplog.text


def test_where_rows_are_packed_only_the_cpus_trees_have_windows(windows: Any, caplog: pytest.LogCaptureFixture):
    def found(mode: str, device: str) -> Any:
        return windows.start(C2TConfig(mode=mode), SimpleNamespace(), worker_of(4, device), packed=True)

    with caplog.at_level(logging.INFO):
        assert [found(*case) for case in (("chain", "cpu"), ("chain", "cuda"), ("tree", "cuda"))] == [None] * 3
        assert found("tree", "cpu").widths == (2, 4, 7)
    assert not caplog.records, "the log says already what is packed"


# --- states


class Worker:
    """What SGLang's has of itself; states are named after the width that they are for."""

    def __init__(self, topk: int, device: str = "cuda") -> None:
        self.topk, self.device, self.speculative_num_draft_tokens = topk, device, WIDTH
        self.built: list[tuple[int, int]] = []
        runner = SimpleNamespace(attn_backend=SimpleNamespace(), decode_cuda_graph_runner=None)
        self.target_worker = SimpleNamespace(model_runner=runner)
        self.draft_runner = SimpleNamespace(attn_backend="own")
        own = {"draft_runner": self.draft_runner, "c2t": SimpleNamespace(packing=None, behind=None)}
        self._draft_worker = SimpleNamespace(speculative_num_draft_tokens=WIDTH, **own)
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(8, 32))

    def build_adaptive_runtime_state(self, depth: int, width: int) -> Any:
        self.built.append((depth, width))
        return state_of(width, depth)

    def now(self) -> dict[str, Any]:
        draft, target = self._draft_worker, self.target_worker.model_runner
        assert self.speculative_num_draft_tokens == draft.speculative_num_draft_tokens
        return {
            "speculative_num_draft_tokens": self.speculative_num_draft_tokens,
            "target_attn_backend": target.attn_backend,
            "target_graph_runner": target.decode_cuda_graph_runner,
            "draft_extend_attn_backend": draft.draft_extend_attn_backend,
            "cuda_graph_runner_for_draft_extend": draft.cuda_graph_runner_for_draft_extend,
        }


def state_of(width: int, depth: int) -> Any:
    named = {name: f"{name} of {width}" for name in EVERY}
    return SpecRuntimeState(
        **{**named, "speculative_num_steps": depth, "speculative_num_draft_tokens": width}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("topk", "built"), [(1, [(0, 1), (1, 2), (2, 3), (4, 5)]), (4, [(1, 1), (1, 2), (1, 3), (1, 5)])]
)
def test_each_width_has_states_of_its_own(windows: Any, topk: int, built: list[tuple[int, int]]):
    worker = Worker(topk)
    made = windows.Windows(worker, (1, 2, 3, 5, 7))
    made.register(state_of(7, D_MAX))
    made.init_states(cuda_graph_bs=[1, 2])
    assert worker.built == built
    for width in made.widths:
        made.enter(width)
        expected = state_of(width, 0)
        assert worker.now() == {name: getattr(expected, name) for name in worker.now()}
        assert worker.draft_runner.attn_backend == f"draft_extend_attn_backend of {width}"
        made.leave()
        assert worker.now() == {name: getattr(state_of(7, 0), name) for name in worker.now()}
    # drafting stays whole
    kept = [made._states[width] for width in made.widths]
    assert [state.cuda_graph_runner for state in kept] == [None] * 4 + ["cuda_graph_runner of 7"]


def test_a_draft_without_an_extend_backend_keeps_its_own(windows: Any):
    worker = Worker(1)
    made = windows.Windows(worker, (2, 7))
    made.register(dataclasses.replace(state_of(7, D_MAX), draft_extend_attn_backend=None))
    made.init_states()
    made._states[2] = dataclasses.replace(made._states[2], draft_extend_attn_backend=None)
    made.enter(2)
    assert worker.draft_runner.attn_backend == "own"


# --- what is verified


@pytest.fixture(params=["QLEN_ONLY", "FULL_MASK"])
def chains(
    windows: Any, sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Any:
    """Windows over a worker, whose verify inputs SGLang builds with the CPU engine's kernel."""
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.speculative.eagle_utils import TreeMaskMode
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from c2t_plugin.engines.sglang.worker import StepMixin

    kernel = sgl_kernel.build_tree_kernel_efficient_cpu
    # SGLang takes this one for a CPU only in a process that was started for it
    monkeypatch.setattr(spec_tree, "sgl_build_tree_kernel_efficient", kernel, raising=False)
    worker = Worker(1, "cpu")
    worker._draft_worker.tree_mask_mode = TreeMaskMode[request.param]
    backend = worker.target_worker.model_runner.attn_backend
    backend.verify_mask, backend.max_context_len = None, 64

    # the methods of the worker that the trivial window takes
    class Whole(StepMixin, EAGLEWorkerV2):
        target_worker = req_to_token_pool = None

    whole = object.__new__(Whole)
    vars(whole).update(vars(worker), _target_worker=worker.target_worker)
    whole.speculative_algorithm = SimpleNamespace(is_standalone=lambda: False)
    made = windows.Windows(whole, windows.widths(WIDTH, "chain"))
    made.register(dataclasses.replace(state_of(7, D_MAX), target_attn_backend=backend, draft_extend_attn_backend=None))
    made.init_states()
    batch = SimpleNamespace(
        seq_lens=torch.tensor(SEQ_LENS),
        seq_lens_sum=sum(SEQ_LENS),
        seq_lens_cpu=torch.tensor(SEQ_LENS),
        reqs=[None] * 3,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        spec_info=SimpleNamespace(bonus_tokens=torch.tensor([50, 60, 70], dtype=torch.int32)),
    )
    return SimpleNamespace(windows=made, worker=whole, batch=batch, form=request.param, backend=backend)


def input_of(chains: Any, kept: list[int]) -> Any:
    """The whole one, with the links behind the cuts taken out, as the draft worker leaves it."""
    from c2t_plugin.engines.sglang.verify.layout import cut_links

    drafts = torch.arange(100, 100 + 3 * WIDTH).view(3, WIDTH)
    made = chains.windows._built(chains.batch, SimpleNamespace(draft_token=drafts.flatten()), WIDTH)
    step = Step(torch.tensor(kept, dtype=torch.int32), drafted="drafted")  # type: ignore[arg-type]
    attach(made, step)
    cut_links(made.retrieve_next_token, step.kept)
    return made


def visible(found: Any, form: str) -> list[list[list[int]]]:
    """Of each request, the tokens of the window that each row sees; none of the prefix is hidden."""
    width, start, rows = found.draft_token_num, 0, []
    for prefix in SEQ_LENS if form == "FULL_MASK" else [0] * 3:
        mask = found.custom_mask[start : start + width * (prefix + width)].view(width, -1)
        assert mask[:, :prefix].all()
        rows.append(mask[:, prefix:].int().tolist())
        start += mask.numel()
    return rows


@pytest.mark.parametrize(
    ("kept", "width"), [([0, 0, 0], 1), ([0, 1, 0], 2), ([2, 1, 0], 3), ([0, 3, 1], 5), ([4, 0, 4], 5)]
)
def test_a_narrower_window_is_the_front_of_the_whole_one(chains: Any, kept: list[int], width: int):
    whole = input_of(chains, kept)
    found = chains.windows.narrow(chains.batch, whole)
    assert (found.draft_token_num, found.spec_steps, found.num_tokens_per_req) == (width, width - 1, width)
    for name in ("draft_token", "positions", "retrieve_next_token", "retrieve_next_sibling"):
        wide = getattr(whole, name).view(3, WIDTH)[:, :width].clone()
        if name == "retrieve_next_token":
            wide[:, -1] = -1  # out of the window, from where no link of this request leads
        assert getattr(found, name).view(3, width).tolist() == wide.tolist(), name
        assert getattr(found, name).dtype == wide.dtype, name
    assert found.retrieve_index.tolist() == torch.arange(3 * width).view(3, width).tolist()
    assert visible(found, chains.form) == [torch.ones(width, width).tril().int().tolist()] * 3
    assert step_of(found) is step_of(whole)
    assert (step_of(found).kept.tolist(), step_of(found).drafted) == (kept, "drafted")  # type: ignore[union-attr]
    # what SGLang had prepared was for the whole window
    assert found.prepared_out_cache_loc is None
    assert found.kv_loc_plan is None
    assert (chains.worker.speculative_num_draft_tokens, chains.backend.num_draft_tokens) == (width, width)
    chains.windows.leave()
    assert (chains.worker.speculative_num_draft_tokens, chains.backend.num_draft_tokens) == (WIDTH, WIDTH)


@pytest.mark.parametrize("kept", [[0, 6, 0], [5, 0, 0]])
def test_a_batch_that_needs_the_whole_window_is_left_alone(chains: Any, kept: list[int]):
    whole = input_of(chains, kept)
    assert chains.windows.narrow(chains.batch, whole) is whole
    assert chains.worker.speculative_num_draft_tokens == WIDTH


@pytest.mark.parametrize("kept", [[0, 1, 0], [2, 1, 0], [0, 3, 3]])
def test_a_window_one_too_narrow_cannot_go_unnoticed(chains: Any, kept: list[int]):
    whole, fitting = input_of(chains, kept), chains.windows.fitting
    chains.windows.fitting = lambda places: max(width for width in chains.windows.widths if width < fitting(places))
    with pytest.raises(RuntimeError, match="out of bounds"):
        chains.windows.narrow(chains.batch, whole)
