"""Every vLLM symbol that the adapter relies on, checked when C2T is selected, before the engine starts."""

from __future__ import annotations

from c2t_plugin.engines.contract import EngineSymbol, check_contract
from c2t_plugin.errors import ContractError

SUPPORTED = "vLLM 0.32"
RELEASE = "0.32."

_ARGUMENTS = "engine/arg_utils.py"
_PROPOSER = "v1/spec_decode/llm_base_proposer.py"
_RUNNER = "v1/worker/gpu_model_runner.py"
_V2 = "v1/worker/gpu"

SYMBOLS: tuple[EngineSymbol, ...] = (
    EngineSymbol(_ARGUMENTS, "EngineArgs.create_engine_config", ("self",), ("self.create_speculative_config(",)),
    EngineSymbol(_ARGUMENTS, "EngineArgs.from_cli_args", ("cls", "args")),
    EngineSymbol(_ARGUMENTS, "EngineArgs.speculative_config"),
    EngineSymbol(_ARGUMENTS, "EngineArgs.additional_config"),
    EngineSymbol(_ARGUMENTS, "EngineArgs.async_scheduling"),
    EngineSymbol("config/parallel.py", "ParallelConfig.worker_cls"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.use_gemma4_mtp"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.use_step3p5_mtp"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.use_multi_module_mtp"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.use_local_argmax_reduction"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.parallel_drafting"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.use_heterogeneous_vocab"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.rejection_sample_method"),
    EngineSymbol("config/speculative.py", "SpeculativeConfig.draft_model_config"),
    EngineSymbol("config/model.py", "ModelConfig.architectures"),
    EngineSymbol("config/vllm.py", "VllmConfig.additional_config"),
    EngineSymbol("v1/worker/worker_base.py", "WorkerWrapperBase.init_worker", contains=("parallel_config.worker_cls",)),
    EngineSymbol("v1/worker/cpu_worker.py", "CPUWorker.init_device", ("self",), ("= CPUModelRunner(",)),
    EngineSymbol("v1/worker/gpu_worker.py", "Worker.__init__", contains=("self.use_v2_model_runner =",)),
    EngineSymbol("v1/worker/gpu_worker.py", "Worker.init_device", ("self",)),
    EngineSymbol("v1/worker/gpu_worker.py", "Worker.compile_or_warm_up_model"),
    EngineSymbol("v1/worker/cpu_worker.py", "CPUWorker.compile_or_warm_up_model"),
    EngineSymbol(
        _PROPOSER,
        "SpecDecodeBaseProposer.propose",
        ("num_speculative_tokens", "common_attn_metadata"),
        ("self._sample_draft_tokens(", "self._last_draft_probs = torch.stack(draft_probs_list, dim=1)"),
    ),
    EngineSymbol(
        _PROPOSER,
        "SpecDecodeBaseProposer._sample_draft_tokens",
        ("hidden_states", "sampling_metadata"),
        ("self._greedy_sample(", "self.model.compute_logits(hidden_states)"),
    ),
    EngineSymbol(_PROPOSER, "SpecDecodeBaseProposer._greedy_sample", contains=("self.model.compute_logits(",)),
    EngineSymbol(_PROPOSER, "SpecDecodeBaseProposer.load_model", ("target_model",), ("self.model =",)),
    EngineSymbol(
        "model_executor/model_loader/default_loader.py",
        "DefaultModelLoader._prepare_weights",
        contains=("filter_duplicate_safetensors_files(",),
    ),
    EngineSymbol("v1/spec_decode/eagle.py", "EagleProposer.__init__", ("vllm_config", "device", "runner")),
    EngineSymbol("v1/spec_decode/draft_model.py", "DraftModelProposer.__init__", ("vllm_config", "device", "runner")),
    EngineSymbol(
        _RUNNER,
        "GPUModelRunner.__init__",
        contains=("= DraftModelProposer(", "= EagleProposer(", "self.requests: dict[", "self.input_batch ="),
    ),
    EngineSymbol(
        _RUNNER, "GPUModelRunner._get_draft_token_ids_cpu", contains=("isinstance(self._draft_token_ids, list)",)
    ),
    EngineSymbol(_RUNNER, "GPUModelRunner._get_spec_decode_draft_probs", contains=("[row_idx, :num_draft]",)),
    EngineSymbol("v1/metrics/loggers.py", "PrometheusStatLogger.__init__", ("vllm_config",)),
    EngineSymbol(
        "v1/metrics/loggers.py",
        "PrometheusStatLogger.record",
        ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    EngineSymbol("v1/metrics/stats.py", "SchedulerStats.spec_decoding_stats"),
    EngineSymbol(
        "v1/metrics/stats.py", "IterationStats.update_from_output", contains=("inter_token_latencies_iter.append(",)
    ),
    EngineSymbol("config/scheduler.py", "SchedulerConfig.async_scheduling"),
    EngineSymbol("config/scheduler.py", "SchedulerConfig.scheduler_cls"),
    EngineSymbol("v1/core/sched/output.py", "SchedulerOutput.scheduled_spec_decode_tokens"),
    EngineSymbol("v1/core/sched/output.py", "SchedulerOutput.num_invalid_spec_tokens"),
    EngineSymbol(
        "v1/core/sched/scheduler.py",
        "Scheduler.update_from_output",
        ("scheduler_output", "model_runner_output"),
        ("num_invalid_spec_tokens=scheduler_output.num_invalid_spec_tokens", "adj_draft_tokens -="),
    ),
    EngineSymbol(
        "v1/core/sched/scheduler.py",
        "Scheduler.make_spec_decoding_stats",
        contains=("num_draft_tokens -= num_invalid_spec_tokens.get(request_id, 0)",),
    ),
    EngineSymbol("v1/core/sched/async_scheduler.py", "AsyncScheduler"),
    EngineSymbol("v1/spec_decode/metrics.py", "SpecDecodingStats.num_drafts"),
    EngineSymbol("v1/spec_decode/metrics.py", "SpecDecodingStats.num_accepted_tokens"),
    EngineSymbol("v1/spec_decode/metrics.py", "SpecDecodingStats.num_draft_tokens_per_pos"),
    EngineSymbol("triton_utils/dispatcher.py", "register_kernels", ("overrides",)),
    EngineSymbol(
        "v1/sample/rejection_sampler.py",
        "apply_sampling_constraints",
        contains=("apply_top_k_top_p(logits, top_k, top_p)",),
    ),
    EngineSymbol("v1/sample/rejection_sampler.py", "expand_kernel", ("output_ptr", "input_ptr", "cu_num_tokens_ptr")),
    EngineSymbol(
        f"{_V2}/spec_decode/speculator.py",
        "DraftModelSpeculator.sample_draft",
        ("hidden_states", "idx_mapping", "draft_step"),
        ("self._maybe_predict_acceptance(logits, idx_mapping, draft_step)",),
    ),
    EngineSymbol(
        f"{_V2}/spec_decode/speculator.py",
        "DraftModelSpeculator._maybe_predict_acceptance",
        contains=("self.acceptance_estimator.predict(", "self.draft_token_confidence_probs", "self.temperature"),
    ),
    EngineSymbol(
        f"{_V2}/spec_decode/speculator.py",
        "DraftModelSpeculator.observe_verification",
        ("idx_mapping", "num_sampled", "num_rejected"),
        ("self.acceptance_estimator.step(idx_mapping, num_sampled, num_rejected)",),
    ),
    EngineSymbol(f"{_V2}/spec_decode/speculator.py", "DraftModelSpeculator.load_model", ("target_model",)),
    EngineSymbol(
        f"{_V2}/spec_decode/acceptance_estimator.py",
        "OnlineAcceptanceEstimator.predict",
        ("logits", "idx_mapping", "draft_step", "confidence_probs", "temperature"),
        ("confidence_probs.stride(0)",),
    ),
    EngineSymbol(
        f"{_V2}/spec_decode/acceptance_estimator.py",
        "OnlineAcceptanceEstimator.step",
        ("idx_mapping", "num_sampled", "num_rejected"),
    ),
    EngineSymbol(f"{_V2}/spec_decode/__init__.py", "init_speculator", contains=("StandaloneARSpeculator(",)),
    EngineSymbol(
        f"{_V2}/spec_decode/speculator.py",
        "BaseSpeculator.propose",
        ("input_batch", "dummy_run", "num_speculative_tokens"),
    ),
    EngineSymbol(
        f"{_V2}/spec_decode/target_dependent_ar/speculator.py",
        "TargetDependentARSpeculator._generate_draft",
        contains=("self._run_model(", "self.sample_draft("),
    ),
    EngineSymbol(
        f"{_V2}/spec_decode/standalone_ar/speculator.py",
        "StandaloneARSpeculator._multi_step_decode",
        contains=("self._run_model(", "self.sample_draft("),
    ),
    EngineSymbol(
        f"{_V2}/spec_decode/mtp/speculator.py",
        "MTPSpeculator.on_prefill_begin",
        contains=("set_skip_topk(False)",),
    ),
    EngineSymbol(
        f"{_V2}/model_runner.py",
        "GPUModelRunner.sample_tokens",
        contains=("self.speculator.propose(", "num_speculative_tokens=num_spec_tokens"),
    ),
    EngineSymbol(
        f"{_V2}/model_runner.py",
        "GPUModelRunner.__init__",
        contains=("self.output_copy_stream = torch.cuda.Stream(",),
    ),
    EngineSymbol(f"{_V2}/model_runner.py", "GPUModelRunner.main_stream"),
    EngineSymbol(
        f"{_V2}/async_utils.py",
        "AsyncOutput.__init__",
        contains=(
            "self.sampler_output =",
            "copy_stream.wait_stream(main_stream)",
            "self.copy_event.record(copy_stream)",
        ),
    ),
    EngineSymbol(f"{_V2}/async_utils.py", "AsyncOutput.get_output", contains=("self.copy_event.synchronize()",)),
    EngineSymbol(f"{_V2}/async_utils.py", "async_copy_to_np"),
    EngineSymbol(f"{_V2}/async_utils.py", "stream", ("to_stream", "from_stream")),
    EngineSymbol(f"{_V2}/sample/output.py", "SamplerOutput.num_rejected"),
    EngineSymbol("v1/worker/gpu_worker.py", "Worker.sample_tokens", ("self", "grammar_output")),
    EngineSymbol(
        f"{_V2}/states.py",
        "RequestState.__init__",
        contains=("self.req_id_to_index", "self.all_token_ids", "self.prompt_len", "self.total_len"),
    ),
    EngineSymbol(f"{_V2}/spec_decode/eagle/speculator.py", "EagleSpeculator.load_draft_model"),
    EngineSymbol(f"{_V2}/spec_decode/mtp/speculator.py", "MTPSpeculator.load_draft_model"),
    EngineSymbol(f"{_V2}/spec_decode/standalone_ar/speculator.py", "StandaloneARSpeculator.load_draft_model"),
    EngineSymbol(f"{_V2}/spec_decode/utils.py", "DraftTokensHandler.set_draft_tokens", ("input_batch", "draft_tokens")),
    EngineSymbol(f"{_V2}/spec_decode/utils.py", "DraftTokensHandler.get_draft_tokens"),
    EngineSymbol(
        f"{_V2}/model_runner.py",
        "GPUModelRunner.take_draft_token_ids",
        contains=("self.draft_tokens_handler.get_draft_tokens()",),
    ),
)


def check(version: str) -> None:
    """Raise ContractError unless this release of vLLM is one the adapter knows and has every symbol as it needs it."""
    if not version.startswith(RELEASE):
        raise ContractError(
            f"vLLM {version} is installed, C2T supports {SUPPORTED}: install that, or a C2T that knows yours"
        )
    check_contract("vllm", SYMBOLS, SUPPORTED)
