"""What the throughput benchmark's rows say of real servers, whichever engine they run."""

from __future__ import annotations

from benchmarks.report.rows import BenchRow
from benchmarks.serving.arms import ARMS


def check_plain_and_cut(plain: BenchRow, cut: BenchRow, together: int) -> None:
    """Plain decoding and C2T at temperature 0: equal outputs, real counts, times of streamed answers."""
    assert (plain.metrics["ran_at_once"], cut.metrics["ran_at_once"]) == (together, together)
    assert plain.metrics["tau"] is None and plain.metrics["gamma_per_token"] == 0.0
    assert cut.metrics["identical_share"] == 1.0
    if not ARMS[cut.arm].counted:
        assert cut.metrics["gamma_per_token"] is None
    else:
        assert (cut.metrics["gamma_per_token"] or 0.0) > 0.0
    for name in ("tau", "output_tokens_per_s", "tpot_p50_ms", "ttft_p50_ms", "ratio_to_plain_low"):
        assert (cut.metrics[name] or 0.0) > 0.0
