"""A plugin for tests only: faults of tree mode that one running server has or has not, and a record of what it did.

The file named by PLANTED_FAULT holds the fault's name, or nothing. TREE_RECORD names a file that gets one line per
verify step: requests, width, draft forwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def planted(fault: Callable[..., Any]) -> bool:
    return Path(os.environ["PLANTED_FAULT"]).read_text() == fault.__name__


def register() -> None:
    from c2t_cpu_engine import sampling
    from sglang.srt.speculative import eagle_worker_common

    from c2t_plugin.engines.sglang import worker
    from c2t_plugin.engines.sglang.drafters import tree, tree_input
    from c2t_plugin.engines.sglang.verify.packing import PackedVerify
    from c2t_plugin.trees import grower

    tree_input.build_tree = tampered(tree_input.build_tree)
    tree.inherit_branches = unless(keys_of_another_branch, tree.inherit_branches)
    tree._of_parents = state_of_another_branch(tree._of_parents)
    eagle_worker_common.move_accept_tokens_to_target_kvcache = unless(
        kv_of_a_rejected_branch_kept, eagle_worker_common.move_accept_tokens_to_target_kvcache
    )
    grower.TreeGrower.write_seed = seed_of_the_wrong_slot(grower.TreeGrower.write_seed)
    sampling._draw = refused_drafts_drawn_again(sampling._draw)
    PackedVerify.sizes = graphs_of_24_rows(PackedVerify.sizes)
    record(grower.TreeGrower, worker.StepMixin)


def record(grower: type, worker: type) -> None:
    path = os.environ.get("TREE_RECORD")
    step, verify = grower.step, worker.verify
    forwards = []

    def counted(self, logits):
        forwards.append(1)
        return step(self, logits)

    def recorded(self, batch, *positional, **keyword):
        if path:
            with Path(path).open("a") as lines:
                lines.write(f"{len(batch.reqs)} {batch.spec_info.draft_token_num} {len(forwards)}\n")
        forwards.clear()
        return verify(self, batch, *positional, **keyword)

    grower.step, worker.verify = counted, recorded


def unless(fault: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe(*positional, **keyword):
        if not planted(fault):
            original(*positional, **keyword)

    return maybe


def keys_of_another_branch() -> None:
    """Branches keep what they wrote themselves, as in stock SGLang, whatever their nodes grew from."""


def kv_of_a_rejected_branch_kept() -> None:
    """The accepted path is not moved to the front, so that the target reads keys of nodes that were refused."""


def tampered(build_tree: Callable[..., Any]) -> Callable[..., Any]:
    def tampering(parent_ids, keep, token_ids, *others, bucket):
        if planted(a_parent_after_its_child):
            parent_ids, keep, token_ids = a_parent_after_its_child(parent_ids, keep, token_ids)
        layout = build_tree(parent_ids, keep, token_ids, *others, bucket=bucket)
        for fault in (a_pad_node_reachable, a_sibling_link_lost, a_mask_bit_off, positions_by_index):
            if planted(fault):
                fault(layout, keep, token_ids)
        return layout

    return tampering


def a_pad_node_reachable(layout, keep, token_ids) -> None:
    """Pads hold words that were cut below the root, linked behind the root's last child."""
    for row, count in enumerate(layout.counts.tolist()):
        cut = token_ids[row][~keep[row]].tolist()
        last, link = 0, layout.retrieve_next_token[row]
        while link[last] >= 0:
            last, link = int(link[last]), layout.retrieve_next_sibling[row]
        for pad, token in zip(range(count, layout.mask.shape[1]), cut, strict=False):
            layout.draft_tokens[row, pad] = token
            link[last] = pad
            last, link = pad, layout.retrieve_next_sibling[row]


def a_sibling_link_lost(layout, keep, token_ids) -> None:
    if layout.mask.shape[1] > 1:
        layout.retrieve_next_sibling[:, 1] = -1


def a_mask_bit_off(layout, keep, token_ids) -> None:
    """A node of depth 2 or more does not see its parent."""
    rows, places = (layout.parents > 0).nonzero(as_tuple=True)
    layout.mask[rows, places, layout.parents[rows, places].long()] = False


def a_parent_after_its_child(parent_ids, keep, token_ids):
    """Columns from the last to the first."""
    turned = (parent_ids.shape[1] - 1 - parent_ids).masked_fill(parent_ids < 0, -1)
    return turned.flip(1), keep.flip(1), token_ids.flip(1)


def positions_by_index(layout, keep, token_ids) -> None:
    layout.positions[:] = layout.positions[:, :1] + layout.positions.new_ones(layout.positions.shape).cumsum(1) - 1


def state_of_another_branch(of_parents: Callable[..., Any]) -> Callable[..., Any]:
    def confused(hidden, parents):
        return of_parents(hidden, parents.flip(1) if planted(state_of_another_branch) else parents)

    return confused


def seed_of_the_wrong_slot(write: Callable[..., Any]) -> Callable[..., Any]:
    def misplaced(self, slots, logits):
        write(self, slots.roll(1) if planted(seed_of_the_wrong_slot) else slots, logits)

    return misplaced


def refused_drafts_drawn_again(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Sampled verification only: after all children were refused, one of them may be drawn after all."""

    def biased(probs, refused, coin):
        return draw(probs, [] if planted(refused_drafts_drawn_again) else refused, coin)

    return biased


def graphs_of_24_rows(sizes: Callable[..., Any]) -> Callable[..., Any]:
    """No fault: as if target passes of 24, 48, ... rows were captured."""

    def captured(self):
        return list(range(24, 4800, 24)) if planted(graphs_of_24_rows) else sizes(self)

    return captured


# Of them the first four may change the output as well; the others change only how much is drafted and accepted.
FAULTS = (
    a_mask_bit_off,
    a_parent_after_its_child,
    positions_by_index,
    kv_of_a_rejected_branch_kept,
    a_pad_node_reachable,
    a_sibling_link_lost,
    state_of_another_branch,
    seed_of_the_wrong_slot,
)
