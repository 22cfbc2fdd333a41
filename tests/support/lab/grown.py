"""From a batch of grown trees to what the verifications take."""

from __future__ import annotations

import torch
from torch import Tensor

from c2t_plugin.lab.grow import Grown
from c2t_plugin.lab.verify.compatible import Verification, compatible
from c2t_plugin.lab.verify.walk import DraftTree, probabilities
from c2t_plugin.trees.nodes import ROOT


def one_tree(grown: Grown, row: int, temperature: float, verification: Verification) -> tuple[DraftTree, Tensor]:
    """One tree without its dead nodes, and the distributions that its children were drawn from, for a verification.

    temperature: the draft's when it drew, 0 for the most likely token. verification: the one that it will be given to.
    Returns the tree and draft_probs (nodes + 1, vocab) float64; rows of nodes without children are zeros, nothing was
    drawn from them. Raises ConfigError if that verification is not exact for a tree drafted this way, C2TError if the
    drafter knows statistics only.
    """
    compatible(grown.drafting, verification)
    single = grown.tree
    columns = single.alive[row].nonzero().flatten()
    place = torch.full((single.nodes + 1,), ROOT, dtype=torch.int64)
    place[columns] = torch.arange(len(columns))
    # the last place belongs to the root, whose column is -1
    parents = single.parent_ids[row, columns]
    tree = DraftTree(single.token_ids[row, columns], place[parents])
    draft_probs = torch.zeros(len(columns) + 1, grown.logits_after(row, ROOT).shape[-1], dtype=torch.float64)
    for parent in {ROOT, *parents.tolist()}:
        draft_probs[int(place[parent]) + 1] = probabilities(grown.logits_after(row, parent).double(), temperature)
    return tree, draft_probs
