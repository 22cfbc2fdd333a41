"""Launches of c2t_kernels.score.kernel that are compiled ahead of time."""

from __future__ import annotations

from ahead_of_time.configuration import Configuration, signature_of
from c2t_kernels.network import FEATURES
from c2t_kernels.score.kernel import NUM_WARPS, constants, score_chain_kernel


def _configuration(features: tuple[str, ...], hidden: int) -> Configuration:
    fixed, name = constants(features, hidden), f"score_chain_{len(features)}_features_{hidden}_hidden"
    return Configuration(score_chain_kernel, name, signature_of(score_chain_kernel, fixed), fixed, NUM_WARPS)


# the paper's classifier and the largest that a file may hold
CONFIGURATIONS = (_configuration(("joint_prob", "entropy", "depth"), 64), _configuration(FEATURES, 64))
