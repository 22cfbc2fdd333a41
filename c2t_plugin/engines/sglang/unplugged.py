"""Processes into which SGLang loads no plugins: extra tokenizer workers, Ray's actors, its Rust front end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from c2t_plugin.engines.contract import EngineSymbol, broken_symbols, engine_version, package_root
from c2t_plugin.errors import ConfigError

# Where SGLang lets a variable name the application that tokenizer workers import.
APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
APP = "c2t_plugin.engines.sglang.http_app:app"
# What each patch of ours adds, named as its file is.
PATCHED = {
    "tokenizer-workers": EngineSymbol(
        "srt/entrypoints/http_server.py",
        "_setup_and_run_http_server",
        contains=(f'uvicorn.run( os.environ.get( "{APP_VARIABLE}"',),
    ),
    "ray-actors": EngineSymbol("srt/ray/scheduler_actor.py", "SchedulerActor.__init__", contains=("load_plugins()",)),
}
# that C2T's repository has a patch for
RELEASES = {"tokenizer-workers": ("0.5.17",), "ray-actors": ("0.5.17", "0.5.23")}
APP_BY_VARIABLE = EngineSymbol(
    "srt/entrypoints/http_server.py",
    "_setup_and_run_http_server",
    contains=(f"app_path = envs.{APP_VARIABLE}.get()", "uvicorn.run(app_path"),
)

RUST = (
    "SGLang's Rust front end carries a request's own settings on /generate alone, where bad ones are ignored and not "
    "refused; it has no /set_internal_state and answers without meta_info.c2t"
)


def reach(server_args: Any, root: Path | None = None) -> None:
    """See to it that every process of this server will know C2T. Raises ConfigError if one cannot.

    root: SGLang's package directory, by default that of the installed one.
    """
    found = package_root("sglang") if root is None else root
    assert found is not None, "the contract was checked before"
    if (getattr(server_args, "tokenizer_worker_num", None) or 1) > 1:
        if not (_has(found, APP_BY_VARIABLE) or _has(found, PATCHED["tokenizer-workers"])):
            raise _unpatched("--tokenizer-worker-num above 1", "tokenizer-workers")
        named = os.environ.setdefault(APP_VARIABLE, APP)
        if named != APP:
            raise ConfigError(
                f"--tokenizer-worker-num above 1 cannot be combined with C2T while {APP_VARIABLE} is {named}: the "
                f"workers load plugins through {APP} alone; leave the variable out"
            )
    if getattr(server_args, "use_ray", False) and not _has(found, PATCHED["ray-actors"]):
        raise _unpatched("--use-ray", "ray-actors")


def _has(root: Path, symbol: EngineSymbol) -> bool:
    return not broken_symbols(root, [symbol])


def _unpatched(flag: str, patch: str) -> ConfigError:
    installed = str(engine_version("sglang"))
    releases = [installed] if installed in RELEASES[patch] else RELEASES[patch]
    found = " or ".join(f"patches/sglang/{release}/{patch}.patch" for release in releases)
    if installed not in releases:
        found += f", made for other releases than {installed},"
    return ConfigError(
        f"{flag} cannot be combined with C2T: this SGLang does not load plugins there; leave it out, or apply "
        f"{found} of C2T's repository"
    )
