"""What strangers send: refused with one line at the front, and whatever passes raises nothing where it is used."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang]

from benchmarks.cpu_engine import SITE  # noqa: E402
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier  # noqa: E402
from c2t_plugin.engines.sglang import control, requests  # noqa: E402
from c2t_plugin.engines.sglang.metrics import Counts  # noqa: E402
from c2t_plugin.engines.sglang.parts import Parts  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.ahead import DraftEnd  # noqa: E402
from c2t_plugin.planner.planner import WHOLE_FIRST  # noqa: E402
from c2t_plugin.planner.step_planner import StepPlanner  # noqa: E402
from c2t_plugin.request_options import MOST  # noqa: E402
from c2t_plugin.scorer import ChainScorer  # noqa: E402
from tests.support.engines.hostile_json import JSON  # noqa: E402
from tests.support.sglang.front import VOCABULARY, WIDTH, at_the_front  # noqa: E402

BETA, D_MAX = 0.25, 4
COSTS = CostCurve(verify=((1, 1.0), (8, 1.4), (64, 6.0)), draft=((1, 0.1), (64, 0.4)), fixed=0.05, draft_extend=0.05)
OURS = st.fixed_dictionaries({}, optional={name: JSON for name in ("enabled", "beta", "max_depth", "beta2")})
PARAMS = JSON | st.fixed_dictionaries({"c2t": JSON | OURS})
CONTROL = st.fixed_dictionaries(
    {}, optional={name: JSON for name in (control.BETA, control.MAX_DEPTH, control.AUTO_BETA)}
)


def parts_of(**configuration: str) -> Parts:
    scorer = ChainScorer(
        NodeClassifier(ClassifierSpec(top_m=10)), slots=8, rows=4, max_depth=D_MAX, beta=BETA, device="cpu"
    )
    found = {"request_settings": "all", "policy": "c2t", **configuration}
    scorer.lower = found["request_settings"] == "lower"
    return Parts(scorer, Counts(D_MAX), None, None, found)


class Fixed(NamedTuple):
    """A request of which nothing can be changed."""

    top_logprobs_num: int


def request(custom_params: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params))


def limits(parts: Parts, *asked: Any) -> list[tuple[float, int]]:
    """Threshold and depth of requests that ask for this."""
    slots = torch.arange(len(asked))
    requests.set_options(parts, slots, [request(each) for each in asked])
    beta, depth = parts.scorer.limits_of(slots)
    return list(zip(beta.tolist(), depth.tolist(), strict=True))


@pytest.fixture(scope="module", autouse=True)
def messages(sgl_kernel: ModuleType) -> None:
    """SGLang's messages, whose module imports more than there is on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        importlib.import_module("sglang.srt.managers.io_struct")


# --- where they are used: nothing raises


@pytest.mark.slow
@settings(deadline=None, max_examples=300, derandomize=True)
@given(custom_params=PARAMS, setting=st.sampled_from(["all", "lower", "none"]))
def test_no_custom_params_raise_in_a_scheduler(custom_params: Any, setting: str):
    parts = parts_of(request_settings=setting)
    ((beta, depth),) = limits(parts, custom_params)
    assert 0.0 <= beta <= 1.0 and 0 <= depth <= D_MAX
    if parts.counts.settings_ignored:
        assert (beta, depth) == (BETA, D_MAX), "as the server is set"


@pytest.mark.slow
@settings(deadline=None, max_examples=300, derandomize=True)
@given(values=CONTROL.filter(bool))
def test_no_control_message_raises_in_a_scheduler(values: dict[str, Any]):
    parts = parts_of()
    handler = control.setter(lambda *_: pytest.fail("these are ours"))
    answer = handler(SimpleNamespace(draft_worker=SimpleNamespace(c2t=parts)), SimpleNamespace(server_args=values))
    state = control.state(parts)
    assert 0.0 <= state["beta"] <= 1.0 and 0 <= state["max_depth"] <= D_MAX
    if not answer.updated:
        assert (state["beta"], state["max_depth"]) == (BETA, D_MAX)


