"""What servers learn: when it is read, of which server, and what a row holds of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving import learning
from benchmarks.serving.closed_forms import ON_P_FILE
from benchmarks.serving.engines import ENGINES
from benchmarks.serving.learning import at_marks, figures, main
from benchmarks.serving.server import Runner
from c2t_plugin.errors import C2TError
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.curve_file import read_curve


class Client:
    """A server that verifies 30 draft tokens of a batch."""

    def __init__(self, *_: Any, each: int = 30) -> None:
        self.batches: list[Any] = []
        self._each = each

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, prompts: Any, concurrency: int, *_: Any) -> None:
        assert len(prompts) == concurrency
        self.batches.append(prompts)

    def learnt(self) -> dict[str, Any]:
        seen = self._each * len(self.batches)
        return {"seen": seen, "discarded": 0, "nll": [0.5, 0.4], "auc": [0.8, 0.85 + seen / 1e4]}


ASKED = [[number] for number in range(6)]


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learning, "held_out_prompts", lambda n: ASKED)
    chat = SimpleNamespace(ids=[[100 + number] for number in range(4)])
    monkeypatch.setattr(learning, "chat_prompts", lambda target, part: chat if part == "development" else None)


def test_a_mark_is_read_when_it_is_passed_and_one_of_each_batch():
    client = Client()
    found = [(mark, metrics["seen"]) for mark, metrics in at_marks(client, [100, 40, 110], 4, ASKED)]
    assert found == [(40, 60), (110, 120)]
    # prompts come in their order, over and over
    assert [prompt for batch in client.batches for (prompt,) in batch][:8] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_a_server_that_drafts_nothing_is_not_waited_for_for_ever():
    with pytest.raises(C2TError, match="not 40 draft tokens verified after 400 batches of 4 prompts"):
        list(at_marks(Client(each=0), [40], 4, ASKED))


def test_a_window_that_says_nothing_is_said():
    assert figures({"seen": 3, "discarded": 1, "nll": [0.5, 0.4], "auc": [0.8, 0.9]}) == {
        "seen": 3,
        "discarded": 1,
        "nll_prior": 0.5,
        "nll_learnt": 0.4,
        "auc_prior": 0.8,
        "auc_learnt": 0.9,
    }
    network = {"seen": 3, "discarded": 1, "nll": [0.5, 0.4], "auc": [0.8, 0.9], "network": {"swaps": 2, "batches": 128}}
    assert figures(network)["networks_in_force"] == 2
    with pytest.raises(C2TError, match="has verified 3 draft tokens"):
        figures({"seen": 3, "discarded": 0, "nll": [0.5, 0.4], "auc": None})


def test_a_server_for_each_start_and_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started: list[tuple[str, Any, tuple[str, ...]]] = []

    def server(_: Runner, name: str, arm: Any, on: Any, *more: str) -> None:
        started.append((arm.name, on.classifier, more))
        if "bad" in name:
            raise C2TError("no such file")

    seen: list[Any] = []
    run = Client.run
    for engine in ENGINES.values():
        monkeypatch.setattr(type(engine), "client", Client)
    monkeypatch.setattr(Client, "run", lambda *given: (seen.append(given[1]), run(*given))[1])
    monkeypatch.setattr(Runner, "server", lambda *given: Entered(server, given))
    out = tmp_path / "out"
    command = ("--cpu", "--learn", "calibrate", "--marks", "40", "--out", str(out))
    assert main([*command, "--from", "bad=x.safetensors"]) == 1
    own, bad, alone = read_rows(out / "rows.jsonl", BenchRow)
    assert own.metrics["nll_learnt"] == 0.4 and own.setting["verified"] == 40 and not own.error
    assert bad.error == "no such file" and not bad.metrics
    files = [None, "x.safetensors", out / ON_P_FILE]
    assert [each[:2] for each in started] == [("C2T auto", file) for file in files]
    assert (own.setting["stream"], alone.arm) == ("toy, EAGLE-3", "from P alone, calibrate")
    assert all(more[-2:] == ("--speculative-c2t-learn", "calibrate") for *_, more in started)
    # by a curve that does not follow from this machine
    assert isinstance(read_curve(Path(started[0][2][1])), CostCurve)
    assert main([*command, "--from", "nothing"]) == 2
    before = len(seen)
    assert main([*command, "--chat", "--name", "SmolLM2"]) == 0
    assert (seen[0][0], seen[before][0]) == ([0], [100])
    assert read_rows(out / "rows.jsonl", BenchRow)[-1].setting["stream"] == "SmolLM2"
    started.clear()
    assert main([*command, "--engine", "vllm"]) == 0
    assert all(more[-2:] == ("--speculative-config.c2t_learn", "calibrate") for *_, more in started)
    assert read_rows(out / "rows.jsonl", BenchRow)[-1].setting["engine"] == "vllm"


class Entered:
    """Starts when it is entered, as a server does."""

    base_url = ""

    def __init__(self, start: Any, given: tuple[Any, ...]) -> None:
        self._start, self._given = start, given

    def __enter__(self) -> Entered:
        self._start(*self._given)
        return self

    def __exit__(self, *_: object) -> None:
        pass
