"""Numerical operations of C2T on draft logits, with a plain torch reference for each."""

from c2t_kernels.reference import DraftStats, draft_stats

__all__ = ["DraftStats", "draft_stats"]
