"""Verification of draft trees against the target's greedy choice, and the bookkeeping that follows it."""

from __future__ import annotations

import torch

from ._guard import INDEX, INT32, INT64, check, check_size


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root along the children that equal the target's choice.

    `candidates`, `target_predict` and the links `retrive_*` (spelt as in SGLang's call) are int64 [B, n]. Written, all
    int32: `predicts` [B * n], the target's token at every accepted node, the bonus token at the last; `accept_index`
    [B, max depth], the accepted nodes' numbers over the batch, the root first; `accept_token_num` [B], the accepted
    drafts without root and bonus.
    """
    check("predicts", predicts, INT32, 1)
    check("accept_index", accept_index, INT32, 2)
    check("accept_token_num", accept_token_num, INT32, 1)
    named = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
    for name, tensor in zip(names, named, strict=True):
        check(name, tensor, INT64, 2)
        check_size(name, tensor, predicts.numel())
    rows = range(candidates.shape[0])
    lists = [tensor.tolist() for tensor in (candidates, retrive_next_token, retrive_next_sibling, target_predict)]
    paths = [_greedy_path(*(rows_of[row] for rows_of in lists), max_nodes=accept_index.shape[1]) for row in rows]
    accept_token_num.copy_(torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32))
    for row, path in enumerate(paths):
        numbers = retrive_index[row, path]
        accept_index[row, : len(path)] = numbers.to(torch.int32)
        predicts[numbers] = target_predict[row, path].to(torch.int32)


def _greedy_path(
    candidates: list[int],
    next_token: list[int],
    next_sibling: list[int],
    target_predict: list[int],
    *,
    max_nodes: int,
) -> list[int]:
    path = [0]
    while len(path) < max_nodes:
        wanted, child = target_predict[path[-1]], next_token[path[-1]]
        while child != -1 and candidates[child] != wanted:
            child = next_sibling[child]
        if child == -1:
            break
        path.append(child)
    return path


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """`bonus_tokens[b]` = the last of the `accept_lens[b]` tokens in row b of `accept_tokens` [B, accept_stride]."""
    check("accept_tokens", accept_tokens, INT32)
    check("accept_lens", accept_lens, INT32, 1)
    check("bonus_tokens", bonus_tokens, INT32, 1)
    check_size("accept_tokens", accept_tokens, accept_lens.numel() * accept_stride)
    last = (accept_lens - 1).to(torch.int64)[:, None]
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride).gather(1, last)[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted nodes (`accept_index` other than -1) to the front of `accept_out_cache_loc`."""
    check("accept_index", accept_index, INT32)
    check("out_cache_loc", out_cache_loc, INT64, 1)
    check("accept_out_cache_loc", accept_out_cache_loc, INT64, 1)
    check_size("accept_out_cache_loc", accept_out_cache_loc, accept_index.numel())
    accepted = accept_index.view(-1)
    accepted = accepted[accepted > -1]
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """Shift each request's ids left by one in place and put `topk_index[b]` last, or at `select_index[b]` if given."""
    check("input_ids", input_ids, INDEX, 1)
    check_size("topk_index", topk_index, extend_seq_lens.numel())
    tokens = topk_index.reshape(-1).tolist()
    last = None if select_index is None else select_index.tolist()
    spans = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for request, (start, length) in enumerate(spans):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        input_ids[start + length - 1 if last is None else last[request]] = tokens[request]
