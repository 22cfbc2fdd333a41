"""Learning while serving, as far as it is the same in every adapter: where it starts, when it applies, who is told."""

from __future__ import annotations

import atexit
import logging
import os.path
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.config import AUTO, CALIBRATE, NETWORK, OFF, C2TConfig
from c2t_plugin.engines.checkpoints import SHIPPED_DRAFTS, fetch, read_config
from c2t_plugin.errors import C2TError
from c2t_plugin.planner.calibration import Calibration
from c2t_plugin.planner.step_planner import StepPlanner
from c2t_plugin.weights import fingerprint, same

logger = logging.getLogger(__name__)


def pair_of(base: str, target: tuple[str, str | None], draft: tuple[str | None, str | None]) -> dict[str, Any]:
    """What a classifier file says of the pair that is served. base: eagle, eagle3, mtp or standalone. target, draft:
    checkpoint and revision; a target may carry its draft."""
    checkpoint, revision = target if draft[0] is None else draft
    shape = read_config(str(checkpoint), revision)
    return {
        "target": _weights(*target),
        "draft": _weights(str(checkpoint), revision),
        "kind": SHIPPED_DRAFTS.get(base, base),
        "draft_vocab_size": shape.get("draft_vocab_size") or shape.get("vocab_size"),
    }


def _weights(checkpoint: str, revision: str | None) -> str:
    """Their fingerprint; where they cannot be read from here, the checkpoint's name."""
    try:
        config = fetch(checkpoint, "config.json", revision)
        if config is not None:
            return fingerprint(config.parent, read_config(checkpoint, revision))
    except (C2TError, OSError, LookupError, TypeError) as error:
        logger.warning("C2T: the weights of %s cannot be told from others: %s", checkpoint, error)
    path = Path(checkpoint)
    return path.resolve().name if os.path.exists(path) else checkpoint


def calibration(
    config: C2TConfig, classifier: NodeClassifier, d_max: int, pair: Callable[[], dict[str, Any]]
) -> Calibration | None:
    """What a planner of chains starts with. config: its `learn` and `learned`. pair: see pair_of, which takes a while.

    Raises C2TError for a file of what another server has learnt that is no good here.
    """
    if config.learn == OFF:
        return None
    start = None
    if config.learned is not None and os.path.exists(config.learned):
        from c2t_plugin.engines.learned import earlier

        _, start = earlier(Path(config.learned), classifier, pair, d_max)
    trusted = config.learn == AUTO and same(classifier.spec.pair, pair())
    if trusted:
        logger.info("C2T: the classifier was fitted on this very pair, so it counts for more than the first outcomes")
    return Calibration(d_max, trusted=trusted, start=start, thread=ThreadPoolExecutor(1, "c2t-fit"))


def warn_unless_learnt(config: C2TConfig) -> None:
    """Say in one line what is not learnt though it was asked for."""
    if config.learn in (CALIBRATE, NETWORK) and not config.plans_chains:
        logger.warning("C2T: learn %s is for a planner of chains, and there is none: nothing is learnt", config.learn)


def trains(config: C2TConfig) -> bool:
    """Whether the network itself is learnt."""
    return config.learn == NETWORK and config.plans_chains


def report(
    planner: StepPlanner, learned: str | None, classifier: NodeClassifier, pair: Callable[[], dict[str, Any]]
) -> None:
    """Have what a planner learns said in the log, and written to the file, if there is one; by one rank."""
    planner.listeners.append(tell)
    if learned is not None:
        from c2t_plugin.engines.learned import LearnedFile

        file = LearnedFile(Path(learned), classifier, pair(), lambda: planner.network)
        planner.listeners.append(file.keep)
        atexit.register(lambda: file.close(planner.state()))


def tell(state: dict[str, Any]) -> None:
    """One line. state: see StepPlanner.state."""
    learnt = state["learnt"]
    depths = [f"{each['accepted']:.2f} ({each['learnt']:.2f})" for each in learnt["depths"] if each["tokens"]]
    (plain, now), (auc, _) = learnt["nll"], learnt["auc"] or (float("nan"), 0.0)
    logger.info(
        "C2T: learnt from %d draft tokens; accepted by depth (expected) %s; nats a token %.3f, of the classifier alone "
        "%.3f; AUC %.3f; slope %.2f, of the draft's own %.2f, offsets %s; %d fits thrown away, %d as the traffic had "
        "turned",
        *(learnt["seen"], ", ".join(depths), now, plain, auc),
        *(learnt["slope"], learnt["own"], ", ".join(f"{each:+.2f}" for each in learnt["offsets"])),
        *(learnt["discarded"], learnt["turns"]),
    )
    if network := learnt.get("network"):
        logger.info(
            "C2T: learnt networks: %d put in force, %d thrown away; the last trial gained %s nats a draft",
            *(network["swaps"], network["discarded"]),
            "?" if network["gain"] is None else f"{network['gain']:+.4f}",
        )
