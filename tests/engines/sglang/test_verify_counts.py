"""Greedy decoding through real servers: output equals plain decoding, and every count equals a simulation's.

Output alone is blind: a draft that reads wrong keys or a chain cut at the wrong place changes only the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

CONCURRENCIES = (1, 8)
PROMPTS = 16
# 1: no draft forward at all; 4: the usual length; 8: the longest asked of us.
DEPTHS = (1, 4, 8)
# Of what is asked one after the other, FEW where a step gives a token, HALF of static chains. A cap changes nothing
# about how requests share a batch.
FEW, HALF, ALL = slice(None, None, 4), slice(None, None, 2), slice(None)
# Every other length once as a server of its own, and on every base as a run-time cap on the longest chain.
SERVERS = [(base, depth) for base in vc.DRAFTS for depth in DEPTHS]
LONGEST = max(DEPTHS)
CAPS = range(1, LONGEST)
SERVERS += [("eagle3", 2), ("eagle", 3), ("eagle3", 5), ("eagle", 6), ("standalone", 7)]


def varied_prompts() -> list[list[int]]:
    """Held-out prompts cut to lengths from 2 to 120 tokens."""
    lengths = [2, 3, 5, 9, 17, 30, 33, 47, 64, 64, 70, 81, 95, 100, 110, 120]
    return [ids[:n] for ids, n in zip(held_out_prompts(PROMPTS, min_tokens=96, seed=7), lengths, strict=True)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("counts")
    target = Target(pair_dir() / "target")
    prompts = varied_prompts()
    return SimpleNamespace(
        folder=folder,
        prompts=prompts,
        plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        oracle=vc.Oracle(pair_dir(), target),
    )


@pytest.fixture(scope="module", params=SERVERS, ids=lambda server: f"{server[0]}-{server[1]}")
def served(request: pytest.FixtureRequest, setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Answers of one server, by (mode, concurrency); modes are C2T, beta 0, nothing verified and each cap. Some get
    few prompts."""
    base, d_max = request.param
    if not (pair_dir() / vc.DRAFTS[base]).is_dir():
        pytest.skip(f"the pair has no {vc.DRAFTS[base]} draft")
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    log = setting.folder / f"{base}-{d_max}.log"
    modes = {"c2t": (vc.BETA, d_max), "static": (0.0, d_max), "nothing": (0.0, 0)}
    if d_max == LONGEST:
        modes |= {f"cap-{cap}": (vc.BETA, cap) for cap in CAPS}
    with vc.server(pair_dir(), base, d_max, setting.classifier, log) as running:
        for mode, (beta, max_depth) in modes.items():
            vc.control(running, beta=beta, max_depth=max_depth)
            for concurrency in CONCURRENCIES:
                prompts = setting.prompts[asked(mode, concurrency)]
                found[mode, concurrency] = vc.answers(running, prompts, concurrency)
    yield SimpleNamespace(base=base, d_max=d_max, answers=found, log=log)


def asked(mode: str, concurrency: int) -> slice:
    """Which prompts."""
    if mode == "c2t":
        return ALL
    if concurrency == 1:
        return HALF if mode == "static" else FEW
    return ALL if mode == "static" else HALF


def counts(served: SimpleNamespace, mode: str, concurrency: int) -> list[vc.Counts]:
    return [vc.Counts.of_answer(answer) for answer in served.answers[mode, concurrency]]


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
@pytest.mark.parametrize("mode", ["c2t", "static", "nothing"])
def test_output_is_plain_decodings(served: SimpleNamespace, setting: SimpleNamespace, mode: str, concurrency: int):
    plain = setting.plain[asked(mode, concurrency)]
    assert [found.output_ids for found in counts(served, mode, concurrency)] == plain


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_beta_zero_is_the_static_chain(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    prompts = setting.prompts[asked("static", concurrency)]
    expected = [setting.oracle.counts(served.base, p, served.d_max, None) for p in prompts]
    assert counts(served, "static", concurrency) == expected


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_nothing_verified_is_one_token_a_step(served: SimpleNamespace, concurrency: int):
    # the first token comes from the prefill
    steps = vc.NEW_TOKENS - 1
    for found in counts(served, "nothing", concurrency):
        assert (found.verify_count, found.draft_lengths) == (steps, ((0, steps),))


def assert_cut_as_simulated(
    found: list[vc.Counts], setting: SimpleNamespace, base: str, d_max: int, prompts: slice = slice(None)
) -> None:
    expected = [setting.oracle.counts(base, p, d_max, setting.classifier) for p in setting.prompts[prompts]]
    decided = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs is not None]
    assert len(decided) >= len(expected) - 2, "too many confidences lie at beta: choose another"
    assert [mine for mine, _ in decided] == [theirs for _, theirs in decided]
    lengths = {length for mine, _ in decided for length, _ in mine.draft_lengths}
    assert len(lengths) >= min(3, d_max + 1), f"only lengths {lengths}: beta cuts too little or too much to tell"


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_each_request_is_cut_where_the_classifier_says(
    served: SimpleNamespace, setting: SimpleNamespace, concurrency: int
):
    assert_cut_as_simulated(counts(served, "c2t", concurrency), setting, served.base, served.d_max)


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_a_cap_makes_a_shorter_chain_of_the_longest(
    served: SimpleNamespace, setting: SimpleNamespace, concurrency: int
):
    caps = CAPS if served.d_max == LONGEST else ()
    for cap in caps:
        mode = f"cap-{cap}"
        found, prompts = counts(served, mode, concurrency), asked(mode, concurrency)
        assert [answer.output_ids for answer in found] == setting.plain[prompts]
        assert_cut_as_simulated(found, setting, served.base, cap, prompts)
    assert {mode for mode, _ in served.answers} == {"c2t", "static", "nothing", *(f"cap-{cap}" for cap in caps)}


def test_the_log_says_what_runs(served: SimpleNamespace, setting: SimpleNamespace):
    log = served.log.read_text(encoding="utf-8", errors="replace")
    line = f"C2T: base {served.base.upper()}, chains of at most {served.d_max}, beta {vc.BETA}, classifier "
    assert line in log
