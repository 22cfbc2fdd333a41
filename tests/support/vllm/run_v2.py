"""Model runner V2 in a process of its own: `python -m tests.support.vllm.run_v2 JOB.json OUT.json`.

JOB: target, prompts, new_tokens, max_num_seqs, speculative (one configuration per engine, with a `target` where that
is another; None for plain decoding), and further `options` of every engine. OUT: per engine the output ids and the
steps of each request as (drafted, accepted), C2T's state and counters of /metrics then, and the first prompt's steps
alone, with the state behind them; under adaptive verification what its manager gave each request, step by step; of a
configuration with `fits_every` vLLM's estimator is fitted after so many steps; of one with `own`, what each prompt's
request sets for itself, their outputs and steps once more with that, and the first one's without behind it; of a
configuration with `sampled` (tokens, and further sampling parameters), outputs at temperature 1 without and with a
planted fault; of one with `swap`, parameters that drafts are scored by before the first prompt's steps alone, of the
worker and of the scheduler's learner, and behind them, when all of them have been multiplied by so much. With `mixed`:
test_features.py's answers, the last prompt's twice more with its steps, counters, and by `exact` outputs and steps of
its `exact_prompts`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What is sampled is harder to foresee: with a low threshold most of its tokens are drafts, kept ones and cut ones.
SAMPLED_BETA = 0.2
# A token of the target costs as much as this many verified draft tokens: the least the manager's cost tables need.
COST_OF_A_STEP = 20.0


def main(job: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from tests.support.vllm import interpreter

    interpreter.install()
    interpreter.replace_what_it_does_not_know()
    allow_adaptive_verification()
    allow_asynchronous_scheduling()
    run = _mixed if job.get("mixed") else _run
    return [run(job, spec) for spec in job["speculative"]]


@contextlib.contextmanager
def engine(job: dict[str, Any], spec: dict[str, Any] | None) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        spec.pop("target", job["target"]) if spec else job["target"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=job["max_num_seqs"],
        disable_log_stats=False,
        kv_cache_memory_bytes=2**28,
        speculative_config=spec,
        per_request_spec_decode_metrics="detailed" if spec else "none",
        seed=0,
        **{"max_model_len": 512, **job.get("options", {})},
    )
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _run(job: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    from tests.engines.vllm.test_features import counter, steps_by_length
    from tests.support.vllm.verify_counts import Steps

    greedy = {"temperature": 0, "max_tokens": job["new_tokens"], "ignore_eos": True}
    sampled, fits_every, own, swap = (spec.pop(name, None) for name in ("sampled", "fits_every", "own", "swap"))
    if fits_every is not None:
        from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

        OnlineAcceptanceEstimator.REFIT_INTERVAL = fits_every
    with engine(job, spec) as llm:

        def steps_of(prompts: list[list[int]], own: list[dict[str, Any]] | None = None) -> list[Steps]:
            asked = [SamplingParams(**greedy, extra_args=each) for each in own or [{}] * len(prompts)]
            found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
            return [Steps.of_output(output) for output in found]

        steps = steps_of(job["prompts"])
        (state,) = llm.collective_rpc("c2t_control")
        counted = {"steps": list(steps_by_length(llm).items()), "accepted": counter(llm, "vllm:c2t_accepted_tokens")}
        networks = [] if swap is None else [scored_by(llm)]
        if swap is not None:
            put_in_force(llm, swap)
        (alone,) = steps_of(job["prompts"][:1])
        networks += [] if swap is None else [scored_by(llm)]
        (state_alone,) = llm.collective_rpc("c2t_control")
        (drawn,) = llm.collective_rpc(lambda worker: worker.model_runner.speculator.draft_logits is not None)
        (manager,) = llm.collective_rpc(lambda worker: worker.model_runner.adaptive_verification)
        with_own = [] if own is None else [*steps_of(job["prompts"], own), *steps_of(job["prompts"][:1])]
        samples = {}
        if sampled is not None:
            llm.collective_rpc("c2t_control", kwargs={"beta": SAMPLED_BETA})
            samples["right"] = sample(llm, job["prompts"], sampled)
            llm.collective_rpc(take_drafts_unseen)
            samples["faulty"] = sample(llm, job["prompts"], sampled)
    return {
        "asynchronous": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "given": None if manager is None else list(manager.verified.values()),
        "drafts_are_drawn": drawn,
        "samples": samples,
        "outputs": [each.output_ids for each in steps],
        "steps": [each.steps for each in steps],
        "own": [[each.output_ids, each.steps] for each in with_own],
        "networks": networks,
        "state": state,
        "counted": counted,
        "alone": alone.steps,
        "state_alone": state_alone,
    }


def scored_by(llm: Any) -> dict[str, Any]:
    """Of the worker and of the scheduler's learner the weights of the last layer; and how many drafts that has seen."""
    (worker,) = llm.collective_rpc(lambda worker: worker.model_runner.speculator.scorer.network.out_weight.tolist())
    planning = llm.llm_engine.engine_core.engine_core.scheduler.planning
    planning.learn()
    learner = planning.planner._calibration
    return {"worker": worker, "learner": learner.network.out_weight.tolist(), "drafts": len(learner.outcomes)}


