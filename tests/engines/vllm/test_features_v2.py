"""Mixed requests on model runner V2, interpreted on the CPU: answered as without C2T, chunked and after preemption."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import pair_dir  # noqa: E402
from tests.engines.vllm.conftest import DRAFTS  # noqa: E402
from tests.engines.vllm.test_features import (  # noqa: E402
    KINDS,
    REPEATS,
    all_prompts,
    assert_the_same,
    exact_prompts,
    of_kind,
    penalties_matter,
)
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.sglang.verify_counts import save_hand_made_classifier  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps, UnnormedMtpDraft  # noqa: E402

BASES = (*DRAFTS, "mtp")
# Short ones, for the interpreter's sake: 20 to 43 tokens, and 4 requests want more blocks than there are.
LENGTHS = range(20, 20 + REPEATS * len(KINDS))
NEW_TOKENS = 8
D_MAX = 4
BETA = 0.45
OPTIONS = {
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "block_size": 32,
    "num_gpu_blocks_override": 6,
}
# With these drafts, one request at a time: of each kind so many tokens of a prompt, of which a chunk holds 32.
EXACT_BASES = ("draft_model", "eagle3")
EXACT_LENGTHS = {"logprobs": 20, "structured": 24, "in chunks": 35}
EXACT_PROMPTS = 2
TIMEOUT_S = 900

Answers = dict[str | None, SimpleNamespace]


def prompts() -> list[list[int]]:
    return [ids[:length] for ids, length in zip(all_prompts(), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def found(layout: Path, mimo: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """By base, None for plain decoding: what run_v2 tells of mixed requests, all engines in one process."""
    folder = tmp_path_factory.mktemp("v2-features")
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    cut = {"num_speculative_tokens": D_MAX, "c2t_classifier": str(classifier), "c2t_beta": BETA}
    models = {base: {"model": str(layout / draft)} for base, draft in DRAFTS.items()} | {"mtp": {"target": str(mimo)}}
    exact = {base: {"exact": EXACT_LENGTHS} for base in EXACT_BASES}
    specs = [{"method": f"c2t:{base}", **models[base], **cut, **exact.get(base, {})} for base in BASES]
    job = {
        "target": str(layout / "target"),
        "prompts": prompts(),
        "new_tokens": NEW_TOKENS,
        "max_num_seqs": 4,
        "options": OPTIONS,
        "mixed": True,
        "exact_prompts": EXACT_PROMPTS,
        "speculative": [None, *specs],
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.support.vllm.run_v2", str(folder / "job.json"), str(folder / "out.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads((folder / "out.json").read_text())
    return {
        base: SimpleNamespace(
            **{**one, "answers": [SimpleNamespace(**each) for each in one["answers"]], "classifier": classifier}
        )
        for base, one in zip((None, *BASES), out, strict=True)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_each_kind_of_request_is_answered_as_without_c2t(found: Answers, base: str, kind: str):
    assert_the_same(of_kind(found[base].answers, kind), of_kind(found[None].answers, kind))


@pytest.mark.parametrize("base", BASES)
def test_requests_were_preempted(found: Answers, base: str):
    assert found[base].preemptions > 0


@pytest.mark.parametrize("base", BASES)
def test_chains_of_several_lengths_were_verified(found: Answers, base: str):
    assert sum(count > 0 for length, count in found[base].steps if 0 < length < D_MAX) >= 2, found[base].steps


@pytest.mark.parametrize("base", BASES)
def test_a_prompt_found_in_the_prefix_cache_is_answered_the_same(found: Answers, base: str):
    # so short a prompt has but one block, which vLLM 0.32 computes again with a head; 0.33 hashes what follows it too
    assert (found[base].prefix_hits > 0) != found[base].drops_last_block
    assert found["draft_model"].prefix_hits > 0
    assert found[base].again == found[None].again
    assert found[base].again[0] == found[base].again[1]


@pytest.fixture(scope="module")
def oracle(mimo: Path) -> Oracle:
    target = Target(pair_dir() / "target")
    found = Oracle(pair_dir(), target)
    found.drafts["mtp"] = UnnormedMtpDraft(mimo, target)
    return found


@pytest.mark.parametrize("base", BASES)
def test_in_chunks_and_behind_a_cached_prefix_a_request_is_cut_where_the_classifier_says(
    found: Answers, oracle: Oracle, base: str
):
    mine = found[base]
    expected = oracle.steps(base, prompts()[-1], NEW_TOKENS, D_MAX, mine.classifier, BETA)
    assert expected is not None and expected.steps, "choose another beta"
    assert [[tuple(pair) for pair in steps] for steps in mine.again_steps] == [list(expected.steps)] * 2


@pytest.mark.parametrize("base", EXACT_BASES)
def test_under_each_feature_requests_are_cut_where_the_classifier_says(found: Answers, oracle: Oracle, base: str):
    """On this model runner a head is told which token follows a chunk."""
    compared, lengths = 0, set()
    for name, length in EXACT_LENGTHS.items():
        for ids, (output, pairs) in zip(exact_prompts(name)[-EXACT_PROMPTS:], found[base].exact[name], strict=True):
            steps = Steps(tuple(output), tuple((drafted, accepted) for drafted, accepted in pairs))
            expected = oracle.steps(base, ids[:length], NEW_TOKENS, D_MAX, found[base].classifier, BETA)
            compared += expected is not None
            assert expected in (None, steps), name
            lengths |= {drafted for drafted, _ in steps.steps}
    assert compared > len(EXACT_LENGTHS) * EXACT_PROMPTS // 2
    assert len(lengths) > 2, "choose another beta"


def test_what_a_head_is_told_of_a_chunks_end_changes_its_counts(found: Answers, oracle: Oracle):
    """So that the counts above would differ, were it told another token."""
    length, classifier = EXACT_LENGTHS["in chunks"], found["eagle3"].classifier
    asked = exact_prompts("in chunks")[-EXACT_PROMPTS:]
    given = [("eagle3", ids[:length], NEW_TOKENS, D_MAX, classifier, BETA) for ids in asked]
    chunk = OPTIONS["max_num_batched_tokens"]
    assert any(oracle.steps(*each) != oracle.steps(*each, chunk=chunk) for each in given)


def test_the_requests_are_what_their_names_say(found: Answers):
    plain = found[None].answers
    assert all(len(each.ids) == 1 for each in of_kind(plain, "one token"))
    assert all(len(each.logprobs) == NEW_TOKENS for each in of_kind(plain, "logprobs"))
    assert all(len(each.ids) > NEW_TOKENS for each in of_kind(plain, "to the end"))
    # a prefix of what the expression allows
    shape = re.compile(r"([a-z_]{3,12}, ){0,6}[a-z_]{0,12},?")
    assert all(shape.fullmatch(each.text) for each in of_kind(plain, "structured"))
    assert not any(shape.fullmatch(each.text) for each in of_kind(plain, "plain"))
    assert penalties_matter(prompts(), plain)
