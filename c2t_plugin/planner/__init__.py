"""How deep a step drafts and how much of that it verifies, by what it costs. Imports no engine."""

from c2t_plugin.planner.budget import Budget, spend
from c2t_plugin.planner.curve import CostCurve
from c2t_plugin.planner.planner import FORGET, PROBE_EVERY, OwnLimits, Planner, draft_passes, switched_depths

__all__ = [
    "FORGET",
    "PROBE_EVERY",
    "Budget",
    "CostCurve",
    "OwnLimits",
    "Planner",
    "draft_passes",
    "spend",
    "switched_depths",
]
