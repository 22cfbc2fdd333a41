"""The classifier as score_chain and grow_layer take it: features in, one confidence out (C2T 4.1)."""

from c2t_kernels.network.reference import FEATURES, MAX_HIDDEN, MIN_LOG_PROB, ScoringNetwork, confidence_of

__all__ = ["FEATURES", "MAX_HIDDEN", "MIN_LOG_PROB", "ScoringNetwork", "confidence_of"]
