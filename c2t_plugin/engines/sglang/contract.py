"""Every SGLang symbol that the adapter relies on, checked when C2T is selected, before the server starts.

One file, so that whoever asks what a release may break reads one list.
"""

from __future__ import annotations

import re

from c2t_plugin.engines.contract import (
    EngineSymbol,
    broken_symbols,
    check_contract,
    listed,
    package_root,
    require_tested,
)

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
SUPPORTED = "SGLang 0.5.17 to 0.5.23"

SYMBOLS: tuple[EngineSymbol, ...] = listed("""
srt/speculative/spec_info.py
  SpeculativeAlgorithm.register(name, supports_overlap, spec_class)
  SpeculativeAlgorithm.from_string(name)
  SpeculativeAlgorithm: EAGLE, EAGLE3, STANDALONE, create_future_map, supports_ragged_verify
  SpeculativeAlgorithm.handle_server_args(server_args)
  SpeculativeAlgorithm.build_disagg_draft_input(batch, future_map)
  SpecInput: ragged_verify_layout
srt/disaggregation/decode_schedule_batch_mixin.py
  ScheduleBatchDisaggregationDecodeMixin: req_pool_indices_cpu, prepare_for_prebuilt
  ScheduleBatchDisaggregationDecodeMixin.process_prebuilt
    self.spec_algorithm.build_disagg_draft_input( self,
srt/speculative/spec_registry.py
  CustomSpecAlgo.__init__(name, factory, supports_overlap)
srt/plugins/hook_registry.py
  HookRegistry.register(target, hook, hook_type)
  HookType: AFTER, AROUND
srt/server_args.py
  ServerArgs: add_cli_args
  ServerArgs.from_cli_args(args)
srt/speculative/eagle_worker_v2.py
  EagleDraftWorker: hot_token_id
  speculative_moe_backend_context
  speculative_moe_a2a_backend_context
  EagleDraftWorker.alloc_memory_pool(req_to_token_pool)
  EagleDraftWorker.draft(batch)
  EagleDraftWorker.draft_forward(forward_batch)
    self.draft_runner.forward(
  EagleDraftWorker._draft_extend_for_prefill(batch, target_hidden_states, next_token_ids)
    self.draft_runner.forward(
  EagleDraftWorker._draft_extend_for_decode(batch, batch_result)
    self.cuda_graph_runner_for_draft_extend.execute(
  EagleDraftWorker: tree_mask_mode, _capture_cuda_graphs
  EAGLEWorkerV2: _draft_worker
  EAGLEWorkerV2.__init__(server_args)
    EagleDraftWorker(
  EAGLEWorkerV2.verify(batch)
    target_worker=self.target_worker
    num_draft_tokens=self.speculative_num_draft_tokens
  EAGLEWorkerV2.init_cuda_graphs
    self.adaptive_controller.init_states(
  EAGLEWorkerV2.forward_batch_generation(batch)
    self.activate_step_by_batch(batch.seq_lens.shape[0])
    self._build_trivial_verify_input(batch)
  EAGLEWorkerV2._build_trivial_verify_input(batch)
  EAGLEWorkerV2.build_adaptive_runtime_state(speculative_num_steps, speculative_num_draft_tokens)
  EAGLEWorkerV2.apply_runtime_state(state)
    dw.draft_runner.attn_backend = state.draft_extend_attn_backend
srt/speculative/base_spec_worker.py
  EagleDraftWorkerBase._rebuild_topk1_chain_buffers
    parent_width = num_steps if num_steps > 1 else 0
  BaseSpecWorker: init_attention_backends
srt/speculative/adaptive_runtime_state.py
  SpecRuntimeState: speculative_num_steps, speculative_num_draft_tokens, draft_attn_backend, cuda_graph_runner
  SpecRuntimeState: target_attn_backend, target_graph_runner, draft_extend_attn_backend
  SpecRuntimeState: cuda_graph_runner_for_draft_extend
srt/speculative/eagle_draft_extend_cuda_graph_runner.py
  EAGLEDraftExtendCudaGraphRunner.__init__
    self.captured_req_width = resolve_num_tokens_per_req(
srt/speculative/spec_utils.py
  resolve_num_tokens_per_req(phase)
srt/runtime_context.py
  get_context
  get_spec
  RuntimeContext.override(source)
    self._overrides_log.append((source, dict(fields)))
  get_server_args
srt/managers/utils.py
  GenerationBatchResult: speculative_num_draft_tokens, can_run_cuda_graph, cap_lens
  GenerationBatchResult.copy_to_cpu
    self.cap_lens =
    copy_done.record()
srt/speculative/eagle_worker_common.py
  run_eagle_verify(batch, target_worker)
    target_worker.forward_batch_generation(
  build_eagle_verify_input(batch, draft_input, parent_list, top_scores_index, draft_tokens, draft_probs)
srt/managers/tp_worker.py
  TpModelWorker.forward_batch_generation(batch, forward_batch, is_verify)
  TpModelWorker: init_attention_backends, init_cuda_graphs
srt/model_executor/forward_batch_info.py
  ForwardBatch.init_new(batch, model_runner, capture_hidden_mode, return_hidden_states_before_norm)
srt/speculative/ragged_verify.py
  RaggedVerifyLayout: verify_lens, qo_indptr_device, extend_start_loc, graph_num_tokens, cap
srt/model_executor/runner/decode_cuda_graph_runner.py
  ragged_verify_compact_graphs_enabled(spec_algorithm)
    spec_algorithm.supports_ragged_verify()
  DecodeCudaGraphRunner: ragged_verify_mode, capture_num_tokens, _can_run_ragged_verify_graph
  DecodeCudaGraphRunner.get_spec_info(num_tokens)
  DecodeCudaGraphRunner._capture_ragged_verify_layout(num_tokens)
  DecodeCudaGraphRunner._ragged_capture_slots(num_tokens)
  DecodeCudaGraphRunner.can_run_graph(forward_batch)
srt/layers/attention/attention_registry.py
  ATTENTION_BACKENDS
  register_attention_backend(name)
srt/layers/attention/triton_backend.py
  TritonAttnBackend: qo_indptr, mask_indptr, extend_attention_fwd, _verify_mask, num_draft_tokens
  TritonAttnBackend.init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf)
  TritonAttnBackend.init_forward_metadata(forward_batch)
    custom_mask = spec_info.custom_mask
  TritonAttnBackend.init_forward_metadata_out_graph(forward_batch, in_capture)
  TritonAttnBackend.forward_extend
    causal, self.forward_metadata.mask_indptr, self.forward_metadata.max_extend_len, k_descale, v_descale,
  ForwardMetadata: qo_indptr, mask_indptr
srt/layers/radix_attention.py
  RadixAttention: qk_head_dim, v_head_dim, logit_cap, sliding_window_size, is_cross_attention, attn_type
  RadixAttention: xai_temperature_len, k_scale, k_scale_float, v_scale_float, tp_q_head_num, tp_k_head_num
  AttentionType: DECODER
srt/layers/attention/verify_mask.py
  VerifyMask: mode, max_bs
srt/model_executor/model_runner.py
  ModelRunner: model, dtype, load_model, kv_cache_dtype, configure_kv_cache_dtype, device, is_draft_worker
  ModelRunner._get_attention_backend(init_new_workspace)
kernels/ops/attention/extend_attention.py
  extend_attention_fwd(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices)
srt/layers/attention/flashinfer_mla_backend.py
  FlashInferMLAAttnBackend.init_forward_metadata(forward_batch)
  FlashInferMLAAttnBackend.init_forward_metadata_out_graph(forward_batch, in_capture)
  FlashInferMLAAttnBackend._verify_graph_key
    layout.graph_num_tokens
srt/layers/attention/flashmla_backend.py
  FlashMLABackend: num_draft_tokens
  FlashMLABackend.forward_extend(q, k, v, layer, forward_batch)
    q.view(bs, -1, layer.tp_q_head_num, layer.head_dim)
srt/speculative/dflash_info.py
  DFlashVerifyInput: draft_token, positions, draft_token_num, ragged_verify_layout
  DFlashVerifyInput.generate_attn_arg_prefill
    kv_indices_extra = layout.total_verify_tokens
srt/speculative/ragged_verify.py
  RaggedVerifyLayout: total_verify_tokens
srt/layers/attention/flashinfer_backend.py
  FlashInferAttnBackend: workspace_buffer, prefill_backend, dispatch_reason
  fast_prefill_plan(qo_indptr_host, kv_indptr_host, kv_lens_host, max_q_len, max_kv_len)
  FlashInferAttnBackend.init_cuda_graph_state(max_bs, max_num_tokens)
  FlashInferAttnBackend.init_forward_metadata(forward_batch)
  FlashInferAttnBackend.init_forward_metadata_out_graph(forward_batch, in_capture)
    prefill_wrappers=self.prefill_cuda_graph_metadata[bs]
  FlashInferAttnBackend._prepare_cuda_graph_metadata
    getattr(spec_info, "custom_mask", None)
  FlashInferAttnBackend.forward_extend(q, k, v, layer, forward_batch)
    causal=causal
  FlashInferIndicesUpdaterPrefill.call_begin_forward
    spec_info.generate_attn_arg_prefill(
srt/speculative/eagle_info.py
  EagleDraftExtendInput.generate_attn_arg_prefill(paged_kernel_lens, paged_kernel_lens_sum)
    torch.cumsum(paged_kernel_lens, dim=0)
  EagleVerifyInput: retrieve_next_token, max_tree_depth
srt/layers/attention/hybrid_attn_backend.py
  HybridAttnBackend: prefill_backend, decode_backend, spec_attn_is_decode
  HybridAttnBackend.__init__(model_runner, prefill_backend, decode_backend)
  HybridAttnBackend._select_backend(forward_mode)
  HybridAttnBackend.init_cuda_graph_state(max_bs, max_num_tokens)
  HybridAttnBackend.forward_decode(q, k, v, layer, forward_batch)
srt/layers/attention/hybrid_linear_attn_backend.py
  HybridLinearAttnBackend: full_attn_backend, linear_attn_backend
  MambaAttnBackendBase._replay_metadata
    padded_bs=bs, cap=spec_info.draft_token_num
srt/layers/attention/linear/kda_backend.py
  KDAAttnBackend: supports_ragged_verify_graph, kernel_dispatcher
  KDAAttnBackend._forward_target_verify
    dense.index_copy_(0, dense_token_indices, mixed_qkv)
  KDAKernelDispatcher: verify_kernel
srt/mem_cache/memory_pool.py
  HybridReqToTokenPool: mamba_allocator, mamba_pool, req_index_to_mamba_index_mapping
srt/layers/attention/trtllm_mha_backend.py
  TRTLLMHAAttnBackend: supports_ragged_verify_graph, is_xqa_impl
srt/layers/attention/trtllm_mla_backend.py
  TRTLLMMLABackend: supports_ragged_verify_graph
srt/mem_cache/allocator/base.py
  BaseTokenToKVPoolAllocator: available_size
  BaseTokenToKVPoolAllocator.alloc(need_size)
  BaseTokenToKVPoolAllocator.free(free_index)
srt/layers/attention/flashattention_backend.py
  FlashAttentionBackend: supports_ragged_verify_graph, fa_impl_ver
  FlashAttentionBackend.init_forward_metadata
    forward_batch.spec_info, "ragged_verify_layout"
srt/speculative/standalone_worker_v2.py
  StandaloneDraftWorker.alloc_memory_pool(req_to_token_pool)
  StandaloneWorkerV2.__init__(server_args)
    = StandaloneDraftWorker(
srt/layers/dp_attention.py
  is_dp_attention_enabled
srt/distributed/parallel_state.py
  get_tp_group
  get_attn_tp_group
  GroupCoordinator.broadcast(input_, src)
  GroupCoordinator: rank_in_group
srt/managers/schedule_batch.py
  ScheduleBatch: reqs, req_pool_indices, out_cache_loc, seq_lens, seq_lens_cpu, seq_lens_sum, orig_seq_lens, input_ids
  ScheduleBatch: forward_mode, spec_info, spec_algorithm, multimodal_inputs, return_logprob, model_config, device
  Req: finished, is_retracted, rid, output_ids, finished_len, grammar, seqlen
  Req.__init__(rid, origin_input_ids)
srt/sampling/sampling_params.py
  SamplingParams: custom_params
srt/managers/tokenizer_manager.py
  TokenizerManager: model_config, mm_processor
  TokenizerManager._validate_one_request(obj, input_ids)
  TokenizerManager._tokenize_one_request
    self._validate_one_request(obj, input_ids)
  TokenizerManager._batch_tokenize_and_process
    self._validate_one_request(obj[i], input_ids_list[i])
srt/configs/model_config.py
  ModelConfig: vocab_size, hidden_size, dtype
srt/managers/io_struct.py
  GenerateReqInput: input_ids, input_embeds, sampling_params, contains_mm_input
srt/managers/scheduler.py
  Scheduler.init_request_dispatcher
    (TokenizedGenerateReqInput, self.handle_generate_request),
  Scheduler.handle_generate_request(recv_req)
  Scheduler.handle_batch_generate_request
    self.handle_generate_request(
  Scheduler.process_batch_result(batch, result)
  Scheduler.set_internal_state(recv_req)
  Scheduler.get_internal_state(recv_req)
srt/managers/scheduler_components/batch_result_processor.py
  SchedulerBatchResultProcessor._resolve_spec_v2_tokens(result, batch)
    if req.is_retracted or req.finished():
  SchedulerBatchResultProcessor: draft_worker
srt/managers/scheduler_components/output_streamer.py
  _GenerationStreamAccumulator.accept(req)
    self.rids.append(req.rid)
    self.rust_server_mode
    if len(per_request_values) < len(self.output_ids):
  _GenerationStreamAccumulator.to_payload
    wrap_as_pickle(self.customized_info)
srt/managers/io_struct.py
  TokenizedGenerateReqInput: top_logprobs_num, logprob_start_len, return_hidden_states, positional_embed_overrides
  SetInternalStateReq: server_args
  SetInternalStateReqOutput: updated
  GetInternalStateReqOutput: internal_state
""")

