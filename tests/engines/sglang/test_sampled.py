"""Temperature 0.8: what a server samples has the joint distribution of the target alone, cuts or not.

The first four tokens are compared with exact enumeration by transformers (chi-square). The same test on a server whose
verification is biased on purpose has to fail. So it is while a planner learns from what is sampled.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import pair_dir  # noqa: E402
from c2t_plugin.planner import CostCurve  # noqa: E402
from c2t_plugin.planner.curve_file import write_curve  # noqa: E402
from tests.support.engines.distribution import (  # noqa: E402
    ALPHA,
    MIN_EXPECTED,
    SAMPLES,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    Outcome,
    most_varied_prompt,
    p_value,
)
from tests.support.sglang import faults, learns_fast  # noqa: E402
from tests.support.sglang.verify_counts import (  # noqa: E402
    DRAFTS,
    save_hand_made_classifier,
    save_untaught_classifier,
)

BETA = 0.45
D_MAX = 6
SEED = "20251"
# By how many requests run at once; one at a time takes long.
COUNTS = {1: 100, 40: SAMPLES}
# Tokens beside others cost something, drafting next to nothing: a planner drafts, and cuts.
CUTS = CostCurve(verify=((1, 1.0), (400, 5.0)), draft=((1, 0.01), (64, 0.02)))
# While a planner learns: samples of a call, calls, and calls that a change may take.
PART, PARTS, MOST_PARTS = 500, 3, 16


@pytest.fixture(scope="module")
def enumerated() -> tuple[list[int], dict[Outcome, float]]:
    return most_varied_prompt()


def server(base: str, folder: Path, *rule: str, **options: Any) -> CpuServer:
    """rule: flags in the place of a classifier and a beta."""
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    return CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(pair_dir() / DRAFTS[base])),
        *("--speculative-num-steps", str(D_MAX)),
        *(rule or ("--speculative-c2t-classifier", str(classifier), "--speculative-c2t-beta", str(BETA))),
        *("--max-running-requests", "48", "--random-seed", SEED),
        log=folder / "server.log",
        **options,
    )


def sample(running: CpuServer, prompt: list[int], count: int = SAMPLES) -> list[dict[str, Any]]:
    params = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_new_tokens": TOKENS, "ignore_eos": True, "n": count}
    return running.request("/generate", {"input_ids": prompt, "sampling_params": params})


def sample_at(running: CpuServer, prompt: list[int], concurrency: int) -> list[dict[str, Any]]:
    """COUNTS samples, `concurrency` at a time: of one client, or of two that ask for several at once each, so that
    requests come and go while others run."""
    params = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_new_tokens": TOKENS, "ignore_eos": True}
    clients = min(2, concurrency)
    each = concurrency // clients
    body = {"input_ids": [prompt] * each, "sampling_params": params}
    with ThreadPoolExecutor(clients) as pool:
        found = pool.map(lambda _: running.request("/generate", body), range(COUNTS[concurrency] // each))
        return [answer for answers in found for answer in answers]


def outcomes(answers: Iterable[dict[str, Any]]) -> list[Outcome]:
    return [tuple(answer["output_ids"]) for answer in answers]


def assert_drafts_were_tried_and_cut(answers: Sequence[dict[str, Any]]) -> None:
    metas = [answer["meta_info"] for answer in answers]
    lengths = Counter[int]()
    for meta in metas:
        lengths.update({n - 1: steps for n, steps in enumerate(meta["spec_cap_lens_histogram"])})
    cut_short = sum(steps for length, steps in lengths.items() if length < D_MAX)
    assert cut_short > len(answers) / 10, "next to nothing is cut: the test would show stock verification only"
    accepted = sum(meta["spec_num_correct_drafts"] for meta in metas)
    tried = sum(length * steps for length, steps in lengths.items())
    assert len(answers) / 10 < accepted < tried - len(answers) / 10, "too few drafts are kept, or too few are refused"


@pytest.mark.parametrize("base", ["standalone", "eagle3"])
def test_samples_have_the_targets_distribution(
    base: str, enumerated: tuple[list[int], dict[Outcome, float]], tmp_path: Path
):
    prompt, probs = enumerated
    assert sum(p * SAMPLES >= MIN_EXPECTED for p in probs.values()) >= 20, "too few outcomes to tell anything"
    with server(base, tmp_path) as running:
        answers = {n: sample_at(running, prompt, n) for n in COUNTS}
    assert {n: len(found) for n, found in answers.items()} == COUNTS
    for found in answers.values():
        assert_drafts_were_tried_and_cut(found)
    values = {n: p_value(outcomes(found), probs) for n, found in answers.items()}
    assert min(values.values()) >= ALPHA, values


def draw_independently(probs: list[float], count: int) -> list[Outcome]:
    """Outcomes whose words are independent and have these probabilities."""
    generator = torch.Generator().manual_seed(2)
    words = torch.multinomial(torch.tensor(probs), count * TOKENS, replacement=True, generator=generator)
    return [tuple(row) for row in words.view(count, TOKENS).tolist()]


@pytest.mark.parametrize("count", COUNTS.values())
def test_the_test_itself(count: int):
    """It passes on samples of the distribution, and fails on those of the bias below or with an impossible one."""
    right, biased = [0.5, 0.3, 0.2], [0.75, 0.15, 0.1]
    known = {
        words: math.prod(right[word] for word in words) for words in itertools.product(range(TOP_K), repeat=TOKENS)
    }
    samples = draw_independently(right, count)
    assert p_value(samples, known) >= ALPHA
    assert p_value(draw_independently(biased, count), known) < ALPHA
    assert p_value([(9,) * TOKENS, *samples[1:]], known) < ALPHA


# The draft is refused by its own coin, and the next token is then drawn as if it had not been tried. A rule that cut a
# chain by the target's draw instead of by the draft's statistics would do just this: p becomes p + (1 - p) p.
BIAS = """
def register():
    print("planted: refused drafts can be drawn again", flush=True)
    from c2t_cpu_engine import sampling

    draw = sampling._draw
    sampling._draw = lambda probs, refused, coin: draw(probs, [], coin)
