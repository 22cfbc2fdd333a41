"""Every operation in plain float32 torch: short, reads like the paper, and is the judge of every faster one."""

from c2t_kernels.reference.stats import DraftStats, draft_stats

__all__ = ["DraftStats", "draft_stats"]
