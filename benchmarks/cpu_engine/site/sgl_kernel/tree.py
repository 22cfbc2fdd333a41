"""Draft trees: links, positions and attention mask from the drafter's scores, or from a ready mask.

A tree has n nodes per request, node 0 is the root (the last committed token) and children follow their parents. Links
are int64 [B, n] and hold node numbers or -1: `next_token` is a node's first child, `next_sibling` the next child of the
same parent; `index` numbers the nodes over the batch.
"""

from __future__ import annotations

import torch

from ._guard import INDEX, INT64, check, check_size

FULL_MASK = 0
QLEN_ONLY = 1
_NOT_IN_TREE = -1


def _parents(parent_list: torch.Tensor, selected: torch.Tensor, topk: int) -> torch.Tensor:
    """Parent of every node but the root, [B, n - 1]; _NOT_IN_TREE where the parent was not selected.

    `selected` [B, n - 1] are the chosen candidates' numbers. Candidate c grew from candidate
    `parent_list[b, c // topk]`, or from the root if c // topk is 0. With equal scores a child can be chosen without
    its parent: SGLang leaves such a node unlinked, and so does this.
    """
    column = selected // topk
    if parent_list.shape[1] == 0:
        return torch.zeros_like(column)
    candidate = parent_list.to(torch.int64).gather(1, column.clamp(max=parent_list.shape[1] - 1))
    match = selected[:, None, :] == candidate[:, :, None]
    position = match.to(torch.uint8).argmax(-1) + 1
    parent = torch.where(match.any(-1), position, _NOT_IN_TREE)
    return torch.where(column == 0, 0, parent)


def _write_links(parent: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    """Fill the links from `parent` [B, n], where -1 stands for no parent (the root, an unlinked node)."""
    n = parent.shape[1]
    node = torch.arange(n)
    child_of = (parent[:, None, :] == node[:, None]) & (node > node[:, None])
    _first(child_of, next_token)
    sibling_of = (parent[:, None, :] == parent[:, :, None]) & (parent[:, :, None] >= 0) & (node > node[:, None])
    _first(sibling_of, next_sibling)


def _first(candidates: torch.Tensor, out: torch.Tensor) -> None:
    first = candidates.to(torch.uint8).argmax(-1)
    out.copy_(torch.where(candidates.any(-1), first, -1))


def _ancestors(parent: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask [B, n, n] of each node's path to the root, and the path's length [B, n], from `parent` [B, n - 1].

    A path has at most `depth` nodes below the root, and ends at a node that is not linked.
    """
    batch, below = parent.shape
    mask = torch.zeros(batch, below + 1, below + 1, dtype=torch.bool)
    mask[:, :, 0] = True
    length = torch.zeros(batch, below + 1, dtype=torch.int64)
    node = torch.arange(1, below + 1).expand(batch, below)
    for _ in range(depth):
        on_path = node > 0
        mask[:, 1:].scatter_(2, node.clamp(min=0)[:, :, None], True)
        length[:, 1:] += on_path
        node = torch.where(on_path, parent.gather(1, (node - 1).clamp(min=0)), node)
    return mask, length


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill `positions` [B * n], the links and `tree_mask` for n = `draft_token_num` nodes per request.

    `tree_mask` is flat bool: [B * n * n] for QLEN_ONLY; for FULL_MASK each row has the request's prefix in front of
    the n columns, and only the n columns are written.
    """
    batch, n = verified_seq_len.numel(), draft_token_num
    check("parent_list", parent_list, INDEX, 2)
    check("selected_index", selected_index, INT64, 2)
    check("verified_seq_len", verified_seq_len, INDEX, 1)
    check("tree_mask", tree_mask, (torch.bool,), 1)
    check("positions", positions, INT64, 1)
    check_size("selected_index", selected_index, batch * (n - 1))
    check_size("positions", positions, batch * n)
    for link in (retrieve_index, retrieve_next_token, retrieve_next_sibling):
        check("retrieve_*", link, INT64, 2)
        check_size("retrieve_*", link, batch * n)
    parent = _parents(parent_list, selected_index, topk)
    root = torch.full((batch, 1), -1)
    _write_links(torch.cat([root, parent], dim=1), retrieve_next_token, retrieve_next_sibling)
    retrieve_index.copy_(torch.arange(batch * n).view(batch, n))
    mask, length = _ancestors(parent, depth)
    positions.copy_((length + verified_seq_len[:, None]).view(-1))
    if tree_mask_mode == QLEN_ONLY:
        tree_mask[: mask.numel()] = mask.view(-1)
    elif tree_mask_mode == FULL_MASK:
        _write_full_mask(mask, verified_seq_len, tree_mask)
    else:
        raise RuntimeError(f"build_tree_kernel_efficient_cpu: got tree_mask_mode {tree_mask_mode}, expected 0 or 1")


def _write_full_mask(mask: torch.Tensor, verified_seq_len: torch.Tensor, tree_mask: torch.Tensor) -> None:
    n, offset = mask.shape[1], 0
    for own, prefix in zip(mask, verified_seq_len.tolist(), strict=True):
        size = n * (prefix + n)
        tree_mask[offset : offset + size].view(n, prefix + n)[:, prefix:] = own
        offset += size


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Fill `positions` and the links from a flat QLEN_ONLY mask [B * n * n]; its row i marks node i's ancestors."""
    n = draft_token_num
    check("tree_mask", tree_mask, (torch.bool,), 1)
    check_size("tree_mask", tree_mask, batch_size * n * n)
    check("positions", positions, INT64, 1)
    node = torch.arange(n)
    ancestor = tree_mask.view(batch_size, n, n) & (node < node[:, None])
    parent = torch.where(ancestor, node, -1).amax(-1)
    links = (torch.empty(batch_size, n, dtype=torch.int64), torch.empty(batch_size, n, dtype=torch.int64))
    _write_links(parent, *links)
    for out, link in zip((retrieve_next_token, retrieve_next_sibling), links, strict=True):
        out.view(batch_size, n).copy_(link)
    retrieve_index.view(-1).copy_(torch.arange(batch_size * n))
    positions.copy_((ancestor.sum(-1) + verified_seq_len[:, None]).view(-1))
