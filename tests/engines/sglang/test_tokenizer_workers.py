"""Two tokenizer workers, which SGLang starts without plugins: each knows the algorithm and checks what requests ask."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.serving.process import ServerError  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

D_MAX = 3
# enough that both workers have some: each accepts connections from the one socket
REQUESTS = 16
TIMEOUT_S = 300.0


def wait_for_both(log: Path) -> None:
    """A server is healthy as soon as one of them answers."""
    deadline = time.monotonic() + TIMEOUT_S
    while log.read_text().count("Router registered worker IPC") < 2:
        assert time.monotonic() < deadline, "the second worker has not started"
        time.sleep(0.5)


def test_both_workers_answer_and_refuse(tmp_path: Path):
    classifier = vc.save_hand_made_classifier(tmp_path / "hand.safetensors")
    (prompt,) = held_out_prompts(1, min_tokens=64, seed=5)
    flags = ("--tokenizer-worker-num", "2", "--speculative-c2t-request-tiers", "on")
    with vc.server(pair_dir(), "eagle3", D_MAX, classifier, tmp_path / "log", *flags) as server:
        wait_for_both(tmp_path / "log")
        answers = vc.answers(server, [prompt] * REQUESTS, 4)
        for meta in (answer["meta_info"] for answer in answers):
            assert sum(meta["c2t"][0]["tiers"].values()) == meta["spec_verify_ct"]
        found = [vc.Counts.of_answer(answer) for answer in answers]
        assert {each.output_ids for each in found} == {
            tuple(Target(pair_dir() / "target").greedy(prompt, vc.NEW_TOKENS))
        }
        assert {length for each in found for length, _ in each.draft_lengths} - {0, D_MAX}, "some chains are cut"
        for _ in range(REQUESTS):
            with pytest.raises(ServerError, match=r"answered with 400.*c2t\.beta must be a number in \[0, 1\]"):
                server.generate(prompt, custom_params={"c2t": {"beta": 7}})
        vc.control(server, max_depth=0)
        assert [
            length for length, _ in vc.Counts.of_answer(server.generate(prompt, max_new_tokens=8)).draft_lengths
        ] == [0]
