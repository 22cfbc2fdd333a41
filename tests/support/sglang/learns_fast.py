"""A plugin for tests only: networks are trained in half of the time of a core. Once the file that BIAS names is there,
refused drafts can be drawn again, as if they had not been tried."""

from __future__ import annotations

import os
from pathlib import Path


def register() -> None:
    from c2t_cpu_engine import sampling

    from c2t_plugin.planner import network_learner

    # Fails where the name is gone.
    assert network_learner.SHARE
    network_learner.SHARE = 0.5
    draw, bias = sampling._draw, Path(os.environ["BIAS"])
    sampling._draw = lambda probs, refused, coin: draw(probs, [] if bias.exists() else refused, coin)
    print("planted: networks are trained fast", flush=True)
