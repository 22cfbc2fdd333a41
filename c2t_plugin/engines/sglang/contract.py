"""Every SGLang symbol that the adapter relies on, checked when C2T is selected, before the server starts.

Longer than most files: it is one list.
"""

from __future__ import annotations

from c2t_plugin.engines.contract import EngineSymbol

SUPPORTED = "SGLang 0.5.17 to 0.5.23"

_SPEC = "srt/speculative"
_WORKER = f"{_SPEC}/eagle_worker_v2.py"
_PREBUILT = "srt/disaggregation/decode_schedule_batch_mixin.py"
_GRAPHS = "srt/model_executor/runner/decode_cuda_graph_runner.py"
_TRITON = "srt/layers/attention/triton_backend.py"
_FLASHINFER = "srt/layers/attention/flashinfer_backend.py"
_RUNNER = "srt/model_executor/model_runner.py"
_STANDALONE = f"{_SPEC}/standalone_worker_v2.py"
# What the Triton backend calls its extend kernel with, behind queries, keys, values, output and both pools.
_KERNEL_ARGUMENTS = """\
            self.forward_metadata.qo_indptr,
            kv_indptr,
            kv_indices,
            self.forward_metadata.custom_mask,
            causal,
            self.forward_metadata.mask_indptr,
            self.forward_metadata.max_extend_len,
            k_descale,
            v_descale,
            layer.scaling,
            logit_cap="""

