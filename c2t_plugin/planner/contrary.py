"""Requests whose outcomes are the contrary of what others' say: as long as they are few, they teach nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from c2t_plugin.planner.arrays import Array

# Newest drafts that are looked at, and tokens by which one request is judged.
NEWEST, LEAST = 256, 8
# Standard deviations by which a request is off, from the one in the middle. On recorded text one in 100 is by chance.
OFF = 3.5
# Of those drafts. More of them are no exception: the traffic is another.
FEW = 1 / 3


def contrary(owners: Sequence[Hashable], chance: Array, hit: Array, reached: Array) -> set[Hashable]:
    """Those requests. owners: of each draft. chance, hit, reached: (drafts, depths) of each token, of being accepted if
    all before it are, as is believed now; whether it was, and whether that is known."""
    numbers: dict[Hashable, int] = {}
    owner = np.array([numbers.setdefault(each, len(numbers)) for each in owners])

    def total(each: Array) -> Array:
        return np.bincount(owner, np.where(reached, each, 0.0).sum(1))

    off = total(hit - chance) / np.sqrt(np.maximum(total(chance * (1.0 - chance)), 1e-9))
    judged = total(np.ones_like(chance)) >= LEAST
    if not judged.any():
        return set()
    found = judged & (np.abs(off - np.median(off[judged])) > OFF)
    if found[owner].mean() > FEW:
        return set()
    return {name for name, number in numbers.items() if found[number]}
