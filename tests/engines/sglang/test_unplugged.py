"""Processes without plugins: what is refused, and how each release's are reached."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from c2t_plugin.engines.sglang import unplugged
from c2t_plugin.errors import ConfigError

STOCK = {
    "srt/entrypoints/http_server.py": "async def init_multi_tokenizer():\n    read_from_shared_memory()\n",
    "srt/ray/scheduler_actor.py": "class SchedulerActor:\n    def __init__(self):\n        Scheduler()\n",
}
BY_VARIABLE = f"""
def _setup_and_run_http_server():
    app_path = envs.{unplugged.APP_VARIABLE}.get()
    uvicorn.run(app_path)
"""
BY_PATCH = f"""
def _setup_and_run_http_server():
    uvicorn.run(
        os.environ.get(
            "{unplugged.APP_VARIABLE}",
            "app",
        ),
    )
"""
PATCHES = Path(__file__).resolve().parents[3] / "patches" / "sglang"
WORKERS, RAY = SimpleNamespace(tokenizer_worker_num=2), SimpleNamespace(use_ray=True)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SGLang of only these files, that is as 0.5.17."""
    monkeypatch.delenv(unplugged.APP_VARIABLE, raising=False)
    for name, source in STOCK.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(source)
    return tmp_path


def change(engine: Path, name: str, old: str, new: str) -> None:
    (engine / name).write_text((engine / name).read_text().replace(old, new))


@pytest.mark.parametrize("asked", [SimpleNamespace(), SimpleNamespace(tokenizer_worker_num=1, use_ray=False)])
def test_a_server_without_such_processes_is_left_alone(engine: Path, asked: SimpleNamespace):
    unplugged.reach(asked, engine)
    assert unplugged.APP_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("asked", "flag", "patch"),
    [(WORKERS, "--tokenizer-worker-num above 1", "tokenizer-workers"), (RAY, "--use-ray", "ray-actors")],
    ids=["workers", "ray"],
)
def test_unpatched_is_refused_in_one_line_that_names_the_patch(
    engine: Path, asked: SimpleNamespace, flag: str, patch: str
):
    with pytest.raises(ConfigError, match=rf"^{flag} .*patches/sglang/.*/{patch}\.patch") as error:
        unplugged.reach(asked, engine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("patched", "other"), [(WORKERS, RAY), (RAY, WORKERS)], ids=["workers", "ray"])
def test_a_patched_engine_is_known_by_its_source(
    engine: Path, patched: SimpleNamespace, other: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    workers = patched is WORKERS
    if workers:
        change(engine, "srt/entrypoints/http_server.py", "async def", f"{BY_PATCH}\nasync def")
    else:
        change(engine, "srt/ray/scheduler_actor.py", "Scheduler()", "load_plugins(); Scheduler()")
    monkeypatch.setattr(os, "environ", {})
    unplugged.reach(patched, engine)
    assert os.environ == ({unplugged.APP_VARIABLE: unplugged.APP} if workers else {})
    with pytest.raises(ConfigError):
        unplugged.reach(other, engine)


def test_workers_are_given_our_application_where_a_variable_names_it(engine: Path, monkeypatch: pytest.MonkeyPatch):
    change(engine, "srt/entrypoints/http_server.py", "async def", f"{BY_VARIABLE}\nasync def")
    monkeypatch.setattr(os, "environ", {})
    unplugged.reach(WORKERS, engine)
    assert os.environ[unplugged.APP_VARIABLE] == unplugged.APP
    unplugged.reach(WORKERS, engine)
    os.environ[unplugged.APP_VARIABLE] = "mine:app"
    with pytest.raises(ConfigError, match=f"{unplugged.APP_VARIABLE} is mine:app"):
        unplugged.reach(WORKERS, engine)


@pytest.mark.sglang
def test_0_5_23_has_that_variable(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    monkeypatch.setattr(os, "environ", {})
    unplugged.reach(WORKERS)
    assert os.environ == {unplugged.APP_VARIABLE: unplugged.APP}


def test_a_patch_is_named_that_there_is(monkeypatch: pytest.MonkeyPatch):
    there: dict[str, set[str]] = {path.stem: set() for path in PATCHES.rglob("*.patch")}
    for path in PATCHES.rglob("*.patch"):
        there[path.stem].add(path.parent.name)
    assert there == {patch: set(releases) for patch, releases in unplugged.RELEASES.items()}
    for release, said in (
        ("0.5.23", "apply patches/sglang/0.5.23/ray-actors.patch of C2T's repository"),
        ("0.5.19", "0.5.17/ray-actors.patch or patches/sglang/0.5.23/ray-actors.patch, made for other releases than"),
    ):
        monkeypatch.setattr(unplugged, "engine_version", lambda _, release=release: release)
        assert said in str(unplugged._unpatched("--use-ray", "ray-actors"))
