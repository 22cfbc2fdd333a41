"""Verification that never looks at the draft's probabilities: exact for every tree, however it was made."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from c2t_plugin.lab.verify.chance import Chance
from c2t_plugin.lab.verify.walk import ROOT, DraftTree, Verified, check_target, probabilities, row


def verify_greedy(tree: DraftTree, target_logits: Tensor) -> Verified:
    """Walk down while a child holds the target's most likely token (temperature 0).

    target_logits: (nodes + 1, vocab) any float, or probabilities; row 0 after the root, row i + 1 after node i.
    Ties go to the lower token id.
    """
    return _walk(tree, probabilities(target_logits, 0.0), lambda probs: int(probs.argmax()))


def verify_target_only(tree: DraftTree, target_probs: Tensor, chance: Chance) -> Verified:
    """Sample from the target, and walk on if a child holds that token (EAGLE's and SGLang's rule for top-k trees).

    target_probs: (nodes + 1, vocab), row 0 after the root, row i + 1 after node i. The root is the last token of the
    output so far: S4's algorithm 1 (line 10) starts every round after the first input, which is stale after one round.
    The target's draws do not know the tree, so the output is the target's whatever the tree is. EAGLE's loop over
    siblings (accept a child with probability T[child], else set it to 0 and renormalise) is the same distribution.
    """
    return _walk(tree, target_probs, chance.draw)


def _walk(tree: DraftTree, target_probs: Tensor, choose: Callable[[Tensor], int]) -> Verified:
    check_target(tree, target_probs)
    node = ROOT
    while True:
        token = choose(target_probs[row(node)])
        match = next((child for child in tree.children(node) if tree.token(child) == token), None)
        if match is None:
            return tree.verified(node, token)
        node = match
