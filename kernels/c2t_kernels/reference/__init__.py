"""Every operation in plain float32 torch: short, reads like the paper, and is the judge of every faster one."""

from c2t_kernels.reference.chain import ChainClassifier, ChainState, score_chain
from c2t_kernels.reference.stats import DraftStats, draft_stats

__all__ = ["ChainClassifier", "ChainState", "DraftStats", "draft_stats", "score_chain"]
