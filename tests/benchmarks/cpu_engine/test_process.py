"""Starting and ending servers of the CPU engine, with small stubs for the server itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cpu_engine import __main__ as launch
from benchmarks.cpu_engine import cpu_engine_env
from benchmarks.cpu_engine.server import CpuServer
from benchmarks.serving import sessions as processes
from benchmarks.serving.process import SUPERVISE, ServerError, ServerProcess
from c2t_plugin.errors import C2TError

PATIENCE_S = 120.0
# A server: it says that it runs, and so does a child that ignores SIGTERM and outlives its parent if nobody cares.
TWO_PROCESSES = """
import pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if sys.argv[2:] == ["child"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
(folder / "-".join(["up", *sys.argv[2:]])).touch()
time.sleep(600)
"""
# A test run: starts a supervised server in a session of its own and says which.
SUPERVISED = f"""
import os, subprocess, sys, time
SUPERVISE = {SUPERVISE!r}
command = [*SUPERVISE, str(os.getpid()), *sys.argv[1:]]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def server_command(tmp_path: Path) -> list[str]:
    script = tmp_path / "server.py"
    script.write_text(TWO_PROCESSES)
    return [sys.executable, str(script), str(tmp_path)]


def both_up(folder: Path) -> bool:
    return (folder / "up").exists() and (folder / "up-child").exists()


def test_imports_do_not_wait_for_the_garbage_collector() -> None:
    show = [sys.executable, "-c", "import gc; print(gc.get_threshold()[0])"]
    thresholds = [subprocess.check_output(show, env=env) for env in (os.environ, cpu_engine_env(os.environ))]
    assert int(thresholds[0]) < int(thresholds[1]) == 50_000


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_killed_test_run(tmp_path: Path, server_command: list[str], signum: int) -> None:
    run = subprocess.Popen([sys.executable, "-c", SUPERVISED, *server_command], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    session = int(run.stdout.readline())
    wait_for(lambda: both_up(tmp_path))
    assert len(processes.alive(session)) == 3
    run.send_signal(signum)
    run.wait()
    run.stdout.close()
    wait_for(lambda: not processes.alive(session))


def test_supervisor_of_a_dead_parent_starts_nothing(tmp_path: Path, server_command: list[str]) -> None:
    done = subprocess.run([*SUPERVISE, "1", *server_command], timeout=PATIENCE_S)
    assert done.returncode == 1
    assert not (tmp_path / "up").exists()


def test_supervisor_hands_on_the_exit_code() -> None:
    command = [*SUPERVISE, str(os.getpid()), sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, start_new_session=True, timeout=PATIENCE_S).returncode == 7


ASKED = """
import http.server, pathlib, signal, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()

def end(*_):
    pathlib.Path(sys.argv[2]).touch()
    sys.exit()

signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


class Asked(ServerProcess):
    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", ASKED, str(port), str(self.log.with_name("asked"))]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


@pytest.mark.parametrize("grace", [0.0, PATIENCE_S])
def test_a_server_is_asked_to_end_if_it_has_a_grace(tmp_path: Path, grace: float) -> None:
    with Asked(log=tmp_path / "log", start_timeout=PATIENCE_S, grace=grace):
        pass
    assert (tmp_path / "asked").exists() == bool(grace)


def test_a_server_may_give_way_to_everything_else(tmp_path: Path) -> None:
    server = Asked(log=tmp_path / "log", start_timeout=PATIENCE_S)
    server.niceness = 3
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with server:
        assert server.process is not None
        session = processes.alive(server.process.pid)
        assert len(session) == 2
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in session} == {min(19, own + 3)}
        groups = [Path(f"/proc/{pid}/autogroup") for pid in session]
        assert all(group.read_text().endswith(" nice 3\n") for group in groups if group.exists())
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_session_that_may_not_be_changed_yet_is_asked_again(
    tmp_path: Path, server_command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux takes ten changes a second, of all users but root together."""
    written: list[str] = []

    def write(path: Path, text: str) -> None:
        written.append(text)
        if len(written) == 1:
            raise BlockingIOError

    leader = subprocess.Popen(server_command, start_new_session=True)
    monkeypatch.setattr(Path, "write_text", write)
    processes.give_way(leader.pid, 4)
    assert written == ["4", "4"]
    processes.kill_session(leader)
    processes.give_way(leader.pid, 4)


def test_kill_session_ends_children_too(tmp_path: Path, server_command: list[str]) -> None:
    leader = subprocess.Popen(server_command, start_new_session=True)
    wait_for(lambda: both_up(tmp_path))
    assert len(processes.alive(leader.pid)) == 2
    assert processes.kill_session(leader) == []
    assert processes.alive(leader.pid) == []
    assert leader.returncode == -signal.SIGKILL


def test_kill_session_removes_shared_memory(tmp_path: Path) -> None:
    """A mapped file, as SGLang's load snapshots, and a semaphore, whose name is not the one that was mapped."""
    shared = Path("/dev/shm") / f"c2t-test-{os.getpid()}"
    script = (
        "import mmap, multiprocessing, sys, time\n"
        "semaphore = multiprocessing.get_context('spawn').Semaphore()\n"
        "file = open(sys.argv[1], 'w+b'); file.truncate(4096); memory = mmap.mmap(file.fileno(), 4096)\n"
        "print(semaphore._semlock.name, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(shared)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=False, start_new_session=True)
    assert leader.stdout is not None
    semaphore = Path("/dev/shm") / ("sem." + leader.stdout.readline().decode().strip().lstrip("/"))
    assert shared.exists()
    assert semaphore.exists()
    assert processes.kill_session(leader) == []
    leader.stdout.close()
    assert not shared.exists()
    assert not semaphore.exists()


def test_launch_replaces_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: calls.append(arguments))
    launch.main(["--", sys.executable, "-m", "sglang.launch_server", "--", "x"])
    [(file, command, env)] = calls
    assert (file, command) == (sys.executable, [sys.executable, "-m", "sglang.launch_server", "--", "x"])
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "no command given"), (["--"], "no command given"), (["c2t-no-such-command"], "not found")],
)
def test_launch_refuses(argv: list[str], message: str) -> None:
    with pytest.raises(C2TError, match=message):
        launch.main(argv)


@pytest.mark.sglang
@pytest.mark.server
def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = CpuServer(tmp_path / "no-such-model", log=tmp_path / "log")
    with (
        pytest.raises(
            ServerError, match=r"ended with 1 before it was ready; the log .* ends with:\n(.*\n)*.*no-such-model"
        ),
        server,
    ):
        pytest.fail("it started")
