"""Servers of both engines: how they are started, and what is said of one that does not come up."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving.arms import ARMS, Speculation
from benchmarks.serving.engines import ENGINES, Device, Launch
from benchmarks.serving.server import Runner, Server, complaint
from c2t_plugin.errors import C2TError


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("loading\nTraceback (most recent call last):\n  x\nValueError: bad flag\nbye\n", "ValueError: bad flag"),
        ("c2t_plugin.errors.ConfigError: no beta\n", "c2t_plugin.errors.ConfigError: no beta"),
        ("C2T: c2t_mode is 'tree': no\n", "C2T: c2t_mode is 'tree': no"),
        ("(EngineCore pid=7) ValueError: no memory\n", "ValueError: no memory"),
        (
            "pydantic_core.ValidationError: 1 error\n  Value error, no graphs [type=value_error, x]\n",
            "Value error, no graphs",
        ),
        (
            "usage: launch_server\nlaunch_server.py: error: unrecognized arguments: --x\n",
            "launch_server.py: error: unrecognized arguments: --x",
        ),
        (
            'Traceback (most recent call last):\n  File "a.py", line 2, in outer\n    inner()\n'
            '  File "b.py", line 7, in inner\n    raise NotImplementedError()\nNotImplementedError\n\nkilling all\n',
            "NotImplementedError in inner",
        ),
        ("killed\n\n", "killed"),
        ("", "its log is empty"),
    ],
)
def test_a_log_says_why_in_one_line(log: str, expected: str, tmp_path: Path):
    (tmp_path / "log").write_text(log)
    assert complaint(tmp_path / "log") == expected


@pytest.mark.parametrize(
    ("code", "timeout", "expected"),
    [("print('ValueError: no model')", 30.0, "no model"), ("import time; time.sleep(60)", 0.2, "did not start")],
    ids=["ends", "hangs"],
)
def test_a_server_that_does_not_come_up_is_an_error_and_leaves_nothing(
    code: str, timeout: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    launch = ENGINES["sglang"].launch(Path("m"), [], Device.GPU)
    server = Server(launch, log=tmp_path / "log", start_timeout=timeout)
    with pytest.raises(C2TError, match=expected), server:
        pass


@pytest.mark.parametrize(("own", "kept"), [(None, "off"), ("/mine", "/mine")])
def test_a_server_begins_with_nothing_that_another_has_measured(
    own: str | None, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    code = "import os; print('ValueError: kept in', os.environ['C2T_CACHE_DIR'])"
    (tmp_path / "sglang" / "launch_server.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("C2T_CACHE_DIR", raising=False)
    if own is not None:
        monkeypatch.setenv("C2T_CACHE_DIR", own)
    server = Server(ENGINES["sglang"].launch(Path("m"), [], Device.GPU), log=tmp_path / "log", start_timeout=30.0)
    with pytest.raises(C2TError, match=f"kept in {kept}"), server:
        pass


@pytest.mark.parametrize("engine", ENGINES)
def test_servers_on_a_cpu_leave_it_to_their_client_first(engine: str, tmp_path: Path):
    for device, niceness in ((Device.CPU, 5), (Device.GPU, 0)):
        launch = ENGINES[engine].launch(Path("m"), [], device)
        assert Server(launch, log=tmp_path / "log").niceness == niceness


@pytest.mark.parametrize(("engine", "small"), [("vllm", "--enforce-eager"), ("sglang", "--disable-cuda-graph")])
def test_flags_for_small_models_are_for_a_cpu_alone(engine: str, small: str, tmp_path: Path):
    launches = [ENGINES[engine].launch(Path("m"), ["--x"], device) for device in (Device.CPU, Device.GPU)]
    commands = [Server(launch, log=tmp_path / "log").command(7) for launch in launches]
    assert [small in command for command in commands] == [True, False]
    assert all(command[-1] == "--x" and command[command.index("--port") + 1] == "7" for command in commands)


def test_a_server_is_forked_from_what_has_imported_its_engine(tmp_path: Path):
    """Where there is such a process; it gets the command, the environment and the place behind others."""
    started: list[Any] = []

    def start(command: Sequence[str], environment: Mapping[str, str], log: Path, niceness: int) -> str:
        started.append((list(command), environment["WHERE"], log, niceness))
        return "forked"

    preloaded: Any = SimpleNamespace(start=start)
    launch = Launch(("sglang",), ("--x",), {"WHERE": "here"}, niceness=5, preloaded=lambda: preloaded)
    server = Server(launch, log=tmp_path / "log")
    command = server.command(7)
    assert server.launch(command, server.environment()) == "forked"
    assert started == [(["sglang", "--host", "127.0.0.1", "--port", "7", "--x"], "here", tmp_path / "log", 5)]


@pytest.mark.parametrize(("engine", "device"), [("sglang", Device.GPU), ("vllm", Device.CPU), ("vllm", Device.GPU)])
def test_other_servers_import_by_themselves(engine: str, device: Device):
    assert ENGINES[engine].launch(Path("m"), [], device).preloaded() is None


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_caller_adds_wins_over_the_arm_and_that_over_all_servers(engine: str, tmp_path: Path):
    runner = Runner(ENGINES[engine], Device.GPU, Path("m"), tmp_path, ("--of-all",), {"MINE": "1"})
    on = Speculation(draft=Path("D"))
    server = runner.server("a run, static 4", ARMS["static 4"], on, "--more", "1")
    flags = ENGINES[engine].flags(ARMS["static 4"].options(engine, on))
    assert flags and server.command(7)[-len(flags) - 3 :] == ["--of-all", *flags, "--more", "1"]
    assert server.environment()["MINE"] == "1" and "PATH" not in server.environment()
    assert server.log == tmp_path / "a-run-static-4.log"


def test_an_arm_that_an_engine_has_not_is_one_line(tmp_path: Path):
    runner = Runner(ENGINES["vllm"], Device.CPU, Path("m"), tmp_path)
    with pytest.raises(C2TError, match=r"^not supported: vLLM has no tree attention$"):
        runner.server("x", ARMS["C2T tree"], Speculation(draft=Path("D")))