# What it takes for the draft to read plain steps later. Where it is not there, each of them is read at once.
PLAIN_SYMBOLS: tuple[EngineSymbol, ...] = listed("""
srt/speculative/eagle_worker_v2.py
  EAGLEWorkerV2.forward_batch_generation
    elif self.speculative_num_steps == 0:
  EagleDraftWorker: seed_dsa_topk_from_draft_extend
  EagleDraftWorker._draft_extend_for_prefill(batch, target_hidden_states, next_token_ids)
    torch.cat((input_ids[1:], tail_tokens[i].reshape(1)))
    return EagleDraftInput(
srt/speculative/eagle_utils.py
  _eagle_prefill_tail_tokens
    batch.chunked_req_next_prompt_token
srt/speculative/eagle_info.py
  EagleDraftInput: topk_p, topk_index, hidden_states
srt/model_executor/forward_batch_info.py
  ForwardMode: EXTEND
srt/managers/utils.py
  GenerationBatchResult: next_draft_input, next_token_ids, logits_output
srt/runtime_context.py
  get_schedule
srt/managers/schedule_batch.py
  Req: kv
  Req.owned_kv_len
  ReqKvInfo: cache_protected_len
  ScheduleBatch: req_to_token_pool, req_pool_indices_cpu, prefix_lens, extend_lens, extend_num_tokens, sampling_info
  ScheduleBatch: chunked_req, chunked_req_next_prompt_token, decoding_reqs, extend_logprob_start_lens, has_grammar
  ScheduleBatch: extend_input_logprob_token_ids, input_embeds, replace_embeds, replace_positions
srt/mem_cache/common.py
  release_kv_cache
    owned_kv_len = req.owned_kv_len()
    tree_cache.checkpoint(req, up_to=owned_kv_len)
    _release_overallocated_kv_indices( req, owned_kv_len, req.kv.kv_allocated_len, tree_cache
""")

