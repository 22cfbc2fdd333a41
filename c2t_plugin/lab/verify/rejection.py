"""Rejection sampling with residuals: one chain, children drawn with replacement, children drawn without."""

from __future__ import annotations

from torch import Tensor

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.verify.chance import Chance
from c2t_plugin.lab.verify.walk import ROOT, DraftTree, Verified, check_pair, normalise, ratio, residual, row

# Arguments of all three, beside the tree: draft_probs and target_probs are (nodes + 1, vocab) of one float dtype. Row 0
# is the distribution at the root, row i + 1 the one after node i; a node's children were drawn from the node's row of
# draft_probs, at the draft's temperature. Rows of draft_probs that nothing was drawn from are not looked at.


def verify_chain(tree: DraftTree, draft_probs: Tensor, target_probs: Tensor, chance: Chance) -> Verified:
    """Speculative sampling of one drawn chain (Leviathan et al. 2023; Chen et al. 2023).

    A token is accepted with min(1, T / D); after the first rejection the bonus comes from norm(max(T - D, 0)), after
    a chain that was accepted whole from the target. Raises C2TError if a node has more than one child.
    """
    check_pair(tree, draft_probs, target_probs)
    node = ROOT
    while children := tree.children(node):
        if len(children) > 1:
            raise C2TError(f"node {node} has {len(children)} children; verify_chain takes chains only")
        draft, target = draft_probs[row(node)], target_probs[row(node)]
        if not chance.accepts(ratio(target, draft, tree.token(children[0]))):
            return tree.verified(node, chance.draw(residual(target, draft)))
        node = children[0]
    return tree.verified(node, chance.draw(target_probs[row(node)]))


def verify_multi_round(tree: DraftTree, draft_probs: Tensor, target_probs: Tensor, chance: Chance) -> Verified:
    """Multi-round speculative sampling (SpecInfer, Miao et al. 2023): siblings are independent draws.

    The siblings are tried in turn, each against what the rejections before it left of the target. Siblings that drew
    the same token must be separate nodes: merging them changes how often D is subtracted.
    """
    check_pair(tree, draft_probs, target_probs)
    node, bonus = ROOT, None
    while bonus is None:
        draft, left = draft_probs[row(node)], target_probs[row(node)]
        for child in tree.children(node):
            if chance.accepts(ratio(left, draft, tree.token(child))):
                node = child
                break
            left = residual(left, draft)
        else:
            bonus = chance.draw(left)
    return tree.verified(node, bonus)


def verify_without_replacement(tree: DraftTree, draft_probs: Tensor, target_probs: Tensor, chance: Chance) -> Verified:
    """Multi-branch rejection with residuals (DySpec, Xiong et al. 2024, algorithm 3): siblings differ.

    The printed algorithm draws c from N(0, 1), which must be uniform on (0, 1), and adds no bonus token after a leaf,
    which would throw away what the target computed there; both are corrected here. Its early return when the draft's
    mass is spent is not needed: no further sibling can exist then.
    """
    check_pair(tree, draft_probs, target_probs)
    node, bonus = ROOT, None
    while bonus is None:
        draft, left = draft_probs[row(node)].clone(), target_probs[row(node)]
        for child in tree.children(node):
            token = tree.token(child)
            if chance.accepts(ratio(left, draft, token)):
                node = child
                break
            left = residual(left, draft)
            draft[token] = 0
            draft = normalise(draft)
        else:
            bonus = chance.draw(left)
    return tree.verified(node, bonus)
