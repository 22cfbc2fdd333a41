"""`make demo ENGINE=vllm`: the same servers as on SGLang, by vLLM on a CPU; a table and a picture.

A functional check: it shows that the servers work and what they count, not how fast C2T is on a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.pairs.toy.vllm_layout import write_vllm_layout
from benchmarks.serving import demo
from benchmarks.serving.client import Client
from benchmarks.serving.vllm_client import VllmClient
from benchmarks.serving.vllm_server import VllmServer
from c2t_plugin.classifier import FILE_NAME

METHODS = {"standalone": "draft_model", "eagle3": "eagle3"}


class VllmDemo(demo.Demo):
    """The demo on vLLM."""

    title = "C2T on vLLM's CPU backend: a functional check, not a speed claim"

    @contextmanager
    def opened(self, server: demo.Server, pair: Path, log: Path) -> Iterator[Client]:
        with tempfile.TemporaryDirectory() as folder:
            layout = write_vllm_layout(pair, Path(folder))
            flags = speculative(server, pair, layout)
            running = VllmServer(layout / "target", flags, log)
            with running, VllmClient(running.base_url, demo.MAX_TOKENS) as client:
                yield client


def speculative(server: demo.Server, pair: Path, layout: Path) -> list[str]:
    """Flags of this server, target and those of small models aside."""
    if server.arm == "plain":
        return []
    draft, method = demo.DRAFTS[server.base], METHODS[server.base]
    values: dict[str, object] = {"model": str(layout / draft), "num_speculative_tokens": server.d_max}
    if server.arm == "c2t":
        values |= {"method": f"c2t:{method}", "c2t_classifier": str(pair / draft / FILE_NAME)}
    else:
        values |= {"method": method}
    return ["--speculative-config", json.dumps(values)]


if __name__ == "__main__":
    sys.exit(demo.main(sys.argv[1:], VllmDemo))