# What trees need further, checked when they are selected.
SUPPORTED_TREES = f"{SUPPORTED} for trees"

TREE_SYMBOLS: tuple[EngineSymbol, ...] = listed("""
srt/speculative/eagle_worker_v2.py
  EagleDraftWorker.draft(batch)
    build_eagle_verify_input(
    self.topk,
  EagleDraftWorker.draft_forward(forward_batch)
    attn_backend=self.draft_attn_backend.attn_backends[i]
    forward_batch.positions.add_(1)
srt/speculative/eagle_draft_cuda_graph_runner.py
  EAGLEDraftCudaGraphRunner._postprocess_output_to_raw_bs(out, raw_bs)
  EAGLEDraftCudaGraphRunner.__init__(eagle_worker)
    self.backend = resolve_decode_backend(self)
  EAGLEDraftCudaGraphRunner.capture_one_shape(size)
    self.backend.capture_one(
  EAGLEDraftCudaGraphRunner.execute(forward_batch)
    buffers.positions[:raw_num_token]
srt/model_executor/runner_backend/full_cuda_graph_backend.py
  FullCudaGraphBackend.capture_one(shape_key, forward_fn)
    graph_ctx = self._device_module.graph
    graph_ctx(cuda_graph=graph, pool=self._pool, stream=self._capture_stream)
    self._graphs[shape_key] = graph
  FullCudaGraphBackend.replay(shape_key)
    self._graphs[shape_key].replay()
  FullCudaGraphBackend: cleanup, _memory_saver_adapter, _device_module
srt/model_executor/runner/shape_key.py
  ShapeKey: size
srt/speculative/eagle_utils.py
  per_step_draft_out_cache_loc
    view(batch_size, topk, num_steps)
  default_tree_mask_mode
srt/speculative/eagle_worker_common.py
  build_eagle_verify_input(batch, draft_input, parent_list, top_scores_index, draft_tokens, draft_probs)
  run_eagle_verify(num_draft_tokens)
    _finalize_accept_tree_path(
srt/speculative/eagle_info.py
  EagleVerifyInput: tree_topk
srt/layers/attention/verify_mask.py
  maybe_create_verify_mask
    mode = default_tree_mask_mode() if is_read else TreeMaskMode.QLEN_ONLY
  VerifyMask: buffer
  VerifyMask.fits(bs)
srt/layers/attention/triton_backend.py
  TritonAttnBackend._update_target_verify_buffers
    self._verify_mask.buffer
srt/layers/attention/flashattention_backend.py
  FlashAttentionBackend: target_verify_metadata_topk_normal, target_verify_metadata_topk_expand, _verify_mask
  FlashAttentionBackend: has_swa, has_local_attention, use_mla, req_to_token, max_context_len, page_size
  FlashAttentionBackend: kv_cache_dtype_str
  FlashAttentionBackend.init_cuda_graph_state(max_bs, max_num_tokens)
  FlashAttentionBackend.init_forward_metadata(forward_batch)
  FlashAttentionBackend.init_forward_metadata_out_graph(forward_batch, in_capture)
  FlashAttentionBackend.forward_extend
    cache_seqlens=self.forward_metadata_spec_decode_expand.cache_seqlens_int32
    o, _ = merge_state_v2_wrapper(
  FlashAttentionMetadata: cache_seqlens_int32, max_seq_len_q, cu_seqlens_q, cu_seqlens_k, page_table
  build_trtllm_mha_page_table
srt/model_executor/forward_context.py
  ForwardContext: attn_backend
  forward_context
srt/layers/attention/intel_amx_backend.py
  IntelAMXAttnBackend.init_forward_metadata
    max_extend_len = self.num_draft_tokens
  IntelAMXMultiStepDraftBackend.init_forward_metadata
    topk = self.topk
srt/mem_cache/memory_pool.py
  MHATokenToKVPool
  MLATokenToKVPool
""")

