"""The demo's side of vLLM: flags of its servers, and counters read off /metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import demo, demo_vllm
from benchmarks.serving.vllm_client import value_of
from c2t_plugin.classifier import FILE_NAME

METRICS = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="pair"} 12.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="pair"} 3.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="pair"} 1.7e+09
"""


@pytest.mark.parametrize(
    ("server", "method"),
    [
        (demo.Server("static", "standalone", 4), "draft_model"),
        (demo.Server("static", "eagle3", 4), "eagle3"),
        (demo.Server("c2t", "eagle3", 6), "c2t:eagle3"),
    ],
    ids=str,
)
def test_flags_of_a_server(server: demo.Server, method: str):
    flag, values = demo_vllm.speculative(server, Path("pair"), Path("layout"))
    found = json.loads(values)
    draft = demo.DRAFTS[server.base]
    assert flag == "--speculative-config"
    assert (found["method"], found["num_speculative_tokens"]) == (method, server.d_max)
    assert found["model"] == f"layout/{draft}"
    # the layout has no classifier, and the generic one would be of another pair where C2T_PAIR is set
    assert found.get("c2t_classifier") == (f"pair/{draft}/{FILE_NAME}" if server.arm == "c2t" else None)


def test_plain_decoding_has_no_flags():
    assert demo_vllm.speculative(demo.SERVERS[0], Path("pair"), Path("layout")) == []


def test_a_metric_is_read_over_all_its_labels():
    assert value_of(METRICS, "spec_decode_num_draft_tokens_total") == 15
    assert value_of(METRICS, "inter_token_latency_seconds_count") == 0
