"""The servers of ladder.py: the arm of each, what it is told beside, and how a GPU and the CPU engine serve it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.environment import FLAGS
from benchmarks.gpu.rungs import STEPS, TOPK
from benchmarks.pairs.toy import pair_dir
from benchmarks.serving.arms import ARMS, Arm, Speculation, Tree
from benchmarks.serving.engines import ENGINES, Device
from benchmarks.serving.server import Runner, Server

DRAFT = "eagle3"
START_TIMEOUT_S = 240.0
# requests at a time
MOST = 32

PLAIN, CHAIN, TREE = ARMS["plain"], ARMS["C2T"], ARMS["C2T tree"]
PADDED = ("--speculative-c2t-packing", "off")
# Requests that graphs are captured for. The second's whole chains have fewer rows than there are requests at most, so
# that graph is captured with one row of as many requests (SGLang 34384).
GRAPHS = (1, 6, MOST)
# name: arm, and flags beside its own
SERVERS: dict[str, tuple[Arm, tuple[str, ...]]] = {
    "plain": (PLAIN, ()),
    "kept": (CHAIN, ()),
    "slots": (CHAIN, ("--cuda-graph-bs-decode", *map(str, GRAPHS))),
    "window": (CHAIN, PADDED),
    "eager": (CHAIN, ("--disable-cuda-graph",)),
    # told nothing of whether it plans
    "auto": (ARMS["C2T as it comes"], ("--speculative-num-steps", str(STEPS))),
    "rough": (CHAIN, ("--chunked-prefill-size", "32", "--enable-mixed-chunk")),
    "sync": (CHAIN, ("--disable-overlap-schedule",)),
    "tree": (TREE, ()),
    "padded tree": (TREE, PADDED),
}
RECORDED = ("kept", "eager", "rough")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
# Else SGLang's Triton attention multiplies float32 in TF32, of 10 bits, and tokens that are nearly level change places.
PRECISE = {"TRITON_F32_DEFAULT": "ieee"}
# Of servers that share a GPU: each takes what its requests need, not what it finds
SHARED = ("--mem-fraction-static", "0.5", "--max-total-tokens", "65536")


def serve(
    name: str, out: Path, environment: Mapping[str, str] | None, more: Sequence[str] = ()
) -> tuple[Server, Path, Path | None]:
    """A server, its log, and where it records; environment: None for the CPU engine. more: flags of a GPU's server."""
    arm, own = SERVERS[name]
    traces = out / f"traces-{name}" if name in RECORDED else None
    if traces is not None:
        own += ("--speculative-c2t-trace-dir", str(traces), "--speculative-c2t-trace-share", "1.0")
        own += ("--speculative-c2t-trace-precision", "exact")
    added = RETRACT if name == "rough" else {}
    flags: tuple[str, ...]
    if environment is None:
        device, env, flags = Device.CPU, {**os.environ, **added}, ("--skip-server-warmup",)
    else:
        device, env = Device.GPU, {**environment, **added, **PRECISE}
        flags = (*FLAGS, "--dtype", "float32", "--max-running-requests", str(MOST), *more)
    runner = Runner(ENGINES["sglang"], device, pair_dir() / "target", out, flags, env, START_TIMEOUT_S)
    on = Speculation(pair_dir() / DRAFT, DRAFT, STEPS, tree=Tree(STEPS, TOPK))
    server = runner.server(f"ladder-{name}", arm, on, *own)
    return server, server.log, traces
