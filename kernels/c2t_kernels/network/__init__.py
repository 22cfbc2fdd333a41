"""The classifier as score_chain and grow_layer take it: features in, one confidence out (C2T 4.1)."""

from c2t_kernels.network.features import (
    FEATURES,
    MIN_LOG_PROB,
    TABLE,
    Feature,
    NodeStats,
    PathSums,
    SiblingStats,
    children,
    counted_features,
    extend_path,
    finite,
    node_features,
)
from c2t_kernels.network.reference import MAX_HIDDEN, ScoringNetwork, confidence_of, logit_of

__all__ = [
    "FEATURES",
    "MAX_HIDDEN",
    "MIN_LOG_PROB",
    "TABLE",
    "Feature",
    "NodeStats",
    "PathSums",
    "ScoringNetwork",
    "SiblingStats",
    "children",
    "confidence_of",
    "counted_features",
    "extend_path",
    "finite",
    "logit_of",
    "node_features",
]