"""


def test_a_planted_bias_is_seen(enumerated: tuple[list[int], dict[Outcome, float]], tmp_path: Path):
    prompt, probs = enumerated
    (tmp_path / "planted_bias.py").write_text(BIAS)
    info = tmp_path / "planted_bias-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-bias\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbias = planted_bias:register\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with server("standalone", tmp_path, env={**os.environ, "PYTHONPATH": path}) as running:
        answers = sample(running, prompt)
    assert "planted: refused drafts" in (tmp_path / "server.log").read_text(errors="replace")
    assert_drafts_were_tried_and_cut(answers)
    assert p_value(outcomes(answers), probs) < ALPHA


def learnt(running: CpuServer) -> dict[str, Any]:
    """With `changes` of what confidences are taken for: networks that were put in force, else whether a fit was."""
    (state,) = running.request("/get_server_info")["internal_states"]
    found = state["c2t"]["planner"]["learnt"]
    return {**found, "changes": found["network"]["swaps"] if "network" in found else int(found["slope"] != 1.0)}


@pytest.mark.parametrize("learn", ["calibrate", "network"])
def test_samples_have_it_while_a_planner_learns_from_them(
    learn: str, enumerated: tuple[list[int], dict[Outcome, float]], tmp_path: Path
):
    prompt, probs = enumerated
    write_curve(CUTS, tmp_path / "curve.json")
    plugin = str(faults.install(tmp_path, learns_fast.__file__))
    path = os.pathsep.join(filter(None, [plugin, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "BIAS": str(tmp_path / "bias")}
    classifier = str(save_untaught_classifier(tmp_path / "untaught.safetensors"))
    planned = ("--speculative-c2t-planner", str(tmp_path / "curve.json"), "--speculative-c2t-learn", learn)
    with server("eagle3", tmp_path, "--speculative-c2t-classifier", classifier, *planned, env=env) as running:
        told, answers = [learnt(running)], list[dict[str, Any]]()
        # some before and some after, however long it takes
        while len(told) <= PARTS or (not told[-2]["changes"] and len(told) <= MOST_PARTS):
            answers += sample(running, prompt, PART)
            told.append(learnt(running))
        (tmp_path / "bias").touch()
        # either way of learning has the same verification
        biased = sample(running, prompt, SAMPLES // 2) if learn == "network" else []
    assert "planted: networks are trained fast" in (tmp_path / "server.log").read_text(errors="replace")
    assert told[0]["changes"] == 0 < told[-2]["changes"], f"nothing was learnt while it sampled: {told[-1]}"
    assert_drafts_were_tried_and_cut(answers)
    assert p_value(outcomes(answers), probs) >= ALPHA
    if biased:
        assert_drafts_were_tried_and_cut(biased)
        assert p_value(outcomes(biased), probs) < ALPHA
