"""Servers that take turns: who runs when, what a death or an interrupt leaves, and how passes are compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.serving import interleaved, sessions
from benchmarks.serving.client import Completion, Pass
from benchmarks.serving.engines.sglang import NativeClient
from benchmarks.serving.interleaved import Interleaved, paired_ratio, same_as_plain, turned
from benchmarks.serving.measuring import Outcome
from benchmarks.serving.process import ServerProcess
from c2t_plugin.errors import C2TError

pytestmark = pytest.mark.slow

# for what takes a moment, unless the machine is busy
PATIENCE_S = 60
# healthy, with a child of its own, as engines have
PROGRAM = """
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Stub(ServerProcess):
    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(port)]

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def end_of_log(self) -> str:
        return "the log ends with: so it goes"


def states(server: ServerProcess) -> list[str]:
    """Of the server's processes but its supervisor."""
    assert server.process is not None
    found = []
    for pid in sessions.alive(server.process.pid):
        if pid != server.process.pid:
            found.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "SETTLE_S", 0.0)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Stub]:
    return {name: Stub(log=tmp_path / name) for name in ("plain", "other")}


@pytest.fixture
def contest(pair: dict[str, Stub]) -> Iterator[Interleaved]:
    with Interleaved(lambda url: NativeClient(url, 1)) as contest:
        for name, server in pair.items():
            contest.start(name, server)
        yield contest


def settled(server: ServerProcess, stopped: bool) -> bool:
    """Whether both its processes come to be stopped, or not stopped: a signal takes a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = states(server)
        if len(found) == 2 and all((state == "T") is stopped for state in found):
            return True
        time.sleep(0.01)
    return False


def test_only_the_one_whose_turn_it_is_runs(contest: Interleaved, pair: dict[str, Stub]) -> None:
    assert contest.names == ["plain", "other"]
    assert settled(pair["plain"], True) and settled(pair["other"], True)
    with contest.turn("other"):
        assert settled(pair["other"], False) and settled(pair["plain"], True)
    assert settled(pair["other"], True)


def test_servers_can_start_at_the_same_time(tmp_path: Path) -> None:
    """One that starts alone would wait for the other in vain."""
    both = threading.Barrier(2, timeout=PATIENCE_S)

    class Together(Stub):
        def environment(self) -> Mapping[str, str]:
            both.wait()
            return super().environment()

    class Broken(Together):
        def __enter__(self) -> Broken:
            both.wait()
            raise C2TError("it does not start\nfor some reason")

    with Interleaved(lambda url: NativeClient(url, 1)) as contest:
        made = {"plain": Together(log=tmp_path / "plain"), "other": Broken(log=tmp_path / "other")}
        assert contest.start_together(made, made.__getitem__, "plain") == {"other": "it does not start"}
        assert contest.names == ["plain"] and settled(made["plain"], True)
        with contest.turn("plain"):
            assert settled(made["plain"], False)
    assert made["plain"].process is None


def test_the_supervisor_is_never_stopped(contest: Interleaved, pair: dict[str, Stub]) -> None:
    process = pair["plain"].process
    assert process is not None and settled(pair["plain"], True)
    assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"


def test_a_server_that_has_died_is_one_line_that_names_it(contest: Interleaved, pair: dict[str, Stub]) -> None:
    process = pair["other"].process
    assert isinstance(process, subprocess.Popen)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    line = r"^other: the server ended with -9 while it was wanted; the log ends with: so it goes$"
    with pytest.raises(C2TError, match=line), contest.turn("other"):
        pytest.fail("it got a turn")


def test_one_that_dies_in_its_turn_is_named_by_its_end_and_not_by_the_refused_request(
    contest: Interleaved, pair: dict[str, Stub]
) -> None:
    process = pair["other"].process
    assert isinstance(process, subprocess.Popen)
    with pytest.raises(C2TError, match=r"^other: the server ended with -9") as raised, contest.turn("other"):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise C2TError("the server did not answer: connection refused\nmore")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, C2TError])
def test_nothing_is_left_after_an_error(error: type[BaseException], pair: dict[str, Stub]) -> None:
    leaders = []
    with pytest.raises(error), Interleaved(lambda url: NativeClient(url, 1)) as contest:
        for name, server in pair.items():
            contest.start(name, server)
            assert server.process is not None
            leaders.append(server.process.pid)
        with contest.turn("plain"):
            raise error("stop")
    assert [sessions.alive(leader) for leader in leaders] == [[], []]


@pytest.mark.slow
def test_stopped_servers_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = (
        "import sys, time; sys.path[:0] = sys.argv[1:2]\n"
        "from pathlib import Path\n"
        "from tests.benchmarks.serving.test_interleaved import Stub\n"
        "with Stub(log=Path(sys.argv[2])) as server:\n"
        "    server.halt(); print(server.process.pid, flush=True); time.sleep(600)\n"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", owner, str(root), str(tmp_path / "log")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    leader = int(process.stdout.readline())
    assert sessions.alive(leader)
    process.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while sessions.alive(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sessions.alive(leader) == []


def test_a_server_is_let_go_on_before_it_is_ended(tmp_path: Path) -> None:
    told: list[str] = []

    class Asked(Stub):
        def resume(self) -> None:
            told.append("resume")
            super().resume()

        def _stop(self) -> None:
            told.append("stop")
            super()._stop()

    with Interleaved(lambda url: NativeClient(url, 1)) as contest:
        contest.start("plain", Asked(log=tmp_path / "log", grace=5.0))
    assert told == ["resume", "stop"]


def test_every_server_has_every_place_in_a_round() -> None:
    names = ["a", "b", "c"]
    orders = [turned(names, number) for number in range(6)]
    assert orders[:2] == [["a", "b", "c"], ["c", "b", "a"]]
    assert all(sorted(order) == names for order in orders)
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]


def passes(*speeds: float, tokens: tuple[int, ...] = (1,)) -> list[Pass]:
    return [Pass((Completion(tokens, 0, 0, 0),), len(tokens) / speed) for speed in speeds]


def test_a_drift_that_meets_both_arms_does_not_widen_the_interval() -> None:
    found = paired_ratio("ratio", passes(20, 10, 40), passes(10, 5, 20))
    assert found == pytest.approx({"ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0})


def test_the_interval_is_students() -> None:
    found = paired_ratio("ratio", passes(2.0, 8.0), passes(1.0, 1.0))
    # logarithms ln 2 and ln 8: mean ln 4, standard error ln 2
    assert found["ratio"] == pytest.approx(4.0)
    assert found["ratio_high"] == pytest.approx(4.0 * 2.0**12.706)
    assert found["ratio_low"] == pytest.approx(4.0 / 2.0**12.706)


def test_one_pass_has_no_interval() -> None:
    assert paired_ratio("ratio", passes(3.0), passes(2.0)) == pytest.approx({"ratio": 1.5})


def test_answers_are_compared_within_a_round() -> None:
    plain = [*passes(1.0, tokens=(1, 2)), *passes(1.0, tokens=(3, 4))]
    other = [*passes(1.0, tokens=(1, 2)), *passes(1.0, tokens=(1, 2))]
    assert same_as_plain({"plain": Outcome(plain), "other": Outcome(other)}, "other") == (1, 2)
