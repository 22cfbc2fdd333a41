"""A layer of the target as SGLang's attention backends read it, for the programs beside this."""

from __future__ import annotations

from types import SimpleNamespace


def attention_layer(
    heads: int, kv_heads: int, dim: int, *, v_dim: int | None = None, scale: float | None = None
) -> SimpleNamespace:
    """heads: of queries. dim: of queries and keys. v_dim: of values, None: the same. scale: of scores, None: usual."""
    return SimpleNamespace(
        layer_id=0,
        head_dim=dim,
        qk_head_dim=dim,
        v_head_dim=dim if v_dim is None else v_dim,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        scaling=dim**-0.5 if scale is None else scale,
        logit_cap=0.0,
        logit_capping_method="tanh",
        k_scale=None,
        v_scale=None,
        k_scale_float=None,
        v_scale_float=None,
        is_cross_attention=False,
        attn_type=None,
        sliding_window_size=-1,
        xai_temperature_len=-1,
    )