# What DP attention needs further, checked when it is selected.
SUPPORTED_DP = f"{SUPPORTED} for DP attention"

DP_SYMBOLS: tuple[EngineSymbol, ...] = listed("""
srt/managers/scheduler.py
  Scheduler.get_next_batch_to_run
    need_mlp_sync = new_batch is None
srt/managers/scheduler_components/dp_attn.py
  _update_gather_batch
    batch.is_extend_in_batch = mlp_sync_info.is_extend_in_batch
  SchedulerDPAttnAdapter: get_idle_batch
srt/speculative/eagle_worker_v2.py
  EAGLEWorkerV2.forward_batch_generation(batch)
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
    self.activate_step_by_batch(batch.seq_lens.shape[0])
srt/speculative/eagle_info.py
  EagleVerifyInput: draft_token, positions, custom_mask, draft_token_num
srt/layers/moe/utils.py
  get_moe_a2a_backend
srt/utils/common.py
  require_mlp_tp_gather
srt/runtime_context.py
  get_parallel
srt/model_executor/cuda_graph_buffer_registry.py
  build_decode_registry
    buf.fill_(ctx.padded_num_tokens)
""")


def check(version: str | None) -> None:
    """Raise ContractError unless this release of SGLang was tested, or is asked for, and has every symbol as needed."""
    found = tuple(int(number) for number in re.findall(r"\d+", version or "")[:3])
    require_tested(OLDEST <= found <= NEWEST, f"SGLang {version}", SUPPORTED)
    check_contract("sglang", SYMBOLS, SUPPORTED)


def missing_for_plain_steps() -> list[str]:
    """What the installed release lacks of PLAIN_SYMBOLS."""
    root = package_root("sglang")
    return [] if root is None else broken_symbols(root, PLAIN_SYMBOLS)
