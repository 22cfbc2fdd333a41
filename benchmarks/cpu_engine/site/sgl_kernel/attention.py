"""Decode and extend attention over SGLang's paged KV pool: torch.ops.sgl_kernel.{decode,extend}_attention_cpu.

Shapes: B requests, H query heads, G key/value heads (H divisible by G), D and E the key and value head widths. The
pool's buffers are [slots, G, D] and [slots, G, E]; `req_to_token[r, p]` is the slot of position p in row r.
"""

from __future__ import annotations

import torch

from ._guard import INDEX, INT64, check, check_size, refuse
from .passes import Part, Shared, attend, parts_of, read, slots_of

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

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots_of(req_to_token, req_pool_indices, seq_lens)
        return slots, (torch.arange(slots.shape[1]) < seq_lens[:, None])[:, None]

    slots, mask = _decode_shared.get(k_buffer, req_to_token, (seq_lens, req_pool_indices), made)
    out = attend(query[:, None], read(k_buffer, slots, "k"), read(v_buffer, slots, "v"), mask, sm_scale)
    output.copy_(out[:, 0])


_extend_shared, _decode_shared = Shared(), Shared()


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
    All positions are read from the pool: the caller has written `k_extend` and `v_extend` there. `tree_mask` (flat,
    [q * q] of each request one after another) replaces the causal mask among them; the real op takes one q for all
    requests.
    Rows of no request, which may only come after all others, become 0.
    """
    _refuse_extras("extend_attention_cpu", logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    if k_extend is None or v_extend is None:
        raise RuntimeError("extend_attention_cpu: the CPU stub needs k_extend and v_extend")
    _check_pool(k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens)
    check("q_extend", q_extend, (k_buffer.dtype,), 3)
    lengths = _check_extend(q_extend, o_extend, extend_seq_lens, extend_start_loc, max_len_extend, tree_mask)

    def made() -> list[Part]:
        slots = slots_of(req_to_token, req_pool_indices, seq_lens)
        return parts_of(lengths, extend_start_loc.tolist(), seq_lens, slots, tree_mask, is_causal)

    asked = seq_lens, extend_seq_lens, extend_start_loc, req_pool_indices
    parts = _extend_shared.get(
        k_buffer, req_to_token, asked if tree_mask is None else (*asked, tree_mask), made, is_causal
    )
    for part in parts:
        part.attend(q_extend, (k_buffer, v_buffer), o_extend, sm_scale)
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


_library.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
_library.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
