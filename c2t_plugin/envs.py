"""The only reader of the C2T_* environment variables; docs/environment.md lists them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from c2t_plugin import json_text
from c2t_plugin.errors import ConfigError


def pair() -> Path | None:
    """C2T_PAIR: the pair directory (target/, draft/, ...) that commands take without --pair."""
    raw = os.environ.get("C2T_PAIR")
    return Path(raw) if raw else None


def option(name: str) -> str | None:
    """C2T_CLASSIFIER, C2T_BETA, C2T_BASE, C2T_MODE, C2T_POLICY, C2T_TOP_M, C2T_TRACE_DIR, C2T_TRACE_SHARE,
    C2T_TRACE_LIMIT, C2T_TRACE_PRECISION, C2T_PACKING, C2T_ROWS, C2T_ATTENTION, C2T_SELF_CHECK, C2T_PLANNER, C2T_LEARN,
    C2T_LEARNED, C2T_REQUEST_SETTINGS, C2T_REQUEST_TIERS, C2T_VERIFY_ATTENTION: one option of C2TConfig, None if not
    set; C2T_COST_CURVE, C2T_RAGGED, C2T_PLAN, old names."""
    return os.environ.get(f"C2T_{name.upper()}") or None


def cache_dir() -> Path | None:
    """C2T_CACHE_DIR: the folder of what servers measure and later ones begin with; by default `c2t` in the user's
    cache directory. None for `off`, and where the user has none."""
    own = os.environ.get("C2T_CACHE_DIR")
    if own:
        return None if own == "off" else Path(own)
    above = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(above):
        above = os.path.expanduser("~/.cache")
    return Path(above, "c2t") if os.path.isabs(above) else None


def untested_release() -> bool:
    """C2T_UNTESTED_RELEASE: 1 serves with a release of the engine that C2T was not tested with. The contract holds."""
    value = os.environ.get("C2T_UNTESTED_RELEASE") or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"C2T_UNTESTED_RELEASE must be 0 or 1, got {value!r}")
    return value == "1"


def config() -> dict[str, Any]:
    """C2T_CONFIG: options as a JSON object, or the path of a file that holds one; empty if not set."""
    raw = os.environ.get("C2T_CONFIG")
    if not raw:
        return {}
    if not raw.lstrip().startswith("{"):
        path = Path(raw)
        # os.path, since Path raises where a name is too long
        if not os.path.isfile(path):
            raise ConfigError(f"C2T_CONFIG must be a JSON object or the path of a JSON file, got {raw!r}")
        value = json_text.load(path, ConfigError)
    else:
        value = json_text.parse(raw, "C2T_CONFIG", ConfigError)
    if not isinstance(value, dict):
        raise ConfigError(f"C2T_CONFIG must hold a JSON object, got {type(value).__name__}")
    return value