@pytest.mark.parametrize("name", [control.BETA, control.MAX_DEPTH, control.AUTO_BETA])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, "nan", None, [], 10**400])
def test_a_control_message_that_is_no_number_is_answered_with_false_and_a_line(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
):
    worker = SimpleNamespace(c2t=parts_of())
    handler = control.setter(lambda *_: None)
    answer = handler(SimpleNamespace(draft_worker=worker), SimpleNamespace(server_args={name: value}))
    assert answer.updated is False
    assert len(caplog.records) == 1 and "C2T: nothing was changed" in caplog.text


def test_bad_settings_are_counted_and_said_once(caplog: pytest.LogCaptureFixture):
    parts = parts_of()
    bad, good = {"c2t": {"beta": 7, "max_depth": 1}}, {"c2t": {"max_depth": 1}}
    with caplog.at_level(logging.WARNING):
        assert limits(parts, bad, good, bad) == [(BETA, D_MAX), (BETA, 1), (BETA, D_MAX)]
    assert parts.counts.state()["settings_ignored"] == 2
    (line,) = caplog.messages
    assert "settings are ignored" in line and "c2t.beta must be a number in [0, 1], got 7" in line


def test_they_are_read_once_however_many_chunks_a_prompt_has():
    parts, req = parts_of(), request({"c2t": {"beta": 7}})
    for _ in range(3):
        requests.set_options(parts, torch.tensor([1]), [req])
    assert parts.counts.settings_ignored == 1


# --- what requests may set


@pytest.mark.parametrize(
    ("setting", "asked", "expected"),
    [
        ("all", {"beta": 0.0}, (0.0, D_MAX)),
        ("all", {"enabled": False}, (0.0, D_MAX)),
        ("all", {"max_depth": 99}, (BETA, D_MAX)),
        ("lower", {"beta": 0.0}, (BETA, D_MAX)),
        ("lower", {"beta": 0.5, "max_depth": 2}, (0.5, 2)),
        ("lower", {"enabled": False}, (BETA, D_MAX)),
        ("none", {"beta": 0.5}, (BETA, D_MAX)),
        ("none", {"max_depth": 1}, (BETA, D_MAX)),
    ],
)
def test_what_the_operator_leaves_to_requests(setting: str, asked: dict[str, Any], expected: tuple[float, int]):
    assert limits(parts_of(request_settings=setting), {"c2t": asked}) == [expected]


def test_a_lower_threshold_moves_with_the_servers():
    parts = parts_of(request_settings="lower")
    assert limits(parts, {"c2t": {"beta": 0.5}}) == [(0.5, D_MAX)]
    parts.scorer.set_beta(0.75)
    assert parts.scorer.limits_of(torch.tensor([0]))[0].tolist() == [0.75]
    assert parts.scorer.owns(torch.tensor([0])).tolist() == [False], "a budget may cut it further"


