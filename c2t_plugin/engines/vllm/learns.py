"""What an engine learns while it serves, and of which pair: settled before it starts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.config import AUTO, CALIBRATE, NETWORK, OFF, C2TConfig
from c2t_plugin.engines import learned, learning
from c2t_plugin.engines.checkpoints import warn_of_kind
from c2t_plugin.weights import same

logger = logging.getLogger("vllm.c2t")


def settled(vllm_config: Any, config: C2TConfig, classifier: NodeClassifier, base: str) -> tuple[str, str | None]:
    """`learn` and `learned` of C2TConfig as they hold here; what was asked for and is not done is said in the log.

    config: with the planner that there is, if there is one. Raises C2TError if what is learnt can neither be read from
    its file nor written there.
    """
    from vllm import envs

    learned.check(config, classifier, pair_of(vllm_config, base), network=learning.trains(config))
    if config.planned and config.learn != OFF and envs.VLLM_BATCH_INVARIANT:
        logger.warning("C2T: learns nothing: VLLM_BATCH_INVARIANT, and what is learnt is other requests'")
        return OFF, None
    if not vllm_config.speculative_config.enable_adaptive_verification:
        learning.warn_unless_learnt(config)
    return config.learn, config.learned


def estimates(vllm_config: Any, config: C2TConfig, classifier: NodeClassifier, base: str) -> bool:
    """Whether adaptive verification, where no planner decides, learns what confidences mean. `auto`: of a classifier
    that was fitted on another pair."""
    from vllm import envs

    if config.learn == OFF or (config.learn == AUTO and same(classifier.spec.pair, pair_of(vllm_config, base)())):
        return False
    if envs.VLLM_BATCH_INVARIANT:
        logger.warning("C2T: learns nothing: VLLM_BATCH_INVARIANT, and what is learnt is other requests'")
        return False
    if config.learn == NETWORK:
        logger.warning("C2T: learn %s is %s under adaptive verification, what confidences mean", NETWORK, CALIBRATE)
    logger.info("C2T: adaptive verification learns what confidences mean, by vLLM's own estimator")
    return True


def warn(path: Path, fitted: ClassifierSpec, base: str, *, probabilities: bool) -> None:
    """Say what may make a classifier's confidences poor ones. Outputs stay right."""
    warn_of_kind(logger, path, fitted, base)
    if probabilities and fitted.training.get("calibrated") != "chain":
        logger.warning(
            "C2T: a planner and adaptive verification take confidences for probabilities, and this classifier's were "
            "not made that on chains: `c2t calibrate` does that"
        )


def pair_of(vllm_config: Any, base: str) -> Callable[[], dict[str, Any]]:
    """See learning.pair_of; computed once, when it is first asked for."""

    def found() -> dict[str, Any]:
        target, spec = vllm_config.model_config, vllm_config.speculative_config
        carried = spec.model == target.model
        draft = (target.model, target.revision) if carried else (spec.model, spec.revision)
        return learning.pair_of(base, (target.model, target.revision), draft)

    return functools.cache(found)
