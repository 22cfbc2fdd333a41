"""Acceptance of every draft of a pair on held-out prompts, written into its provenance.

The drafts belong to the target; the stand-alone one is also measured over the small target, which it was not made for.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from benchmarks.pairs.toy import load, load_prompts
from benchmarks.pairs.toy.acceptance import Visits, continue_prompts, interval, mean_accepted, visits_of
from c2t_plugin.lab.heads import EagleHead
from c2t_plugin.provenance import RunRecord

DRAFTS = ("eagle3", "draft", "eagle1", "mtp")
GAMMA = 4
NEW_TOKENS = 40


def evaluate(directory: Path, work: Path | None, prompts: int, seed: int, device: str) -> dict[str, Any]:
    """Measure every draft that `directory` holds and write provenance.json there.

    work: directory with the records of the training; records of stages that it lacks stay as provenance.json has them.
    """
    began = RunRecord.capture(seed)
    results = measure(directory, prompts, seed, device)
    path = directory / "provenance.json"
    previous = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    training = previous.get("training", {}) | (_records(work) if work else {})
    provenance = {
        "evaluation": began.to_json(),
        "weights": weights_digests(directory),
        "acceptance": results,
        "training": training,
    }
    path.write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    return results


def weights_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of the weights of every checkpoint in a pair directory."""
    present = [kind for kind in load.ARCHITECTURES if _has_weights(directory / kind)]
    return {kind: hashlib.sha256(load.weights_path(directory / kind).read_bytes()).hexdigest() for kind in present}


def measure(directory: Path, prompts: int, seed: int, device: str) -> dict[str, Any]:
    """Acceptance figures per draft; fp32, chain of GAMMA, NEW_TOKENS new tokens, bonus excluded.

    Those of the drafts over the small target are in a dictionary of their own, under small_target.
    """
    ids = [prompt["ids"] for prompt in load_prompts(directory)]
    chosen = random.Random(seed).sample(ids, min(prompts, len(ids)))
    results: dict[str, Any] = {"prompts": len(chosen), "gamma": GAMMA, "new_tokens": NEW_TOKENS, "bonus_counted": False}
    results |= _measure_over("target", DRAFTS, directory, chosen, seed, device)
    if _has_weights(directory / "small_target"):
        results["small_target"] = _measure_over("small_target", ("draft",), directory, chosen, seed, device)
    return results


def _measure_over(
    over: str, drafts: Sequence[str], directory: Path, prompts: Sequence[Sequence[int]], seed: int, device: str
) -> dict[str, Any]:
    """Figures of those of the drafts that the directory holds, over the target or small_target."""
    recipe = load.load_recipe(directory)
    target = load.load_llama(over, recipe, directory, device)
    greedy = continue_prompts(target, prompts, NEW_TOKENS, GAMMA, sample=False, seed=seed)
    sampled = continue_prompts(target, prompts, NEW_TOKENS, GAMMA, sample=True, seed=seed)
    results = {}
    for name in drafts:
        if not _has_weights(directory / name):
            continue
        draft: LlamaForCausalLM | EagleHead
        if name == "draft":
            draft = load.load_llama(name, recipe, directory, device)
        else:
            draft = load.load_head(name, recipe, target, directory).to(device)
        results[name] = summarise(
            visits_of(draft, target, greedy, GAMMA, sample=False), visits_of(draft, target, sampled, GAMMA, sample=True)
        )
        print(f"{name} over {over}", json.dumps(results[name]), flush=True)
    return results


def _has_weights(checkpoint: Path) -> bool:
    return load.weights_path(checkpoint).is_file()


def summarise(greedy: list[Visits], sampled: list[Visits]) -> dict[str, Any]:
    """The figures that go into the provenance. Intervals: 95%, over prompts; looped: share of states not novel."""
    states = [(count, novel) for v in greedy for count, novel in zip(v.accepted, v.novel, strict=True)]
    histogram = Counter(int(count) for count, _ in states)
    return {
        "greedy_novel_states": _with_interval(greedy, novel_only=True),
        "greedy_all_states": _with_interval(greedy),
        "temperature_1": _with_interval(sampled),
        "looped": round(sum(not novel for _, novel in states) / len(states), 3),
        "verify_steps": len(states),
        "greedy_histogram": [round(histogram[k] / len(states), 3) for k in range(GAMMA + 1)],
    }


def _with_interval(visits: list[Visits], novel_only: bool = False) -> dict[str, float | list[float]]:
    return {
        "mean": round(mean_accepted(visits, novel_only), 3),
        "interval": [round(bound, 3) for bound in interval(visits, novel_only)],
    }


def _records(work: Path) -> dict[str, Any]:
    return {
        path.stem.removeprefix("record-"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(work.glob("record-*.json"))
    }
