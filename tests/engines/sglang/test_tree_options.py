"""What tree mode writes into SGLang's arguments, and what it refuses before a server starts."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from c2t_plugin.engines.sglang import tree_options  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from c2t_plugin.trees.shape import DEFAULT_TOPK  # noqa: E402
from tests.support.sglang.front import at_the_front  # noqa: E402


def record(**changes: Any) -> types.SimpleNamespace:
    """The fields that decide a tree's shape, as they are once the draft steps are known."""
    fields = {"speculative_num_steps": 5, "speculative_eagle_topk": None, "speculative_num_draft_tokens": None}
    return types.SimpleNamespace(**{**fields, **changes})


def resolved(policy: str = "c2t", **changes: Any) -> tuple[int, int]:
    server_args = record(**changes)
    tree_options.resolve(server_args, policy)
    return server_args.speculative_eagle_topk, server_args.speculative_num_draft_tokens


def test_a_tree_has_room_for_all_that_is_drafted_from():
    assert resolved() == (DEFAULT_TOPK, DEFAULT_TOPK * 5 + 1)
    assert resolved(speculative_eagle_topk=8, speculative_num_steps=2) == (8, 17)


def test_every_policy_has_its_width():
    assert resolved("static") == (4, 26)
    assert resolved("static", speculative_eagle_topk=8, speculative_num_steps=7) == (8, 26)
    assert resolved("eagle2") == (4, 21)
    assert resolved("eagle2", speculative_num_draft_tokens=60) == (4, 60)
    assert resolved("dyspec", speculative_num_steps=1) == (4, 5)


def test_the_width_is_the_users():
    assert resolved(speculative_eagle_topk=8, speculative_num_draft_tokens=12) == (8, 12)
    assert resolved(speculative_eagle_topk=1, speculative_num_draft_tokens=6) == (1, 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculative_eagle_topk": 0}, r"--speculative-eagle-topk is 0; in tree mode it must be from 1 to 32"),
        ({"speculative_eagle_topk": 33}, r"--speculative-eagle-topk is 33"),
        ({"speculative_num_draft_tokens": 22}, r"--speculative-num-draft-tokens is 22; .* from 2 to 21"),
        ({"speculative_num_draft_tokens": 1}, r"--speculative-num-draft-tokens is 1; .* from 2 to 21"),
        ({"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}, r"from 6 to 6"),
        ({"speculative_eagle_topk": 32}, r"draft 4128 nodes; tree mode takes up to 4096"),
        ({"kv_canary": "log"}, r"--kv-canary watches"),
        ({"policy": "static", "speculative_eagle_topk": 3}, r"static .* at least 4 and --speculative-num-steps of at"),
        ({"policy": "static", "speculative_num_draft_tokens": 20}, r"from 26 to 26"),
        ({"policy": "eagle2", "speculative_num_draft_tokens": 70}, r"with policy eagle2, top-k 4 .* from 2 to 69"),
        ({"attention_backend": "trtllm_mha"}, r"--attention-backend is trtllm_mha, which takes no trees"),
        ({"decode_attention_backend": "flashmla"}, r"--decode-attention-backend is flashmla"),
        (
            {"speculative_draft_attention_backend": "fa4"},
            r"--speculative-draft-attention-backend is fa4, which takes no",
        ),
        ({"attention_backend": "intel_amx", "page_size": 16}, r"--page-size is 16; on intel_amx trees need pages of"),
    ],
)
def test_refused(changes: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        resolved(**changes)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton", "intel_amx", None])
def test_backends_with_a_mask(backend: str | None):
    assert resolved(attention_backend=backend)[1] == 21


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
def test_larger_pages(backend: str):
    assert resolved(attention_backend=backend, page_size=16)[1] == 21


# the server's record -> what is said of a request's own beta
ASKED = {
    "chains": ({"speculative_algorithm": "C2T"}, None),
    "trees that are cut": ({"speculative_algorithm": "C2T_EAGLE3", "_c2t": {"mode": "tree"}}, None),
    "trees that are not": (
        {"speculative_algorithm": "c2t_eagle3", "_c2t": {"mode": "tree", "policy": "eagle2"}},
        r"c2t\.beta has no meaning",
    ),
    "another algorithm": ({"speculative_algorithm": "EAGLE3"}, None),
    "none": ({"speculative_algorithm": None}, None),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_requests_beta_needs_a_threshold(name: str, monkeypatch: pytest.MonkeyPatch):
    server, says = ASKED[name]
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: types.SimpleNamespace(**server))
    at_the_front({"c2t": {"max_depth": 1}})
    with nullcontext() if says is None else pytest.raises(ConfigError, match=says):
        at_the_front({"c2t": {"beta": 0.3}})


@pytest.mark.parametrize("name", ASKED)
def test_a_bad_value_is_c2ts_to_refuse(name: str, monkeypatch: pytest.MonkeyPatch):
    server, _ = ASKED[name]
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: types.SimpleNamespace(**server))
    ours = str(server["speculative_algorithm"]).upper().startswith("C2T")
    with pytest.raises(ConfigError, match="c2t has no 'colour'") if ours else nullcontext():
        at_the_front({"c2t": {"colour": "red"}})
