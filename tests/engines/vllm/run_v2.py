"""Model runner V2 in a process of its own: `python -m tests.engines.vllm.run_v2 JOB.json OUT.json`.

JOB: target, prompts, new_tokens, max_num_seqs, speculative (one configuration per engine). OUT: per engine the output
ids and the steps of each request as (drafted, accepted), C2T's state then, and the first prompt's steps alone, with the
state behind them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# A token of the target costs as much as this many verified draft tokens: the least the manager's cost tables need.
COST_OF_A_STEP = 20.0


def main(job: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from tests.engines.vllm import interpreter

    interpreter.install()
    _allow_adaptive_verification()
    return [_run(job, spec) for spec in job["speculative"]]


def _run(job: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.engines.vllm.verify_counts import Steps

    llm = LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=job["max_num_seqs"],
        kv_cache_memory_bytes=2**28,
        speculative_config=spec,
        per_request_spec_decode_metrics="detailed",
        seed=0,
    )
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True)

    def steps_of(prompts: list[list[int]]) -> list[Steps]:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [Steps.of_output(output) for output in found]

    steps = steps_of(job["prompts"])
    (state,) = llm.collective_rpc("c2t_control")
    (alone,) = steps_of(job["prompts"][:1])
    (state_alone,) = llm.collective_rpc("c2t_control")
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return {
        "outputs": [each.output_ids for each in steps],
        "steps": [each.steps for each in steps],
        "state": state,
        "alone": alone.steps,
        "state_alone": state_alone,
    }


def _allow_adaptive_verification() -> None:
    """It needs full CUDA graphs, to price its batches; a CPU has neither, so the prices are made up."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as stock

    def manager(*, enable_adaptive_verification: bool, **keyword: Any) -> Any:
        if not enable_adaptive_verification:
            return None
        names = ("req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits")
        made = stock.AdaptiveVerificationManager(**{name: keyword[name] for name in names})
        most = made.req_states.max_num_batched_tokens
        curve = [(tokens, COST_OF_A_STEP + tokens) for tokens in range(0, most + 1, most // 8)]
        made.set_cost_curves([(made.req_states.max_num_reqs, 0.0)], curve)
        return made

    VllmConfig._validate_adaptive_verification = lambda self: None
    model_runner.maybe_create_adaptive_verification_manager = manager
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode
    stock._assign_draft_token_budget_compiled = stock._assign_draft_token_budget
    stock.stream = lambda *_: contextlib.nullcontext()


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
