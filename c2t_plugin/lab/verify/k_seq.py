"""SpecTr's verification of k independent draft sequences (Sun et al. 2023, arXiv:2310.15141: K-SEQ)."""

from __future__ import annotations

from torch import Tensor

from c2t_plugin.lab.verify.chance import Chance
from c2t_plugin.lab.verify.walk import ROOT, DraftTree, Verified, check_pair, ratio, residual, row

# Bisection stops when the bracket is no wider than this share of k; any division factor above the best one is exact.
BRACKET = 1e-9


def overlap(draft: Tensor, target: Tensor, factor: float) -> Tensor:
    """beta(factor) = sum over tokens of min(D, T / factor): how likely one draw is selected."""
    return (target / factor).minimum(draft).sum()


def division_factor(draft: Tensor, target: Tensor, k: int) -> float:
    """The smallest factor for which K-SEQ's residual is a distribution: factor * beta = 1 - (1 - beta)^k.

    draft, target: (vocab,) float. k: draws, at least 1. Returns a number in [1, k]. SpecTr calls it rho.
    The left side grows with the factor and the right side falls, so bisection finds it.
    """
    low, high = 1.0, float(k)
    if _valid(draft, target, k, low):
        return low
    while high - low > BRACKET * k:
        middle = (low + high) / 2
        low, high = (low, middle) if _valid(draft, target, k, middle) else (middle, high)
    return high


def select(tokens: list[int], draft: Tensor, target: Tensor, chance: Chance) -> tuple[int, bool]:
    """K-SEQ: one token distributed as `target`, chosen among k independent draws where possible.

    tokens: k >= 1 draws from draft. draft, target: (vocab,) float.
    Returns the token and whether it is one of the draws that was selected (False: it comes from the residual).
    """
    k = len(tokens)
    factor = division_factor(draft, target, k)
    for token in tokens:
        if chance.accepts(ratio(target, draft, token) / factor):
            return token, True
    # p_acc / beta as a finite sum, which also holds where draft and target share no token (beta = 0)
    rejected = 1 - overlap(draft, target, factor)
    tried = sum(rejected**turn for turn in range(k))
    return chance.draw(residual(target, (target / factor).minimum(draft) * tried)), False


def verify_k_seq(tree: DraftTree, draft_probs: Tensor, target_probs: Tensor, chance: Chance) -> Verified:
    """Verify k sequences that were drawn independently, each a chain below the root.

    tree: draws that happened to give the same token stay separate nodes; nodes with equal paths are verified together,
    so a tree of independent siblings may be passed too. draft_probs, target_probs: (nodes + 1, vocab), row 0 at the
    root, row i + 1 after node i. How many siblings a node gets must be decided before the first of them is drawn,
    because the division factor depends on their number.
    """
    check_pair(tree, draft_probs, target_probs)
    same_path, children = [ROOT], tree.children(ROOT)
    while children:
        parent = int(tree.parent_ids[children[0]])
        draft, target = draft_probs[row(parent)], target_probs[row(parent)]
        token, selected = select([tree.token(child) for child in children], draft, target, chance)
        if not selected:
            return tree.verified(same_path[0], token)
        same_path = [child for child in children if tree.token(child) == token]
        children = [grandchild for child in same_path for grandchild in tree.children(child)]
    return tree.verified(same_path[0], chance.draw(target_probs[row(same_path[0])]))


def _valid(draft: Tensor, target: Tensor, k: int, factor: float) -> bool:
    beta = overlap(draft, target, factor)
    return bool(factor * beta >= 1 - (1 - beta) ** k)
