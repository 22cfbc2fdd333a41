"""The stub's attention ops against attention written out per query and head in float64."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

SLOTS, WIDTH, K_DIM, V_DIM, SCALE = 96, 24, 8, 8, 0.3
# float32 sums of at most 24 terms of order 1, against float64
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@dataclass
class Pool:
    """A KV pool of random content and a table of distinct, shuffled slots."""

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor


def make_pool(kv_heads: int, requests: int, seed: int = 0) -> Pool:
    torch.manual_seed(seed)
    table = torch.randperm(SLOTS)[: 4 * WIDTH].view(4, WIDTH).to(torch.int32)
    return Pool(
        torch.randn(SLOTS, kv_heads, K_DIM),
        torch.randn(SLOTS, kv_heads, V_DIM),
        table,
        torch.tensor([2, 0, 3, 1])[:requests],
    )


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: list[int]) -> torch.Tensor:
    """Attention of one query [H, D] over the positions `seen` of keys [L, G, D] and values [L, G, E]."""
    heads, groups = query.shape[0], keys.shape[1]
    out = torch.zeros(heads, values.shape[2], dtype=torch.float64)
    for head in range(heads):
        group = head * groups // heads
        scores = [SCALE * float(query[head].double() @ keys[p, group].double()) for p in seen]
        weights = [math.exp(score - max(scores)) for score in scores]
        for weight, p in zip(weights, seen, strict=True):
            out[head] += weight / sum(weights) * values[p, group].double()
    return out.float()


def decode(query: torch.Tensor, output: torch.Tensor, pool: Pool, lens: torch.Tensor, /, **changes: object) -> None:
    arguments = {
        "query": query,
        "k_buffer": pool.key,
        "v_buffer": pool.value,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "output": output,
        "key": None,
        "value": None,
        "loc": torch.zeros(len(lens), dtype=torch.int64),
        "attn_logits": torch.zeros(1),
        "req_to_token": pool.table,
        "req_pool_indices": pool.rows,
        "seq_lens": lens,
        "sm_scale": SCALE,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "sliding_window_size": 0,
        "encoder_lens": None,
        "sinks": None,
    }
    torch.ops.sgl_kernel.decode_attention_cpu(*{**arguments, **changes}.values())


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 1)])
def test_decode(sgl_kernel: ModuleType, heads: int, kv_heads: int) -> None:
    pool, lens = make_pool(kv_heads, 3), torch.tensor([5, 24, 1])
    query = torch.randn(3, heads, K_DIM)
    output = torch.full((3, heads, V_DIM), torch.nan)
    new_key, new_value = torch.randn(3, kv_heads, K_DIM), torch.randn(3, kv_heads, V_DIM)
    newest = pool.table[pool.rows, lens - 1].long()
    before = pool.key.clone()
    decode(query, output, pool, lens, key=new_key, value=new_value, loc=newest)
    assert torch.equal(pool.key[newest], new_key)
    assert torch.equal(pool.value[newest], new_value)
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, newest, False)
    assert torch.equal(pool.key[others], before[others])
    for request, length in enumerate(lens.tolist()):
        slots = pool.table[pool.rows[request], :length].long()
        expected = dense(query[request], pool.key[slots], pool.value[slots], list(range(length)))
        torch.testing.assert_close(output[request], expected, **TOLERANCE)


def test_decode_ignores_stale_slots(sgl_kernel: ModuleType) -> None:
    pool, lens = make_pool(2, 3), torch.tensor([5, 12, 1])
    query, clean = torch.randn(3, 4, K_DIM), torch.empty(3, 4, V_DIM)
    decode(query, clean, pool, lens)
    pool.key[pool.table[2, 5:].long()] = 1e4
    again = torch.empty_like(clean)
    decode(query, again, pool, lens)
    assert torch.equal(clean, again)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"sliding_window_size": 9}, "sliding_window"),
        ({"is_cross_attn": True}, "cross_attention"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"k_scale": 0.5}, "KV scales 0.5"),
        ({"seq_lens": torch.tensor([5, 12, 1], dtype=torch.int32)}, "seq_lens: got dtype torch.int32"),
        ({"query": torch.zeros(4, 3, K_DIM).transpose(0, 1)}, "query: got strides"),
        ({"query": torch.zeros(3, 4, K_DIM, dtype=torch.float64)}, "query: got dtype torch.float64"),
        ({"req_pool_indices": torch.tensor([1, 2])}, "req_pool_indices: got 2 elements"),
    ],
)
def test_decode_refuses(sgl_kernel: ModuleType, changes: dict[str, object], message: str) -> None:
    pool = make_pool(2, 3)
    with pytest.raises(RuntimeError, match=message):
        decode(torch.zeros(3, 4, K_DIM), torch.zeros(3, 4, V_DIM), pool, torch.tensor([5, 12, 1]), **changes)


@dataclass
class Extend:
    """One extend batch; the new keys and values are in the pool already, as SGLang's caller leaves them."""

    pool: Pool
    prefix: list[int]
    new: list[int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def run(self, tree_mask: torch.Tensor | None = None, is_causal: bool = True) -> torch.Tensor:
        output = torch.full((*self.query.shape[:2], V_DIM), torch.nan)
        new, prefix = torch.tensor(self.new), torch.tensor(self.prefix)
        torch.ops.sgl_kernel.extend_attention_cpu(
            *(self.query, self.key, self.value, output, self.pool.key, self.pool.value, 1.0, 1.0),
            *(self.pool.table, self.pool.rows, prefix + new, new.int(), (new.cumsum(0) - new).int()),
            *(max(self.new), SCALE, 0.0, False, 0, None, None, tree_mask, is_causal),
        )
        return output

    def expected(self, seen: list[list[list[int]]]) -> torch.Tensor:
        """Dense result, where `seen[b][i]` are the new positions that query i of request b sees."""
        rows, start = [], 0
        for request, (prefix, new) in enumerate(zip(self.prefix, self.new, strict=True)):
            slots = self.pool.table[self.pool.rows[request], :prefix].long()
            keys = torch.cat([self.pool.key[slots], self.key[start : start + new]])
            values = torch.cat([self.pool.value[slots], self.value[start : start + new]])
            for i in range(new):
                positions = [*range(prefix), *(prefix + j for j in seen[request][i])]
                rows.append(dense(self.query[start + i], keys, values, positions))
            start += new
        return torch.stack(rows)


def make_extend(prefix: list[int], new: list[int], heads: int = 4, kv_heads: int = 2) -> Extend:
    pool = make_pool(kv_heads, len(new), seed=1)
    total = sum(new)
    query, key, value = torch.randn(total, heads, K_DIM), *torch.randn(2, total, kv_heads, K_DIM)
    places = [
        int(pool.table[row, first + place])
        for row, first, length in zip(pool.rows.tolist(), prefix, new, strict=True)
        for place in range(length)
    ]
    pool.key[places], pool.value[places] = key, value
    return Extend(pool, prefix, new, query, key, value)


@pytest.mark.parametrize(
    ("prefix", "new"),
    [
        pytest.param([0, 0, 0], [5, 3, 1], id="prefill"),
        pytest.param([7, 0, 3], [2, 5, 2], id="mixed"),
        pytest.param([4, 9, 0], [3, 3, 3], id="uniform"),
        pytest.param([4, 9, 2], [3, 3, 1], id="a-uniform-run"),
        pytest.param([4, 9, 2, 6], [2, 1, 2, 1], id="lengths-apart"),
        pytest.param([4, 9, 2, 6], [2, 0, 2, 1], id="one-of-none-between"),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_extend(sgl_kernel: ModuleType, prefix: list[int], new: list[int], kv_heads: int) -> None:
    batch = make_extend(prefix, new, kv_heads=kv_heads)
    causal = [[list(range(i + 1)) for i in range(n)] for n in new]
    torch.testing.assert_close(batch.run(), batch.expected(causal), **TOLERANCE)


@pytest.mark.parametrize(
    ("most_filled", "calls"), [(2, [(4, 2)]), (1, [(2, 2), (2, 1)])], ids=["filled-up", "one-length-each"]
)
def test_requests_share_calls(
    sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, most_filled: int, calls: list[tuple[int, int]]
) -> None:
    """All of them, where that computes few queries that are nobody's; else those of one length."""
    passes = sys.modules["sgl_kernel.passes"]
    attend, shapes = passes.attend, list[tuple[int, ...]]()

    def seen(query: torch.Tensor, *arguments: object) -> torch.Tensor:
        shapes.append(tuple(query.shape[:2]))
        return attend(query, *arguments)

    monkeypatch.setattr(passes, "attend", seen)
    monkeypatch.setattr(passes, "MOST_FILLED", most_filled)
    # which may hold the other case's
    monkeypatch.setattr(sys.modules["sgl_kernel.attention"], "_extend_shared", passes.Shared())
    batch = make_extend([4, 9, 2, 6], [2, 1, 2, 1])
    causal = [[list(range(i + 1)) for i in range(n)] for n in batch.new]
    torch.testing.assert_close(batch.run(), batch.expected(causal), **TOLERANCE)
    assert shapes == calls


def test_layers_of_a_pass_share_what_is_theirs(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once for all layers, and anew for a pass whose slots are others while all lengths are the same."""
    attention = sys.modules["sgl_kernel.attention"]
    made, parts = list[int](), attention.parts_of

    def counted(*arguments: object) -> object:
        made.append(1)
        return parts(*arguments)

    monkeypatch.setattr(attention, "parts_of", counted)
    layers = [make_extend([4, 9, 2], [2, 1, 3]) for _ in range(3)]
    causal = [[list(range(i + 1)) for i in range(n)] for n in layers[0].new]
    for layer in layers[1:]:
        layer.pool.table = layers[0].pool.table
        layer.pool.key.add_(1.0)
        layer.key.add_(1.0)
    for passes in (1, 2):
        for layer in layers:
            torch.testing.assert_close(layer.run(), layer.expected(causal), **TOLERANCE)
        assert len(made) == passes
        # the next pass has its prefixes elsewhere, in the same table
        layers[0].pool.table[:, :2] = layers[0].pool.table[:, :2].flip(1).clone()
        layers[0].pool.table[pool_row(layers[0]), 0] = 7


def pool_row(batch: Extend) -> int:
    return int(batch.pool.rows[1])


def test_decoding_takes_the_slots_of_its_own_pass(sgl_kernel: ModuleType) -> None:
    pool, lens = make_pool(2, 3), torch.tensor([5, 12, 4])
    query = torch.randn(3, 4, K_DIM)
    for _ in range(2):
        output = torch.full((3, 4, V_DIM), torch.nan)
        decode(query, output, pool, lens)
        for request, length in enumerate(lens.tolist()):
            slots = pool.table[pool.rows[request], :length].long()
            expected = dense(query[request], pool.key[slots], pool.value[slots], list(range(length)))
            torch.testing.assert_close(output[request], expected, **TOLERANCE)
        pool.table[:, 0] = 3


def test_extend_without_causal_mask(sgl_kernel: ModuleType) -> None:
    batch = make_extend([4, 0], [3, 2])
    everything = [[list(range(n))] * n for n in batch.new]
    torch.testing.assert_close(batch.run(is_causal=False), batch.expected(everything), **TOLERANCE)


def test_extend_with_tree_mask(sgl_kernel: ModuleType) -> None:
    """Root 0 with children 1 and 2, node 3 under 1; the second request has a chain."""
    batch = make_extend([6, 2], [4, 4])
    seen = [[[0], [0, 1], [0, 2], [0, 1, 3]], [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]]
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    for request, queries in enumerate(seen):
        for i, nodes in enumerate(queries):
            mask[request, i, nodes] = True
    torch.testing.assert_close(batch.run(mask.view(-1)), batch.expected(seen), **TOLERANCE)


@pytest.mark.parametrize("turned", [False, True])
def test_extend_with_trees_of_different_sizes(sgl_kernel: ModuleType, turned: bool) -> None:
    """A root alone, two trees of one size that differ, and a larger one."""
    seen = [
        [[0]],
        [[0], [0, 1], [0, 2]],
        [[0], [0, 1], [0, 1, 2]],
        [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]],
    ]
    prefix = [6, 2, 0, 9]
    if turned:
        seen, prefix = seen[::-1], prefix[::-1]
    batch = make_extend(prefix, [len(queries) for queries in seen])
    rows = [[j in nodes for j in range(len(queries))] for queries in seen for nodes in queries]
    mask = torch.tensor([bit for row in rows for bit in row])
    found = batch.run(mask)
    torch.testing.assert_close(found, batch.expected(seen), **TOLERANCE)
    for bit in (mask.nonzero().flatten()[-2], mask.logical_not().nonzero().flatten()[0]):
        wrong = mask.clone()
        wrong[bit] = ~wrong[bit]
        assert (batch.run(wrong) - found).abs().max() > 1e-3


def test_extend_refuses_a_mask_of_wrong_size(sgl_kernel: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="tree_mask: got 9 elements, expected 32"):
        make_extend([6, 2], [4, 4]).run(torch.ones(9, dtype=torch.bool))
