"""What chains take from CUDA graphs of the draft, over stubs for graphs: the seed of the next draft, and depths."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier  # noqa: E402
from c2t_plugin.engines.sglang.metrics import Counts  # noqa: E402
from c2t_plugin.engines.sglang.parts import Parts  # noqa: E402
from c2t_plugin.scorer import ChainScorer  # noqa: E402
from tests.engines.sglang.drafters.test_tree_segments import Graph  # noqa: E402
from tests.engines.sglang.verify.test_windows import EVERY, state_of  # noqa: E402

DEPTHS = (0, 1, 2, 4)
SLOTS, ROWS, VOCAB = 8, 4, 20


@pytest.fixture
def worker(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang import worker

    return worker


def batch_of(slots: list[int]) -> Any:
    return SimpleNamespace(
        req_pool_indices=torch.tensor(slots), reqs=slots, forward_mode=SimpleNamespace(is_idle=lambda: False)
    )


def scorer_of() -> ChainScorer:
    torch.manual_seed(3)
    classifier = NodeClassifier(ClassifierSpec(top_m=10)).eval().requires_grad_(False)
    return ChainScorer(classifier, slots=SLOTS, rows=ROWS, max_depth=4, beta=0.0, device="cpu")


class Captured:
    """For SGLang's runner of the captured draft extend: one graph for ROWS requests, results in its memory."""

    def __init__(self, words: Tensor) -> None:
        self.inputs, self.graph = torch.zeros(ROWS, dtype=torch.int64), Graph()
        with self.graph:
            self.logits = words[self.inputs] * 1.0

    def execute(self, tokens: Tensor, select_index: Any) -> Any:
        self.inputs.zero_()[: len(tokens)] = tokens
        self.graph.replay()
        # pads too: SGLang takes the first rows later
        return SimpleNamespace(next_token_logits=self.logits)


class Stock:
    """SGLang's draft worker as far as seeds go; `words` are what its model says behind each token."""

    def __init__(self) -> None:
        self.words = 3 * torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(7))
        self.draft_runner = SimpleNamespace(forward=self._forward)
        self.captures = True

    def _forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=self.words[tokens]))

    def _capture_cuda_graphs(self) -> None:
        self.cuda_graph_runner_for_draft_extend = Captured(self.words) if self.captures else None

    def _draft_extend_for_decode(self, batch: Any, tokens: Tensor) -> None:
        runner = self.cuda_graph_runner_for_draft_extend
        if runner is None:
            self.draft_runner.forward(tokens)
        else:
            runner.execute(tokens, None)


@pytest.fixture
def draft(worker: Any) -> Any:
    from c2t_plugin.engines.sglang.drafters.chain import ChainDrafter

    made = type("Draft", (worker.DraftMixin, Stock), {})()
    made.c2t = Parts(scorer_of(), Counts(4), None, None, {})
    made.drafter = ChainDrafter(made, made.c2t)
    made._capture_cuda_graphs()
    return made


def first(scorer: ChainScorer, slots: list[int]) -> Tensor:
    """Confidences of the first tokens of drafts for these slots."""
    scorer.begin(torch.tensor(slots))
    return scorer.confidence(len(slots))[:, 0].clone()


def expected(draft: Any, tokens: dict[int, int], slots: list[int]) -> Tensor:
    """The same where each slot's seed is what the model says behind its token."""
    scorer = scorer_of()
    scorer.write_seed(torch.tensor(list(tokens)), draft.words[torch.tensor(list(tokens.values()))])
    return first(scorer, slots)


STEPS = (([5, 2, 7], [30, 11, 4]), ([7, 1], [22, 9]), ([2, 5, 1, 7], [8, 41, 3, 17]))


def test_seeds_are_those_of_the_replayed_graph(draft: Any):
    """Also of requests that later replays, into the same memory, are not for."""
    tokens: dict[int, int] = {}
    for slots, behind in STEPS:
        draft._draft_extend_for_decode(batch_of(slots), torch.tensor(behind))
        tokens |= dict(zip(slots, behind, strict=True))
        mine = sorted(tokens)
        assert torch.equal(first(draft.c2t.scorer, mine), expected(draft, tokens, mine))
    graph = draft.cuda_graph_runner_for_draft_extend.graph
    assert graph.replays == len(STEPS)
    assert len(set(expected(draft, tokens, mine).tolist())) == len(mine), "one seed for another would not be seen"


def test_every_depths_graph_gives_seeds_and_so_does_none(draft: Any):
    """SGLang captures again for each depth, and where a batch has no graph the model itself runs."""
    runners = []
    for captures in (True, True, False):
        draft.captures = captures
        draft._capture_cuda_graphs()
        runners.append(draft.cuda_graph_runner_for_draft_extend)
    for token, runner in enumerate((runners[1], runners[2], runners[0], runners[1])):
        draft.cuda_graph_runner_for_draft_extend = runner
        draft._draft_extend_for_decode(batch_of([3]), torch.tensor([token]))
        assert torch.equal(first(draft.c2t.scorer, [3]), expected(draft, {3: token}, [3]))
    assert [runner.graph.replays for runner in runners[:2]] == [1, 2]


