"""Sampled verification of a draft tree on a CPU, with the probabilities of plain sampling.

On a GPU these are CUDA kernels. Drafts are proposed deterministically (argmax or top-k), so a drafted token x is kept
with the target's probability p(x), and if every child of a node is refused the next token is drawn from p without
them: the committed tokens are distributed as if drawn one by one from p (Leviathan et al. 2023, with a point mass as
the proposal).
"""

from __future__ import annotations

import itertools

import torch


def verify_uses_greedy(
    *, is_all_greedy: bool, is_cpu: bool, is_hip: bool, is_xpu: bool, use_rejection_sampling: bool
) -> bool:
    """Whether verification may commit the argmax: only if every request of the batch is greedy.

    Raises RuntimeError for rejection sampling, whose kernel exists in Triton only.
    """
    if is_all_greedy:
        return True
    if use_rejection_sampling:
        raise RuntimeError(
            "--speculative-use-rejection-sampling needs a GPU: start the CPU engine without it, "
            "sampled verification is lossless either way"
        )
    return False


def tree_speculative_sampling(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walk each tree from its root, keep a child by the coin of its parent, and draw the token after the last one.

    Shapes: B requests, n nodes, V tokens. `candidates` and the links `retrive_*` int64 [B, n], `uniform_samples`
    float32 [B, n] and `uniform_samples_for_final_sampling` [B] in [0, 1), `target_probs` float32 [B, n, V]. Written,
    int32: `predicts` [B * n], `accept_index` [B, max depth] (numbers over the batch), `accept_token_num` [B] (without
    root and bonus). With a threshold below 1 more is kept than p allows, as in SGLang; `draft_probs` (zeros, the
    drafts are deterministic) and `deterministic` are ignored.
    """
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    trees = [list(tree) for tree in zip(*(t.tolist() for t in (candidates, *links)), strict=True)]
    coins, last_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    for row, (tokens, index, next_token, next_sibling) in enumerate(trees):
        path, refused = _walk(
            (tokens, next_token, next_sibling),
            target_probs[row],
            coins[row],
            accept_index.shape[1],
            (threshold_single, threshold_acc),
        )
        accept_token_num[row] = len(path) - 1
        for depth, node in enumerate(path):
            accept_index[row, depth] = index[node]
        for node, child in itertools.pairwise(path):
            predicts[index[node]] = tokens[child]
        predicts[index[path[-1]]] = _draw(target_probs[row, path[-1]], refused, last_coins[row])


def _walk(
    tree: tuple[list[int], list[int], list[int]],
    probs: torch.Tensor,
    coins: list[float],
    max_nodes: int,
    thresholds: tuple[float, float],
) -> tuple[list[int], list[int]]:
    """The kept nodes, root first, and the tokens refused after the last of them."""
    tokens, next_token, next_sibling = tree
    single, total = thresholds
    path: list[int] = [0]
    refused: list[int] = []
    while len(path) < max_nodes:
        node = path[-1]
        child, mass = next_token[node], 0.0
        while child != -1:
            # one coin for all children: its part of [0, 1) below the sum of their probabilities picks one of them
            p = float(probs[node, tokens[child]])
            mass += p
            if p > 0.0 and (coins[node] < mass / total or p >= single):
                break
            refused.append(tokens[child])
            child = next_sibling[child]
        if child == -1:
            break
        path.append(child)
        refused = []
    return path, refused


def _draw(probs: torch.Tensor, refused: list[int], coin: float) -> int:
    """A token from `probs` [V] without `refused`, by inversion of the distribution function at `coin` in [0, 1)."""
    weights = probs.to(torch.float64, copy=True)
    weights[refused] = 0.0
    if float(weights.sum()) <= 0.0:
        # rounding only: with all mass on refused tokens, exact arithmetic would have kept one of them
        weights = probs.to(torch.float64)
    cumulative = weights.cumsum(0)
    token = int(torch.searchsorted(cumulative, coin * cumulative[-1], right=True))
    return min(token, int(weights.nonzero()[-1]))


def _renorm(probs: torch.Tensor, order: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.zeros_like(probs).scatter_(-1, order, kept), p=1.0, dim=-1)


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """`probs` [N, V] with all but the `top_ks` [N] largest entries of each row at zero, scaled to sum 1."""
    values, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1])
    return _renorm(probs, order, values.masked_fill(rank >= top_ks.view(-1, 1), 0.0))


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """`probs` [N, V] cut to the most likely tokens whose sum first reaches `top_ps` [N], scaled to sum 1.

    The boundary is that of SGLang's own torch sampler: a token stays if those before it sum to at most top_p.
    """
    values, order = probs.sort(dim=-1, descending=True)
    before = values.cumsum(dim=-1) - values
    return _renorm(probs, order, values.masked_fill(before > top_ps.view(-1, 1), 0.0))
