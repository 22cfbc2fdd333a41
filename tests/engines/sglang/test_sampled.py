"""Temperature 0.8: what a server samples has the joint distribution of the target alone, cuts or not.

The first four tokens are compared with exact enumeration by transformers (chi-square). The same test on a server whose
verification is biased on purpose has to fail.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from scipy.stats import chisquare  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from c2t_plugin.engines.sglang.cpu_engine.server import CpuServer  # noqa: E402
from c2t_plugin.pair import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.sglang.verify_counts import DRAFTS, save_hand_made_classifier  # noqa: E402

TOKENS = 4
# With three words per token there are 81 outcomes, few enough for samples of each.
TOP_K = 3
TEMPERATURE = 0.8
SAMPLES = 2000
BETA = 0.45
D_MAX = 6
# A right server fails one run in ten thousand. The seed fixes its draws, though not how requests meet in batches.
ALPHA = 1e-4
SEED = "20251"
# Below this expected count the chi-square distribution is a poor approximation; such outcomes are pooled.
MIN_EXPECTED = 5.0

Outcome = tuple[int, ...]


@torch.no_grad()
def next_token_probs(model: LlamaForCausalLM, contexts: list[list[int]]) -> list[dict[int, float]]:
    """Per context (all of one length), the TOP_K most probable next words with their renormalised probabilities."""
    logits = model(torch.tensor(contexts), use_cache=False).logits[:, -1].double()
    values, words = (logits / TEMPERATURE).softmax(-1).topk(TOP_K)
    rows = (values / values.sum(-1, keepdim=True)).tolist()
    return [dict(zip(ids, probs, strict=True)) for ids, probs in zip(words.tolist(), rows, strict=True)]


def enumerate_outcomes(model: LlamaForCausalLM, prompt: list[int]) -> dict[Outcome, float]:
    """Probability of every sequence of TOKENS words."""
    known: dict[Outcome, float] = {(): 1.0}
    for _ in range(TOKENS):
        nexts = next_token_probs(model, [[*prompt, *words] for words in known])
        known = {
            (*words, word): p * q
            for (words, p), row in zip(known.items(), nexts, strict=True)
            for word, q in row.items()
        }
    return known


def p_value(samples: Iterable[Outcome], probs: Mapping[Outcome, float]) -> float:
    """Of the chi-square test that the samples have these probabilities; rare and impossible outcomes are one class."""
    counts = Counter(samples)
    total = sum(counts.values())
    often = [outcome for outcome, p in probs.items() if p * total >= MIN_EXPECTED]
    observed = [counts[outcome] for outcome in often]
    expected = [probs[outcome] * total for outcome in often]
    rest = total - sum(expected)
    if rest >= MIN_EXPECTED:
        observed.append(total - sum(observed))
        expected.append(rest)
    else:
        observed[-1] += total - sum(observed)
        expected[-1] += rest
    return float(chisquare(observed, expected).pvalue)


@pytest.fixture(scope="module")
def enumerated() -> tuple[list[int], dict[Outcome, float]]:
    """The held-out prompt whose continuations vary most, and their exact distribution."""
    model = LlamaForCausalLM.from_pretrained(pair_dir() / "target", dtype=torch.float32).eval()
    found = [(prompt[:64], enumerate_outcomes(model, prompt[:64])) for prompt in held_out_prompts(8, seed=2)]
    return max(found, key=lambda item: sum(p * SAMPLES >= MIN_EXPECTED for p in item[1].values()))


def server(base: str, folder: Path, **options: Any) -> CpuServer:
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    return CpuServer(
        pair_dir() / "target",
        *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(pair_dir() / DRAFTS[base])),
        *("--speculative-num-steps", str(D_MAX)),
        *("--speculative-c2t-classifier", str(classifier), "--speculative-c2t-beta", str(BETA)),
        *("--max-running-requests", "48", "--random-seed", SEED),
        log=folder / "server.log",
        **options,
    )


def sample(running: CpuServer, prompt: list[int]) -> list[dict[str, Any]]:
    params = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_new_tokens": TOKENS, "ignore_eos": True, "n": SAMPLES}
    return running.request("/generate", {"input_ids": prompt, "sampling_params": params})


def outcomes(answers: Iterable[dict[str, Any]]) -> list[Outcome]:
    return [tuple(answer["output_ids"]) for answer in answers]


def assert_drafts_were_tried_and_cut(answers: Iterable[dict[str, Any]]) -> None:
    metas = [answer["meta_info"] for answer in answers]
    lengths = Counter[int]()
    for meta in metas:
        lengths.update({n - 1: steps for n, steps in enumerate(meta["spec_cap_lens_histogram"])})
    cut_short = sum(steps for length, steps in lengths.items() if length < D_MAX)
    assert cut_short > SAMPLES / 10, "next to nothing is cut: the test would show stock verification only"
    accepted = sum(meta["spec_num_correct_drafts"] for meta in metas)
    tried = sum(length * steps for length, steps in lengths.items())
    assert SAMPLES / 10 < accepted < tried - SAMPLES / 10, "too few drafts are kept, or too few are refused"


@pytest.mark.parametrize("base", ["standalone", "eagle3"])
def test_samples_have_the_targets_distribution(
    base: str, enumerated: tuple[list[int], dict[Outcome, float]], tmp_path: Path
):
    prompt, probs = enumerated
    assert sum(p * SAMPLES >= MIN_EXPECTED for p in probs.values()) >= 20, "too few outcomes to tell anything"
    with server(base, tmp_path) as running:
        answers = sample(running, prompt)
    assert len(answers) == SAMPLES
    assert_drafts_were_tried_and_cut(answers)
    assert p_value(outcomes(answers), probs) >= ALPHA


def draw_independently(probs: list[float]) -> list[Outcome]:
    """SAMPLES outcomes whose words are independent and have these probabilities."""
    generator = torch.Generator().manual_seed(2)
    words = torch.multinomial(torch.tensor(probs), SAMPLES * TOKENS, replacement=True, generator=generator)
    return [tuple(row) for row in words.view(SAMPLES, TOKENS).tolist()]


def test_the_test_itself():
    """It passes on samples of the distribution, and fails on those of the bias below or with impossible ones."""
    right, biased = [0.5, 0.3, 0.2], [0.75, 0.15, 0.1]
    known = {
        words: math.prod(right[word] for word in words) for words in itertools.product(range(TOP_K), repeat=TOKENS)
    }
    samples = draw_independently(right)
    assert p_value(samples, known) >= ALPHA
    assert p_value(draw_independently(biased), known) < ALPHA
    assert p_value([(9,) * TOKENS] * (SAMPLES // 20) + samples[SAMPLES // 20 :], known) < ALPHA


# The draft is refused by its own coin, and the next token is then drawn as if it had not been tried. A rule that cut a
# chain by the target's draw instead of by the draft's statistics would do just this: p becomes p + (1 - p) p.
BIAS = """
def register():
    print("planted: refused drafts can be drawn again", flush=True)
    from c2t_plugin.engines.sglang.cpu_engine import sampling

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