def put_in_force(llm: Any, times: float) -> None:
    """As if a candidate had proved better."""
    from c2t_plugin.planner.network import Network
    from c2t_plugin.planner.network_learner import Trial

    learner = llm.llm_engine.engine_core.engine_core.scheduler.planning.planner._calibration
    learner._settled = Trial(Network(*(times * each for each in learner.network)), learner.calibration, 0)


def sample(llm: Any, prompts: list[list[int]], sampled: dict[str, Any]) -> dict[str, Any]:
    """Of each prompt an output at temperature 1 and its steps."""
    from vllm import SamplingParams

    from tests.support.vllm.verify_counts import Steps

    # Noise is by seed and position, so requests of one seed would draw alike.
    sampling = [
        SamplingParams(temperature=1.0, ignore_eos=True, seed=101 + place, **sampled) for place in range(len(prompts))
    ]
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    steps = [Steps.of_output(output) for output in found]
    return {"outputs": [each.output_ids for each in steps], "steps": [each.steps for each in steps]}


def take_drafts_unseen(worker: Any) -> None:
    """The fault: whatever was not cut is accepted. vLLM has a switch for that, to try acceptance rates with."""
    import torch

    runner = worker.model_runner
    runner.rejection_sampler.synthetic_conditional_rates = torch.ones(runner.num_speculative_steps)


def _mixed(job: dict[str, Any], spec: dict[str, Any] | None) -> dict[str, Any]:
    from tests.engines.vllm.test_features import alone, answers, counter, steps_by_length, twice

    exact = {} if spec is None else spec.pop("exact", {})
    with engine(job, spec) as llm:
        found = answers(llm, job["prompts"], job["new_tokens"])
        steps, hits = steps_by_length(llm), counter(llm, "vllm:prefix_cache_hits")
        # the longest, which fills a block
        again = twice(llm, job["prompts"][-1], job["new_tokens"])
        hits = counter(llm, "vllm:prefix_cache_hits") - hits
        steps_of = alone(llm, exact, job["exact_prompts"], job["new_tokens"])
        return {
            "answers": [vars(each) for each in found],
            "again": [each.output_ids for each in again],
            "again_steps": [each.steps for each in again],
            "drops_last_block": llm.llm_engine.engine_core.engine_core.scheduler.use_eagle_block_drop,
            "preemptions": counter(llm, "vllm:num_preemptions"),
            "prefix_hits": hits,
            "exact": {name: [[each.output_ids, each.steps] for each in found] for name, found in steps_of.items()},
            "steps": list(steps.items()),
        }


def allow_adaptive_verification() -> None:
    """It needs full CUDA graphs, to price its batches; a CPU has neither, so the prices are made up."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as stock

    class Manager(stock.AdaptiveVerificationManager):
        """Set `share` to have that share of the drafts verified, whatever they cost; `verified` lists by request."""

        share: float | None = None

        def get_num_tokens(self, *positional: Any, **keyword: Any) -> int:
            tokens = super().get_num_tokens(*positional, **keyword)
            if self.share is None:
                return tokens
            drafts, others, _ = self._batch_budget
            self._batch_budget = drafts, others, round(self.share * sum(drafts.values()))
            return sum(others.values()) + self._batch_budget[2]

        def reallocate_drafts(self, req_ids: list[str], idx_mapping: Any) -> Any:
            scheduled, _, _ = self._batch_budget
            found = super().reallocate_drafts(req_ids, idx_mapping)
            for name, drafts in zip(req_ids, self._batch_draft_capacity.tolist(), strict=False):
                if scheduled[name]:
                    self.verified[name].append(drafts)
            return found

    def manager(*, enable_adaptive_verification: bool, **keyword: Any) -> Any:
        if not enable_adaptive_verification:
            return None
        names = ("req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits")
        made = Manager(**{name: keyword[name] for name in names})
        made.verified = defaultdict(list)
        most = made.req_states.max_num_batched_tokens
        curve = [(tokens, COST_OF_A_STEP + tokens) for tokens in range(0, most + 1, most // 8)]
        made.set_cost_curves([(made.req_states.max_num_reqs, 0.0)], curve)
        return made

    VllmConfig._validate_adaptive_verification = lambda self: None
    model_runner.maybe_create_adaptive_verification_manager = manager
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode
    stock._assign_draft_token_budget_compiled = stock._assign_draft_token_budget
    stock.stream = lambda *_: contextlib.nullcontext()


def allow_asynchronous_scheduling() -> None:
    """vLLM turns it off wherever it runs on a CPU, behind what the arguments resolve to."""
    from vllm.platforms import current_platform

    stock = current_platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        resolved = vllm_config.scheduler_config.async_scheduling
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = resolved

    current_platform.check_and_update_config = check_and_update_config


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
