"""Launches of c2t_kernels.step.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from c2t_kernels.network import FEATURES
from c2t_kernels.score.kernel import NUM_WARPS, constants
from c2t_kernels.step.kernel import score_step_kernel

KINDS = {"p_unknown": "*i64", "p_step": "*i64", "p_slots": "*i64", "p_max_depth": "*i32"}


LEARNT = ("p_slope", "p_offsets", "p_logits", "p_foretold")


def _configuration(features: tuple[str, ...], hidden: int, *, keeps: bool, learns: bool = False) -> Configuration:
    """keeps: whether statistics are kept, for traces and for a planner. learns: whether what chances mean is learnt."""
    fixed = {**constants(features, hidden), **({} if keeps else {"p_stats": None})}
    fixed |= {} if learns else dict.fromkeys(LEARNT)
    name = f"score_step_{len(features)}_features_{hidden}_hidden{'_kept' * keeps}{'_learnt' * learns}"
    return Configuration(score_step_kernel, name, signature_of(score_step_kernel, fixed, KINDS), fixed, NUM_WARPS)


# the paper's classifier and the largest that a file may hold
CONFIGURATIONS = tuple(
    _configuration(features, 64, keeps=keeps)
    for features in (("joint_prob", "entropy", "depth"), FEATURES)
    for keeps in (False, True)
) + tuple(
    _configuration(features, 64, keeps=False, learns=True)
    for features in (("joint_prob", "entropy", "depth"), FEATURES)
)