REFUSED = {
    "none": ({"max_depth": 1}, "cannot be set: this server was started with --speculative-c2t-request-settings none"),
    "lower": ({"enabled": False}, "c2t.enabled false verifies more than the server does: .*-request-settings lower"),
}


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The record of a server of C2T, as the front end finds it."""
    found = SimpleNamespace(speculative_algorithm="C2T_EAGLE3", _c2t={})
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: found)
    return found


@pytest.mark.parametrize("setting", REFUSED)
def test_what_they_may_not_is_refused_at_the_front(serving: Any, setting: str):
    asked, says = REFUSED[setting]
    serving._c2t = {"request_settings": setting}
    at_the_front({"c2t": {}})
    with pytest.raises(ConfigError, match=says):
        at_the_front({"c2t": asked})


# --- the front


@pytest.mark.slow
@settings(deadline=None, max_examples=300, derandomize=True)
@given(custom_params=PARAMS)
def test_the_front_refuses_or_passes(custom_params: Any):
    # ValueError is what SGLang answers with status 400; a ConfigError is one
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        found = SimpleNamespace(speculative_algorithm="C2T_EAGLE3", _c2t={})
        context.setattr("sglang.srt.runtime_context.get_server_args", lambda: found)
        try:
            at_the_front(custom_params)
        except ConfigError as error:
            assert len(str(error)) < 1000 and str(error).isascii()


@pytest.mark.parametrize("custom_params", [[1], "c2t", 7, True, [["c2t", {}]]])
def test_custom_params_that_are_no_object(serving: Any, custom_params: Any):
    with pytest.raises(ConfigError, match="custom_params must be an object, got "):
        at_the_front(custom_params)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**12])
def test_a_token_outside_the_vocabulary(serving: Any, token: int):
    at_the_front(tokens=[0, VOCABULARY - 1])
    with pytest.raises(ConfigError, match=rf"input_ids has the token {token}; expected 0 to 99"):
        at_the_front(tokens=[5, token, 6])


def test_a_prompt_without_tokens(serving: Any):
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        at_the_front(tokens=[])
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        at_the_front(tokens=[], input_ids=None)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[0.0] * (WIDTH - 1)], torch.bfloat16),
        ([[0.0] * WIDTH, []], torch.bfloat16),
        ([[0.0] * WIDTH], torch.float32),
        ([[0.0] * WIDTH], torch.float16),
    ],
)
def test_embeddings_that_the_model_cannot_read(serving: Any, rows: list[list[float]], dtype: torch.dtype):
    """Plain SGLang's scheduler dies of them."""
    at_the_front(tokens=[], input_ids=None, input_embeds=[[0.0] * WIDTH] * 2)
    with pytest.raises(ConfigError, match=f"input_embeds takes rows of {WIDTH} numbers, of a model in bfloat16"):
        at_the_front(tokens=[], input_ids=None, input_embeds=rows, dtype=dtype)


@pytest.mark.parametrize("name", ["return_hidden_states", "positional_embed_overrides"])
@pytest.mark.parametrize("value", [[], {}, [1], 7, "x"])
def test_fields_that_are_taken_as_they_come(serving: Any, name: str, value: Any):
    """Plain SGLang's scheduler dies of some."""
    for good in (True, False, "last", None):
        at_the_front(return_hidden_states=good, positional_embed_overrides=None)
    with pytest.raises(ConfigError, match=f"{name} (must be|takes)"):
        at_the_front(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_logprobs_num", VOCABULARY + 1),
        ("top_logprobs_num", -1),
        ("logprob_start_len", -2),
        ("logprob_start_len", "x"),
    ],
)
def test_log_probabilities_of_more_than_there_is(serving: Any, name: str, value: Any):
    """Of these too."""
    at_the_front(top_logprobs_num=VOCABULARY, logprob_start_len=-1)
    with pytest.raises(ConfigError, match=f"{name} must be from"):
        at_the_front(**{name: value})


