"""Every vLLM symbol that the adapter relies on, checked when C2T is selected, before the engine starts."""

from __future__ import annotations

from c2t_plugin.engines.contract import EngineSymbol, check_contract, listed, require_tested

SUPPORTED = "vLLM 0.32 or 0.33"
RELEASES = ("0.32.", "0.33.")

SYMBOLS: tuple[EngineSymbol, ...] = listed("""
engine/arg_utils.py
  EngineArgs.create_engine_config(self)
    self.create_speculative_config(
  EngineArgs.from_cli_args(cls, args)
  EngineArgs: speculative_config, additional_config, async_scheduling
envs.py
  environment_variables
    "VLLM_BATCH_INVARIANT": lambda: bool(
sampling_params.py
  SamplingParams: extra_args, _verify_extra_args
config/parallel.py
  ParallelConfig: worker_cls
config/speculative.py
  SpeculativeConfig: use_gemma4_mtp, use_step3p5_mtp, use_multi_module_mtp, use_local_argmax_reduction
  SpeculativeConfig: revision, parallel_drafting, use_heterogeneous_vocab, rejection_sample_method, draft_model_config
  SpeculativeConfig: num_speculative_tokens_per_batch_size
config/model.py
  ModelConfig: architectures
config/vllm.py
  VllmConfig: additional_config, lora_config
v1/worker/worker_base.py
  WorkerWrapperBase.init_worker
    parallel_config.worker_cls
v1/worker/cpu_worker.py
  CPUWorker.init_device(self)
    = CPUModelRunner(
  CPUWorker: compile_or_warm_up_model
v1/worker/gpu_worker.py
  Worker: use_v2_model_runner, compile_or_warm_up_model
  Worker.init_device(self)
  Worker.sample_tokens(self, grammar_output)
v1/spec_decode/llm_base_proposer.py
  SpecDecodeBaseProposer.propose(num_speculative_tokens, common_attn_metadata)
    self._sample_draft_tokens(
    self._last_draft_probs = torch.stack(draft_probs_list, dim=1)
  SpecDecodeBaseProposer._sample_draft_tokens(hidden_states, sampling_metadata)
    self.model.compute_logits(hidden_states)
  SpecDecodeBaseProposer._greedy_sample(hidden_states)
    self.model.compute_logits(
  SpecDecodeBaseProposer: model
  SpecDecodeBaseProposer.load_model(target_model)
  SpecDecodeBaseProposer.initialize_attn_backend
  SpecDecodeBaseProposer: block_size, max_num_tokens
  SpecDecodeBaseProposer.propose
    if self.num_speculative_tokens == 0:
model_executor/models/llama_eagle3.py
  Eagle3LlamaForCausalLM.compute_logits(hidden_states)
    self.logits_processor(self.lm_head, hidden_states)
    targets = base + self.draft_id_to_target_id
model_executor/model_loader/default_loader.py
  DefaultModelLoader._prepare_weights
    filter_duplicate_safetensors_files(
v1/spec_decode/eagle.py
  EagleProposer.__init__(vllm_config, device, runner)
v1/spec_decode/draft_model.py
  DraftModelProposer.__init__(vllm_config, device, runner)
v1/worker/gpu_model_runner.py
  GPUModelRunner: requests, input_batch
  GPUModelRunner.propose_draft_token_ids
    num_speculative_tokens=num_spec_tokens_to_schedule
    target_token_ids=target_token_ids,
    target_positions=target_positions,
    target_hidden_states=target_hidden_states,
    next_token_ids=next_token_ids,
    num_rejected_tokens_gpu=num_rejected_tokens_gpu,
    common_attn_metadata=common_attn_metadata,
  GPUModelRunner._get_spec_decode_draft_probs
    [row_idx, :num_draft]
  GPUModelRunner._sample(self, logits, spec_decode_metadata)
    if spec_decode_metadata is None:
    self.rejection_sampler(
  GPUModelRunner.__init__
    = DraftModelProposer(
    = EagleProposer(
  GPUModelRunner._get_draft_token_ids_cpu
    isinstance(self._draft_token_ids, list)
v1/worker/gpu_input_batch.py
  InputBatch: req_ids, num_computed_tokens_cpu
v1/attention/backend.py
  AttentionCGSupport: ALWAYS
  CommonAttentionMetadata: query_start_loc_cpu, max_query_len, block_table_tensor, slot_mapping
  CommonAttentionMetadata: seq_lens_cpu_upper_bound
v1/metrics/loggers.py
  PrometheusStatLogger.__init__(vllm_config)
  PrometheusStatLogger.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
v1/metrics/stats.py
  SchedulerStats: spec_decoding_stats, waiting_lora_adapters
config/scheduler.py
  SchedulerConfig: async_scheduling, scheduler_cls, max_num_seqs
v1/core/sched/output.py
  SchedulerOutput: scheduled_spec_decode_tokens, num_invalid_spec_tokens, num_scheduled_tokens
v1/core/sched/scheduler.py
  Scheduler.update_from_output(scheduler_output, model_runner_output)
    num_invalid_spec_tokens=scheduler_output.num_invalid_spec_tokens
  Scheduler.__init__
    self.dynamic_sd_lookup: list[int] | None = None
  Scheduler.schedule
    num_spec_tokens_to_schedule = self.dynamic_sd_lookup[
  Scheduler.update_draft_token_ids(draft_token_ids)
  Scheduler.get_grammar_bitmask(self, scheduler_output)
  Scheduler.make_stats
  Scheduler.make_spec_decoding_stats
    num_draft_tokens -= num_invalid_spec_tokens.get(request_id, 0)
  Scheduler._update_request_with_output
    del new_token_ids[num_new:]
v1/engine/core.py
  EngineCore.post_step(self, model_executed)
    self.model_executor.take_draft_token_ids()
    self.scheduler.update_draft_token_ids(draft_token_ids)
v1/request.py
  Request: use_structured_output, is_prefill_chunk, num_output_tokens, num_tokens
v1/core/sched/async_scheduler.py
  AsyncScheduler
v1/spec_decode/metrics.py
  SpecDecodingStats: num_drafts, num_accepted_tokens, num_draft_tokens_per_pos
v1/spec_decode/metadata.py
  SpecDecodeMetadata: draft_token_ids, num_draft_tokens, max_spec_len
v1/sample/metadata.py
  SamplingMetadata: all_greedy, max_num_logprobs, logprob_token_ids, no_penalties, allowed_token_ids_mask
  SamplingMetadata: bad_words_token_ids, logitsprocs, thinking_budget_state_holder
v1/sample/logits_processor/builtin.py
  MinTokensLogitsProcessor: min_toks
v1/sample/sampler.py
  Sampler.greedy_sample(logits)
triton_utils/dispatcher.py
  register_kernels(overrides)
v1/sample/rejection_sampler.py
  RejectionSampler: synthetic_mode
  RejectionSampler.forward
    target_logits = self.apply_logits_processors(
  PLACEHOLDER_TOKEN_ID
  apply_sampling_constraints
    apply_top_k_top_p(logits, top_k, top_p)
  expand_kernel(output_ptr, input_ptr, cu_num_tokens_ptr)
v1/worker/gpu/spec_decode/speculator.py
  DraftModelSpeculator.sample_draft(hidden_states, idx_mapping, draft_step)
    self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
  DraftModelSpeculator._maybe_predict_acceptance
    self.acceptance_estimator.predict(
  DraftModelSpeculator.observe_verification(idx_mapping, num_sampled, num_rejected)
    self.acceptance_estimator.step(idx_mapping, num_sampled, num_rejected)
  DraftModelSpeculator.load_model(target_model)
    self.acceptance_estimator = OnlineAcceptanceEstimator(
  BaseSpeculator.propose(input_batch, dummy_run, num_speculative_tokens)
v1/worker/gpu/spec_decode/acceptance_estimator.py
  OnlineAcceptanceEstimator.predict(logits, idx_mapping, draft_step, confidence_probs, temperature)
    confidence_probs.stride(0)
  OnlineAcceptanceEstimator.step(idx_mapping, num_sampled, num_rejected)
    self.features,
    self.predictions,
  OnlineAcceptanceEstimator: slope, intercepts, info, grad, counts
v1/worker/gpu/spec_decode/__init__.py
  init_speculator
    StandaloneARSpeculator(
v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py
  TargetDependentARSpeculator._generate_draft
    self._run_model(
  TargetDependentARSpeculator.on_prefill_end(num_reqs)
  TargetDependentARSpeculator.propose
    self.on_prefill_end(
v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py
  SpeculatorCudaGraphManager.capture
    speculative_config.num_speculative_tokens_per_batch_size
v1/worker/gpu/spec_decode/standalone_ar/speculator.py
  StandaloneARSpeculator._multi_step_decode
    self._run_model(
  StandaloneARSpeculator: load_draft_model
v1/worker/gpu/spec_decode/mtp/speculator.py
  MTPSpeculator: on_prefill_begin, load_draft_model
v1/worker/gpu/model_runner.py
  GPUModelRunner.sample_tokens
    num_speculative_tokens=num_spec_tokens
  GPUModelRunner: main_stream, output_copy_stream, attn_groups, model_state, decode_query_len, ubatch_runner
  GPUModelRunner.initialize_kv_cache
    self.cudagraph_manager = ModelCudaGraphManager(
    varlen_decode=self.adaptive_verification is not None
  GPUModelRunner.take_draft_token_ids
    self.draft_tokens_handler.get_draft_tokens()
v1/worker/gpu/cudagraph_utils.py
  CudaGraphManager._init_candidates
    max_query_len=self.decode_query_len
v1/worker/gpu/attn_utils.py
  get_varlen_cudagraph_unsupported_backend(attn_groups, vllm_config, max_query_len)
v1/worker/gpu/model_states/interface.py
  ModelState.get_additional_cg_support
v1/outputs.py
  AsyncModelRunnerOutput: get_output
  DraftTokenIds: req_ids, draft_token_ids
  ModelRunnerOutput: req_ids
v1/worker/gpu/async_utils.py
  AsyncOutput: sampler_output, get_output
  AsyncOutput.__init__
    copy_stream.wait_stream(main_stream)
  async_copy_to_np
  stream(to_stream, from_stream)
v1/worker/gpu/sample/output.py
  SamplerOutput: num_rejected
v1/worker/gpu/states.py
  RequestState: req_id_to_index, all_token_ids, prompt_len, total_len
v1/worker/gpu/spec_decode/eagle/speculator.py
  EagleSpeculator: load_draft_model
v1/worker/gpu/spec_decode/utils.py
  DraftTokensHandler.set_draft_tokens(input_batch, draft_tokens)
  DraftTokensHandler: get_draft_tokens
""")


def check(version: str) -> None:
    """Raise ContractError unless this release of vLLM was tested, or is asked for, and has every symbol as needed."""
    require_tested(version.startswith(RELEASES), f"vLLM {version}", SUPPORTED)
    check_contract("vllm", SYMBOLS, SUPPORTED)
