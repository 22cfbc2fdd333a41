"""DP attention (`--attn-dp-size`, in older releases `--enable-dp-attention`): ranks with requests of their own.

Between the layers of attention the tokens of all ranks are computed together. So each pass of target and draft is one
that all ranks take at the same time and in the same shape, those that have no request too; SGLang sees to that as long
as all draft equally deep. Here they agree on a depth, before each step: the rank with the most requests decides, since
SGLang pads the others to its batch. Its planner knows what such a step costs; the others' learn from it.

Where a rank prefills, SGLang has the others wait: nobody drafts, and nobody asks here.

The window is that of the depth, unless an attention is named that packs rows. Then there is a second thing to agree on,
the number of rows, which is the most that a planner wants (verify/one_tier.py). What every rank would have to agree on
while a step runs is left out: cuts by a beta, and that the draft reads plain steps later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.environ import envs

from c2t_plugin.config import STRICT, UNIFORM, C2TConfig
from c2t_plugin.engines.contract import check_contract
from c2t_plugin.errors import C2TError, ConfigError

if TYPE_CHECKING:
    from c2t_plugin.engines.sglang.verify.one_tier import OneTier

logger = logging.getLogger(__name__)

DEPTH = "ranks agree on one depth for all"


class Together:
    """What all ranks of a server do alike, step after step."""

    def __init__(self, group: Any, packing: OneTier | None = None) -> None:
        """group: torch's, of all these ranks, for numbers on the host. packing: None where windows are verified."""
        self._group, self._ranks = group, torch.distributed.get_world_size(group)
        self._packing = packing

    def begin(self, worker: Any, reqs: Any) -> None:
        """Switch a worker to the depth of the step at hand, and to its rows. To be called on every rank. reqs: this
        one's; none: it has to take the step nevertheless. Raises C2TError if another rank takes another step."""
        planner, requests = worker.c2t.planner, len(reqs)
        counts, depths = self.gather(worker.steps, requests, worker.planned_depth(reqs) if reqs else 0)
        worker.adaptive_controller.switch(depth := depths[counts.index(max(counts))])
        if reqs:
            planner.follow(depth)
        if self._packing is None:
            return
        window = requests * (depth + 1)
        wanted = planner.plan_rows(requests) if reqs else None
        rows, _ = self.gather(worker.steps, window if wanted is None else min(max(wanted, requests), window))
        planner.rows = self._packing.tier = self._packing.fitting(max(rows), max(counts))

    def gather(self, step: int, one: int, other: int = 0) -> tuple[list[int], list[int]]:
        """Of both numbers those of every rank, in order. Raises C2TError if another rank is at another step."""
        mine = torch.tensor([step, one, other])
        gathered = [torch.empty_like(mine) for _ in range(self._ranks)]
        torch.distributed.all_gather(gathered, mine, group=self._group)
        steps, ones, others = torch.stack(gathered).T.tolist()
        if len(set(steps)) > 1:
            raise C2TError(
                f"ranks are at steps {', '.join(map(str, steps))}, expected one and the same; start the server without "
                "DP attention, and report this"
            )
        return ones, others

    def idling(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        """Around the verification of a rank without requests. batch: SGLang's, without any either."""
        return contextlib.nullcontext() if self._packing is None else self._packing.idling(batch)


def start(worker: Any, config: C2TConfig) -> Together | None:
    """For a worker whose ranks have requests of their own; said in the log. None: each draft is whole, so there is
    nothing to agree on. Raises ConfigError for what cannot be had, where SGLang has chosen DP attention itself."""
    check(worker.server_args, worker.speculative_algorithm.base.name, config)
    parts = worker.c2t
    if parts.planner is None:
        logger.info("C2T: DP attention: all ranks draft and verify whole windows")
        return None
    rows = "" if parts.packing is None else ", and verify as many rows as one of them wants"
    logger.info("C2T: DP attention: all ranks draft as deep as the one with the most requests plans%s", rows)
    return Together(get_tp_group().cpu_group, parts.packing)


def check(server_args: Any, base: str, config: C2TConfig) -> None:
    """Raises ConfigError for what cannot be had with it, ContractError if SGLang lacks what it takes."""
    # once, at start
    from c2t_plugin.engines.sglang import contract

    check_contract("sglang", contract.DP_SYMBOLS, contract.SUPPORTED_DP)
    for found, reason, remedy in _refused(server_args, base, config):
        raise ConfigError(f"DP attention cannot be combined with {found}: {reason}; {remedy}")


def _refused(server_args: Any, base: str, config: C2TConfig) -> Iterator[tuple[str, str, str]]:
    """What is in the way, why, and what to do."""
    out = "leave it out"
    if config.mode == "tree":
        yield "trees", f"{DEPTH}, and a tree is as deep as it grows", "use chains"
    elif not config.planned and config.beta != 0.0:
        asked = "no planner" if config.beta is None else f"beta {config.beta}"
        yield asked, f"{DEPTH}, and what a beta cuts of that is computed anyway", "let a planner choose, or set beta 0"
    if base == "STANDALONE":
        yield "a stand-alone draft", "SGLang does not serve those with it (speculative_hook.py:1078 of 0.5.23)", out
    if config.packing == "cpu":
        yield "--speculative-c2t-packing cpu", "ranks agree on the size of a captured graph", out
    if config.packing not in ("auto", *UNIFORM) and (config.rows == "sync" or not config.planned):
        yield (
            f"--speculative-c2t-packing {config.packing}",
            "ranks agree on what a planner plans, before they draft",
            ("leave rows sync out, and let a planner choose"),
        )
    if config.learned is not None:
        yield f"--speculative-c2t-learned {config.learned}", "ranks learn apart and would overwrite each other's", out
    if config.self_check == STRICT:
        yield f"--speculative-c2t-self-check {STRICT}", "target and draft are not tried there", out
    if getattr(server_args, "disaggregation_mode", None) not in (None, "null"):
        yield f"--disaggregation-mode {server_args.disaggregation_mode}", "ranks agree on steps of one server only", out
    for field in ("attn_cp_size", "dcp_size", "dwdp_size"):
        if (getattr(server_args, field, None) or 1) > 1:
            flag = f"--{field.replace('_', '-')} {getattr(server_args, field)}"
            yield flag, "which ranks have the same requests was not tried there", out
    if getattr(server_args, "speculative_skip_dp_mlp_sync", False):
        yield "--speculative-skip-dp-mlp-sync", "it has some ranks decode while others prefill", out
    if getattr(server_args, "elastic_ep_backend", None) is not None:
        yield f"--elastic-ep-backend {server_args.elastic_ep_backend}", "ranks come and go, and steps wait for all", out
    for name in ("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"):
        # the second is none of 0.5.17's
        variable = getattr(envs, name, None)
        if variable is not None and variable.get():
            yield name, "it has ranks take different steps at the same time", "unset it"
