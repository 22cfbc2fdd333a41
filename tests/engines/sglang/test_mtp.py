"""The shipped target with its MTP head as one MiMo checkpoint: the stock engine's own chain, and C2T over it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.pairs.toy.export import export, write_mimo  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import MtpDraft, Target, simulate  # noqa: E402

STATIC, D_MAX = 4, 6
# from 2 tokens on: the head's first entry, whose embedding is blanked, is then all it has
LENGTHS = (2, 3, 17, 33, 64, 81, 100, 120)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("mtp")
    export(write_mimo, pair_dir(), folder / "mimo")
    target = Target(pair_dir() / "target")
    prompts = [ids[:n] for ids, n in zip(held_out_prompts(len(LENGTHS), min_tokens=120, seed=7), LENGTHS, strict=True)]
    return SimpleNamespace(
        mimo=folder / "mimo",
        folder=folder,
        target=target,
        draft=MtpDraft(folder / "mimo", target),
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
    )


def served(setting: SimpleNamespace, name: str, *flags: str) -> CpuServer:
    # The engine looks for a MiMo head only where it is told to.
    carried = ("--speculative-draft-model-path", str(setting.mimo), "--disable-radix-cache")
    return CpuServer(setting.mimo, *carried, *flags, log=setting.folder / f"{name}.log")


def static_chain(setting: SimpleNamespace, prompt: list[int], length: int) -> vc.Counts:
    return vc.Counts.of_simulation(simulate(setting.target, setting.draft, prompt, vc.NEW_TOKENS, length))


def test_the_stock_engine_drafts_with_the_head(setting: SimpleNamespace):
    flags = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(STATIC))
    width = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(STATIC + 1))
    with served(setting, "stock", *flags, *width) as running:
        answers = vc.answers(running, setting.prompts, concurrency=4)
    assert [tuple(answer["output_ids"]) for answer in answers] == setting.plain
    expected = [static_chain(setting, prompt, STATIC) for prompt in setting.prompts]
    assert [a["meta_info"]["spec_verify_ct"] for a in answers] == [counts.verify_count for counts in expected]


def test_c2t_cuts_the_heads_chains(setting: SimpleNamespace):
    flags = ("--speculative-algorithm", "C2T", "--speculative-num-steps", str(D_MAX))
    rule = ("--speculative-c2t-classifier", str(setting.classifier), "--speculative-c2t-beta", str(vc.BETA))
    with served(setting, "c2t", *flags, *rule) as running:
        cut = [vc.Counts.of_answer(a) for a in vc.answers(running, setting.prompts, concurrency=4)]
        vc.control(running, beta=0.0)
        static = [vc.Counts.of_answer(a) for a in vc.answers(running, setting.prompts, concurrency=4)]
    assert [counts.output_ids for counts in cut] == setting.plain
    assert static == [static_chain(setting, prompt, D_MAX) for prompt in setting.prompts]
    decided = 0
    for found, prompt in zip(cut, setting.prompts, strict=True):
        keep = vc.Rule(setting.classifier, vc.BETA)
        expected = simulate(setting.target, setting.draft, prompt, vc.NEW_TOKENS, D_MAX, keep.keep_length)
        if not keep.undecided:
            decided += 1
            assert found == vc.Counts.of_simulation(expected)
    assert decided >= len(setting.prompts) - 2, "too many confidences lie at beta: choose another"
    lengths = {length for counts in cut for length, _ in counts.draft_lengths}
    assert len(lengths) >= 3, f"only lengths {lengths}: beta cuts too little or too much to tell"
    log = (setting.folder / "c2t.log").read_text(encoding="utf-8", errors="replace")
    assert f"C2T: base EAGLE, chains of at most {D_MAX}, beta {vc.BETA}, classifier " in log