@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({}, {}),
        ({"top_logprobs_num": 5000}, {"top_logprobs_num": VOCABULARY}),
        ({"top_logprobs_num": -1}, {"top_logprobs_num": 0}),
        ({"top_logprobs_num": math.nan}, {"top_logprobs_num": 0}),
        ({"logprob_start_len": -5}, {"logprob_start_len": -1}),
        ({"logprob_start_len": 2**63, "top_logprobs_num": "x"}, {"logprob_start_len": MOST, "top_logprobs_num": 0}),
        ({"return_hidden_states": []}, {"return_hidden_states": False}),
        ({"positional_embed_overrides": {}}, {"positional_embed_overrides": None}),
    ],
)
def test_what_a_scheduler_would_die_of_is_bounded_there(
    fields: dict[str, Any], served: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    """SGLang's Rust front end lets it through."""
    good = {"top_logprobs_num": VOCABULARY, "logprob_start_len": -1, "return_hidden_states": "last"}
    worker = SimpleNamespace(c2t=parts_of())
    scheduler = SimpleNamespace(draft_worker=worker, model_config=SimpleNamespace(vocab_size=VOCABULARY))
    handler = requests.bounding(lambda _, recv_req, mm_input_error=None: (vars(recv_req), mm_input_error))
    for _ in range(2):
        assert handler(scheduler, SimpleNamespace(**{**good, **fields}), mm_input_error="e") == (
            {**good, **served},
            "e",
        )
    assert worker.c2t.counts.settings_ignored == (2 if fields else 0)
    assert len(caplog.records) == (1 if fields else 0)


def test_a_request_that_cannot_be_bounded_is_passed_on():
    worker = SimpleNamespace(c2t=parts_of())
    scheduler = SimpleNamespace(draft_worker=worker, model_config=SimpleNamespace(vocab_size=VOCABULARY))
    assert requests.bounding(lambda _, recv_req: recv_req.top_logprobs_num)(scheduler, (fixed := Fixed(-1))) == -1
    assert fixed.top_logprobs_num == -1 and worker.c2t.counts.settings_ignored == 1


def test_pictures_excuse_tokens_where_the_model_sees_them(serving: Any):
    for tokens in ([], [10**6]):
        at_the_front(tokens=tokens, processor=object(), contains_mm_input=lambda: True)
        with pytest.raises(ConfigError, match=r"no tokens|has the token"):
            at_the_front(tokens=tokens, contains_mm_input=lambda: True)


def test_other_algorithms_requests_are_left_alone(serving: Any):
    serving.speculative_algorithm = "EAGLE3"
    at_the_front(custom_params=[1], tokens=[])


# --- neighbours


@pytest.mark.parametrize(
    ("setting", "asked", "whole"),
    [
        ("all", [{"enabled": False}, {}], False),
        ("all", [{"beta": 0.5}, {"max_depth": 1}], False),
        ("all", [{"enabled": False}, {"beta": 0.5}], True),
        ("lower", [{"beta": 0.5}, {"beta": 0.75}], False),
    ],
)
def test_ones_own_threshold_does_not_deepen_the_drafts_of_others(
    setting: str, asked: list[dict[str, Any]], whole: bool, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        worker = importlib.import_module("c2t_plugin.engines.sglang.worker")
    monkeypatch.setattr(worker.ranks, "_peers", lambda: SimpleNamespace(world_size=1))
    parts, reqs, told = parts_of(request_settings=setting), [request({"c2t": each}) for each in asked], []
    requests.set_options(parts, torch.arange(len(reqs)), reqs)
    parts.planner = SimpleNamespace(begin=lambda count, whole, own: told.append((count, whole)) or 3)
    assert worker.StepMixin.planned_depth(SimpleNamespace(c2t=parts, device="cpu"), reqs) == 3
    assert told == [(2, whole)]


@pytest.mark.parametrize(("setting", "exact"), [("all", True), ("lower", False)])
def test_the_planner_is_told_what_requests_set_for_themselves(setting: str, exact: bool):
    parts = parts_of(request_settings=setting)
    asked = [{}, {"beta": 0.5}, {"max_depth": 1}, {"beta": 0.75, "max_depth": 2}, {"enabled": True}]
    reqs = [request(None), *(request({"c2t": each}) for each in asked)]
    assert requests.limits_of(reqs) == [None] * 6, "as long as they are not read"
    requests.set_options(parts, torch.arange(len(reqs)), reqs)
    own = [(0.5, None, exact), (None, 1, False), (0.75, 2, exact)]
    assert requests.limits_of(reqs) == [None, None, *own, None]


@pytest.mark.parametrize("odd", [0, 1])
def test_drafts_beside_one_that_wants_none_end_as_without_it(odd: int, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        worker = importlib.import_module("c2t_plugin.engines.sglang.worker")
    monkeypatch.setattr(worker.ranks, "_peers", lambda: SimpleNamespace(world_size=1))
    planner = StepPlanner(COSTS, None, steps=D_MAX, most=D_MAX, device=torch.device("cpu"), depths=range(D_MAX + 1))
    planner.packed, planner.draft_end = True, DraftEnd()
    for _ in range(WHOLE_FIRST):
        planner.begin(2)
        planner.keep(torch.full((2,), D_MAX), torch.zeros(2, dtype=torch.bool), torch.full((2, D_MAX), 0.9))
    parts, reqs = parts_of(), [request(None), request(None)]
    reqs[odd] = request({"c2t": {"max_depth": 0}})
    parts.planner = planner
    requests.set_options(parts, torch.arange(2), reqs)
    for own, neighbours, goes_on in ((0.99, 0.01, False), (0.01, 0.99, True)):
        assert worker.StepMixin.planned_depth(SimpleNamespace(c2t=parts, device="cpu"), reqs) == D_MAX
        newest = [own, neighbours] if odd == 0 else [neighbours, own]
        assert planner.goes_on(1, newest, [math.nan] * 2) is goes_on


@pytest.mark.parametrize(
    ("asked", "windows", "kept"),
    [
        ([{"enabled": False}, {}, {}], True, [2, 1, 2]),
        ([{"enabled": False}, {}, {}], False, [4, 1, 2]),
        # among themselves they are as wide as they like, and one that asks for less widens nothing
        ([{"enabled": False}, {"beta": 0.1}, {"enabled": False}], True, [4, 1, 2]),
        ([{}, {"beta": 0.9}, {}], True, [4, 1, 2]),
    ],
)
def test_ones_own_threshold_does_not_widen_the_window_of_others(
    asked: list[dict[str, Any]], windows: bool, kept: list[int], monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        chain = importlib.import_module("c2t_plugin.engines.sglang.drafters.chain")
    parts, reqs = parts_of(), [request({"c2t": each}) for each in asked]
    slots = torch.arange(len(reqs))
    requests.set_options(parts, slots, reqs)
    parts.scorer.begin(slots)
    monkeypatch.setattr(parts.scorer, "end", lambda *_: torch.tensor([4, 1, 2], dtype=torch.int32))
    parts.windows = object() if windows else None
    _, found = chain.ChainDrafter(None, parts)._kept(reqs, parts.scorer.sure(len(reqs)), None)
    assert (found.tolist(), found.dtype) == (kept, torch.int32)


def test_one_requests_limits_cost_no_batch_without_them(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        worker = importlib.import_module("c2t_plugin.engines.sglang.worker")
    parts = parts_of()
    scorer, reqs = parts.scorer, [request({"c2t": {"max_depth": 1}}), request({"c2t": {"beta": 1.0}}), request(None)]
    scorer.set_beta(0.0)
    requests.set_options(parts, torch.arange(len(reqs)), reqs)

    class Stock:
        def draft(self, batch: Any) -> Any:
            scorer.begin(batch.req_pool_indices)
            for _ in range(D_MAX - 1):
                scorer.step(torch.zeros(len(batch.reqs), 20))
            return scorer.cuts, scorer.end(len(batch.reqs)).tolist()

    made = object.__new__(type("Draft", (worker.DraftMixin, Stock), {}))
    made.c2t = parts
    made.drafter = SimpleNamespace(drafting=contextlib.nullcontext, decide=lambda batch, drafted: drafted)
    decode = SimpleNamespace(is_idle=lambda: False)
    scorer.write_seed(torch.arange(len(reqs)), torch.zeros(len(reqs), 20))
    for rows, expected in (([2], (False, [D_MAX])), ([0, 2, 1], (True, [1, D_MAX, 0])), ([2], (False, [D_MAX]))):
        batch = SimpleNamespace(
            forward_mode=decode, reqs=[reqs[row] for row in rows], req_pool_indices=torch.tensor(rows), spec_info=None
        )
        assert made.draft(batch) == expected
