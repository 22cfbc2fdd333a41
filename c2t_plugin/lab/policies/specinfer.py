"""SpecInfer's trees: a fixed number of branches per layer (Miao et al., 2023; DySpec figure 1c)."""

from __future__ import annotations

from dataclasses import dataclass

from c2t_plugin.lab.policies.static import LayerBranches


@dataclass(frozen=True, kw_only=True)
class SpecInfer(LayerBranches):
    """Its expansion configuration <k1, k2, ...> (SpecInfer 6.1) as `branches`.

    With a temperature the children of a node are independent draws, as its verification by multi-round rejection
    allows; without one they are the most probable tokens.
    """
