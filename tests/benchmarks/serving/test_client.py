"""The measuring client: what it makes of an engine's per-request statistics."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.serving import client as serving
from benchmarks.serving.answers import Ask, Completion, Pass
from benchmarks.serving.client import Client
from benchmarks.serving.engines import vllm as vllm_engine
from benchmarks.serving.engines.sglang import SglangClient, counts
from benchmarks.serving.engines.vllm import VllmClient, value_of
from c2t_plugin.errors import C2TError

pytestmark = pytest.mark.slow

# three steps, of 1, 3 and 3 verified tokens, roots included
CUT: dict[str, Any] = {
    "spec_verify_ct": 3,
    "spec_num_correct_drafts": 2,
    "spec_num_proposed_drafts": 18,
    "spec_cap_lens_histogram": [0, 1, 0, 2],
}


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (None, (0, 0, 0)),
        (CUT, (3, 2, 4)),
        ({**CUT, "spec_cap_lens_histogram": []}, (3, 2, 18)),
    ],
    ids=["no speculation", "cut chains", "static chain"],
)
def test_counts(details: dict[str, Any] | None, expected: tuple[int, int, int]) -> None:
    assert counts(details) == expected


def test_a_histogram_that_lost_a_step_is_refused() -> None:
    with pytest.raises(C2TError, match="histogram"):
        counts({**CUT, "spec_cap_lens_histogram": [0, 1, 0, 1]})


def test_a_pass_sums_its_requests() -> None:
    done = Pass((Completion((1, 2, 3), 2, 1, 4), Completion((4, 5), 1, 1, 4)), seconds=2.0)
    assert (done.output_tokens, done.verify_steps) == (5, 3)
    assert done.tau == 2 / 3
    assert done.gamma_per_token == 8 / 5


def test_plain_decoding_has_no_tau() -> None:
    assert Pass((Completion((1,), 0, 0, 0),), seconds=1.0).tau is None


def test_identical_outputs_are_counted_prompt_by_prompt() -> None:
    one = Pass((Completion((1, 2), 0, 0, 0), Completion((3,), 0, 0, 0)), 1.0)
    other = Pass((Completion((1, 2), 2, 1, 4), Completion((4,), 1, 0, 2)), 1.0)
    assert one.n_identical(other) == 1


@pytest.mark.parametrize(
    "call", [lambda client: client.complete([1]), lambda client: client.flush(), lambda client: client.c2t_state()]
)
def test_a_server_that_is_gone_is_an_error_of_ours(call: Callable[[Client], object]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with (
        SglangClient(f"http://127.0.0.1:{port}", max_tokens=1) as client,
        pytest.raises(C2TError, match="did not answer"),
    ):
        call(client)


# what ends a line in Unicode and not in a stream of events
LINE_ENDS = "a\x85b\u2028c\u2029"
WAIT_S = 120.0


class Stub(BaseHTTPRequestHandler):
    """A server that streams prompt[0] tokens, one a line, and says that it runs as many requests as are open."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[dict[str, Any]]] = []
    flushed: ClassVar[int] = 0
    open: ClassVar[int] = 0
    broken: ClassVar[str] = ""
    lock: ClassVar[threading.Lock] = threading.Lock()
    # that it was asked what runs while `full` requests did, for which answers wait; 0 for not
    seen: ClassVar[threading.Event] = threading.Event()
    full: ClassVar[int] = 0

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.broken == "loads":
            self.send_error(404)
            return
        if self.open >= self.full:
            self.seen.set()
        loads = [{"num_running_reqs": self.open, "num_waiting_reqs": 7}, {"num_running_reqs": 0}]
        self.answer(json.dumps({"loads": loads}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/flush_cache"):
            type(self).flushed += 1
            self.answer(b"{}")
            return
        request = json.loads(body)
        with self.lock:
            self.asked.append(request)
            type(self).open += 1
        if self.full:
            self.seen.wait(WAIT_S)
        if "logprobs" in request:
            type(self).open -= 1
            best = {"a": -0.5, "b": -0.75} if request["prompt"][0] else {"a": -0.5}
            self.answer(json.dumps({"choices": [{"logprobs": {"top_logprobs": [best]}}]}).encode())
            return
        lines: list[dict[str, Any]] = [
            {"choices": [{"token_ids": [place], "text": LINE_ENDS}]} for place in range(request["prompt"][0])
        ]
        lines.append({"choices": [], "sglext": {"spec_tokens_details": CUT}})
        if self.broken == "midway":
            lines = [{"error": {"message": "no room"}}]
        with self.lock:
            type(self).open -= 1
        text = "".join(f"data: {json.dumps(line, ensure_ascii=False)}\n\n" for line in lines) + "data: [DONE]\n\n"
        self.answer(b": a comment\n\n" + text.encode(), "text/event-stream")


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Stub, "asked", [])
    monkeypatch.setattr(Stub, "flushed", 0)
    monkeypatch.setattr(Stub, "open", 0)
    monkeypatch.setattr(Stub, "seen", threading.Event())
    # a proxy for the world outside is none for a server on this machine
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_pass_has_its_answers_in_order_and_what_the_server_ran(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[length, 9] for length in (3, 1, 2, 5, 4, 1)]
    done: list[None] = []
    monkeypatch.setattr(Stub, "full", 2)
    with SglangClient(url, max_tokens=5, whole=True) as client:
        found = client.run(prompts, 2, lambda: done.append(None), 1.0)
    assert [one.token_ids for one in found.completions] == [tuple(range(prompt[0])) for prompt in prompts]
    assert (len(done), Stub.flushed) == (6, 1)
    assert all((one.verify_steps, one.accepted, one.candidates) == (3, 2, 4) for one in found.completions)
    assert all(0.0 < one.first_s <= one.last_s < found.seconds for one in found.completions)
    assert found.most_at_once == 2 and 1.0 <= found.mean_at_once <= 2.0
    assert found.client_share > 0.0


def test_answers_of_a_pass_may_have_lengths_of_their_own(url: str) -> None:
    with SglangClient(url, max_tokens=5) as client:
        client.lengths = (7, 3)
        client.run([[1, 9], [2, 9], [3, 9]], 1, lambda: None)
    assert [asked["max_tokens"] for asked in Stub.asked] == [7, 3, 7]


def test_requests_are_sent_at_their_time_whatever_became_of_those_before(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer ends before the server has three requests at once, so a client that waited would wait for ever."""
    monkeypatch.setattr(Stub, "full", 3)
    asks = [Ask(0.02 * place, [length, 9], 10 + length) for place, length in enumerate((3, 1, 2))]
    with SglangClient(url, max_tokens=5) as client:
        found = client.arrive(asks)
    assert [one.token_ids for one in found.completions] == [(0, 1, 2), (0,), (0, 1)]
    assert [asked["max_tokens"] for asked in Stub.asked] == [13, 11, 12]
    assert (found.most_at_once, Stub.flushed) == (3, 1) and found.seconds >= 0.04
    assert all(0.0 < one.first_s <= one.last_s for one in found.completions)


def test_a_pass_knows_how_long_its_client_waited_for_a_processor(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "schedstat"
    told.write_text("5000000000 1000000000 7\n")
    monkeypatch.setattr(serving, "SCHEDULED", told)
    with SglangClient(url, max_tokens=5, whole=True) as client:
        found = client.run([[1, 9]], 1, lambda: told.write_text("6000000000 3000000000 9\n"))
        assert found.client_waited * found.seconds == pytest.approx(2.0)
        told.unlink()
        assert client.run([[1, 9]], 1, lambda: None).client_waited == 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_leaves_nothing_to_the_models_own_sampling(temperature: float, url: str) -> None:
    with SglangClient(url, max_tokens=5, whole=True) as client:
        client.complete([2, 9], temperature)
    (asked,) = Stub.asked
    assert (asked["temperature"], asked["max_tokens"], asked["prompt"]) == (temperature, 5, [2, 9])
    assert asked["ignore_eos"] is True and asked["return_token_ids"] is True
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)


@pytest.mark.parametrize(("broken", "says"), [("midway", "no room"), ("loads", "did not answer /v1/loads")])
def test_a_server_that_fails_midway_is_an_error(
    broken: str, says: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stub, "broken", broken)
    with SglangClient(url, max_tokens=5) as client, pytest.raises(C2TError, match=says):
        client.run([[1], [1]], 2, lambda: None)


def test_an_answer_without_a_token_is_an_error(url: str) -> None:
    with SglangClient(url, max_tokens=5) as client, pytest.raises(C2TError, match="without a token"):
        client.complete([0])


def metrics(steps: int, firsts: int, iterations: int, running: int) -> str:
    values = {
        "inter_token_latency_seconds_count": steps,
        "spec_decode_num_accepted_tokens_total": 2 * steps,
        "spec_decode_num_draft_tokens_total": 3 * steps,
        "time_to_first_token_seconds_count": firsts,
        "iteration_tokens_total_count": iterations,
        "num_requests_running": running,
    }
    return "".join(f'vllm:{name}{{engine="0"}} {float(value)}\n' for name, value in values.items())


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> VllmClient:
    """Of a server that always says that nothing runs."""
    answer = Completion((1, 2), 0, 0, 0)
    monkeypatch.setattr(VllmClient, "__init__", lambda client: None)
    monkeypatch.setattr(VllmClient, "flush", lambda client: None)
    monkeypatch.setattr(VllmClient, "watched_every_s", 0.0)
    monkeypatch.setattr(VllmClient, "answers", lambda client, prompts, *_: (answer,) * len(prompts))
    return VllmClient()  # type: ignore[call-arg]


@pytest.mark.parametrize(("iterations", "most"), [(20, 2), (21, 2), (40, 1), (10, 4)])
def test_vllms_counters_say_how_many_ran_together(
    iterations: int, most: int, vllm: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter([metrics(100, 5, 50, 0), metrics(136, 9, 50 + iterations, 0)])
    monkeypatch.setattr(vllm, "_request", lambda *_: SimpleNamespace(text=next(texts)))
    found = vllm.run([[1]] * 4, 2, lambda: None)
    assert (found.most_at_once, found.mean_at_once) == (most, 40 / iterations)
    first = found.completions[0]
    assert (first.verify_steps, first.accepted, first.candidates) == (36, 72, 108)


def test_a_vllm_that_counts_nothing_is_an_error(vllm: VllmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_request", lambda *_: SimpleNamespace(text=""))
    with pytest.raises(C2TError, match="without --disable-log-stats"):
        vllm.run([[1]], 1, lambda: None)


LABELLED = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="pair"} 12.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="pair"} 3.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="pair"} 1.7e+09
"""


def test_a_metric_of_vllm_is_read_over_all_its_labels() -> None:
    assert value_of(LABELLED, "spec_decode_num_draft_tokens_total") == 15
    assert value_of(LABELLED, "inter_token_latency_seconds_count") == 0


GAUGES = """vllm:c2t_learnt_tokens{engine="0",model_name="pair"} 120.0
vllm:c2t_learnt_discarded{engine="0",model_name="pair"} 1.0
vllm:c2t_expected_nll{by="classifier",engine="0",model_name="pair"} 0.5
vllm:c2t_expected_nll{by="learnt",engine="0",model_name="pair"} 0.4
"""


def test_what_vllms_planner_has_learnt_is_in_its_gauges(vllm: VllmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GAUGES
    monkeypatch.setattr(vllm, "_request", lambda *_: SimpleNamespace(text=text))
    assert vllm.learnt() == {"seen": 120, "discarded": 1, "nll": [0.5, 0.4], "auc": None}
    text += 'vllm:c2t_learnt_networks{engine="0",model_name="pair"} 3.0\n'
    assert vllm.learnt()["network"] == {"swaps": 3}
    text = ""
    assert vllm.learnt() == {"seen": 0, "discarded": 0, "nll": None, "auc": None}


@pytest.mark.parametrize("answers", [[True], [False, False, True]])
def test_a_cache_that_vllm_could_not_empty_is_asked_for_again(
    answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmClient, "__init__", lambda client: None)
    monkeypatch.setattr(vllm_engine, "FLUSH_AGAIN_S", 0.0)
    client, left = VllmClient(), list(answers)  # type: ignore[call-arg]
    reply = SimpleNamespace(json=lambda: {"success": left.pop(0)}, text="no")
    monkeypatch.setattr(client, "_request", lambda *_: reply)
    client.flush()
    assert not left
    monkeypatch.setattr(vllm_engine, "FLUSH_TIMEOUT_S", -1.0)
    left.append(False)
    with pytest.raises(C2TError, match="did not empty its prefix cache"):
        client.flush()


def test_an_answer_comes_in_the_pieces_that_the_server_sent(url: str) -> None:
    with SglangClient(url, max_tokens=5) as client:
        assert list(client.pieces([3, 9])) == [(0,), (1,), (2,)]
    (asked,) = Stub.asked
    assert (asked["temperature"], asked["max_tokens"], asked["stream"]) == (0.0, 5, True)
    assert "ignore_eos" not in asked


def test_a_streamed_answer_that_breaks_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "broken", "midway")
    with SglangClient(url, max_tokens=5) as client, pytest.raises(C2TError, match="no room"):
        list(client.pieces([3, 9]))


def test_the_gap_is_between_the_two_best_tokens(url: str) -> None:
    with SglangClient(url, max_tokens=5) as client:
        assert client.top_two_gap([1, 9]) == pytest.approx(0.25)
        with pytest.raises(C2TError, match="two logprobs"):
            client.top_two_gap([0, 9])
    assert (Stub.asked[0]["max_tokens"], Stub.asked[0]["logprobs"]) == (1, 2)
