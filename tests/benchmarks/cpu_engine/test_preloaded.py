"""Servers that are forked from a process with SGLang in it: when they are, and that they are like started ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine import cpu_engine_env, preloaded  # noqa: E402
from benchmarks.serving import sessions  # noqa: E402

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def process() -> Iterator[preloaded.Preloaded]:
    found = preloaded.Preloaded(cpu_engine_env(os.environ))
    yield found
    found.close()


def environment(**more: str) -> dict[str, str]:
    return cpu_engine_env({**os.environ, **more})


@pytest.fixture
def known(process: preloaded.Preloaded, monkeypatch: pytest.MonkeyPatch) -> preloaded.Preloaded:
    monkeypatch.setattr(preloaded, "_PRELOADED", [process])
    return process


def test_the_usual_environment_is_forked(known: preloaded.Preloaded) -> None:
    assert preloaded.preloaded_for(environment(C2T_BETA="0.5", PLANTED_FAULT="x")) is known


@pytest.mark.parametrize("name", ["TRITON_INTERPRET", "SGLANG_ENABLE_SOMETHING", "OMP_NUM_THREADS"])
def test_what_imports_read_is_not_forked(known: preloaded.Preloaded, name: str) -> None:
    assert preloaded.preloaded_for(environment(**{name: "77"})) is None


def test_a_fork_says_why_it_ends(process: preloaded.Preloaded, tmp_path: Path) -> None:
    (tmp_path / "says_why.py").write_text("import sys\nsys.exit('one clear line')\n")
    command, log = [sys.executable, "-m", "says_why"], tmp_path / "log"
    assert process.start(command, environment(PYTHONPATH=str(tmp_path)), log, 0).wait(PATIENCE_S) == 1
    assert log.read_text() == "one clear line\n"


@pytest.fixture
def started(known: preloaded.Preloaded, monkeypatch: pytest.MonkeyPatch) -> list[preloaded.Preloaded]:
    """Every further process that was asked for, none of which is real."""
    made: list[preloaded.Preloaded] = []

    class Another(preloaded.Preloaded):
        def __init__(self, environment: dict[str, str]) -> None:
            self.imports, self.path = preloaded._import_environment(environment), preloaded._path(environment)
            self.modules = known.modules
            made.append(self)

        def close(self) -> None:
            made.remove(self)

    monkeypatch.setattr(preloaded, "Preloaded", Another)
    return made


def test_servers_in_tritons_interpreter_share_a_process_of_their_own(
    known: preloaded.Preloaded, started: list[preloaded.Preloaded]
) -> None:
    forked_from = [preloaded.preloaded_for(environment(TRITON_INTERPRET="1", C2T_BETA=beta)) for beta in "01"]
    assert len(started) == 1 and forked_from == started * 2 != [known] * 2
    assert preloaded.preloaded_for(environment()) is known


@pytest.mark.parametrize("name", preloaded._READ_LATE)
def test_what_is_read_late_is_forked(known: preloaded.Preloaded, name: str) -> None:
    assert preloaded.preloaded_for(environment(**{name: "1"})) is known


def test_another_sglang_has_a_process_of_its_own(
    known: preloaded.Preloaded, started: list[preloaded.Preloaded], tmp_path: Path
) -> None:
    (tmp_path / "sglang").touch()
    other = environment(PYTHONPATH=str(tmp_path))
    assert preloaded.preloaded_for(other) is None
    with preloaded.preloaded_with(other):
        assert [preloaded.preloaded_for(other)] == started and preloaded.preloaded_for(environment()) is known
    assert preloaded.preloaded_for(other) is None and started == []


@pytest.mark.parametrize(
    ("name", "forked"), [("planted_fault.py", True), ("sitecustomize.py", False), ("sglang", False), ("torch", False)]
)
def test_a_folder_in_front_is_forked_unless_it_replaces_something(
    known: preloaded.Preloaded, tmp_path: Path, name: str, forked: bool
) -> None:
    (tmp_path / name).touch()
    found = preloaded.preloaded_for(environment(PYTHONPATH=str(tmp_path)))
    assert found is (known if forked else None)


def test_a_fork_has_its_own_path_log_and_exit_code(process: preloaded.Preloaded, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "ends_with_7.py").write_text("import os, sys\nprint(sys.argv, os.environ['MINE'])\nsys.exit(7)\n")
    command = [sys.executable, "-m", "ends_with_7", "--flag"]
    server = process.start(command, environment(PYTHONPATH=str(tmp_path), MINE="yes"), log, 0)
    assert server.wait(PATIENCE_S) == 7
    assert "--flag'] yes" in log.read_text()
    assert "MINE" not in os.environ


CHILD = """
import multiprocessing, os, pathlib, sys, time

def work(folder):
    pathlib.Path(folder, "child").write_text(os.environ["SET_BY_THE_SERVER"])
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    os.environ["SET_BY_THE_SERVER"] = "late"
    multiprocessing.Process(target=work, args=(sys.argv[1],)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["kill_session", "close", "SIGKILL"])
def test_children_get_the_servers_environment_and_end_with_it(
    process: preloaded.Preloaded, tmp_path: Path, end: str
) -> None:
    if end != "kill_session":
        # it ends here, so it is no other test's
        process = preloaded.Preloaded(environment())
    (tmp_path / "has_a_child.py").write_text(CHILD)
    command = [sys.executable, "-m", "has_a_child", str(tmp_path)]
    server = process.start(command, environment(PYTHONPATH=str(tmp_path)), tmp_path / "log", 0)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    assert (tmp_path / "child").read_text() == "late"
    assert len(sessions.alive(server.pid)) >= 3
    if end == "kill_session":
        assert sessions.kill_session(server) == []
    elif end == "SIGKILL":
        os.kill(process.pid, signal.SIGKILL)
    if end != "kill_session":
        process.close()
    while sessions.alive(server.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


LEAVES = """
import atexit, multiprocessing, pathlib, setproctitle, sys, threading

def work(folder):
    atexit.register((folder / "child").touch)
    setproctitle.setproctitle("sglang::scheduler")
    (folder / "title").write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    atexit.register((folder / "server").touch)
    threading.Timer(0.5, (folder / "thread").touch).start()
    multiprocessing.set_start_method("spawn", force=True)
    child = multiprocessing.Process(target=work, args=(folder,))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_fork_ends_as_a_started_one(process: preloaded.Preloaded, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    command, log = [sys.executable, "-m", "leaves", str(tmp_path)], tmp_path / "log"
    server = process.start(command, environment(PYTHONPATH=str(tmp_path)), log, 0)
    assert server.wait(PATIENCE_S) == 0, log.read_text()
    assert all((tmp_path / name).exists() for name in ("child", "server", "thread"))
    # SGLang waits for what is called so before it kills what is left
    assert (tmp_path / "title").read_bytes().startswith(b"sglang::scheduler")


def test_waiting_for_a_fork_ends_in_time(process: preloaded.Preloaded, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "sleeps"]
    server = process.start(command, environment(PYTHONPATH=str(tmp_path)), tmp_path / "log", 0)
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.2)
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == -signal.SIGTERM