class Target:
    """A worker whose depths are switched, on a device with CUDA graphs; a state's parts are named after its width."""

    device = "cuda"

    def build_adaptive_runtime_state(self, depth: int, width: int) -> Any:
        self.built.append((depth, width))
        return state_of(width, depth)


@pytest.fixture
def switched(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.srt.speculative import eagle_worker_v2

    from c2t_plugin.engines.sglang import states
    from c2t_plugin.engines.sglang.drafters.depths import DepthSwitch

    kept: list[tuple[str, dict[str, int]]] = [("at start", {"width": 1})]
    context = SimpleNamespace(override=lambda source, **fields: kept.append((source, fields)), _overrides_log=kept)
    for module in (eagle_worker_v2, states):
        monkeypatch.setattr(module, "get_context", lambda: context)
    monkeypatch.setattr(eagle_worker_v2, "log_info_on_rank0", lambda logger, text: logger.info(text))
    made = object.__new__(type("Whole", (Target, worker.StepMixin, eagle_worker_v2.EAGLEWorkerV2), {}))
    made.built, made.planned, made.changes = [], [], kept
    made.speculative_num_steps, made.speculative_num_draft_tokens = DEPTHS[-1], DEPTHS[-1] + 1
    made._target_worker = SimpleNamespace(model_runner=SimpleNamespace())
    made.planned_depth, made.plan_rows = lambda reqs: made.planned.pop(), lambda requests: None
    made._draft_worker = SimpleNamespace(
        draft_runner=SimpleNamespace(),
        _rebuild_topk1_chain_buffers=lambda: None,
        c2t=SimpleNamespace(together=None),
    )
    made.adaptive_controller = DepthSwitch(made, DEPTHS)
    made.adaptive_controller.register(state_of(DEPTHS[-1] + 1, DEPTHS[-1]))
    made.adaptive_controller.init_states(cuda_graph_bs=[1, 2])
    return made


def in_use(worker: Any) -> dict[str, Any]:
    draft, target = worker._draft_worker, worker._target_worker.model_runner
    assert draft.speculative_num_steps == worker.speculative_num_steps
    assert draft.speculative_num_draft_tokens == worker.speculative_num_draft_tokens
    assert draft.draft_runner.draft_attn_backend == draft.draft_attn_backend
    assert draft.draft_runner.attn_backend == draft.draft_extend_attn_backend
    found = {name: getattr(draft, name, None) for name in EVERY}
    return found | {"target_attn_backend": target.attn_backend, "target_graph_runner": target.decode_cuda_graph_runner}


def test_each_depth_has_backends_and_graphs_of_its_own(switched: Any, caplog: pytest.LogCaptureFixture):
    assert switched.built == [(depth, depth + 1) for depth in DEPTHS[:-1]]
    with caplog.at_level(logging.INFO):
        for depth in (2, 0, 1, 4, 0, 4):
            switched.planned = [depth]
            switched.activate_step_by_batch(3)
            assert switched.planned == []
            assert in_use(switched) == {name: getattr(state_of(depth + 1, depth), name) for name in EVERY}
    assert "Switch adaptive runtime state" not in caplog.text
    newest = {"speculative_num_steps": 4, "speculative_num_draft_tokens": 5}
    assert switched.changes == [("at start", {"width": 1}), ("adaptive_spec.restore", newest)]
    assert len(switched.built) == len(DEPTHS) - 1, "made at start, once"


def test_the_release_whose_extend_graphs_keep_the_widest_width_gets_the_states(
    worker: Any, monkeypatch: pytest.MonkeyPatch
):
    """As 0.5.17 asks for it; later releases, which ask without the arguments, are left alone."""
    from c2t_plugin.engines.sglang import states

    spec, widest = SimpleNamespace(speculative_num_draft_tokens=None), SimpleNamespace(speculative_num_draft_tokens=7)

    class Built:
        def build_adaptive_runtime_state(self, depth: int, width: int) -> int:
            spec.speculative_num_draft_tokens = width
            return asked(states.extend_graphs.resolve_num_tokens_per_req)

    def asked(resolve: Any) -> int:
        return resolve(phase="draft_extend", **({"server_args": widest} if old else {}))

    monkeypatch.setattr(states, "get_spec", lambda: spec)
    old, name = True, "resolve_num_tokens_per_req"
    stock = lambda *, phase, server_args: server_args.speculative_num_draft_tokens  # noqa: E731
    monkeypatch.setattr(states.extend_graphs, name, stock)
    assert (states.build(Built(), 2, 3), asked(states.extend_graphs.resolve_num_tokens_per_req)) == (3, 7)
    old = False
    monkeypatch.setattr(states.extend_graphs, name, lambda *, phase: "its own")
    assert states.build(Built(), 2, 3) == "its own"


def test_an_idle_step_asks_for_no_depth(switched: Any):
    switched.planned = [2]
    switched.activate_step_by_batch(0)
    assert (switched.planned, switched.speculative_num_steps) == ([2], DEPTHS[-1])
