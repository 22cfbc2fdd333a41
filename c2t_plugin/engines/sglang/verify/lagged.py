"""`--speculative-c2t-rows lagged`, on a GPU the default: rows by the steps before, so that no step waits for a number.

The host chooses the target's graph, and only the device knows how many tokens a draft keeps. This predicts it from the
numbers of earlier steps, which are on the host by then; what does not fit the graph is clipped on the device.

Neither says anything about a token's own random draw: a prediction comes of statistics of earlier drafts, and what is
clipped are the tokens of lowest confidence. So output stays the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from c2t_plugin.config import AUTO, LAGGED, C2TConfig
from c2t_plugin.engines.sglang.verify.layout import rows_to_compute
from c2t_plugin.engines.sglang.verify.packing import PackedVerify
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner.step_planner import StepPlanner
from c2t_plugin.scorer import ChainScorer

if TYPE_CHECKING:
    from c2t_plugin.engines.sglang.verify.predicted import LaggedRows

logger = logging.getLogger(__name__)


class PlannedRows:
    """Rows of a planner's steps: it has decided on them before the draft began, by confidences of steps before."""

    def __init__(self, planner: StepPlanner) -> None:
        self._planner = planner

    def rows(self, rids: Sequence[str], width: int) -> int:
        """Of the step at hand; see LaggedRows."""
        window = len(rids) * width
        # roots have to be computed whatever was planned
        needed = min(max(self._planner.rows or window, len(rids)), window)
        return rows_to_compute(needed, self._planner.sizes())

    def note(self, wanted: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
        """See LaggedRows. The first rank's choices are everybody's."""
        return wanted, self._planner.note(sure)


def start(
    config: C2TConfig,
    packing: PackedVerify | None,
    scorer: ChainScorer,
    requests: int,
    planner: StepPlanner | None = None,
) -> LaggedRows | PlannedRows | None:
    """The plan, if it is the lagged one. packing: None where the uniform window is verified. requests: of the largest
    batch. Raises ConfigError where that is asked for and cannot be clipped."""
    device, chains = scorer.beta.device, config.mode == "chain"
    wanted = config.rows == LAGGED or (config.rows == AUTO and device.type != "cpu" and (chains or planner is not None))
    if not wanted:
        return None
    if packing is None:
        if config.rows == LAGGED:
            logger.warning("C2T: rows lagged chooses nothing over the uniform window")
        return None
    try:
        if chains:
            scorer.drafted(scorer.d_max)
            scorer.lengths(requests, budget=0)
    except ValueError as error:
        if config.rows == LAGGED:
            raise ConfigError(f"rows {LAGGED} cannot clip {requests} requests ({error}): use sync") from error
        logger.info("C2T: each step waits for its number of rows, since %d requests cannot be clipped", requests)
        return None
    if planner is None:
        from c2t_plugin.engines.sglang.verify.predicted import LaggedRows

        return LaggedRows(packing.sizes, device, requests)
    planner.wait_for_nothing(requests, device)
    return PlannedRows(planner)
