"""What tree mode writes into SGLang's arguments, and what it refuses before a server starts."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from c2t_plugin.engines.sglang.trees import shape  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402


def record(**changes: Any) -> types.SimpleNamespace:
    """The fields that decide a tree's shape, as they are once the draft steps are known."""
    fields = {"speculative_num_steps": 5, "speculative_eagle_topk": None, "speculative_num_draft_tokens": None}
    return types.SimpleNamespace(**{**fields, **changes})


def resolved(**changes: Any) -> tuple[int, int]:
    server_args = record(**changes)
    shape.resolve(server_args)
    return server_args.speculative_eagle_topk, server_args.speculative_num_draft_tokens


def test_a_tree_has_room_for_all_that_is_drafted_from():
    assert resolved() == (shape.DEFAULT_TOPK, shape.DEFAULT_TOPK * 5 + 1)
    assert resolved(speculative_eagle_topk=8, speculative_num_steps=2) == (8, 17)


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
        ({"attention_backend": "trtllm_mha"}, r"--attention-backend is trtllm_mha, which verifies no trees"),
        ({"decode_attention_backend": "flashmla"}, r"--decode-attention-backend is flashmla"),
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
