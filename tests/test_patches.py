"""The ledger and the patch files say the same; each patch applies to its release of the engine and does its work."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from c2t_plugin.engines.contract import broken_symbols, engine_version, package_root
from c2t_plugin.engines.sglang.unplugged import APP, APP_VARIABLE, PATCHED

REQUIRED = {"file", "why", "remove_when"}


def mismatches(entries: list[dict[str, str]], files: set[str]) -> list[str]:
    listed = [entry.get("file", "") for entry in entries]
    found = [f"{name}: no file" for name in listed if name not in files]
    found += [f"{name}: not in the ledger" for name in sorted(files - set(listed))]
    found += [f"{name}: listed twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    found += [f"{entry.get('file')}: keys {sorted(entry)}" for entry in entries if set(entry) != REQUIRED]
    found += [f"{entry.get('file')}: empty value" for entry in entries if not all(entry.values())]
    return found


def test_ledger_equals_files(root: Path) -> None:
    entries = tomllib.loads((root / "patches/ledger.toml").read_text(encoding="utf-8")).get("patch", [])
    files = {str(path.relative_to(root / "patches")) for path in (root / "patches").rglob("*.patch")}
    assert mismatches(entries, files) == []
    assert files == set(PATCHES)


ENTRY = {"file": "sglang/0.5.23/0001-x.patch", "why": "because", "remove_when": "then"}


@pytest.mark.parametrize(
    ("entries", "files"),
    [
        ([], {ENTRY["file"]}),
        ([ENTRY], set()),
        ([ENTRY, ENTRY], {ENTRY["file"]}),
        ([{**ENTRY, "why": ""}], {ENTRY["file"]}),
        ([{"file": ENTRY["file"]}], {ENTRY["file"]}),
    ],
    ids=["file without entry", "entry without file", "twice", "no reason", "no end date"],
)
def test_a_mismatch_is_seen(entries: list[dict[str, str]], files: set[str]) -> None:
    assert mismatches(entries, files)


def test_a_matching_ledger_passes() -> None:
    assert mismatches([ENTRY], {ENTRY["file"]}) == []


# --- the patches themselves

HTTP_SERVER, ACTOR = "sglang/srt/entrypoints/http_server.py", "sglang/srt/ray/scheduler_actor.py"


@dataclasses.dataclass
class Record:
    """The argument record as SGLang hands it to a process; 0.5.17's is a dataclass that changes in this way alone."""

    api_key: None = None
    dist_init_addr: str | None = None

    def override(self, source: str, **changes: Any) -> None:
        vars(self).update(changes)


def definition(source: str, name: str, **world: Any) -> Any:
    """The function or class of this name, made in a module that has nothing else but `world`."""
    (node,) = [each for each in ast.parse(source).body if getattr(each, "name", None) == name]
    # the module has it too: annotations are not to be looked up
    code = "from __future__ import annotations\n" + (ast.get_source_segment(source, node) or "")
    namespace = dict(world)
    exec(compile(code, name, "exec"), namespace)
    return namespace[name]


def start_tokenizer_worker(source: str, record: Record, needs_algorithm: Callable[[Any], None]) -> None:
    """As uvicorn does: by importing the application that it is told, of which ours loads plugins first."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    (run,) = (call for call in calls if ast.unparse(call.func) == "uvicorn.run" and "workers" in ast.unparse(call))
    told = compile(ast.Expression(run.args[0]), "application", "eval")
    application = eval(told, {"os": SimpleNamespace(environ={APP_VARIABLE: APP})})
    assert application in (APP, "sglang.srt.entrypoints.http_server:app")
    if application == APP:
        sys.modules["sglang.srt.plugins"].load_plugins()
    needs_algorithm(record)


def start_ray_actor(source: str, record: Record, needs_algorithm: Callable[[Any], None]) -> None:
    scheduler = sys.modules["sglang.srt.managers.scheduler"]
    scheduler.Scheduler = lambda server_args, **_: needs_algorithm(server_args)  # type: ignore[attr-defined]
    ray = MagicMock(remote=lambda actor: actor)
    ray.get_runtime_context().get_accelerator_ids.return_value = {}
    names = ("logger", "publish", "SpawnRanks", "spawn_world_rank", "declare_resolution")
    actor = definition(source, "SchedulerActor", ray=ray, **{name: MagicMock() for name in names})
    ranks = {name: 0 for name in inspect.signature(actor).parameters}
    actor(**{**ranks, "server_args": record, "dist_init_addr": "host:1"})


# path below patches/ -> the file it changes, what runs the changed part
PATCHES: dict[str, tuple[str, Callable[..., None]]] = {
    "sglang/0.5.17/tokenizer-workers.patch": (HTTP_SERVER, start_tokenizer_worker),
    "sglang/0.5.17/ray-actors.patch": (ACTOR, start_ray_actor),
    "sglang/0.5.23/ray-actors.patch": (ACTOR, start_ray_actor),
}


def released(release: str, file: str, root: Path) -> str:
    """A file of that release of SGLang."""
    if release == engine_version("sglang"):
        package = package_root("sglang")
        assert package is not None
        return (package.parent / file).read_text(encoding="utf-8")
    wheels = sorted((root / ".venv" / "wheels").glob(f"sglang-{release}-*.whl"))
    if not wheels:
        pytest.skip(f"SGLang {release} is neither installed nor a wheel in .venv/wheels; `make test` downloads 0.5.17")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return wheel.read(file).decode()


class Finished(Exception):
    """The start got as far as the part that looks the algorithm up."""


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_applies_and_loads_plugins_in_time(
    name: str, patched: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, start = PATCHES[name]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(released(name.split("/")[1], file, root), encoding="utf-8")
    if patched:
        # outside of any repository, where git would look for the file
        apply = ["git", "apply", "-p1", str(root / "patches" / name)]
        subprocess.run(apply, cwd=tmp_path, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)})
    (symbol,) = [each for each in PATCHED.values() if file == f"sglang/{each.file}"]
    assert (broken_symbols(tmp_path / "sglang", [symbol]) == []) is patched

    calls: list[str] = []
    plugins = SimpleNamespace(load_plugins=lambda: calls.append("load_plugins"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", plugins)
    for module in ("environ", "managers", "managers.scheduler", "utils", "utils.numa_utils"):
        monkeypatch.setitem(sys.modules, f"sglang.srt.{module}", MagicMock())
    for module in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module, ModuleType(module)))
    record = Record()
    record._c2t = {"beta": "0.3"}  # type: ignore[attr-defined]

    def needs_algorithm(server_args: Any) -> None:
        calls.append("from_string")
        assert not patched or server_args._c2t == {"beta": "0.3"}
        raise Finished

    with pytest.raises(Finished):
        start((tmp_path / file).read_text(encoding="utf-8"), record, needs_algorithm)
    assert calls == ["load_plugins", "from_string"][not patched :]
