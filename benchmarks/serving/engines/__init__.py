"""The engines that benchmarks serve with, by the name that the table of arms has for them."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.serving.engines.engine import Device, Engine, Launch
from benchmarks.serving.engines.sglang import Sglang
from benchmarks.serving.engines.vllm import Vllm

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (Sglang(), Vllm())}

__all__ = ["ENGINES", "Device", "Engine", "Launch"]
