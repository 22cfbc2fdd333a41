"""Each fault is planted into a real server: output stays plain decoding's, and the counts give it away."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.support.sglang import faults  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

D_MAX = 4
PROMPTS = 6
# Only a head drafts from other hidden states than the target's, so only there do its own stale keys differ.
BASES = {name: "eagle3" if "draft_kv" in name else "standalone" for name in faults.FAULTS}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("faults")
    target = Target(pair_dir() / "target")
    prompts = [ids[:64] for ids in held_out_prompts(PROMPTS, seed=11)]
    return SimpleNamespace(
        plugin=str(faults.install(folder)),
        folder=folder,
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        oracle=vc.Oracle(pair_dir(), target),
    )


@pytest.mark.parametrize("fault", [None, *faults.FAULTS])
def test_fault_is_caught_by_the_counts(setting: SimpleNamespace, fault: str | None):
    base = BASES.get(fault or "", "standalone")
    planted = {"PLANTED_FAULT": fault, "PYTHONPATH": setting.plugin} if fault else {}
    log = setting.folder / f"{fault}.log"
    with vc.server(pair_dir(), base, D_MAX, setting.classifier, log, env={**os.environ, **planted}) as running:
        found = [vc.Counts.of_answer(answer) for answer in vc.answers(running, setting.prompts, concurrency=PROMPTS)]
    if fault:
        assert f"planted: {fault}" in log.read_text(encoding="utf-8", errors="replace")
    expected = [setting.oracle.counts(base, prompt, D_MAX, setting.classifier) for prompt in setting.prompts]
    decided = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs is not None]
    assert [mine.output_ids for mine in found] == setting.plain
    assert len(decided) >= PROMPTS - 2
    assert all(mine == theirs for mine, theirs in decided) == (fault is None)
