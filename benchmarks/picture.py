"""The demo's picture: what each verified draft token buys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from benchmarks.record import ServingRow

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TITLES = {"standalone": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE-3"}


def draw(rows: Sequence[ServingRow], path: Path) -> None:
    """One panel a base: static chains of growing length, and C2T at falling beta on the same server.

    rows: the sweep rows of a run; those of arm `static` are one line, those of arm `c2t` the other.
    """
    bases = [base for base in TITLES if any(row.base == base for row in rows)]
    figure, panels = plt.subplots(1, len(bases), figsize=(5.5 * len(bases), 4.5), squeeze=False)
    for base, axes in zip(bases, panels[0], strict=True):
        for arm, style in (("static", "o--"), ("c2t", "s-")):
            points = sorted(
                (row for row in rows if (row.base, row.arm) == (base, arm)), key=lambda r: r.gamma_per_token
            )
            label = "static chain, length as marked" if arm == "static" else "C2T, beta as marked"
            axes.plot([row.gamma_per_token for row in points], [row.tau for row in points], style, label=label)
            for row in points:
                note = str(row.d_max) if arm == "static" else f"{row.beta:g}"
                below = (0, -13) if arm == "static" else (0, 6)
                axes.annotate(
                    note, (row.gamma_per_token, row.tau or 0.0), below, textcoords="offset points", ha="center"
                )
        axes.set_title(TITLES[base])
        axes.set_xlabel("gamma per output token (draft tokens verified, root excluded)")
        axes.set_ylabel("tau: accepted draft tokens per verify step, bonus excluded")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
