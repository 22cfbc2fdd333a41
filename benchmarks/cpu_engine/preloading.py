"""The process behind preloaded.py: `python -m benchmarks.cpu_engine.preloading FD`, a socket to the one that asked."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from importlib import import_module
from multiprocessing import forkserver, spawn
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from benchmarks.serving import sessions
from c2t_plugin.engines import contract

# All that a server of the tests imports before it reads its arguments, and its scheduler up to the table of all models.
MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.standalone_worker_v2",
    "sglang.srt.server_args",
    "sglang.srt.models.registry",
)
_ENVIRONMENT = "c2t_environment"
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Import, say which modules there are, then fork a server for each request until the asker has gone."""
    for name in MODULES:
        import_module(name)
    _read_engine()
    # It looks for where a title goes once, beside an environment that no fork has cleared yet. SGLang finds its
    # schedulers by their titles, to let them end by themselves.
    setproctitle.getproctitle()
    gc.freeze()
    channel = socket.socket(fileno=int(argv[0]))
    stream = channel.makefile("rw", encoding="utf-8")
    codes: dict[int, int | None] = {}
    _say(stream, {"modules": sorted({name.partition(".")[0] for name in sys.modules})})
    for line in stream:
        request = json.loads(line)
        if "poll" in request:
            _say(stream, {"code": _code(codes, request["poll"])})
            continue
        pid = os.fork()
        if pid == 0:
            # not the stream: its buffer belongs to the parent
            os.close(channel.fileno())
            _serve(request)
        codes[pid] = None
        _say(stream, {"pid": pid})
    for pid in codes:
        _kill_session(pid)


def _read_engine() -> None:
    """Compare SGLang with what C2T relies on, 2 s of reading that a process does once; a server says what is wrong."""
    root = contract.package_root("sglang")
    assert root is not None
    contract.broken_symbols(root, contract.symbols_of("sglang"))
    # what was found is kept, not the files
    contract._module.cache_clear()


def _say(stream: Any, answer: Mapping[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def _code(codes: dict[int, int | None], pid: int) -> int | None:
    if codes[pid] is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
    return codes[pid]


def _kill_session(leader: int) -> None:
    for pid in sessions.alive(leader):
        os.kill(pid, signal.SIGKILL)


def _serve(request: Mapping[str, Any]) -> NoReturn:
    """Become the server of a request: a session of its own, as if it had been started by its command line."""
    code = 1
    try:
        os.setsid()
        _die_with_parent()
        if request["niceness"]:
            sessions.give_way(os.getpid(), request["niceness"])
        _redirect(request["log"])
        os.chdir(request["cwd"])
        sys.path[0] = request["cwd"]
        _set_environment(request["environment"])
        random.seed()
        _fork_children_from_here()
        module, *arguments = request["command"][2:]
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _run_what_waits_for_the_end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_what_waits_for_the_end() -> None:
    """What an interpreter does at its end and os._exit does not: threads are waited for, atexit's functions called."""
    wait_for_threads: Any = vars(threading)["_shutdown"]
    wait_for_threads()
    atexit._run_exitfuncs()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(log: str) -> None:
    output, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    added = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part not in sys.path]
    sys.path[1:1] = added


def _fork_children_from_here() -> None:
    """Have multiprocessing fork its children from a copy of this process, where it would spawn new interpreters.

    The copy is one of Python's fork servers, made before this process has any state of a server's. A child gets
    its process object pickled and, as a spawned one does, this process's environment at that time.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(Path(tempfile.mkdtemp()) / "children"))
    listener.listen()
    alive_r, alive_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive_w)
        _die_with_parent()
        # A child tells its parent of its end by SIGQUIT, which means the server.
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
        _take_environments()
        _end_children_as_spawned()
        try:
            forkserver.main(listener.detach(), alive_r, [])
        finally:
            os._exit(0)
    os.close(alive_r)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = (
        listener.getsockname(),
        alive_w,
        pid,
    )
    listener.close()
    _send_environments()
    _spawn_is_fork()


def _send_environments() -> None:
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), _ENVIRONMENT: dict(os.environ)}

    spawn.get_preparation_data = get_preparation_data


def _take_environments() -> None:
    original = spawn.prepare

    def prepare(data: Any) -> None:
        _die_with_parent()
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        environment = data.pop(_ENVIRONMENT)
        os.environ.clear()
        os.environ.update(environment)
        # a child of this child is made the same way
        _send_environments()
        _spawn_is_fork()
        original(data)

    spawn.prepare = prepare


def _end_children_as_spawned() -> None:
    server: Any = forkserver
    original = server._serve_one

    def serve_one(*asked: Any) -> int:
        code: int = original(*asked)
        _run_what_waits_for_the_end()
        return code

    server._serve_one = serve_one


def _spawn_is_fork() -> None:
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("forkserver" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method


if __name__ == "__main__":
    main(sys.argv[1:])
