"""Float32 twins of attention kernels that need a GPU: FlashAttention 3 and TensorRT-LLM's, of keys per head and latent.

Each computes what its arguments say and nothing else: rows that no request owns stay NaN, and so do those beyond the
most that a request is said to have. A key behind the mask weighs 0, which does not hide a NaN in its value. Row i of m
sees keys up to i + n - m of n. Where there is none, the output is 0.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, last: int, window: int, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q: (heads, dim). keys, values: (n, heads, ...). Sees keys last - window to last, from the first if window < 0.
    sinks: (heads,), logits that weigh and have no value. The output, and the logarithm of the sum by which its weights
    were divided."""
    scores = torch.einsum("hd,khd->hk", q.float(), keys.float()) * scale
    places = torch.arange(len(keys))
    seen = places <= last
    if window >= 0:
        seen &= places >= last - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None]], 1)
    weights = torch.softmax(scores, -1)[:, : len(keys)]
    return torch.einsum("hk,khd->hd", weights, values.float()), torch.logsumexp(scores, -1)


def _descaled(keys: Tensor, scales: Tensor | None, request: int) -> Tensor:
    """keys: (n, kv_heads, dim). scales: (requests, kv_heads), of a cache of few bits."""
    return keys if scales is None else keys * scales[request].float()[:, None]