SYMBOLS: tuple[EngineSymbol, ...] = (
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.register", ("name", "supports_overlap", "spec_class")),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.from_string", ("name",)),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.EAGLE"),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.EAGLE3"),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.STANDALONE"),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.handle_server_args", ("server_args",)),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.create_future_map"),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.build_disagg_draft_input", ("batch", "future_map")),
    EngineSymbol(
        _PREBUILT,
        "ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt",
        contains=("self.req_pool_indices_cpu =",),
    ),
    EngineSymbol(
        _PREBUILT,
        "ScheduleBatchDisaggregationDecodeMixin.process_prebuilt",
        contains=("self.spec_algorithm.build_disagg_draft_input(\n            self,",),
    ),
    EngineSymbol(f"{_SPEC}/spec_registry.py", "CustomSpecAlgo.__init__", ("name", "factory", "supports_overlap")),
    EngineSymbol("srt/plugins/hook_registry.py", "HookRegistry.register", ("target", "hook", "hook_type")),
    EngineSymbol("srt/plugins/hook_registry.py", "HookType.AFTER"),
    EngineSymbol("srt/plugins/hook_registry.py", "HookType.AROUND"),
    EngineSymbol("srt/server_args.py", "ServerArgs.add_cli_args"),
    EngineSymbol("srt/server_args.py", "ServerArgs.from_cli_args", ("args",)),
    EngineSymbol(_WORKER, "EagleDraftWorker.alloc_memory_pool", ("req_to_token_pool",)),
    EngineSymbol(_WORKER, "EagleDraftWorker.draft", ("batch",)),
    EngineSymbol(
        _WORKER,
        "EagleDraftWorker.draft_forward",
        ("forward_batch",),
        ("self.draft_runner.forward(", "for i in range(self.speculative_num_steps)"),
    ),
    EngineSymbol(
        _WORKER,
        "EagleDraftWorker._draft_extend_for_prefill",
        ("batch", "target_hidden_states", "next_token_ids"),
        ("self.draft_runner.forward(",),
    ),
    EngineSymbol(
        _WORKER,
        "EagleDraftWorker._draft_extend_for_decode",
        ("batch", "batch_result"),
        (
            "self.cuda_graph_runner_for_draft_extend.execute(",
            "draft_logits_output.next_token_logits =",
            "num_tokens_per_req=self.speculative_num_draft_tokens",
        ),
    ),
    EngineSymbol(
        _WORKER, "EagleDraftWorker.__init__", contains=("self.tree_mask_mode =", "self._rebuild_topk1_chain_buffers()")
    ),
    # how a chain is given where trees are taken
    EngineSymbol(
        f"{_SPEC}/base_spec_worker.py",
        "EagleDraftWorkerBase._rebuild_topk1_chain_buffers",
        contains=(
            "self.speculative_num_draft_tokens == self.speculative_num_steps + 1",
            "parent_width = num_steps if num_steps > 1 else 0",
            "-1, parent_width - 1,",
        ),
    ),
    EngineSymbol(_WORKER, "EAGLEWorkerV2.__init__", ("server_args",), ("self._draft_worker =", "EagleDraftWorker(")),
    EngineSymbol(
        _WORKER,
        "EAGLEWorkerV2.verify",
        ("batch",),
        (
            "run_eagle_verify(",
            "target_worker=self.target_worker",
            "num_draft_tokens=self.speculative_num_draft_tokens",
        ),
    ),
    EngineSymbol(f"{_SPEC}/base_spec_worker.py", "BaseSpecWorker.init_attention_backends"),
    EngineSymbol(
        _WORKER, "EagleDraftWorker._capture_cuda_graphs", contains=("self.cuda_graph_runner_for_draft_extend",)
    ),
    EngineSymbol(
        _WORKER,
        "EAGLEWorkerV2.init_cuda_graphs",
        contains=("self.adaptive_controller.register(", "self.adaptive_controller.init_states("),
    ),
    EngineSymbol(
        _WORKER,
        "EAGLEWorkerV2.forward_batch_generation",
        ("batch",),
        (
            "self.activate_step_by_batch(batch.seq_lens.shape[0])",
            "self._build_trivial_verify_input(batch)",
            "self.draft_worker._draft_extend_for_decode(",
        ),
    ),
    EngineSymbol(_WORKER, "EAGLEWorkerV2._build_trivial_verify_input", ("batch",), ("draft_token_num=1",)),
    EngineSymbol(
        _WORKER,
        "EAGLEWorkerV2.build_adaptive_runtime_state",
        ("speculative_num_steps", "speculative_num_draft_tokens"),
        ("self._draft_worker._capture_cuda_graphs()",),
    ),
    EngineSymbol(
        _WORKER,
        "EAGLEWorkerV2.apply_runtime_state",
        ("state",),
        (
            "if self.speculative_num_steps == state.speculative_num_steps",
            "Switch adaptive runtime state",
            # what Windows.enter changes too
            "dw.draft_extend_attn_backend = state.draft_extend_attn_backend",
            "dw.draft_runner.attn_backend = state.draft_extend_attn_backend",
            "dw.cuda_graph_runner_for_draft_extend = state.cuda_graph_runner_for_draft_extend",
            "self._target_worker.model_runner.attn_backend = state.target_attn_backend",
            "self._target_worker.model_runner.decode_cuda_graph_runner = (",
        ),
    ),
    *(
        EngineSymbol(f"{_SPEC}/adaptive_runtime_state.py", f"SpecRuntimeState.{field}")
        for field in (
            "speculative_num_steps",
            "speculative_num_draft_tokens",
            "draft_attn_backend",
            "cuda_graph_runner",
            "target_attn_backend",
            "target_graph_runner",
            "draft_extend_attn_backend",
            "cuda_graph_runner_for_draft_extend",
        )
    ),
    EngineSymbol(
        f"{_SPEC}/eagle_draft_extend_cuda_graph_runner.py",
        "EAGLEDraftExtendCudaGraphRunner.__init__",
        contains=("self.captured_req_width = resolve_num_tokens_per_req(",),
    ),
    EngineSymbol(f"{_SPEC}/spec_utils.py", "resolve_num_tokens_per_req", ("phase",)),
    EngineSymbol("srt/runtime_context.py", "get_context"),
    EngineSymbol("srt/runtime_context.py", "get_spec"),
    EngineSymbol(
        "srt/runtime_context.py",
        "RuntimeContext.override",
        ("source",),
        ("self._overrides_log.append((source, dict(fields)))",),
    ),
    EngineSymbol("srt/managers/utils.py", "GenerationBatchResult.speculative_num_draft_tokens"),
    EngineSymbol(
        f"{_SPEC}/eagle_worker_common.py",
        "run_eagle_verify",
        ("batch", "target_worker"),
        (
            "target_worker.forward_batch_generation(",
            "eagle_sample(",
            "speculative_num_draft_tokens=num_draft_tokens",
        ),
    ),
    EngineSymbol(
        "srt/managers/tp_worker.py", "TpModelWorker.forward_batch_generation", ("batch", "forward_batch", "is_verify")
    ),
    EngineSymbol("srt/managers/utils.py", "GenerationBatchResult.can_run_cuda_graph"),
    EngineSymbol(
        "srt/model_executor/forward_batch_info.py",
        "ForwardBatch.init_new",
        ("batch", "model_runner", "capture_hidden_mode", "return_hidden_states_before_norm"),
        ("input_ids=batch.input_ids", "out_cache_loc=batch.out_cache_loc", "ret.spec_info.positions"),
    ),
    EngineSymbol(
        f"{_SPEC}/ragged_verify.py",
        "RaggedVerifyLayout.from_verify_lens_device",
        ("verify_lens", "graph_num_tokens"),
    ),
    EngineSymbol(f"{_SPEC}/ragged_verify.py", "RaggedVerifyLayout.qo_indptr_device"),
    EngineSymbol(f"{_SPEC}/ragged_verify.py", "RaggedVerifyLayout.extend_start_loc"),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpecInput.ragged_verify_layout"),
    EngineSymbol(f"{_SPEC}/spec_info.py", "SpeculativeAlgorithm.supports_ragged_verify"),
    EngineSymbol(
        _GRAPHS,
        "ragged_verify_compact_graphs_enabled",
        ("spec_algorithm",),
        ("spec_algorithm.supports_ragged_verify()",),
    ),
    EngineSymbol(
        _GRAPHS, "DecodeCudaGraphRunner.__init__", contains=("self.ragged_verify_mode", "self.capture_num_tokens")
    ),
    EngineSymbol(_GRAPHS, "DecodeCudaGraphRunner.get_spec_info", ("num_tokens",)),
    EngineSymbol(_GRAPHS, "DecodeCudaGraphRunner._capture_ragged_verify_layout", ("num_tokens",)),
    EngineSymbol(_GRAPHS, "DecodeCudaGraphRunner._can_run_ragged_verify_graph"),
    EngineSymbol("srt/layers/attention/attention_registry.py", "ATTENTION_BACKENDS"),
    EngineSymbol("srt/layers/attention/attention_registry.py", "register_attention_backend", ("name",)),
    EngineSymbol(
        _TRITON,
        "TritonAttnBackend.__init__",
        contains=(
            *("self.qo_indptr =", "self.mask_indptr =", "self.extend_attention_fwd ="),
            *("self._verify_mask =", "self.num_draft_tokens ="),
        ),
    ),
    EngineSymbol(_TRITON, "TritonAttnBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    EngineSymbol(
        _TRITON,
        "TritonAttnBackend.init_forward_metadata",
        ("forward_batch",),
        ("custom_mask = spec_info.custom_mask",),
    ),
    EngineSymbol(_TRITON, "TritonAttnBackend.init_forward_metadata_out_graph", ("forward_batch", "in_capture")),
    EngineSymbol(
        _TRITON,
        "TritonAttnBackend.forward_extend",
        contains=("self.forward_metadata.qo_indptr", "self.forward_metadata.mask_indptr", _KERNEL_ARGUMENTS),
    ),
    EngineSymbol(
        "srt/layers/radix_attention.py",
        "RadixAttention.__init__",
        contains=(
            *("self.qk_head_dim =", "self.v_head_dim =", "self.logit_cap =", "self.sliding_window_size ="),
            *("self.is_cross_attention =", "self.attn_type =", "self.xai_temperature_len =", "self.k_scale ="),
        ),
    ),
    EngineSymbol("srt/layers/radix_attention.py", "AttentionType.DECODER"),
    EngineSymbol("srt/layers/attention/verify_mask.py", "VerifyMask.mode"),
    EngineSymbol("srt/layers/attention/verify_mask.py", "VerifyMask.max_bs"),
    EngineSymbol(_RUNNER, "ModelRunner.load_model", contains=("self.model =", "self.dtype =")),
    EngineSymbol(_RUNNER, "ModelRunner.configure_kv_cache_dtype", contains=("self.kv_cache_dtype =",)),
    EngineSymbol(_TRITON, "ForwardMetadata.qo_indptr"),
    EngineSymbol(_TRITON, "ForwardMetadata.mask_indptr"),
    EngineSymbol(_FLASHINFER, "FlashInferAttnBackend.__init__", contains=("self.workspace_buffer =",)),
    EngineSymbol(_FLASHINFER, "FlashInferAttnBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    EngineSymbol(
        _FLASHINFER,
        "FlashInferAttnBackend.init_forward_metadata",
        ("forward_batch",),
        ("prefill_wrappers=self.prefill_wrappers_verify",),
    ),
    EngineSymbol(
        _FLASHINFER,
        "FlashInferAttnBackend.init_forward_metadata_out_graph",
        ("forward_batch", "in_capture"),
        (
            "self._prepare_cuda_graph_metadata(bs",
            "prefill_wrappers=self.prefill_cuda_graph_metadata[bs]",
        ),
    ),
    EngineSymbol(
        _FLASHINFER,
        "FlashInferAttnBackend._prepare_cuda_graph_metadata",
        contains=('getattr(spec_info, "custom_mask", None)', "self.prefill_cuda_graph_metadata[bs] = prefill_wrappers"),
    ),
    EngineSymbol(
        _FLASHINFER,
        "FlashInferAttnBackend.forward_extend",
        ("q", "k", "v", "layer", "forward_batch"),
        ("prefill_wrapper_paged.forward(", "causal=causal"),
    ),
    EngineSymbol(
        _FLASHINFER,
        "FlashInferIndicesUpdaterPrefill.call_begin_forward",
        contains=("spec_info.generate_attn_arg_prefill(", "wrapper_paged.begin_forward("),
    ),
    EngineSymbol(
        f"{_SPEC}/eagle_info.py",
        "EagleDraftExtendInput.generate_attn_arg_prefill",
        ("paged_kernel_lens", "paged_kernel_lens_sum"),
        ("torch.cumsum(paged_kernel_lens, dim=0)", "self.num_correct_drafts", "self.num_tokens_per_req"),
    ),
    EngineSymbol(f"{_SPEC}/ragged_verify.py", "RaggedVerifyLayout.graph_num_tokens"),
    EngineSymbol(
        "srt/layers/attention/flashattention_backend.py", "FlashAttentionBackend.supports_ragged_verify_graph"
    ),
    EngineSymbol(
        "srt/layers/attention/flashattention_backend.py",
        "FlashAttentionBackend.init_forward_metadata",
        contains=('forward_batch.spec_info, "ragged_verify_layout"', "build_ragged_target_verify_geometry("),
    ),
    EngineSymbol(_STANDALONE, "StandaloneDraftWorker.alloc_memory_pool", ("req_to_token_pool",)),
    EngineSymbol(_STANDALONE, "StandaloneWorkerV2.__init__", ("server_args",), ("= StandaloneDraftWorker(",)),
    EngineSymbol(f"{_SPEC}/eagle_info.py", "EagleVerifyInput.retrieve_next_token"),
    EngineSymbol(f"{_SPEC}/eagle_info.py", "EagleVerifyInput.max_tree_depth"),
    EngineSymbol(
        f"{_SPEC}/eagle_worker_common.py",
        "build_eagle_verify_input",
        ("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens", "draft_probs"),
        ("build_tree_kernel_efficient(", "draft_input.bonus_tokens", "target_worker.model_runner.attn_backend"),
    ),
    EngineSymbol("srt/distributed/parallel_state.py", "get_tp_group"),
    EngineSymbol("srt/distributed/parallel_state.py", "GroupCoordinator.broadcast", ("input_", "src")),
    EngineSymbol("srt/distributed/parallel_state.py", "GroupCoordinator.rank_in_group"),
    EngineSymbol("srt/managers/schedule_batch.py", "ScheduleBatch.reqs"),
    EngineSymbol("srt/managers/schedule_batch.py", "ScheduleBatch.req_pool_indices"),
    EngineSymbol("srt/sampling/sampling_params.py", "SamplingParams.custom_params"),
    EngineSymbol("srt/sampling/sampling_params.py", "SamplingParams.verify"),
    EngineSymbol("srt/runtime_context.py", "get_server_args"),
    EngineSymbol(
        "srt/managers/tokenizer_manager.py",
        "TokenizerManager._create_tokenized_object",
        contains=("sampling_params.verify(",),
    ),
    EngineSymbol("srt/managers/utils.py", "GenerationBatchResult.cap_lens"),
    EngineSymbol(
        "srt/managers/utils.py", "GenerationBatchResult.copy_to_cpu", contains=("self.cap_lens =", "copy_done.record()")
    ),
    EngineSymbol("srt/managers/scheduler.py", "Scheduler.process_batch_result", ("batch", "result")),
    EngineSymbol(
        "srt/managers/scheduler_components/batch_result_processor.py",
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        ("result", "batch"),
        ("if req.is_retracted or req.finished():",),
    ),
    EngineSymbol(
        "srt/managers/scheduler_components/batch_result_processor.py", "SchedulerBatchResultProcessor.draft_worker"
    ),
    EngineSymbol(
        "srt/managers/scheduler_components/output_streamer.py",
        "_GenerationStreamAccumulator.accept",
        ("req",),
        ("self.rids.append(req.rid)", "if len(per_request_values) < len(self.output_ids):", "self.rust_server_mode"),
    ),
    EngineSymbol(
        "srt/managers/scheduler_components/output_streamer.py",
        "_GenerationStreamAccumulator.to_payload",
        contains=("wrap_as_pickle(self.customized_info)",),
    ),
    EngineSymbol("srt/managers/schedule_batch.py", "Req.finished"),
    EngineSymbol(
        "srt/managers/schedule_batch.py",
        "Req.__init__",
        ("rid", "origin_input_ids"),
        ("self.rid = rid", "self.output_ids", "self.is_retracted = "),
    ),
    EngineSymbol("srt/managers/scheduler.py", "Scheduler.set_internal_state", ("recv_req",)),
    EngineSymbol("srt/managers/scheduler.py", "Scheduler.get_internal_state", ("recv_req",)),
    EngineSymbol("srt/managers/io_struct.py", "SetInternalStateReq.server_args"),
    EngineSymbol("srt/managers/io_struct.py", "SetInternalStateReqOutput.updated"),
    EngineSymbol("srt/managers/io_struct.py", "GetInternalStateReqOutput.internal_state"),
)
