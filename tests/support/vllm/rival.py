"""C2T's confidence against vLLM's estimator inside vLLM's own adaptive verification, at equal budgets, on a CPU.

    python -m tests.support.vllm.rival --rivals-from TRAINING.traces [--prompts 16] [--new-tokens 32]

Model runner V2, interpreted. Every step verifies the same share of the drafted tokens, and who is right decides which:
the shipped classifier of the EAGLE-3 head, or vLLM's estimator, which starts from the best fit to the training traces
and goes on learning. Prints drafts accepted per verified token and per step, with 95% intervals of a paired bootstrap
over the held-out prompts. Output is greedy, and the same in every run or the script fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

SHARES = (0.2, 0.4, 0.6)
D_MAX = 6
BATCH = 8
ARMS = {"vLLM's estimator": "eagle3", "C2T": "c2t:eagle3"}
Counts = dict[str, np.ndarray]


def counted(llm: Any, prompts: list[list[int]], new_tokens: int, share: float) -> tuple[list[tuple[int, ...]], Counts]:
    """Outputs, and per prompt how many drafts were verified and accepted, and the steps with a draft."""
    from vllm import SamplingParams

    from tests.support.vllm.verify_counts import Steps

    manager = llm.collective_rpc(lambda worker: worker.model_runner.adaptive_verification)[0]
    manager.share, manager.verified = share, defaultdict(list)
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    steps = [Steps.of_output(output) for output in outputs]
    # the engine appends something of its own to a request's name
    verified = Counter[str]()
    for name, tokens in manager.verified.items():
        verified[name.partition("-")[0]] += sum(tokens)
    counts = {
        "verified": np.array([verified[output.request_id] for output in outputs]),
        "accepted": np.array([sum(accepted for _, accepted in each.steps) for each in steps]),
        "steps": np.array([len(each.steps) for each in steps]),
    }
    return [each.output_ids for each in steps], counts


def ratios(found: Counts, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accepted per verified token and per step, of every row of weights (replicates, prompts)."""
    sums = {name: drawn @ values for name, values in found.items()}
    return sums["accepted"] / sums["verified"], sums["accepted"] / sums["steps"]


def table(found: dict[tuple[str, float], Counts], prompts: int) -> list[str]:
    """Lines of Markdown."""
    drawn = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=2000)
    weights = np.concatenate([np.ones((1, prompts), dtype=int), drawn])
    heads = ["budget", "", "verified", "accepted", "accepted per verified", "accepted per step (bonus excluded)"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for share in SHARES:
        both = {name: ratios(found[name, share], weights) for name in ARMS}
        for name, (per_verified, per_step) in both.items():
            sums = [found[name, share][what].sum() for what in ("verified", "accepted")]
            lines.append(
                f"| {share:.0%} | {name} | {sums[0]:,} | {sums[1]:,} | {per_verified[0]:.3f} | {per_step[0]:.3f} |"
            )
        cells = []
        for ours, theirs in zip(both["C2T"], both["vLLM's estimator"], strict=True):
            gain = ours - theirs
            low, high = np.quantile(gain[1:], [0.025, 0.975])
            cells.append(f"{gain[0]:+.3f} ({low:+.3f} to {high:+.3f})")
        lines.append(f"| {share:.0%} | C2T less vLLM's | | | {' | '.join(cells)} |")
    return lines


def main(argv: list[str]) -> int:
    """Run both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals-from", type=Path, required=True, help="traces that the estimator learns from")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(argv)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from tests.support.vllm import interpreter, run_v2

    interpreter.install()
    run_v2.allow_adaptive_verification()
    from benchmarks.pairs.toy import held_out_prompts, pair_dir
    from benchmarks.pairs.toy.vllm_layout import write_vllm_layout
    from c2t_plugin.classifier import FILE_NAME
    from c2t_plugin.lab.rivals import OnlineLogistic
    from c2t_plugin.lab.sweeps import truncate
    from c2t_plugin.traces.file import load_traces

    fitted = OnlineLogistic(D_MAX).fit_whole(truncate(load_traces(options.rivals_from).chain, D_MAX), D_MAX)
    prompts = held_out_prompts(options.prompts, seed=1)
    found: dict[tuple[str, float], Counts] = {}
    texts = set()
    with TemporaryDirectory() as folder:
        layout = write_vllm_layout(pair_dir(), Path(folder))
        for name, method in ARMS.items():
            spec = {"method": method, "model": str(layout / "eagle3"), "num_speculative_tokens": D_MAX}
            if method.startswith("c2t"):
                spec |= {"c2t_classifier": str(pair_dir() / "eagle3" / FILE_NAME), "c2t_beta": 0.0}
            spec["enable_adaptive_verification"] = True
            with run_v2.engine({"target": str(layout / "target"), "max_num_seqs": BATCH}, spec) as llm:
                for share in SHARES:
                    if not method.startswith("c2t"):
                        estimator = llm.collective_rpc(lambda w: w.model_runner.speculator.acceptance_estimator)[0]
                        estimator.slope.fill_(fitted.slope)
                        estimator.intercepts.copy_(fitted.bias)
                    outputs, found[name, share] = counted(llm, prompts, options.new_tokens, share)
                    texts.add(tuple(outputs))
    if len(texts) != 1:
        print("the outputs differ between runs", file=sys.stderr)
        return 1
    print("\n".join(table(found, options.prompts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
