"""What a server has learnt, as a classifier file: confidences that mean on its pair what they say.

A slope and offsets are folded into the network, so that it is a classifier like any other. What the server itself goes
by is in the record of its training, so that the next one goes on from there.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os.path
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from c2t_kernels.network import MAX_HIDDEN
from c2t_plugin.classifier import NodeClassifier, load_classifier, save_classifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.errors import ClassifierError, ConfigError
from c2t_plugin.output import check_file
from c2t_plugin.planner.learnt import Learnt
from c2t_plugin.planner.network import Network
from c2t_plugin.request_options import is_number, shown
from c2t_plugin.weights import known, same

if TYPE_CHECKING:
    from c2t_plugin.planner.network_learner import NetworkLearner

logger = logging.getLogger(__name__)

KEY, VERSION = "learned", 1
FROM, NETWORK = "network_from", "network"
DEPTH = "depth"
# Of slopes, offsets and their number: what lies beyond was not learnt.
LARGEST, DEEPEST = 100.0, 64
# Seconds that a server which ends waits for the file to be written.
LAST_S = 10.0


class LearnedFile:
    """Written whole, by a thread, when it is told of something new. No failure reaches who tells it."""

    def __init__(
        self,
        path: Path,
        classifier: NodeClassifier,
        pair: Mapping[str, Any],
        network: Callable[[], Network | None] = lambda: None,
    ) -> None:
        """classifier: what the server began with. pair: what it serves, see learning.pair_of. network: the one in
        force, which is replaced and never changed, where that is learnt too."""
        self.path = path
        self.failed = 0
        self._classifier, self._pair, self._network = classifier, pair, network
        self._seen = 0
        self._states: queue.SimpleQueue[tuple[Mapping[str, Any], Network | None]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        # at once, since an interpreter that ends starts no thread
        threading.Thread(target=self._work, daemon=True).start()

    def keep(self, state: Mapping[str, Any]) -> None:
        """Write what a planner has learnt, if the time before has come to its end. state: see StepPlanner.state."""
        if self._idle.is_set():
            self._idle.clear()
            self._states.put((state["learnt"], self._network()))

    def close(self, state: Mapping[str, Any], timeout: float = LAST_S) -> None:
        """Write it for the last time, for which no longer than `timeout` seconds are waited."""
        end = time.monotonic() + timeout
        if self._idle.wait(timeout) and state["learnt"]["seen"] != self._seen:
            self.keep(state)
            self._idle.wait(max(0.0, end - time.monotonic()))
        if not self._idle.is_set():
            logger.error("C2T: what was learnt is not written to %s after %.0f s; it is lost", self.path, timeout)

    def _work(self) -> None:
        while True:
            self._write(*self._states.get())
            self._idle.set()

    def _write(self, learnt: Mapping[str, Any], network: Network | None) -> None:
        try:
            save_classifier(with_learnt(self._classifier, learnt, self._pair, network), self.path)
            self._seen = learnt["seen"]
        except Exception as error:  # a server that cannot write what it learnt serves on
            self.failed += 1
            if self.failed == 1:
                logger.error("C2T: what was learnt cannot be written to %s: %s", self.path, error)


def with_learnt(
    classifier: NodeClassifier, learnt: Mapping[str, Any], pair: Mapping[str, Any], network: Network | None = None
) -> NodeClassifier:
    """A copy whose confidences are those that were learnt, of this pair. learnt: see Calibration.state. network: what
    the classifier's own was trained into, if it was."""
    slope, offsets = learnt["joint"]["slope"], learnt["joint"]["offsets"]
    over = classifier if network is None else with_network(classifier, network)
    found = folded(over, slope, offsets)
    spec = found.spec
    record: dict[str, Any] = {
        "version": VERSION,
        "over": digest(over),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: learnt[name] for name in ("slope", "own", "offsets", "joint", "seen", "nll", "auc")},
    }
    if network is not None:
        # folded there is no way back to it
        record |= {
            FROM: digest(classifier),
            NETWORK: [each.tolist() for each in network],
            "networks": learnt["network"],
        }
    beta, shift = spec.suggested_beta, sum(offsets) / len(offsets)
    if 0.0 < beta < 1.0:
        beta = float(torch.sigmoid(torch.logit(torch.tensor(beta, dtype=torch.float64)) * slope + shift))
    training = {**spec.training, "calibrated": "chain", KEY: record}
    found.spec = replace(spec, pair=dict(pair), suggested_beta=beta, training=training)
    return found


