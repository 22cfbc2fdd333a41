"""The ladder's servers: what each is told, on a GPU and on the CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openai", reason="the servers' client is not installed in this environment")

from benchmarks.gpu.rungs import STEPS, TOPK
from benchmarks.gpu.servers import RECORDED, SERVERS, SHARED, serve
from benchmarks.serving.arms import ARMS
from benchmarks.serving.server import Server

# by server: what tells it from the others of its shape
TOLD: dict[str, dict[str, str | None]] = {
    "plain": {},
    "kept": {"speculative-c2t-planner": "off"},
    # the last of several values
    "slots": {"speculative-c2t-planner": "off", "cuda-graph-bs-decode": "32"},
    "window": {"speculative-c2t-planner": "off", "speculative-c2t-packing": "off"},
    "eager": {"speculative-c2t-planner": "off", "disable-cuda-graph": None},
    "auto": {},
    "rough": {"speculative-c2t-planner": "off", "chunked-prefill-size": "32", "enable-mixed-chunk": None},
    "sync": {"speculative-c2t-planner": "off", "disable-overlap-schedule": None},
    "tree": {"speculative-c2t-mode": "tree", "speculative-eagle-topk": str(TOPK)},
    "padded tree": {
        "speculative-c2t-mode": "tree",
        "speculative-eagle-topk": str(TOPK),
        "speculative-c2t-packing": "off",
    },
}


def flags(server: Server) -> dict[str, str | None]:
    """By name, the last of each, as argparse takes them."""
    found: dict[str, str | None] = {}
    name = ""
    for part in server.command(7):
        if part.startswith("--"):
            name = part[2:]
            found[name] = None
        elif name:
            found[name] = part
    return found


@pytest.mark.parametrize("name", SERVERS)
def test_each_is_told_what_its_rungs_are_about(name: str, tmp_path: Path):
    server, log, traces = serve(name, tmp_path, {})
    plain, told = flags(serve("plain", tmp_path, {})[0]), flags(server)
    own = {flag: value for flag, value in told.items() if flag not in plain}
    expected = dict(TOLD[name])
    if name != "plain":
        expected |= {"speculative-algorithm": "C2T", "speculative-num-steps": str(STEPS)}
        assert (own.pop("speculative-draft-model-path") or "").endswith("eagle3")
    if "speculative-c2t-mode" not in expected:
        # said or not: the only chain that there is
        assert own.pop("speculative-eagle-topk", "1") == "1"
        assert own.pop("speculative-num-draft-tokens", str(STEPS + 1)) == str(STEPS + 1)
    assert (traces is not None) == (name in RECORDED)
    if traces is not None:
        expected |= {"speculative-c2t-trace-dir": str(traces), "speculative-c2t-trace-share": "1.0"}
        expected |= {"speculative-c2t-trace-precision": "exact"}
    assert own == expected
    assert log == server.log and log.parent == tmp_path


def test_a_gpus_compute_in_float32_and_share_it_when_told(tmp_path: Path):
    server = serve("rough", tmp_path, {"MINE": "1"}, SHARED)[0]
    told, environment = flags(server), server.environment()
    assert told["dtype"] == "float32" and told["mem-fraction-static"] == "0.5" and "device" not in told
    assert environment["MINE"] == "1" and environment["TRITON_F32_DEFAULT"] == "ieee"
    assert environment["SGLANG_TEST_RETRACT"] == "1"
    assert "SGLANG_TEST_RETRACT" not in serve("kept", tmp_path, {})[0].environment()


def test_those_of_a_dry_run_are_the_cpu_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINE", "1")
    server = serve("rough", tmp_path, None, SHARED)[0]
    assert flags(server)["device"] == "cpu" and "mem-fraction-static" not in flags(server)
    assert server.environment()["SGLANG_TEST_RETRACT"] == server.environment()["MINE"] == "1"
    assert "TRITON_F32_DEFAULT" not in server.environment()


def test_all_are_arms_of_the_table():
    assert all(ARMS[arm.name] is arm for arm, _ in SERVERS.values())
