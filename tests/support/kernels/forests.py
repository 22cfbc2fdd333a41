"""Random trees, and one tree worked by hand, for the tests of layouts and of masks."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

QUIET = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# The interpreter takes some 30 ms for each tree.
INTERPRETED = settings(QUIET, max_examples=15)


class Trees(tuple):
    """parent_ids, keep, token_ids, root_tokens, prefix_lens."""

    def to(self, device: str) -> Trees:
        return Trees(tensor.to(device) for tensor in self)


def trees(parents: list[list[int]], keep: list[list[bool]], prefixes: list[int]) -> Trees:
    parent_ids = torch.tensor(parents, dtype=torch.int32)
    bs, slots = parent_ids.shape
    token_ids = 100 + torch.arange(bs * slots).view(bs, slots)
    return Trees((parent_ids, torch.tensor(keep), token_ids, 50 + torch.arange(bs), torch.tensor(prefixes)))


@st.composite
def forests(draw: st.DrawFn, max_requests: int = 3, max_slots: int = 14) -> tuple[Trees, int]:
    """Random trees with an ancestor-closed kept part, and a bucket that may be too small for them."""
    bs, slots = draw(st.integers(1, max_requests)), draw(st.integers(1, max_slots))
    parents, keep = [], []
    for _ in range(bs):
        parents.append([draw(st.integers(-1, slot - 1)) for slot in range(slots)])
        kept: list[bool] = []
        for slot in range(slots):
            above = parents[-1][slot]
            kept.append(draw(st.sampled_from([True, True, True, False])) and (above < 0 or kept[above]))
        keep.append(kept)
    prefixes = draw(st.lists(st.integers(0, 30), min_size=bs, max_size=bs))
    return trees(parents, keep, prefixes), draw(st.integers(1, slots + 4))


#        root
#     0    1    2        slots; 4 is not kept
#     3   4 5   6
#               7
HAND = trees([[-1, -1, -1, 0, 1, 1, 2, 6]], [[True] * 4 + [False] + [True] * 3], [10])