def merge_state_v2(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two passes over parts of the keys as one. o: (rows, heads, dim), lse: (rows, heads)."""
    merged = torch.logaddexp(lse, other_lse)
    mine, theirs = ((each - merged).exp()[..., None] for each in (lse, other_lse))
    return mine * o + theirs * other, merged


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    qv: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    sinks: Tensor | None = None,
    ver: int = 3,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
) -> Any:
    """q: (rows, heads, dim), qv: (rows, heads, latent). k_cache, v_cache: (pages, page, kv_heads, ...) of q's dtype,
    whatever that is. Scales have a row for each of its requests, as the kernel asks for."""
    assert ver == 3 and not softcap and q.dtype == k_cache.dtype
    assert k_descale is None or k_descale.shape == (len(cache_seqlens), k_cache.shape[2])
    rows, heads, _ = q.shape
    page, kv_heads = k_cache.shape[1:3]
    found = torch.full((rows, heads, v_cache.shape[-1]), torch.nan)
    sums = torch.full((heads, rows), torch.nan)
    starts = cu_seqlens_q.tolist()
    for request, length in enumerate(cache_seqlens.tolist()):
        places = torch.arange(length)
        slots = page_table[request, places // page].long() * page + places % page
        k, v = (
            _descaled(cache.float().reshape(-1, kv_heads, cache.shape[-1])[slots], scales, request).repeat_interleave(
                heads // kv_heads, 1
            )
            for cache, scales in ((k_cache, k_descale), (v_cache, v_descale))
        )
        count = starts[request + 1] - starts[request]
        for i in range(min(count, max_seqlen_q)):
            row = starts[request] + i
            # latent keys: what is looked at is also what is read
            asked = q[row] if qv is None else torch.cat([q[row], qv[row]], -1)
            keys = k if qv is None else torch.cat([k, v], -1)
            last = i + length - count if causal else length - 1
            found[row], sums[:, row] = _attend(asked, keys, v, last, window_size[0], softmax_scale, sinks)
    return (found, sums) if return_softmax_lse else found


def stand_in() -> None:
    """Have SGLang find that where it looks for FlashAttention's kernels, which the CPU engine does not have."""
    import sgl_kernel

    found = ModuleType("sgl_kernel.flash_attn")
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata"):
        setattr(found, name, flash_attn_with_kvcache)
    sys.modules[found.__name__] = found
    sgl_kernel.merge_state_v2 = merge_state_v2


def trtllm_decode(
    *,
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    max_q_len: int,
    cum_seq_lens_q: Tensor,
    **_: Any,
) -> Tensor:
    """trtllm_batch_decode_with_kv_cache. query: (rows, heads, dim). kv_cache: (pages, kv_heads, page, dim) each."""
    assert query.dtype == kv_cache[0].dtype
    heads, starts = query.shape[1], cum_seq_lens_q.tolist()
    kv_heads, page = kv_cache[0].shape[1:3]
    found = torch.full(query.shape, torch.nan)
    for request, length in enumerate(seq_lens.tolist()):
        places = torch.arange(length)
        blocks = block_tables[request, places // page].long()
        k, v = (each.float()[blocks, :, places % page].repeat_interleave(heads // kv_heads, 1) for each in kv_cache)
        count = starts[request + 1] - starts[request]
        for i in range(min(count, max_q_len)):
            row = starts[request] + i
            attended, _ = _attend(query[row], k, v, i + length - count, window_left, bmm1_scale, sinks)
            found[row] = attended * bmm2_scale
    return found.to(out_dtype)


def trtllm_decode_latent(
    *,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    bmm1_scale: float,
    kv_lora_rank: int,
    **_: Any,
) -> Tensor:
    """trtllm_batch_decode_with_kv_cache_mla. query: (requests, width, heads, rank + rope). kv_cache: (pages, 1, page,
    rank + rope), of the same dtype."""
    assert query.dtype == kv_cache.dtype
    kv_cache = kv_cache.float()
    requests, width, heads, _ = query.shape
    page = kv_cache.shape[2]
    found = torch.full((requests, width, heads, kv_lora_rank), torch.nan)
    for request, length in enumerate(seq_lens.tolist()):
        places = torch.arange(length)
        keys = kv_cache[block_tables[request, places // page].long(), 0, places % page][:, None].expand(-1, heads, -1)
        for i in range(width):
            values = keys[..., :kv_lora_rank]
            found[request, i], _ = _attend(query[request, i], keys, values, i + length - width, -1, bmm1_scale)
    return found


class LatentWrapper:
    """FlashInfer's BatchMLAPagedAttentionWrapper for pages of one token. Where rows and keys begin it knows from its
    own last plan, as FlashInfer keeps that in a workspace of each wrapper, and slots from a buffer that wrappers share.
    """

    def __init__(self, _workspace: Tensor, *, backend: str, use_cuda_graph: bool = False, **buffers: Tensor) -> None:
        self.buffers = buffers if use_cuda_graph else {}

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """The lengths of the buffers are checked as FlashInfer's copies into them do."""
        assert page_size == 1 and causal and torch.equal(kv_indptr.diff(), kv_len_arr)
        for name, given in {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": kv_len_arr}.items():
            if name in self.buffers:
                self.buffers[name].copy_(given)
        self.indices = kv_indices
        if "kv_indices" in self.buffers:
            self.indices = self.buffers["kv_indices"]
            self.indices[: len(kv_indices)].copy_(kv_indices)
        self.starts, self.begun, self.scale = qo_indptr.tolist(), kv_indptr.tolist(), sm_scale

    def run(self, q: Tensor, q_rope: Tensor, ckv: Tensor, kpe: Tensor, *, out: Tensor) -> Tensor:
        """q: (rows, heads, rank), q_rope: (rows, heads, rope). ckv: (slots, 1, rank), kpe: (slots, 1, rope)."""
        out.fill_(torch.nan)
        for request, (first, end) in enumerate(zip(self.begun, self.begun[1:], strict=False)):
            slots = self.indices[first:end].long()
            values = ckv[slots].expand(-1, q.shape[1], -1)
            keys = torch.cat([values, kpe[slots].expand(-1, q.shape[1], -1)], -1)
            start, stop = self.starts[request : request + 2]
            for row in range(start, stop):
                last = row - start + end - first - (stop - start)
                asked = torch.cat([q[row], q_rope[row]], -1)
                out[row], _ = _attend(asked, keys, values, last, -1, self.scale)
        return out


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float,
    causal: bool,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, None]:
    """q: (requests, width, heads, rank + rope). k_cache: (pages, page, 1, rank + rope). Its schedule, made for other
    lengths, would leave keys out: it is those lengths here. Scales: of 8 bits, one each."""
    scales = [1.0 if each is None else float(each) for each in (descale_q, descale_k)]
    assert causal and torch.equal(tile_scheduler_metadata[: len(q), 0], cache_seqlens) and len(num_splits) == len(q) + 1
    found = trtllm_decode_latent(
        query=q,
        kv_cache=k_cache.transpose(1, 2),
        block_tables=block_table,
        seq_lens=cache_seqlens,
        bmm1_scale=softmax_scale * scales[0] * scales[1],
        kv_lora_rank=head_dim_v,
    )
    return found * scales[1], None
