"""Which way of drafting may meet which verification without changing the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from c2t_plugin.errors import ConfigError


class Draw(Enum):
    """How the children of a node are chosen from the draft's distribution."""

    TOP_K = "the most probable tokens"
    INDEPENDENT = "independent draws"
    WITHOUT_REPLACEMENT = "draws without replacement"


class Pruning(Enum):
    """What decides whether a node is drafted or verified; the later in this list, the more the rule has seen.

    BEFORE_SIBLINGS: only what was known before the first of the node's siblings was drawn. How many siblings a fixed
        tree has is such a rule; so is C2T's chain rule with P = P_{d-1} * max q_d.
    BEFORE_DRAW: also its earlier siblings and anything else drawn before the node, never the node itself (DySpec's
        heap). Both rules drop a node's later siblings and its descendants with it.
    OWN_DRAW: the node's own token, its probability or anything that follows from them (a score of the drawn token, a
        rerank after drafting).
    """

    BEFORE_SIBLINGS = "a rule that looks at nothing drawn beside the token"
    BEFORE_DRAW = "a rule that looks at earlier siblings, not at the token's own draw"
    OWN_DRAW = "a rule that looks at the token's own draw"


class Verification(Enum):
    """The verifications of this package; GREEDY is for target temperature 0."""

    GREEDY = "verify_greedy"
    TARGET_ONLY = "verify_target_only"
    CHAIN = "verify_chain"
    MULTI_ROUND = "verify_multi_round"
    WITHOUT_REPLACEMENT = "verify_without_replacement"
    K_SEQ = "verify_k_seq"


@dataclass(frozen=True)
class Drafting:
    """How a tree is made: how tokens are chosen, and what cuts them."""

    draw: Draw
    pruning: Pruning = Pruning.BEFORE_SIBLINGS


ANY_TREE = frozenset({Verification.GREEDY, Verification.TARGET_ONLY})
REJECTION = {
    Draw.TOP_K: frozenset[Verification](),
    Draw.INDEPENDENT: frozenset({Verification.CHAIN, Verification.MULTI_ROUND, Verification.K_SEQ}),
    Draw.WITHOUT_REPLACEMENT: frozenset({Verification.CHAIN, Verification.WITHOUT_REPLACEMENT}),
}


def exact_verifications(drafting: Drafting) -> frozenset[Verification]:
    """The verifications whose output is distributed as the target's for every tree drafted this way."""
    if drafting.pruning is Pruning.OWN_DRAW:
        return ANY_TREE
    exact = ANY_TREE | REJECTION[drafting.draw]
    return exact - {Verification.K_SEQ} if drafting.pruning is Pruning.BEFORE_DRAW else exact


def compatible(drafting: Drafting, verification: Verification) -> None:
    """Raise ConfigError if this verification would change the output's distribution; it says why and what to use."""
    allowed = exact_verifications(drafting)
    if verification in allowed:
        return
    instead = ", ".join(each.value for each in Verification if each in allowed)
    raise ConfigError(
        f"{verification.value} is not exact for {drafting.draw.value} pruned by {drafting.pruning.value}: "
        f"{_reason(drafting, verification)}; use {instead}"
    )


def _reason(drafting: Drafting, verification: Verification) -> str:
    if drafting.draw is Draw.TOP_K:
        return "no token was drawn, so there is no draft probability to divide by"
    if drafting.pruning is Pruning.OWN_DRAW:
        return "what is left after such a cut is no longer distributed as the draft says"
    if verification is Verification.K_SEQ and drafting.draw is Draw.INDEPENDENT:
        return "it divides by a factor that depends on the number of draws, which must not depend on what they gave"
    if drafting.draw is Draw.INDEPENDENT:
        return "it takes drawn tokens out of the draft's distribution, and these draws could repeat"
    return "it expects every sibling to come from the draft's whole distribution"
