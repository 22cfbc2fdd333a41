"""What a request may set of its own on vLLM: refused where it is made, and never raised where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier  # noqa: E402
from c2t_plugin.engines.host_scorer import HostScorer  # noqa: E402
from c2t_plugin.engines.vllm import config, device_scorer, requests  # noqa: E402
from c2t_plugin.engines.vllm.adaptive import StepScorer  # noqa: E402
from c2t_plugin.engines.vllm.patches import ENGINE, PATCHES  # noqa: E402
from c2t_plugin.engines.vllm.requests import OwnSettings, granted  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from c2t_plugin.planner import OwnLimits  # noqa: E402
from c2t_plugin.request_options import RequestOptions  # noqa: E402
from tests.engines.vllm.test_config import resolved  # noqa: E402
from tests.support.engines.hostile_json import JSON  # noqa: E402
from tests.support.engines.undone import undone  # noqa: E402

BAD: list[tuple[dict[str, Any], str]] = [
    ({"c2t_beta": 2}, r"c2t_beta must be a number in \[0, 1\], got 2"),
    ({"c2t_beta": float("nan")}, "c2t_beta must be a number"),
    ({"c2t_beta": "high"}, "c2t_beta must be a number"),
    ({"c2t_beta": [0.5]}, "c2t_beta must be a number"),
    ({"c2t_max_depth": 1.5}, "c2t_max_depth must be a whole number"),
    ({"c2t_max_depth": -1}, "c2t_max_depth must be a whole number"),
    ({"c2t_max_depth": float("inf")}, "c2t_max_depth must be a whole number"),
    ({"c2t_enabled": "no"}, "c2t_enabled must be true or false"),
    ({"c2t_enabled": 2}, "c2t_enabled must be true or false"),
    ({"c2t_learn": "no"}, "c2t_learn must be true or false, got 'no'"),
    ({"c2t_learn": 2}, "c2t_learn must be true or false, got 2"),
    ({"c2t_learn": 0.0}, "c2t_learn must be true or false"),
    ({"c2t_learn": None}, "c2t_learn must be true or false"),
    ({"c2t_enabled": 0, "c2t_beta": 0.5}, "c2t_beta has no meaning with c2t_enabled false"),
    ({"c2t_bta": 0.5}, "there is no 'c2t_bta'.*takes c2t_enabled, c2t_beta, c2t_max_depth"),
]


@pytest.mark.parametrize(
    ("sent", "options"),
    [
        (None, RequestOptions()),
        ("a string", RequestOptions()),
        ({"somebody": "else's", 7: 1}, RequestOptions()),
        ({"c2t_beta": 0.25, "other": 1}, RequestOptions(beta=0.25)),
        ({"c2t_enabled": 0, "c2t_max_depth": 3.0}, RequestOptions(enabled=False, max_depth=3)),
        ({"c2t_enabled": True}, RequestOptions()),
        ({"c2t_learn": False}, RequestOptions(learn=False)),
        # of vLLM's routes
        ({"c2t_learn": 0, "c2t_beta": 0.25}, RequestOptions(beta=0.25, learn=False)),
        ({"c2t_learn": 1}, RequestOptions()),
    ],
)
def test_what_a_request_gets(sent: Any, options: RequestOptions):
    assert granted(sent, "all") == options


@pytest.mark.parametrize(("sent", "message"), BAD)
def test_bad_values_are_named(sent: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        granted(sent, "all")


def test_an_operator_bounds_what_is_set():
    with pytest.raises(ConfigError, match="c2t_beta, c2t_max_depth cannot be set: this server lets requests set none"):
        granted({"c2t_max_depth": 1, "c2t_beta": 0.1}, "none")
    with pytest.raises(ConfigError, match="c2t_enabled false verifies more"):
        granted({"c2t_enabled": 0}, "lower")
    assert granted({"c2t_beta": 0.1}, "lower") == RequestOptions(beta=0.1)
    assert granted({"other": 1}, "none") == RequestOptions()


@pytest.mark.parametrize("settings", ["all", "lower", "none"])
def test_every_request_may_keep_out_of_what_is_learnt(settings: str):
    assert granted({"c2t_learn": 0}, settings) == RequestOptions(learn=False)
    (found,) = OwnSettings(settings, 1).of(["a"], {"a": request({"c2t_learn": False})})
    assert found == RequestOptions(learn=False)


def test_it_brings_nothing_else_with_it():
    with pytest.raises(ConfigError, match="c2t_beta, c2t_learn cannot be set: this server lets requests set none"):
        granted({"c2t_learn": 0, "c2t_beta": 0.1}, "none")


@pytest.fixture
def front() -> Iterator[None]:
    PATCHES.apply(ENGINE)
    yield
    requests._front = None
    undone(PATCHES)


@pytest.mark.parametrize(("sent", "message"), BAD)
def test_parameters_with_bad_values_cannot_be_made(front: None, sent: dict[str, Any], message: str):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    requests.allow("all")
    with pytest.raises(VLLMValidationError, match=message):
        SamplingParams(extra_args=sent)
    assert SamplingParams(extra_args={"c2t_beta": 0.5}).extra_args == {"c2t_beta": 0.5}


@pytest.mark.parametrize(
    ("bound", "sent", "message"),
    [
        ("lower", {"c2t_enabled": 0}, "c2t_enabled false verifies more than the server does"),
        ("none", {"c2t_max_depth": 1}, "c2t_max_depth cannot be set: this server lets requests set none"),
    ],
)
def test_parameters_beyond_what_the_operator_lets_requests_set_cannot_be_made(
    front: None, bound: str, sent: dict[str, Any], message: str
):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    requests.allow(bound)
    with pytest.raises(VLLMValidationError, match=message):
        SamplingParams(extra_args=sent)
    requests.allow("all")
    assert SamplingParams(extra_args=sent).extra_args == sent


def test_a_process_that_makes_no_requests_never_raises(front: None, monkeypatch: pytest.MonkeyPatch):
    from vllm import SamplingParams

    SamplingParams(extra_args={"c2t_beta": 2})
    requests.allow("all")
    monkeypatch.setattr(requests.os, "getpid", lambda: -1)
    SamplingParams(extra_args={"c2t_beta": 2})


def request(extra_args: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args))


class Hostile(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


def test_where_they_are_used_a_bad_value_means_as_the_server_is_set(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(requests.logger, "warning", lambda text, *values: said.append(text % values))
    running = {f"bad{i}": request(sent) for i, (sent, _) in enumerate(BAD)}
    running |= {"hostile": request(Hostile(c2t_beta=1)), "pooling": SimpleNamespace(sampling_params=None)}
    running |= {"plain": request(None), "own": request({"c2t_beta": 0.5})}
    own = OwnSettings("all", len(running))
    for _ in range(2):
        found = dict(zip(running, own.of(running, running), strict=True))
        assert found.pop("own") == RequestOptions(beta=0.5)
        assert set(found.values()) == {RequestOptions()}
        running["own"] = request({"c2t_beta": 0.5})
    assert len(said) == 1
    assert own.ignored == len(BAD) + 1, "once for each request"
    assert own.of(["gone"], {}) == [RequestOptions()]


OURS = st.fixed_dictionaries(
    {}, optional={name: JSON for name in ("c2t_enabled", "c2t_beta", "c2t_max_depth", "c2t_learn", "c2t_b")}
)
BETA, D_MAX = 0.25, 4


@settings(deadline=None, max_examples=300, derandomize=True)
@given(sent=JSON | OURS, setting=st.sampled_from(["all", "lower", "none"]))
def test_nothing_that_is_sent_raises_in_an_engine(sent: Any, setting: str):
    own, running = OwnSettings(setting, 1), {"a": request(sent)}
    (found,) = own.of(["a"], running)
    scorer = HostScorer(NodeClassifier(ClassifierSpec()), rows=1, max_depth=D_MAX, beta=BETA)
    scorer.lower = setting == "lower"
    scorer.limit([found])
    OwnLimits.of(found, lower=scorer.lower)
    scorer.score(torch.zeros(1, 8), first=True)
    assert 0 <= int(scorer.end(1)) <= 1
    if own.ignored:
        assert found == RequestOptions(), "as the server is set"


@settings(deadline=None, max_examples=300, derandomize=True)
@given(sent=JSON | OURS, setting=st.sampled_from(["all", "lower", "none"]))
def test_nothing_that_is_sent_raises_at_the_front_but_a_refusal(sent: Any, setting: str):
    try:
        granted(sent, setting)
    except ConfigError as error:
        assert str(error).isascii() and "\n" not in str(error)


def test_a_name_that_comes_again_brings_settings_of_its_own():
    own = OwnSettings("all", 8)
    for sent, found in [({"c2t_beta": 0.5}, RequestOptions(beta=0.5)), ({"c2t_beta": 0.25}, RequestOptions(beta=0.25))]:
        again = {"a": request(sent)}
        assert own.of(["a"], again) == own.of(["a"], again) == [found]
    for sent in (None, {"c2t_beta": 7}):
        assert own.of(["a"], {"a": request(sent)}) == [RequestOptions()]


def test_what_is_remembered_is_forgotten_with_its_requests():
    own = OwnSettings("all", 2)
    for number in range(50):
        name = f"r{number}"
        assert own.of([name], {name: request({"c2t_max_depth": number})})[0].longest == number
    assert len(own._known) <= 6


@pytest.mark.parametrize("worker", ["vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"])
@pytest.mark.parametrize(
    ("v2", "adaptive", "settings"), [(False, False, "lower"), (True, False, "lower"), (True, True, "none")]
)
def test_requests_set_nothing_where_vllm_cuts_by_its_own_budget(worker: str, v2: bool, adaptive: bool, settings: str):
    found = resolved()
    found.parallel_config.worker_cls, found.use_v2_model_runner = worker, v2
    found.speculative_config.enable_adaptive_verification = adaptive
    found.scheduler_config.max_num_seqs, found.speculative_config.num_speculative_tokens = 8, 6
    asked = config.C2TConfig(request_settings="lower", learn="off")
    assert config.settle(found, asked).request_settings == settings


def test_a_devices_scorers_cut_each_row_by_its_own_limits_and_the_next_batch_by_its(monkeypatch: pytest.MonkeyPatch):
    """As the host's does, whose rows are compared with a device's elsewhere."""
    monkeypatch.setattr(device_scorer, "Ended", lambda *_: None)
    torch.manual_seed(0)
    classifier = NodeClassifier(ClassifierSpec())
    sizes = {"rows": 4, "max_depth": D_MAX, "beta": 0.5}
    host = HostScorer(classifier, **sizes)
    chains = device_scorer.DeviceScorer(classifier, device=torch.device("cpu"), **sizes)
    steps = StepScorer(classifier, device="cpu", **sizes)
    logits = torch.randn(D_MAX, 3, 50)
    own = ([0.0, 0.99, None], [None, None, 1])
    for betas, depths in (own, ([None] * 3, [None] * 3), ([None, 0.0, 0.0], [0, 2, None])):
        for scorer in (host, chains, steps):
            scorer.limit([RequestOptions(beta=beta, max_depth=most) for beta, most in zip(betas, depths, strict=True)])
        for number, each in enumerate(logits):
            host.score(each, first=number == 0)
            chains.score(each, first=number == 0)
            told = torch.zeros(4, D_MAX)
            steps.predict(each, torch.arange(3), torch.tensor([number]), told, torch.ones(3))
        expected = host.end(3).tolist()
        assert chains.end(3).tolist() == steps.kept(3, D_MAX).tolist() == expected
        assert all(depth is None or length <= depth for length, depth in zip(expected, depths, strict=True))
        assert all(
            beta != 0.0 or length == (depth or D_MAX)
            for length, beta, depth in zip(expected, betas, depths, strict=True)
        )
