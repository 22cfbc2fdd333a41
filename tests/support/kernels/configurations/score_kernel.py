"""Launches of c2t_kernels.score.kernel that are compiled ahead of time."""

from __future__ import annotations

from c2t_kernels.network import FEATURES
from c2t_kernels.network.kernel import feature_codes
from c2t_kernels.score.kernel import NUM_WARPS, ROWS, _units, score_chain_kernel
from tests.support.kernels.configuration import Configuration


def _configuration(features: tuple[str, ...], hidden: int) -> Configuration:
    floats = ("log_prob", "entropy", "margin", "joint", "path_entropy")
    weights = ("shift", "scale", "hidden_weight", "hidden_bias", "out_weight", "out_bias")
    strides = ("log_prob_stride", "entropy_stride", "margin_stride", "confidence_stride")
    return Configuration(
        score_chain_kernel,
        f"score_chain_{len(features)}_features_{hidden}_hidden",
        {
            **{f"p_{name}": "*fp32" for name in floats},
            "p_confidence": "*fp32",
            **{f"p_{name}": "*fp32" for name in weights},
            "rows": "i32",
            **{name: "i32" for name in strides},
            **{name: "i32" for name in ("depth", "depth_origin")},
            **{name: "constexpr" for name in ("CODES", "N_FEATURES", "HIDDEN", "BLOCK_H", "BLOCK")},
        },
        {
            "CODES": feature_codes(features),
            "N_FEATURES": len(features),
            "HIDDEN": hidden,
            "BLOCK_H": _units(features, hidden),
            "BLOCK": ROWS,
        },
        num_warps=NUM_WARPS,
    )


# the paper's classifier and the largest that a file may hold
CONFIGURATIONS = (_configuration(("joint_prob", "entropy", "depth"), 64), _configuration(FEATURES, 64))
