"""Prefill-decode disaggregation through servers: decode alone, on SGLang's synthetic transfer, and both sides."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.serving.process import free_port  # noqa: E402
from tests.support.sglang import faults  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

D_MAX = 3
REQUESTS = 6
# what SGLang knows its synthetic transfer by
SYNTHETIC = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 1}
# few slots, so that they are used again; the default pool for retracted requests is pinned memory, which needs CUDA
DECODE = (
    *("--disaggregation-mode", "decode", "--max-running-requests", "1"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
NO_PINNED_MEMORY = """
def register():
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
"""


def body(prompt: list[int], c2t: dict[str, Any], **transfer: Any) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": {**params, "custom_params": {"c2t": c2t}}, **transfer}


def kept_for_want_of_statistics(decode: CpuServer) -> int:
    return decode.request("/get_server_info")["internal_states"][0]["c2t"]["non_finite"]


@pytest.mark.parametrize("plan", ["sync", "lagged"])
def test_first_tokens_are_kept_and_options_are_followed(plan: str, tmp_path: Path):
    """The synthetic transfer brings no keys: what is drafted is noise, what is kept is not."""
    classifier = vc.save_hand_made_classifier(tmp_path / "hand.safetensors")
    flags = (*DECODE, "--disaggregation-transfer-backend", "fake", "--speculative-c2t-rows", plan)
    prompts = held_out_prompts(REQUESTS, min_tokens=64, seed=5)

    def lengths(options: dict[str, Any]) -> list[dict[int, int]]:
        answers = [server.request("/generate", body(prompt, options, **SYNTHETIC)) for prompt in prompts]
        return [dict(vc.Counts.of_answer(answer).draft_lengths) for answer in answers]

    with vc.server(pair_dir(), "eagle3", D_MAX, classifier, tmp_path / "log", *flags) as server:
        before = kept_for_want_of_statistics(server)
        # beta 1 cuts every token that has a confidence
        for found in lengths({"beta": 1.0}):
            assert found.pop(1) == 1 and set(found) == {0}
        assert kept_for_want_of_statistics(server) - before == REQUESTS
        assert [set(found) for found in lengths({"max_depth": 0})] == [{0}] * REQUESTS
        assert [set(found) for found in lengths({"enabled": False})] == [{D_MAX}] * REQUESTS


def test_two_servers_answer_as_one(tmp_path: Path):
    """Over Mooncake's TCP transport, which moves keys between two processes without a GPU."""
    pytest.importorskip(
        "mooncake.engine", reason="mooncake-transfer-engine-non-cuda is not installed", exc_type=ImportError
    )
    (tmp_path / "no_pinned_memory.py").write_text(NO_PINNED_MEMORY)
    (tmp_path / "site").mkdir()
    site = faults.install(tmp_path / "site", str(tmp_path / "no_pinned_memory.py"))
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "SGLANG_HOST_IP": "127.0.0.1"}
    port = free_port()
    shared = ("--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-bootstrap-port", str(port))
    pair = (pair_dir(), "eagle3", D_MAX, vc.save_hand_made_classifier(tmp_path / "hand.safetensors"))
    target = Target(pair_dir() / "target")
    oracle = vc.Oracle(pair_dir(), target)
    with (
        vc.server(*pair, tmp_path / "prefill", "--disaggregation-mode", "prefill", *shared, env=env) as prefill,
        vc.server(*pair, tmp_path / "decode", *DECODE, *shared, env=env) as decode,
        ThreadPoolExecutor(1) as pool,
    ):
        before = kept_for_want_of_statistics(decode)

        def answer(prompt: list[int], options: dict[str, Any], room: int) -> vc.Counts:
            asked = body(prompt, options, bootstrap_host="127.0.0.1", bootstrap_port=port, bootstrap_room=room)
            beside = pool.submit(prefill.request, "/generate", asked)
            found = vc.Counts.of_answer(decode.request("/generate", asked))
            beside.result()
            return found

        for number, prompt in enumerate(held_out_prompts(REQUESTS, min_tokens=64, seed=5)):
            plain = tuple(target.greedy(prompt, vc.NEW_TOKENS))
            found = answer(prompt, {"enabled": False}, 2 * number + 1)
            assert found == oracle.counts("eagle3", prompt, D_MAX, None) and found.output_ids == plain
            found = answer(prompt, {"beta": 1.0}, 2 * number + 2)
            assert (found.output_ids, dict(found.draft_lengths)[1], len(found.draft_lengths)) == (plain, 1, 2)
        assert kept_for_want_of_statistics(decode) - before == 2 * REQUESTS
