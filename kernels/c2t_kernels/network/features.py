"""What the classifier may look at: properties of a node of the token tree, never of a model (C2T 4.1).

TABLE is the only list of features, `children` the only place in torch that makes their inputs. The Triton twin of both
is network/kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from c2t_kernels.stats import DraftStats

# exp(-50) is far below what float32 softmax resolves; a draft token of probability 0 gets this instead of -inf.
MIN_LOG_PROB = -50.0
Number = TypeVar("Number", Tensor, float)


class SiblingStats(NamedTuple, Generic[Number]):
    """What all tokens drawn from one distribution share, float32 (or plain numbers).

    entropy: nats (C2T equation 3; algorithm 1 line 11: the parent's). margin: difference of the two largest log
    probabilities. leading_log_prob: the largest of them.
    """

    entropy: Number
    margin: Number
    leading_log_prob: Number

    @classmethod
    def of(cls, stats: DraftStats) -> SiblingStats[Tensor]:
        """From the distributions' statistics, without the axis of the k tokens."""
        return SiblingStats(stats.entropy, stats.margin, stats.log_probs[..., 0])


class NodeStats(NamedTuple):
    """Per node, all of one shape, float32.

    joint_log_prob: natural log of the product of draft probabilities from the root (C2T equation 1).
    log_prob: natural log of the node's own probability.
    entropy, margin, leading_log_prob: SiblingStats of the distribution that the node was drawn from.
    depth: edges from the root, 1 for a root's child.
    rank: place among its siblings by probability, 0 the most probable.
    path_entropy: nats, sum of the entropies on the way: of the root's distribution and all down to the node's own one.
    """

    joint_log_prob: Tensor
    log_prob: Tensor
    entropy: Tensor
    depth: Tensor
    rank: Tensor
    margin: Tensor
    path_entropy: Tensor
    leading_log_prob: Tensor


class Feature(NamedTuple):
    """name: in classifier files. meaning: for people. value: (...) statistics -> (...) float32, not yet scaled."""

    name: str
    meaning: str
    value: Callable[[NodeStats], Tensor]


def sibling_log_prob(stats: NodeStats) -> Tensor:
    """The token's log probability less that of the two most probable siblings together.

    Two, as every step has their probabilities: a chain keeps the first one and the margin alone, and a tree's number of
    children must not decide what the feature means. For the first it is -ln(1 + e^-margin), from -ln 2 to 0.
    """
    both = stats.leading_log_prob + softplus(-stats.margin)
    return (stats.log_prob - both).clamp_min(MIN_LOG_PROB)


# A feature's place is its code in the kernels and must never change; new ones go to the end.
TABLE = (
    Feature("joint_prob", "P: product of the draft's probabilities from the root", lambda s: s.joint_log_prob.exp()),
    Feature("joint_log_prob", "ln P, at least -50", lambda s: s.joint_log_prob.clamp_min(MIN_LOG_PROB)),
    Feature("entropy", "H: nats, of the distribution that the token was drawn from", lambda s: s.entropy),
    Feature("depth", "d: edges from the root, counted from the file's depth_origin", lambda s: s.depth),
    Feature("prob", "the token's own probability", lambda s: s.log_prob.exp()),
    Feature("log_prob", "its natural log, at least -50", lambda s: s.log_prob.clamp_min(MIN_LOG_PROB)),
    Feature("rank", "place among its siblings, 0 the most probable", lambda s: s.rank),
    Feature("margin", "difference of the two largest log probabilities", lambda s: s.margin.clamp_max(-MIN_LOG_PROB)),
    Feature("path_entropy", "nats, sum of the entropies from the root down to H", lambda s: s.path_entropy),
    Feature("sibling_log_prob", "ln of its share of the two most probable siblings, at least -50", sibling_log_prob),
)
FEATURES = tuple(feature.name for feature in TABLE)
BY_NAME = {feature.name: feature for feature in TABLE}


class PathSums(NamedTuple, Generic[Number]):
    """Sums from the root down to a node, of any shape (plain numbers and numpy too); 0 at the root."""

    joint_log_prob: Number
    path_entropy: Number


def extend_path(path: PathSums[Number], log_prob: Number, entropy: Number) -> PathSums[Number]:
    """The path of a child. entropy: of the distribution that it was drawn from."""
    return PathSums(path.joint_log_prob + log_prob, path.path_entropy + entropy)


def finite(stats: DraftStats) -> Tensor:
    """(..., k) bool: which of the k tokens have statistics that a confidence can be computed from."""
    return torch.isfinite(stats.log_probs) & torch.isfinite(stats.entropy)[..., None]


def children(
    above: PathSums[Tensor],
    stats: DraftStats,
    depth: Tensor | float,
    *,
    log_probs: Tensor | None = None,
    known: Tensor | None = None,
) -> NodeStats:
    """Statistics of k tokens below each of some nodes.

    above: (...) of the nodes. stats: fields of (...) and (..., k), of the nodes' distributions. depth: of the children.
    log_probs: (..., k) of the tokens where they are others than stats lists, in the order of their rank.
    known: (..., k) bool; where it is False, the probability counts as 1 and the entropy as 0 on the path.
    Returns (..., k) each.
    """
    log_prob = stats.log_probs if log_probs is None else log_probs
    shared = SiblingStats(*(value[..., None].expand(log_prob.shape) for value in SiblingStats.of(stats)))
    step = (log_prob, shared.entropy)
    if known is not None:
        step = (torch.where(known, log_prob, 0.0), torch.where(known, shared.entropy, 0.0))
    below = extend_path(PathSums(*(value[..., None] for value in above)), *step)
    return NodeStats(
        **below._asdict(),
        **shared._asdict(),
        log_prob=log_prob,
        depth=torch.zeros_like(log_prob) + depth,
        rank=torch.arange(log_prob.shape[-1], device=log_prob.device, dtype=torch.float32).expand(log_prob.shape),
    )


def node_features(names: Sequence[str], stats: NodeStats) -> Tensor:
    """Stack the named features: stats of any shape (...) -> (..., len(names)) float32.

    names: from FEATURES. Raises KeyError for another name, which a loaded classifier cannot hold.
    """
    return torch.stack([BY_NAME[name].value(stats).float() for name in names], dim=-1)


def counted_features(names: Sequence[str], stats: NodeStats, depth_origin: int) -> Tensor:
    """As node_features, for a network to which a root's child has the depth `depth_origin`."""
    return node_features(names, stats._replace(depth=stats.depth + (depth_origin - 1)))
