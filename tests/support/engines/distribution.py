"""The exact distribution of a target's next tokens, and whether samples have it: for the tests of every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from scipy.stats import chi2, chisquare
from transformers import LlamaForCausalLM

from benchmarks.pairs.toy import held_out_prompts, pair_dir

TOKENS = 4
# With three words per token there are 81 outcomes, few enough for samples of each.
TOP_K = 3
TEMPERATURE = 0.8
SAMPLES = 2000
# Of a prompt. Where nothing is cached each sample's prefill reads all of it: there a SHORT one has as many outcomes,
# and drafts that go past a first page of 16 tokens.
LONG, SHORT = 64, 10
# A right server fails one run in ten thousand. A seed fixes its draws, though not how requests meet in batches.
ALPHA = 1e-4
# Below this expected count the chi-square distribution is a poor approximation; such outcomes are pooled.
MIN_EXPECTED = 5.0
# Of rank_p_value: places of the target's words that are told apart.
RANKS = 3

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
    """Of the chi-square test that the samples have these probabilities; rare outcomes are one class, an impossible one
    leaves no chance."""
    counts = Counter(samples)
    if not counts.keys() <= probs.keys():
        return 0.0
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


@torch.no_grad()
def rank_p_value(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    outputs: list[list[int]],
    top_k: int | None = None,
    top_p: float = 1.0,
) -> float:
    """Of the chi-square test that words drawn at temperature 1 have the ranks that the target gives them.

    Each word of an output counts, by its place among the target's words there: first to RANKS-th, or behind. Their
    probabilities differ from word to word, so the counts' covariance is the sum over the words. A word that top_k or
    top_p leaves out leaves no chance.
    """
    surplus, covariance = torch.zeros(RANKS).double(), torch.zeros(RANKS, RANKS).double()
    for prompt, words in zip(prompts, outputs, strict=True):
        logits = model(torch.tensor([[*prompt, *words]]), use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        probs, ranked = logits.softmax(-1).sort(descending=True)
        # vLLM applies top-k first, and top-p to what is left
        probs = _normalised(probs * (torch.arange(probs.shape[1]) < (top_k or probs.shape[1])))
        probs = _normalised(probs * (probs.cumsum(-1) - probs < top_p))
        drawn = ranked == torch.tensor(words)[:, None]
        if not probs[drawn].all():
            return 0.0
        probs = probs[:, :RANKS]
        surplus += (drawn[:, :RANKS].double() - probs).sum(0)
        covariance += torch.diag(probs.sum(0)) - probs.T @ probs
    return float(chi2.sf(float(surplus @ torch.linalg.solve(covariance, surplus)), df=RANKS))


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


def most_varied_prompt(length: int = LONG) -> tuple[list[int], dict[Outcome, float]]:
    """Of so many tokens the held-out prompt whose continuations vary most, and their exact distribution."""
    model = LlamaForCausalLM.from_pretrained(pair_dir() / "target", dtype=torch.float32).eval()
    prompts = [prompt[:length] for prompt in held_out_prompts(8, seed=2)]
    found = [(prompt, enumerate_outcomes(model, prompt)) for prompt in prompts]
    return max(found, key=lambda item: sum(p * SAMPLES >= MIN_EXPECTED for p in item[1].values()))
