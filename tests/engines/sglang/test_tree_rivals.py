"""Policy eagle2 on a server does to every request what SGLang's own EAGLE-2 trees do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from c2t_plugin.engines.sglang.cpu_engine.server import CpuServer  # noqa: E402
from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.sglang import verify_counts as vc  # noqa: E402

BASE, TOPK, STEPS, WIDTH = "eagle3", 4, 4, 12
PROMPTS = 6


def answers(log: Path, *algorithm: str) -> list[dict[str, Any]]:
    shape = ("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", str(TOPK))
    draft = ("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS[BASE]))
    width = ("--speculative-num-draft-tokens", str(WIDTH), "--disable-radix-cache")
    with CpuServer(pair_dir() / "target", *algorithm, *draft, *shape, *width, log=log) as running:
        return vc.answers(running, held_out_prompts(PROMPTS, seed=5), concurrency=PROMPTS)


def summary(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return answer["output_ids"], meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]


def test_the_trees_are_sglangs_own(tmp_path: Path):
    stock = answers(tmp_path / "stock.log", "--speculative-algorithm", "EAGLE3")
    mode = ("--speculative-c2t-mode", "tree", "--speculative-c2t-policy", "eagle2")
    ours = answers(tmp_path / "ours.log", "--speculative-algorithm", "C2T", *mode)
    assert [summary(answer) for answer in ours] == [summary(answer) for answer in stock]
    # every tree is as large as it may be, the root included
    histograms = [answer["meta_info"]["spec_cap_lens_histogram"] for answer in ours]
    assert all(histogram == [0] * WIDTH + [histogram[-1]] for histogram in histograms)
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in ours) > PROMPTS
    assert "policy eagle2" in (tmp_path / "ours.log").read_text(errors="replace")
