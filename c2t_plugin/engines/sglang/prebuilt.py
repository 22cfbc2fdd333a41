"""Requests whose prompt another server has read: the decode side of prefill-decode disaggregation.

Their prompt's draft extend ran on the prefill server, which sends the first draft token without the distribution it is
the argmax of. Here their slots still hold the seed and the options of whoever had them before. Each gets the request's
own options, and a seed that is not finite: the first token of the first draft is then kept and counted, and its
probability is taken for 1.
"""

from __future__ import annotations

from typing import Any, cast

from c2t_plugin.engines.sglang import requests
from c2t_plugin.engines.sglang.parts import Parts


def take_over(algorithm: Any, parts: Parts, device: Any) -> None:
    """Give the requests that the algorithm has noted since the last step their own seeds and options.

    Not where they are noted: on 0.5.17 a step is running then that may write seeds for the slots' former owners.
    """
    noted, scorer = algorithm.prebuilt, cast(Any, parts.scorer)
    while noted:
        slots, reqs = noted.pop(0)
        slots = slots.to(device, non_blocking=True)
        scorer.clear_seed(slots)
        requests.set_options(parts, slots, reqs)
