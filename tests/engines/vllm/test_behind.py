"""What a draft has not read of plain steps, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from c2t_plugin.engines import plain_steps
from c2t_plugin.engines.vllm import behind as module
from c2t_plugin.engines.vllm.behind import Behind, Late, Plain, reads_later


def step(*tokens: int, at: int = 0) -> Plain:
    """Of requests with these newest tokens; hidden states and slots say which token they are of."""
    ids = torch.tensor(tokens)
    return Plain(ids, torch.full_like(ids, at), ids[:, None].float().repeat(1, 3), 1000 + ids)


def read(late: Late | None) -> list[list[int]]:
    """Tokens of each request."""
    assert late is not None
    assert torch.equal(late.missed.slots, 1000 + late.missed.tokens)
    assert torch.equal(late.missed.hidden[:, 2], late.missed.tokens.float())
    return [part.tolist() for part in late.missed.tokens.split(late.lengths)]


def test_each_request_has_missed_the_steps_that_it_was_in():
    behind = Behind(None, 3, 100)
    assert behind.keep(["a", "b"], [5, 9], step(1, 2)) == []
    assert behind.keep(["b", "a"], [10, 6], step(3, 4, at=1)) == []
    assert behind.keep(["a", "c", "b"], [7, 0, 11], step(5, 6, 7, at=2)) == []
    late = behind.late(["c", "new", "a", "b"], {"c": 1, "new": 0, "a": 8, "b": 12})
    assert late is not None and (late.rows, late.ends) == ([0, 2, 3], [1, 8, 12])
    assert read(late) == [[6], [1, 4, 5], [2, 3, 7]]
    assert late.missed.positions.tolist() == [2, 0, 1, 2, 0, 1, 2]
    assert behind.late(["a"], {"a": 8}) is None


def test_what_vllm_overwrites_is_copied():
    behind, one = Behind(None, 3, 100), step(1)
    behind.keep(["a"], [0], one)
    one.tokens.add_(1)
    assert behind.late(["a"], {"a": 1}).missed.tokens.tolist() == [1]  # type: ignore[union-attr]


def test_a_request_that_was_read_anew_has_missed_nothing():
    behind = Behind(None, 3, 100)
    behind.keep(["a", "b"], [5, 5], step(1, 2))
    # preempted, and read from its beginning on
    assert read(behind.late(["a", "b"], {"a": 0, "b": 6})) == [[2]]
    behind.keep(["a"], [5], step(3))
    behind.keep(["a"], [2], step(4))
    assert read(behind.late(["a"], {"a": 3})) == [[4]]


def test_of_requests_that_have_ended_nothing_is_left():
    behind = Behind(None, 3, 100)
    behind.keep(["a", "b"], [5, 5], step(1, 2))
    behind.forget({"b": None})
    assert behind._rows == 2
    behind.forget({})
    assert behind._rows == behind._steps == 0
    behind.keep(["b"], [6], step(3))
    assert read(behind.late(["b"], {"b": 7})) == [[3]]


def test_a_block_that_is_full_is_read():
    behind = Behind(4, 2, 100)
    assert behind.keep(["a", "b"], [1, 2], step(1, 2)) == []
    assert behind.keep(["a", "b"], [2, 3], step(3, 4)) == ["b"]
    assert read(behind.late(["a", "b"], {"b": 4})) == [[2, 4]]
    assert behind.keep(["a", "b"], [3, 4], step(5, 6)) == ["a"]
    assert read(behind.late(["a", "b"], {"a": 4})) == [[1, 3, 5]]
    assert read(behind.late(["b"], {"b": 5})) == [[6]]


@pytest.mark.parametrize(
    ("most_tokens", "steps", "most_bytes", "after"),
    [(100, 3, 2**20, 3), (6, 64, 2**20, 3), (7, 64, 2**20, 3), (8, 64, 2**20, 4), (100, 64, 100, 4)],
    ids=["steps", "one pass", "one pass and a half", "another pass", "bytes"],
)
def test_no_more_is_kept_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, most_tokens: int, steps: int, most_bytes: int, after: int
):
    monkeypatch.setattr(module, "MOST_STEPS", steps)
    monkeypatch.setattr(plain_steps, "MOST_BYTES", most_bytes)
    behind = Behind(None, 2, most_tokens)
    for number in range(after):
        now = behind.keep(["a", "b"], [number, number], step(1, 2))
        assert now == (["a", "b"] if number == after - 1 else [])


def test_a_batch_that_grows_finds_room():
    behind = Behind(None, 3, 8)
    assert behind.keep(["a"], [0], step(1)) == []
    assert behind.keep(["a", "b", "c"], [1, 0, 0], step(2, 3, 4)) == []
    # seven are kept, and three more would be ten
    assert behind.keep(["a", "b", "c"], [2, 1, 1], step(5, 6, 7)) == ["a", "b", "c"]


def test_what_waits_outside_of_the_batch_keeps_no_room():
    """Preempted, it is read anew; until then it would have every step read at once."""
    behind = Behind(None, 2, 4)
    assert behind.keep(["waits", "a"], [5, 0], step(1, 2)) == []
    for start in (1, 2):
        now = behind.keep(["a"], [start], step(3 + start))
    assert now == ["a"]
    assert read(behind.late(["a"], {"a": 3})) == [[2, 4, 5]]
    assert behind._rows == 0
    assert behind.keep(["a"], [3], step(6)) == []


class Metadata(SimpleNamespace):
    """As vLLM's, of which it takes no more than this."""


def test_the_pass_reads_them_where_their_keys_belong():
    behind = Behind(None, 3, 100)
    behind.keep(["a", "b", "c"], [5, 9, 2], step(1, 2, 3))
    behind.keep(["c", "a"], [3, 6], step(4, 5))
    late = behind.late(["a", "b", "c"], {"a": 7, "c": 4})
    assert late is not None
    tables = torch.arange(12).view(3, 4)
    found = late.attention(Metadata(query_start_loc=torch.zeros(4), block_table_tensor=tables))
    assert found.query_start_loc.tolist() == [0, 2, 4] and found.query_start_loc.dtype == torch.int32
    assert found.seq_lens.tolist() == [7, 4] == found.seq_lens_cpu_upper_bound.tolist()
    assert (found.num_reqs, found.num_actual_tokens, found.max_query_len, found.max_seq_len) == (2, 4, 2, 7)
    assert torch.equal(found.block_table_tensor, tables[[0, 2]])
    assert found.slot_mapping.tolist() == [1001, 1005, 1003, 1004]


@pytest.mark.parametrize(
    ("changed", "later"),
    [
        ({}, True),
        ({"method": "draft_model"}, False),
        ({"data_parallel_size": 2}, False),
        ({"use_v2_model_runner": True}, False),
        ({"enable_adaptive_verification": True}, False),
        ({"uses_mrope": True}, False),
        ({"is_multimodal_model": True}, False),
        ({"kv_transfer_config": object()}, False),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_which_engines_read_later(changed: dict[str, Any], later: bool):
    usual = {
        "parallel_config": {"data_parallel_size": 1},
        "speculative_config": {"method": "eagle3", "enable_adaptive_verification": False},
        "model_config": {"uses_mrope": False, "is_multimodal_model": False},
    }
    parts = {
        name: SimpleNamespace(**{key: changed.get(key, value) for key, value in part.items()})
        for name, part in usual.items()
    }
    own = {"use_v2_model_runner": False, "kv_transfer_config": None}
    assert (
        reads_later(SimpleNamespace(**parts, **{key: changed.get(key, value) for key, value in own.items()})) is later
    )