@torch.no_grad()
def folded(classifier: NodeClassifier, slope: float, offsets: Sequence[float]) -> NodeClassifier:
    """A copy whose logit is slope * logit + offset of the depth, the last one for all below.

    Offsets are ramps of the depth, a hidden unit each. Where depth is no feature, or there would be more units than
    engines take, all depths have the mean offset.
    """
    spec, state = classifier.spec, dict(classifier.state_dict())
    state["out.weight"] = state["out.weight"] * slope
    if DEPTH not in spec.features or spec.hidden + len(offsets) > MAX_HIDDEN:
        offsets = [sum(offsets) / len(offsets)]
    state["out.bias"] = state["out.bias"] * slope + offsets[0]
    rises = [0.0, *(below - above for above, below in itertools.pairwise(offsets)), 0.0]
    bends = [below - above for above, below in itertools.pairwise(rises)]
    if len(offsets) > 1:
        place = spec.features.index(DEPTH)
        weights = torch.zeros(len(bends), len(spec.features))
        # a unit sees the scaled depth: it is itself again, less where its ramp begins
        weights[:, place] = spec.scale[place]
        begins = spec.shift[place] - spec.depth_origin - torch.arange(len(bends), dtype=torch.float32)
        state["hidden.weight"] = torch.cat([state["hidden.weight"], weights])
        state["hidden.bias"] = torch.cat([state["hidden.bias"], begins])
        state["out.weight"] = torch.cat([state["out.weight"], torch.tensor([bends])], dim=1)
    found = NodeClassifier(replace(spec, hidden=len(state["hidden.bias"])))
    found.load_state_dict(state)
    return found.eval().requires_grad_(False)


def with_network(classifier: NodeClassifier, network: Network) -> NodeClassifier:
    """A copy with these parameters."""
    found = NodeClassifier(classifier.spec)
    hidden_weight, hidden_bias, out_weight, out_bias = (torch.from_numpy(each).clone() for each in network)
    state = {"hidden.weight": hidden_weight, "hidden.bias": hidden_bias}
    found.load_state_dict({**state, "out.weight": out_weight[None], "out.bias": out_bias})
    return found.eval().requires_grad_(False)


