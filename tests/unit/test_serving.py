"""The measuring client: what it makes of an engine's per-request statistics."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.serving import Client, Completion, Pass, counts
from c2t_plugin.errors import C2TError

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


def test_requests_run_together_between_their_first_and_last_tokens() -> None:
    """The third one waits for a place and starts where the first one ends."""
    times = [(0.0, 1.0, 4.0), (0.0, 2.0, 5.0), (0.0, 4.5, 6.0), (9.0, 1.0, 1.0)]
    done = Pass(tuple(Completion((1, 2), 0, 0, 0, *each) for each in times), seconds=10.0)
    assert done.most_at_once == 2
    assert Pass(done.completions[3:], 1.0).most_at_once == 1


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
    with Client(f"http://127.0.0.1:{port}", max_tokens=1) as client, pytest.raises(C2TError, match="did not answer"):
        call(client)


class Asked(Exception):
    """In place of an answer."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_has_its_temperature(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def create(**request: Any) -> None:
        asked.update(request)
        raise Asked

    with Client("http://127.0.0.1:9", max_tokens=5, whole=True) as client:
        monkeypatch.setattr(client, "flush", lambda: None)
        monkeypatch.setattr(client._openai.completions, "create", create)
        with pytest.raises(Asked):
            client.run([[1, 2]], 1, lambda: None, temperature)
    assert (asked["temperature"], asked["max_tokens"], asked["prompt"]) == (temperature, 5, [1, 2])
    assert asked["extra_body"]["ignore_eos"] is True
