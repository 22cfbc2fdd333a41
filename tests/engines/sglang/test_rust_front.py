"""SGLang's Rust front end, which checks no sampling parameters: what is bad is seen where it is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402

D_MAX = 3
SAMPLING = {"temperature": 0.0, "max_new_tokens": 8}


def test_bad_settings_end_no_server(tmp_path: Path):
    classifier = vc.save_hand_made_classifier(tmp_path / "hand.safetensors")
    (prompt,) = held_out_prompts(1, min_tokens=64, seed=5)
    env = {**os.environ, "SGLANG_RUST_SERVER": "1"}
    with vc.server(pair_dir(), "eagle3", D_MAX, classifier, tmp_path / "log", env=env) as server:
        plain = server.generate(prompt, max_new_tokens=8)["output_ids"]
        for bad in ({"beta": 7}, {"beta": "a"}, {"max_depth": 1e300}, {"colour": "red"}, [1], "c2t"):
            answer = server.generate(prompt, max_new_tokens=8, custom_params={"c2t": bad})
            assert answer["output_ids"] == plain
        # of which SGLang's scheduler dies
        for name, value in (("top_logprobs_num", 10**6), ("logprob_start_len", -5)):
            body = {"input_ids": list(prompt), "sampling_params": SAMPLING, "return_logprob": True, name: value}
            assert server.request("/generate", body)["output_ids"] == plain
        log = server.log.read_text(errors="replace")
    assert log.count("C2T: a request's settings are ignored, here and from now on: c2t.beta must be a number") == 1
    assert log.count("C2T: SGLang's Rust front end carries a request's own settings on /generate alone") == 1
