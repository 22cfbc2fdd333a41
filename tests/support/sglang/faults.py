"""A plugin for tests only: plants one fault, named by PLANTED_FAULT, in every process of a server.

It is found through an entry point in a directory that the test puts on PYTHONPATH, so nothing of it is in the product.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ENTRY = "[sglang.srt.plugins]\n{name} = {name}:register\n"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"


def install(folder: Path, module: str = __file__, *beside: ModuleType) -> Path:
    """Write a module with a `register` as an installed distribution into `folder`, for PYTHONPATH. beside: modules that
    it imports by their last names."""
    name = f"planted_{Path(module).stem}"
    (folder / f"{name}.py").write_text(Path(module).read_text())
    info = folder / f"{name}-0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(ENTRY.format(name=name))
    (info / "METADATA").write_text(METADATA.format(name=name))
    for each in beside:
        shutil.copy(str(each.__file__), folder)
    return folder


def register() -> None:
    fault = os.environ["PLANTED_FAULT"]
    FAULTS[fault]()
    print(f"planted: {fault}", flush=True)


def seed_of_the_wrong_slot() -> None:
    from c2t_plugin.engines.host_chains import HostChainScorer

    write = HostChainScorer.write_seed

    def write_seed(self, slots, logits):
        write(self, slots.roll(1), logits)

    HostChainScorer.write_seed = write_seed


def entropy_of_the_childs_distribution() -> None:
    """Each token gets the entropy of the distribution that follows it, one step late, instead of its own."""
    from c2t_plugin.engines.host_chains import HostChainScorer

    add = HostChainScorer._add

    def late(self, stats):
        if self._step:
            # score the previous token again, with what came after it
            self._step -= 1
            self._joint[: len(stats.log_prob)] -= self._c2t_previous
            add(self, stats._replace(log_prob=self._c2t_previous))
        self._c2t_previous = stats.log_prob
        add(self, stats)

    HostChainScorer._add = late


def depth_off_by_one() -> None:
    import dataclasses

    from c2t_plugin.classifier import NodeClassifier

    network = NodeClassifier.network

    def deeper(self, device):
        right = network(self, device)
        shift = right.shift.clone()
        shift[right.features.index("depth")] -= 1
        return dataclasses.replace(right, shift=shift)

    NodeClassifier.network = deeper


def joint_probability_not_reset() -> None:
    """The next draft's first token carries on from where the last one of this slot's row ended."""
    from c2t_plugin.scorer import ChainScorer

    begin = ChainScorer.begin

    def stale(self, slots):
        kept = self._state.joint_log_prob.clone()
        begin(self, slots)
        self._state.joint_log_prob.add_(kept)

    ChainScorer.begin = stale


def cut_one_too_late() -> None:
    from c2t_plugin.scorer import ChainScorer

    end = ChainScorer.end

    def late(self, rows, links=None):
        kept = (end(self, rows) + 1).clamp(max=self.d_max)
        if links is not None:
            links.scatter_(1, kept.long()[:, None], -1)
        return kept

    ChainScorer.end = late


def draft_kv_of_a_cut_token_reused() -> None:
    """Draft extend leaves the pool as it is, so that later drafts read the keys and values that drafting left."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from c2t_plugin.engines.sglang import worker

    extend = worker.DraftMixin._draft_extend_for_decode

    def without_writing(self, *positional, **keyword):
        store = MHATokenToKVPool.set_kv_buffer
        MHATokenToKVPool.set_kv_buffer = lambda *_, **__: None
        try:
            return extend(self, *positional, **keyword)
        finally:
            MHATokenToKVPool.set_kv_buffer = store

    worker.DraftMixin._draft_extend_for_decode = without_writing


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        seed_of_the_wrong_slot,
        entropy_of_the_childs_distribution,
        depth_off_by_one,
        joint_probability_not_reset,
        cut_one_too_late,
        draft_kv_of_a_cut_token_reused,
    )
}
