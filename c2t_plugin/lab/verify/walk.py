"""What every verification shares: one draft tree, its walk from the root, and distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from c2t_plugin.errors import C2TError

ROOT = -1
# Room for probabilities that were normalised in half precision.
SUM_TOLERANCE = 1e-2


class Verified(NamedTuple):
    """What one verification step gives.

    nodes: columns of the accepted draft nodes, from the root down; len(nodes) is the accept length without the bonus.
    bonus: the token that the target adds after them; there always is one.
    tokens: the output, accepted tokens and then the bonus.
    """

    nodes: tuple[int, ...]
    bonus: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class DraftTree:
    """One draft tree without padding.

    token_ids: (nodes,) int64.
    parent_ids: (nodes,) int64, column of the parent, -1 for the root, which is no node; parents come before children.
        Siblings stand in the order they were drawn in: rejection sampling is exact in that order only.
    """

    token_ids: Tensor
    parent_ids: Tensor

    def __post_init__(self) -> None:
        if self.token_ids.dim() != 1 or self.token_ids.shape != self.parent_ids.shape:
            raise C2TError(
                "a draft tree needs token_ids and parent_ids of one shape (nodes,), got "
                f"{tuple(self.token_ids.shape)} and {tuple(self.parent_ids.shape)}"
            )
        columns = torch.arange(len(self), device=self.parent_ids.device)
        if bool(((self.parent_ids >= columns) | (self.parent_ids < ROOT)).any()):
            raise C2TError(f"parents must be -1 or an earlier column, got parent_ids {self.parent_ids.tolist()}")

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def children(self, node: int) -> list[int]:
        """Columns of a node's children in the order they were drawn in; node -1 is the root."""
        return (self.parent_ids == node).nonzero().flatten().tolist()

    def token(self, node: int) -> int:
        return int(self.token_ids[node])

    def path(self, node: int) -> tuple[int, ...]:
        """Columns from the root's child down to this node; none for the root."""
        nodes: tuple[int, ...] = ()
        while node != ROOT:
            nodes = (node, *nodes)
            node = int(self.parent_ids[node])
        return nodes

    def verified(self, node: int, bonus: int) -> Verified:
        """The step that accepts the path to `node` (-1: nothing) and adds `bonus`."""
        nodes = self.path(node)
        return Verified(nodes, bonus, (*(self.token(accepted) for accepted in nodes), bonus))


def row(node: int) -> int:
    """Row of a (nodes + 1, vocab) tensor that holds the distribution after a node; row 0 is the root's."""
    return node + 1


def check_probs(name: str, probs: Tensor, tree: DraftTree, rows: list[int]) -> None:
    """Refuse a tensor that cannot belong to this tree: (nodes + 1, vocab), these of its rows distributions."""
    if probs.dim() != 2 or probs.shape[0] != len(tree) + 1:
        raise C2TError(f"{name} must be (nodes + 1, vocab) = ({len(tree) + 1}, vocab), got {tuple(probs.shape)}")
    used = probs[rows]
    # written so that NaN counts as wrong
    right = ((used.sum(dim=-1) - 1).abs() < SUM_TOLERANCE) & (used >= 0).all(dim=-1)
    if not bool(right.all()):
        wrong = [rows[index] for index in (~right).nonzero().flatten().tolist()]
        raise C2TError(f"{name}: rows {wrong} are no probability distributions")
    if len(tree) and not 0 <= int(tree.token_ids.min()) <= int(tree.token_ids.max()) < probs.shape[1]:
        raise C2TError(f"{name} has {probs.shape[1]} tokens, token_ids {tree.token_ids.tolist()} do not fit")


def check_target(tree: DraftTree, target_probs: Tensor) -> None:
    """Every row of target_probs must be a distribution."""
    check_probs("target_probs", target_probs, tree, list(range(len(tree) + 1)))


def check_pair(tree: DraftTree, draft_probs: Tensor, target_probs: Tensor) -> None:
    """As check_target, and the rows of draft_probs that children were drawn from, over the same vocabulary."""
    check_target(tree, target_probs)
    check_probs("draft_probs", draft_probs, tree, (tree.parent_ids.unique() + 1).tolist())
    if draft_probs.shape != target_probs.shape:
        raise C2TError(
            f"draft_probs {tuple(draft_probs.shape)} and target_probs {tuple(target_probs.shape)} must be over one "
            "vocabulary: give tokens that the draft lacks probability 0"
        )


def normalise(weights: Tensor) -> Tensor:
    """(vocab,) weights, not negative -> the distribution in proportion to them; all zeros stay zeros."""
    total = weights.sum()
    return weights / total if total > 0 else weights


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """norm(max(target - draft, 0)), both (vocab,): what is left of the target after a draw from the draft is rejected.

    Where target and draft are equal nothing is left and only rounding leads to a rejection: the target stays as it is.
    """
    left = (target - draft).clamp_min(0)
    return normalise(left) if left.sum() > 0 else target


def ratio(target: Tensor, draft: Tensor, token: int) -> float:
    """target[token] / draft[token], what a drawn token is accepted with (capped at 1).

    Raises C2TError where the draft probability is 0: such a token cannot have been drawn from this distribution.
    """
    if not draft[token] > 0:
        raise C2TError(
            f"token {token} has draft probability 0 here, so it was not drawn from this distribution; pass the "
            "distributions that the tree was drawn from, and the verification that fits the way it was drawn"
        )
    return float(target[token] / draft[token])


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Softmax at a temperature: (..., vocab) any float -> the same shape. At 0 the first largest logit has all."""
    if not temperature >= 0:
        raise C2TError(f"temperature must be 0 or larger, got {temperature}")
    if temperature == 0:
        # argmax does not promise which of several equal logits it returns
        first = (logits == logits.amax(dim=-1, keepdim=True)).int().cumsum(dim=-1)
        return ((first == 1) & (logits == logits.amax(dim=-1, keepdim=True))).to(logits.dtype)
    return torch.softmax(logits / temperature, dim=-1)
