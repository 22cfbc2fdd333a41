"""What servers have measured of their steps, kept for those that start later on such a machine with such settings.

A server begins with it, and measures what it has not. No trouble with a file reaches who asks: it is said in one line,
and the server measures as if there were none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from c2t_plugin import envs, json_text
from c2t_plugin.engines.checkpoints import read_config
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.machine import cpu_model
from c2t_plugin.output import write_text
from c2t_plugin.planner.step_planner import StepPlanner

logger = logging.getLogger(__name__)

FORMAT, VERSION = "c2t-measured-steps", 1


class CurveCache:
    """One file of a folder, named by a hash of the facts that it holds in words: what a step's seconds depend on."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._head = {"format": FORMAT, "version": VERSION, "facts": {name: str(of) for name, of in facts.items()}}
        self.path = folder / "curves" / f"{_digest(self._head)}.json"
        self._kept: Any = None
        self._failed = False

    def begin(self, planner: StepPlanner) -> None:
        """Have a planner go on from what is kept, if there is something."""
        if not os.path.exists(self.path):
            return
        try:
            found = json_text.load(self.path, ConfigError)
            if not isinstance(found, Mapping) or any(found.get(name) != of for name, of in self._head.items()):
                raise ConfigError(f"it is no {FORMAT} of version {VERSION} and of this server")
            planner.resume(found.get("passes"))
        except C2TError as error:
            logger.warning("C2T: %s is not used, and steps are measured anew: %s", self.path, error)
            return
        self._kept = found["passes"]
        logger.info("C2T: cost of a step, as it was measured before (%s): %s", self.path, planner.curve)

    def keep(self, measured: dict[str, Any]) -> None:
        """Write it, if it is something else than what is kept. measured: see CostProfile.measured."""
        if measured == self._kept:
            return
        self._kept = measured
        try:
            write_text(self.path, json.dumps({**self._head, "passes": measured}) + "\n")
        except (OSError, C2TError) as error:
            if not self._failed:
                logger.warning("C2T: %s is not kept, and the next server measures anew: %s", self.path, error)
            self._failed = True


def start(planner: StepPlanner, device: torch.device, facts: Mapping[str, Any], *, writes: bool = True) -> None:
    """Have a planner that measures begin with what is kept, and keep what it measures. device: of the target. facts:
    the engine's, see `checkpoint`. writes: whether this process keeps something."""
    folder = envs.cache_dir()
    if folder is None:
        return
    on_cpu = device.type == "cpu"
    machine = {
        "device": cpu_model() if on_cpu else torch.get_device_module(device).get_device_name(device),
        "cores": len(os.sched_getaffinity(0)) if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "torch": torch.__version__,
    }
    cache = CurveCache(folder, {**machine, **facts})
    cache.begin(planner)
    planner.keep_measured = cache.keep if writes else None


def checkpoint(name: str | None, revision: str | None) -> str:
    """A model as facts have it: its own name, and a hash of its config.json, from which its shape follows."""
    try:
        return "none" if name is None else f"{Path(name).name} {_digest(read_config(name, revision))}"
    except C2TError:
        # nobody can say: the whole name then
        return str(name)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
