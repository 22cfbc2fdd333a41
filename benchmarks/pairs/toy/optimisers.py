"""Muon for the layers' matrices, AdamW for everything else, and their shared schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.pairs.toy.recipe import Stage


class Optimisers:
    """Both optimisers of one stage; step() applies the stage's schedule, which depends on the step number alone."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], stage: Stage) -> None:
        groups: dict[str, list[nn.Parameter]] = {"matrix": [], "embed": [], "rest": []}
        for name, parameter in named:
            if parameter.requires_grad:
                groups[parameter_kind(name, parameter)].append(parameter)
        self.stage = stage
        self.parts: list[torch.optim.Optimizer] = []
        if groups["matrix"]:
            self.parts.append(torch.optim.Muon(groups["matrix"], lr=stage.muon_lr, weight_decay=stage.weight_decay))
        adam = [
            {"params": groups[kind], "lr": rate}
            for kind, rate in (("embed", stage.embed_lr), ("rest", stage.head_lr))
            if groups[kind]
        ]
        if adam:
            self.parts.append(torch.optim.AdamW(adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
        self.base = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, step: int) -> None:
        """One update with the rates of `step` (0-based); clears the gradients."""
        factor = self.stage.rate_factor(step)
        for part, rates in zip(self.parts, self.base, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """State of both optimisers."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """The inverse of state_dict()."""
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)


def parameter_kind(name: str, parameter: torch.Tensor) -> str:
    """matrix (Muon), embed (AdamW at the embedding's rate) or rest: LM head, norms, biases."""
    if "embed" in name:
        return "embed"
    return "matrix" if parameter.ndim == 2 and "lm_head" not in name else "rest"
