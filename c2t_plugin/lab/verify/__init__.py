"""Reference verification of one draft tree: short, engine-free, in the float type of the distributions given.

Randomness enters through a Chance: a Sampler on a torch.Generator, or `outcomes`, which enumerates every decision and
gives the exact distribution of the same code. `compatible` says which drafting a verification is exact for.
"""

from c2t_plugin.lab.verify.chance import Chance, Replay, Sampler, outcomes
from c2t_plugin.lab.verify.compatible import Drafting, Draw, Pruning, Verification, compatible, exact_verifications
from c2t_plugin.lab.verify.k_seq import division_factor, verify_k_seq
from c2t_plugin.lab.verify.rejection import verify_chain, verify_multi_round, verify_without_replacement
from c2t_plugin.lab.verify.target_only import verify_greedy, verify_target_only
from c2t_plugin.lab.verify.walk import ROOT, DraftTree, Verified, probabilities, residual

__all__ = [
    "ROOT",
    "Chance",
    "DraftTree",
    "Drafting",
    "Draw",
    "Pruning",
    "Replay",
    "Sampler",
    "Verification",
    "Verified",
    "compatible",
    "division_factor",
    "exact_verifications",
    "outcomes",
    "probabilities",
    "residual",
    "verify_chain",
    "verify_greedy",
    "verify_k_seq",
    "verify_multi_round",
    "verify_target_only",
    "verify_without_replacement",
]
