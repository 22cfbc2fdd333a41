"""Learning the classifier's network itself while it serves, beside what its confidences mean (calibration.py).

In force is a pair: a network, and a calibration of its confidences. A candidate is trained on recent outcomes. Its
confidences mean what they say, so it is believed as a classifier is that was fitted on this very pair. Both pairs
foretell the same later drafts. A candidate that is better by more than chance is in force from the next step on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from c2t_kernels.network import PathSums
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.planner.arrays import Array
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.features import VALUES, PathNode, extended
from c2t_plugin.planner.learnt import Learnt
from c2t_plugin.planner.network import Adam, Network

logger = logging.getLogger(__name__)

# Of the ring of outcomes.
BYTES = 4 * 2**20
# Drafts before the first round of training; minibatches of a round, and drafts of a minibatch.
FIRST, BATCHES, ROWS = 256, 64, 256
# Adam's, twice the offline fit's since minibatches are few. The classifier that it began from is so many tokens.
RATE, PRIOR_TOKENS = 2e-3, 10.0
# Later drafts that a candidate is tried on, no more than a calibration's window.
TRIAL = 512
# Standard errors by which it has to foretell better to be in force, or worse to be thrown away.
BETTER, WORSE = 1.0, 1.0
# Of the time of one core, what training may take; seconds after which the thread looks whether the server has ended.
SHARE, IDLE_S = 0.01, 5.0


class Outcomes:
    """A ring of drafts and what became of them, of bounded bytes."""

    def __init__(self, d_max: int, features: int, limit: int = BYTES) -> None:
        """limit: bytes."""
        self.rows = max(ROWS, limit // (d_max * (4 * features + 2)))
        self._features = np.zeros((self.rows, d_max, features), dtype=np.float32)
        self._known, self._hits = np.zeros((2, self.rows, d_max), dtype=bool)
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return min(self._count, self.rows)

    @property
    def nbytes(self) -> int:
        return self._features.nbytes + self._known.nbytes + self._hits.nbytes

    @property
    def count(self) -> int:
        """Drafts that ever came."""
        return self._count

    def add(self, features: Array, known: Array, hits: Array) -> None:
        """features: (drafts, depths, features) float32, scaled. known, hits: (drafts, depths) bool, which tokens were
        verified, and accepted with all before them."""
        place, depths = (self._count + np.arange(len(features))) % self.rows, features.shape[1]
        with self._lock:
            self._known[place] = False
            self._features[place, :depths] = features
            self._known[place, :depths], self._hits[place, :depths] = known, hits
            self._count += len(features)

    def drawn(self, chance: np.random.Generator) -> tuple[Array, Array]:
        """Verified tokens of ROWS drafts: (tokens, features) float32 and (tokens,) bool."""
        rows = chance.integers(len(self), size=ROWS)
        with self._lock:
            features, known, hits = self._features[rows], self._known[rows], self._hits[rows]
        return features[known], hits[known]


class Trial(NamedTuple):
    """A candidate, the calibration of its confidences, and how many drafts had come when it began."""

    network: Network
    calibration: Calibration
    began: int


class NetworkLearner:
    """Stands where a Calibration stands, and is called as one; see StepPlanner.

    What `observe` takes beside that are the statistics that features are made of, so confidences of drafts that were
    made before a swap need no telling apart. Nothing is put in force but by `settle`, between two steps.
    """

    def __init__(
        self,
        classifier: NodeClassifier,
        d_max: int,
        *,
        start: Learnt | None = None,
        network: Network | None = None,
        background: bool = True,
        thread: Executor | None = None,
        seed: int = 0,
    ) -> None:
        """classifier: the prior, and where it begins without a network. start, network: what an earlier server has
        learnt. background: whether a thread trains; without it `train` is to be called, when it is `due`. thread: see
        Calibration."""
        self._prior = Network.of(classifier)
        self.network = self._prior.copy() if network is None else network
        self.calibration = Calibration(d_max, start=start, thread=thread)
        self._d_max, self._thread = d_max, thread
        self._followers: list[Callable[[Network], None]] = []
        self.swaps = self.discarded = self.batches = 0
        self.outcomes = Outcomes(d_max, len(classifier.spec.features))
        spec = classifier.spec
        self._names, self._depth_origin = spec.features, spec.depth_origin
        self._shift, self._scale = (np.array(each, dtype=np.float32) for each in (spec.shift, spec.scale))
        self._chance = np.random.default_rng(seed)
        # being trained, by whoever holds `due`; then tried; then in force
        self._candidate, self._adam = self._anew()
        self._trained: Network | None = None
        self._trial: Trial | None = None
        self._settled: Trial | None = None
        self.due = threading.Event()
        self._gain: float | None = None
        self.failed = False
        if background:
            threading.Thread(target=self._trains, name="c2t-learn", daemon=True).start()
        self._background = background

    @property
    def in_force(self) -> Learnt | None:
        """See Calibration."""
        return self.calibration.in_force

    @property
    def fits(self) -> int:
        """See Calibration."""
        return self.calibration.fits

    def __call__(self, confidence: Tensor, log_prob: Tensor | None = None) -> Tensor:
        """See Calibration; of confidences of the network in force."""
        return self.calibration(confidence, log_prob)

    def learn(
        self, sure: Tensor, verified: Tensor, accepted: Tensor, owners: Sequence[Hashable] = (), steps: int = 1
    ) -> None:
        """See Calibration.learn."""
        self.observe(sure[..., 1:], verified, accepted, owners, steps)

    def follow(self, take: Callable[[Network], None]) -> None:
        """Have somebody take the network in force, now and whenever it is another."""
        self._followers.append(take)
        take(self.network)

    def observe(
        self, stats: Tensor, verified: Tensor, accepted: Tensor, owners: Sequence[Hashable] = (), steps: int = 1
    ) -> None:
        """See Calibration.observe. stats: (requests, drafted, 3) float32 log probability, entropy and margin of each
        draft token."""
        features, log_prob = self._features(stats), stats[..., 0]

        def taught(calibration: Calibration, network: Network, rows: Any, owners: Sequence[Hashable] = ()) -> list[int]:
            sure = torch.from_numpy(network.confidence(features[rows]))
            return calibration.observe(sure, verified[rows], accepted[rows], owners, log_prob[rows], steps)

        rows = taught(self.calibration, self.network, slice(None), owners)
        if not rows:
            return
        if self._trial is not None:
            # the same drafts, whoever has no share left
            taught(self._trial.calibration, self._trial.network, rows)
        rows = [row for row in rows if not owners or owners[row] not in self.calibration.contrary]
        at = np.arange(features.shape[1])
        known = (at < verified[rows].numpy()[:, None]) & np.isfinite(features[rows]).all(-1)
        self.outcomes.add(features[rows], known, at < accepted[rows].numpy()[:, None])
        self._go_on()

    def confidence(self, stats: Tensor) -> Tensor:
        """(requests, drafted) float32 of the network in force. stats: see `observe`."""
        return torch.from_numpy(self.network.confidence(self._features(stats)))

    def _features(self, stats: Tensor) -> Array:
        """(requests, drafted, features) float32, scaled; NaN where statistics are not finite."""
        log_prob, entropy, margin = np.moveaxis(stats.float().numpy(), -1, 0)
        joint, path, known = np.empty_like(log_prob), np.empty_like(entropy), np.empty(log_prob.shape, dtype=bool)
        above: PathSums[Any] = PathSums(np.float32(0.0), np.float32(0.0))
        for depth in range(joint.shape[1]):
            above, known[:, depth] = extended(above, log_prob[:, depth], entropy[:, depth])
            joint[:, depth], path[:, depth] = above
        node = PathNode(joint, path, log_prob, entropy, margin)
        found = np.zeros((*joint.shape, len(self._names)), dtype=np.float32)
        for place, name in enumerate(self._names):
            value = VALUES[name]
            if value is not None:
                found[..., place] = value(node)
            elif name == "depth":
                found[..., place] = np.arange(joint.shape[1]) + self._depth_origin
        found = (found - self._shift) / self._scale
        found[~known] = np.nan
        return found

    def _go_on(self) -> None:
        """From training to a trial, from a trial to its end, and on."""
        count = self.outcomes.count
        if self._trained is not None:
            calibration = Calibration(self._d_max, trusted=True, thread=self._thread)
            self._trial, self._trained = Trial(self._trained, calibration, count), None
        elif self._trial is not None and count - self._trial.began >= TRIAL:
            self._judge(self._trial)
        elif self._trial is None and count >= FIRST and not self.failed:
            self.due.set()

    def _judge(self, trial: Trial) -> None:
        self._trial = None
        gain = self.calibration.lost(TRIAL) - trial.calibration.lost(TRIAL)
        self._gain = float(gain.mean())
        error = float(gain.std(ddof=1)) / len(gain) ** 0.5
        if self._gain > BETTER * error:
            self._settled = trial
        elif self._gain < -WORSE * error:
            self.discarded += 1
            self._candidate, self._adam = self._anew()

    def settle(self) -> None:
        """To be called between two steps: what has proved better is in force from here."""
        self.calibration.settle()
        if self._trial is not None:
            self._trial.calibration.settle()
        if self._settled is None:
            return
        trial, self._settled = self._settled, None
        trial.calibration.succeed(self.calibration)
        self.network, self.calibration = trial.network, trial.calibration
        self.swaps += 1
        for take in self._followers:
            take(self.network)

    def _anew(self) -> tuple[Network, Adam]:
        network = self.network.copy()
        return network, Adam(network, RATE)

    def train(self) -> bool:
        """One round, if it is due. Returns whether it was."""
        return self._round(lambda seconds: None)

    def _trains(self) -> None:
        rest = 1.0 / SHARE - 1.0
        while not self.failed:
            if self.due.wait(IDLE_S):
                self._round(lambda seconds: time.sleep(rest * seconds))

    def _round(self, rest: Callable[[float], None]) -> bool:
        """rest: called after each minibatch with the seconds that it took."""
        if not self.due.is_set():
            return False
        try:
            for _ in range(BATCHES):
                began = time.thread_time()
                self._batch()
                rest(time.thread_time() - began)
            if not all(np.isfinite(each).all() for each in self._candidate):
                raise ArithmeticError("parameters that are not finite")
            self._trained = self._candidate.copy()
        except Exception as error:  # a server that cannot train serves on
            self.failed = True
            logger.error("C2T: the network is learnt no further, what is in force stays: %s", error)
        finally:
            self.due.clear()
        return True

    def _batch(self) -> None:
        features, hits = self.outcomes.drawn(self._chance)
        if not len(hits):
            return
        gradient = self._candidate.gradient(features, hits)
        # as if so many tokens of the many that there are said what the classifier says
        weight = np.float32(PRIOR_TOKENS / (len(self.outcomes) * len(hits) / ROWS))
        pulled = (
            slope + weight * (now - at) for slope, now, at in zip(gradient, self._candidate, self._prior, strict=True)
        )
        self._adam.step(self._candidate, Network(*pulled))
        self.batches += 1

    def state(self) -> dict[str, Any]:
        """See Calibration.state. network: swaps; candidates thrown away; minibatches; drafts in the ring; what the last
        candidate foretold better than what was in force, in nats a draft."""
        network = {"swaps": self.swaps, "discarded": self.discarded, "batches": self.batches}
        return {**self.calibration.state(), "network": {**network, "drafts": len(self.outcomes), "gain": self._gain}}