def with_network_of(path: Path, classifier: NodeClassifier) -> NodeClassifier:
    """What `read` takes as the classifier where the network is learnt: with the one of this file, if that was trained
    from this classifier. Raises ClassifierError for a network that is none."""
    record: Any = load_classifier(path).spec.training.get(KEY)
    if not isinstance(record, Mapping) or record.get(FROM) != digest(classifier):
        return classifier
    now = Network.of(classifier)
    try:
        parameters = [np.array(each, dtype=np.float32) for each in record[NETWORK]]
        good = [each.shape for each in parameters] == [each.shape for each in now]
        good = good and all(bool(np.isfinite(each).all()) for each in parameters)
    except (KeyError, TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ClassifierError(f"{path} holds no network of this classifier's shape; name another file, or remove it")
    return with_network(classifier, Network(*parameters))


def check(
    config: C2TConfig, classifier: NodeClassifier, pair: Callable[[], dict[str, Any]], *, network: bool = False
) -> None:
    """Raises C2TError if what is learnt can neither be read from its file nor written there. pair: see
    learning.pair_of. network: whether the server is to learn the network too, see learning.trains."""
    if config.learned is None:
        return
    path = Path(config.learned)
    if not config.plans_chains:
        raise ConfigError(f"learned {path} is what a planner of chains learns, and there is none; leave it out")
    check_file(path)
    # weights that have yet to be fetched are told apart when they are there
    if os.path.exists(path) and known(pair()):
        earlier(path, classifier, pair, 1, network=network)


def network(
    config: C2TConfig, classifier: NodeClassifier, d_max: int, pair: Callable[[], dict[str, Any]], *, leads: bool = True
) -> NetworkLearner:
    """As learning.calibration, of one that learns the network too. leads: whether this rank decides for others, which
    need not train."""
    from c2t_plugin.planner.network_learner import NetworkLearner

    begun, start = classifier, None
    if config.learned is not None and os.path.exists(config.learned):
        begun, start = earlier(Path(config.learned), classifier, pair, d_max, network=True)
    thread = ThreadPoolExecutor(1, "c2t-fit")
    return NetworkLearner(classifier, d_max, start=start, network=Network.of(begun), background=leads, thread=thread)


def earlier(
    path: Path, classifier: NodeClassifier, pair: Callable[[], dict[str, Any]], d_max: int, *, network: bool = False
) -> tuple[NodeClassifier, Learnt]:
    """What the server that wrote this file learnt, over which classifier. network: whether a network that it holds is
    what is served, which what was asked for does not say. Raises ClassifierError for a file that is no good here."""
    over = with_network_of(path, classifier) if network else classifier
    start = read(path, over, pair(), d_max)
    logger.info("C2T: goes on with what was learnt from %d draft tokens, from %s", start.seen, path)
    return over, start


def read(path: Path, classifier: NodeClassifier, pair: Mapping[str, Any], d_max: int) -> Learnt:
    """What an earlier server of this pair learnt over this classifier. Raises ClassifierError for any other file."""
    spec = load_classifier(path).spec
    record: Any = spec.training.get(KEY)
    remedy = "name another file, or remove it"
    if not isinstance(record, Mapping) or record.get("version") != VERSION:
        held = f"version {record.get('version')!r}" if isinstance(record, Mapping) else "none"
        raise ClassifierError(f"{path} holds of what a server learnt {held}, this build reads {VERSION}; {remedy}")
    if not same(spec.pair, pair):
        names = [f"{each.get('draft')} for {each.get('target')}" for each in (spec.pair, pair)]
        raise ClassifierError(f"{path} was learnt on {names[0]}, this server has {names[1]}; {remedy}")
    if record.get("over") != digest(classifier):
        raise ClassifierError(f"{path} was learnt over another classifier than this server has; {remedy}")
    numbers: list[Any] = [record.get(name) for name in ("slope", "own", "offsets", "seen")]
    slope, own, offsets, seen = numbers
    listed = isinstance(offsets, list) and 1 <= len(offsets) <= DEEPEST and all(map(_is_number, offsets))
    if not (listed and _is_number(slope) and _is_number(own) and type(seen) is int and 0 <= seen < 2**63):
        raise ClassifierError(
            f"{path} holds slopes of {shown(slope)} and {shown(own)}, offsets of {shown(offsets)}; {remedy}"
        )
    # of another longest chain: deeper tokens are taken as the deepest that is known
    deep = [*offsets, *[offsets[-1]] * d_max][:d_max]
    return Learnt(float(slope), float(own), torch.tensor(deep, dtype=torch.float64), seen)


def digest(classifier: NodeClassifier) -> str:
    """Of all that decides a confidence."""
    spec, found = classifier.spec, hashlib.sha256()
    found.update(repr((spec.features, spec.shift, spec.scale, spec.depth_origin, spec.top_m)).encode())
    for _, tensor in sorted(classifier.state_dict().items()):
        found.update(tensor.float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) <= LARGEST
