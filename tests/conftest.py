"""Shared by all tests: what to skip where an engine is missing, and a check that no process is left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN_MARK = "PYTEST_RUN_MARK"
GRACE_S = 60.0
# Engines' imports make so many objects, nearly all for good, that the collector takes a fifth of their time.
gc.set_threshold(50_000, 20, 20)


def pytest_configure() -> None:
    # what a server measures is no other test's, and nothing goes into the user's own cache
    os.environ.setdefault("C2T_CACHE_DIR", "off")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _long_files_first(items)
    if importlib.util.find_spec("sglang") is not None:
        return
    skip = pytest.mark.skip(reason="SGLang is not installed in this environment")
    for item in items:
        if item.get_closest_marker("vllm"):
            continue
        if item.get_closest_marker("sglang") or item.get_closest_marker("server"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.freeze()


def _long_files_first(items: list[pytest.Item]) -> None:
    """Files that start servers, those of most tests before the others: what is short fills up the end of a run whose
    jobs take a file at a time."""
    tests = Counter(item.path for item in items)
    servers = {item.path for item in items if item.get_closest_marker("server")}
    items.sort(key=lambda item: -tests[item.path] if item.path in servers else 0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top directory."""
    return ROOT


def _marked(mark: str) -> list[str]:
    """Command lines of the processes, this one aside, that inherited this run's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_MARK) == mark:
                found.append(f"{process.pid}: {' '.join(process.cmdline()[:6])}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    # Python's own helper of multiprocessing ends with the interpreter that started it, which is this one.
    return [line for line in found if "resource_tracker" not in line]


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail the run if a process that it started, orphans included, outlives it."""
    mark = uuid.uuid4().hex
    os.environ[RUN_MARK] = mark
    yield
    # imported by tests that start servers
    if "benchmarks.cpu_engine.preloaded" in sys.modules:
        sys.modules["benchmarks.cpu_engine.preloaded"].close_all()
    deadline = time.monotonic() + GRACE_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"processes left behind: {left}"
