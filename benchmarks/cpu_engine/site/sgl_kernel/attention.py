"""Decode and extend attention over SGLang's paged KV pool: torch.ops.sgl_kernel.{decode,extend}_attention_cpu.

Shapes: B requests, H query heads, G key/value heads (H divisible by G), D and E the key and value head widths. The
pool's buffers are [slots, G, D] and [slots, G, E]; `req_to_token[r, p]` is the slot of position p in row r.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ._guard import INDEX, INT64, check, check_size, refuse

_SCALARS = "float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size"

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    f"Tensor req_pool_indices, Tensor seq_lens, {_SCALARS}, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_library.define(
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer, "
    "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    f"Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, {_SCALARS}, Tensor? encoder_lens, "
    "Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Softmax attention of query [B, q, H, D] over key [B, L, G, D], value [B, L, G, E] under mask [B, q, L]."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask[:, None],
        scale=sm_scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def _slots(req_to_token: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Slots [B, width] of the first `width` positions; those past a request's length are stale and must be masked."""
    return req_to_token[:, :width].index_select(0, rows)


def _read(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return buffer.index_select(0, slots.reshape(-1)).view(*slots.shape, *buffer.shape[1:])


def _refuse_extras(
    op: str,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    refuse(
        op,
        logit_cap=logit_cap != 0.0,
        cross_attention=is_cross_attn,
        sliding_window=sliding_window_size > 0,
        encoder_lens=encoder_lens is not None,
        sinks=sinks is not None,
    )


def _check_pool(
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    if k_scale != 1.0 or v_scale != 1.0:
        raise RuntimeError(f"attention: got KV scales {k_scale} and {v_scale}, the CPU stub has only 1.0")
    floats = (torch.float32, torch.bfloat16, torch.float16)
    check("k_buffer", k_buffer, floats, 3)
    check("v_buffer", v_buffer, (k_buffer.dtype,), 3)
    check("req_to_token", req_to_token, INDEX, 2)
    check("req_pool_indices", req_pool_indices, INT64, 1)
    check("seq_lens", seq_lens, INT64, 1)
    check_size("req_pool_indices", req_pool_indices, seq_lens.numel())


def decode_attention_cpu(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One query per request over its `seq_lens` positions, the newest included.

    Writes `key` and `value` [B, G, D|E] into the pool at `loc` [B] first, unless they are None, then fills `output`
    [B, H, E] from `query` [B, H, D]. `attn_logits` is scratch of the real op and is not touched.
    """
    _refuse_extras("decode_attention_cpu", logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    _check_pool(k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens)
    check("query", query, (k_buffer.dtype,), 3)
    check("output", output, (query.dtype,), 3)
    check_size("seq_lens", seq_lens, query.shape[0])
    if key is not None and value is not None:
        check("loc", loc, INT64, 1)
        k_buffer.index_copy_(0, loc, key.reshape(-1, *k_buffer.shape[1:]))
        v_buffer.index_copy_(0, loc, value.reshape(-1, *v_buffer.shape[1:]))
    width = int(seq_lens.max())
    slots = _slots(req_to_token, req_pool_indices, width)
    mask = torch.arange(width) < seq_lens[:, None]
    out = _attend(query[:, None], _read(k_buffer, slots), _read(v_buffer, slots), mask[:, None], sm_scale)
    output.copy_(out[:, 0])


def _extend_mask(length: int, tree_mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """Which of the `length` new positions each of them sees: [B or 1, length, length]."""
    if tree_mask is not None:
        return tree_mask.view(-1, length, length).to(torch.bool)
    if not is_causal:
        return torch.ones(1, length, length, dtype=torch.bool)
    # not by `tril`, which wakes all threads for it in each layer
    place = torch.arange(length)
    return (place <= place[:, None])[None]


def _extend_uniform(
    query: torch.Tensor,
    new_kv: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Attention of query [B, q, H, D] over each request's prefix in the pool and the q new positions behind it.

    slots: [B, L] of the first L positions, the new ones of the longest request included. Keys lie as `decode` has them,
    by position, so that they are read in one piece and summed in one order.
    """
    batch, length = query.shape[:2]
    width = slots.shape[1]
    new_at = prefix_lens[:, None] + torch.arange(length)
    seen = (torch.arange(width) < prefix_lens[:, None])[:, None].expand(batch, length, width).clone()
    seen.scatter_(2, new_at[:, None].expand(batch, length, length), mask.expand(batch, length, length))
    flat = (torch.arange(batch)[:, None] * width + new_at).view(-1)
    key, value = (_read(buffer, slots) for buffer in buffers)
    for read, new in zip((key, value), new_kv, strict=True):
        read.view(-1, *new.shape[2:]).index_copy_(0, flat, new.reshape(-1, *new.shape[2:]))
    return _attend(query, key, value, seen, sm_scale)


def extend_attention_cpu(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """`extend_seq_lens[b]` new queries per request, over `seq_lens[b]` positions: the prefix and the new ones.

    Request b's rows in `q_extend`, `o_extend` [T, H, D|E] and `k_extend`, `v_extend` start at `extend_start_loc[b]`.
    The prefix is read from the pool, the new positions from `k_extend` and `v_extend`; the caller has written those
    to the pool. `tree_mask` (flat, [q * q] of each request one after another) replaces the causal mask among them; the
    real op takes one q for all requests.
    Rows of no request, which may only come after all others, become 0.
    """
    _refuse_extras("extend_attention_cpu", logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    if k_extend is None or v_extend is None:
        raise RuntimeError("extend_attention_cpu: the CPU stub needs k_extend and v_extend")
    _check_pool(k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens)
    check("q_extend", q_extend, (k_buffer.dtype,), 3)
    lengths = _check_extend(q_extend, o_extend, extend_seq_lens, extend_start_loc, max_len_extend, tree_mask)
    key = k_extend.reshape(-1, *k_buffer.shape[1:])
    value = v_extend.reshape(-1, *v_buffer.shape[1:])
    prefix_lens = seq_lens - extend_seq_lens
    trees = None if tree_mask is None else tree_mask.split([length**2 for length in lengths])
    starts = extend_start_loc.tolist()
    for length, requests in _by_length(lengths).items():
        some, rows = _places(requests, starts, length)
        tree = None if trees is None else torch.cat([trees[request] for request in requests])
        query, new_key, new_value = (each[rows].unflatten(0, (-1, length)) for each in (q_extend, key, value))
        out = _extend_uniform(
            query,
            (new_key, new_value),
            (k_buffer, v_buffer),
            _slots(req_to_token, req_pool_indices[some], int(seq_lens[some].max())),
            prefix_lens[some],
            _extend_mask(length, tree, is_causal),
            sm_scale,
        )
        o_extend[rows] = out.reshape(-1, *o_extend.shape[1:])
    # Left as they are they could be NaN, and their keys in slot 0 would make every masked read of it NaN.
    o_extend[sum(lengths) :] = 0.0


def _check_extend(
    q_extend: torch.Tensor,
    o_extend: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    tree_mask: torch.Tensor | None,
) -> list[int]:
    """The extend lengths as a list, after the checks."""
    check("o_extend", o_extend, (q_extend.dtype,), 3)
    check("extend_seq_lens", extend_seq_lens, INDEX, 1)
    check("extend_start_loc", extend_start_loc, INDEX, 1)
    lengths: list[int] = extend_seq_lens.tolist()
    if max(lengths) > max_len_extend:
        raise RuntimeError(f"extend_attention_cpu: got lengths {lengths}, longer than max_len_extend {max_len_extend}")
    if tree_mask is not None:
        check("tree_mask", tree_mask, (torch.bool, torch.uint8), 1)
        check_size("tree_mask", tree_mask, sum(length**2 for length in lengths))
    return lengths


def _by_length(lengths: list[int]) -> dict[int, list[int]]:
    """Which requests have each length, those of 0 left out: a call for each of them would cost more than its rows."""
    found: dict[int, list[int]] = {}
    for request, length in enumerate(lengths):
        if length:
            found.setdefault(length, []).append(request)
    return found


def _places(
    requests: list[int], starts: list[int], length: int
) -> tuple[slice, slice] | tuple[torch.Tensor, torch.Tensor]:
    """Where these requests of one length are among all, and their rows: in one piece if they lie back to back."""
    first, count = requests[0], len(requests)
    begin = starts[first]
    wanted = [(first + place, begin + place * length) for place in range(count)]
    if [(request, starts[request]) for request in requests] == wanted:
        return slice(first, first + count), slice(begin, begin + count * length)
    rows = torch.tensor([starts[request] + place for request in requests for place in range(length)])
    return torch.tensor(requests), rows


_library.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
_library.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
