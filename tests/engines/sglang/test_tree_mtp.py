"""Trees that the MTP head of a MiMo checkpoint drafts: plain decoding's output, a simulation's counts and sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import pair_dir  # noqa: E402
from tests.engines.sglang.test_mtp import served, setting  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402

__all__ = ["setting"]

TOPK, DEPTH, BETA = 4, 4, 0.15
PROMPTS = 6


def test_c2t_grows_trees_from_the_head(setting: SimpleNamespace):
    prompts, plain = setting.prompts[:PROMPTS], setting.plain[:PROMPTS]
    forest = ts.Forest(pair_dir(), setting.target, drafts={"mtp": setting.draft})
    shape = ("--speculative-num-steps", str(DEPTH), "--speculative-eagle-topk", str(TOPK))
    flags = ("--speculative-algorithm", "C2T", "--speculative-c2t-mode", "tree", *shape)
    rule = ("--speculative-c2t-classifier", str(setting.classifier), "--speculative-c2t-beta", str(BETA))
    sizes = set()
    with served(setting, "trees", *flags, *rule) as running:
        for beta in (BETA, 0.0):
            vc.control(running, beta=beta)
            found = [vc.Counts.of_answer(answer) for answer in vc.answers(running, prompts, concurrency=3)]
            assert [counts.output_ids for counts in found] == plain
            expected = [
                forest.counts("mtp", prompt, setting.classifier, beta, TOPK, DEPTH, TOPK * DEPTH) for prompt in prompts
            ]
            ts.assert_as_simulated(found, expected)
            sizes |= {size for counts in found for size, _ in counts.draft_lengths}
            assert beta == 0.0 or len(sizes) > 4, f"only sizes {sizes}: beta cuts too little or too much to tell"
    log = (setting.folder / "trees.log").read_text(encoding="utf-8", errors="replace")
    assert f"C2T: base EAGLE, trees of at most {TOPK * DEPTH} nodes and depth {DEPTH}, top-k {TOPK}" in log
