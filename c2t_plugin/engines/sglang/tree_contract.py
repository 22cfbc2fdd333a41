"""Every further SGLang symbol that tree mode relies on, checked when it is selected. Imports no engine."""

from __future__ import annotations

from c2t_plugin.engines.contract import EngineSymbol

SUPPORTED = "SGLang 0.5.17 to 0.5.23 for trees"

_SPEC = "srt/speculative"
_GRAPHS = "srt/model_executor/runner_backend"
_POOL = "srt/mem_cache/memory_pool.py"

SYMBOLS: tuple[EngineSymbol, ...] = (
    EngineSymbol(
        f"{_SPEC}/eagle_worker_v2.py",
        "EagleDraftWorker.draft",
        ("batch",),
        ("build_eagle_verify_input(", "init_forward_metadata(", "self.draft_forward("),
    ),
    EngineSymbol(
        f"{_SPEC}/eagle_worker_v2.py",
        "EagleDraftWorker.draft_forward",
        ("forward_batch",),
        (
            "attn_backend=self.draft_attn_backend.attn_backends[i]",
            "forward_batch.positions.add_(1)",
        ),
    ),
    EngineSymbol(
        f"{_SPEC}/eagle_draft_cuda_graph_runner.py",
        "EAGLEDraftCudaGraphRunner._postprocess_output_to_raw_bs",
        ("out", "raw_bs"),
    ),
    # segments of the captured draft loop
    EngineSymbol(
        f"{_SPEC}/eagle_draft_cuda_graph_runner.py",
        "EAGLEDraftCudaGraphRunner.__init__",
        ("eagle_worker",),
        ("self.backend = resolve_decode_backend(self)",),
    ),
    EngineSymbol(
        f"{_SPEC}/eagle_draft_cuda_graph_runner.py",
        "EAGLEDraftCudaGraphRunner.capture_one_shape",
        ("size",),
        (
            "self.eagle_worker.draft_forward(forward_batch)",
            "self.backend.capture_one(",
        ),
    ),
    # A draft that ends early leaves positions short; each replay has them anew.
    EngineSymbol(
        f"{_SPEC}/eagle_draft_cuda_graph_runner.py",
        "EAGLEDraftCudaGraphRunner.execute",
        ("forward_batch",),
        ("buffers.positions[:raw_num_token]", "buffers.positions.zero_()"),
    ),
    EngineSymbol(
        f"{_GRAPHS}/full_cuda_graph_backend.py",
        "FullCudaGraphBackend.capture_one",
        ("shape_key", "forward_fn"),
        (
            "graph_ctx = self._device_module.graph",
            "graph_ctx(cuda_graph=graph, pool=self._pool, stream=self._capture_stream)",
            "self._device_module.synchronize()",
            "self._graphs[shape_key] = graph",
        ),
    ),
    EngineSymbol(
        f"{_GRAPHS}/full_cuda_graph_backend.py",
        "FullCudaGraphBackend.replay",
        ("shape_key",),
        ("self._graphs[shape_key].replay()",),
    ),
    EngineSymbol(f"{_GRAPHS}/full_cuda_graph_backend.py", "FullCudaGraphBackend.cleanup"),
    EngineSymbol(
        f"{_GRAPHS}/full_cuda_graph_backend.py",
        "FullCudaGraphBackend.__init__",
        contains=("self._memory_saver_adapter",),
    ),
    EngineSymbol("srt/model_executor/runner/shape_key.py", "ShapeKey.size"),
    EngineSymbol(
        f"{_SPEC}/eagle_utils.py",
        "per_step_draft_out_cache_loc",
        contains=("view(batch_size, topk, num_steps)",),
    ),
    EngineSymbol(
        f"{_SPEC}/eagle_worker_common.py",
        "build_eagle_verify_input",
        ("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens", "draft_probs"),
    ),
    EngineSymbol(
        f"{_SPEC}/eagle_worker_common.py",
        "run_eagle_verify",
        ("num_draft_tokens",),
        ("_finalize_accept_tree_path(", "eagle_sample("),
    ),
    EngineSymbol(f"{_SPEC}/eagle_info.py", "EagleVerifyInput.tree_topk"),
    # the two forms of a mask that trees are given in
    EngineSymbol(
        f"{_SPEC}/eagle_utils.py",
        "default_tree_mask_mode",
        contains=("TreeMaskMode.QLEN_ONLY if _is_cpu else TreeMaskMode.FULL_MASK",),
    ),
    EngineSymbol(
        "srt/layers/attention/verify_mask.py",
        "maybe_create_verify_mask",
        contains=("mode = default_tree_mask_mode() if is_read else TreeMaskMode.QLEN_ONLY",),
    ),
    EngineSymbol(
        "srt/layers/attention/triton_backend.py",
        "TritonAttnBackend._update_target_verify_buffers",
        contains=("self._verify_mask.buffer", "custom_mask[: spec_info.custom_mask.shape[0]] = spec_info.custom_mask"),
    ),
    EngineSymbol("srt/layers/attention/verify_mask.py", "VerifyMask.buffer"),
    EngineSymbol("srt/layers/attention/verify_mask.py", "VerifyMask.fits", ("bs",)),
    EngineSymbol("srt/model_executor/forward_context.py", "ForwardContext.attn_backend"),
    EngineSymbol("srt/model_executor/forward_context.py", "forward_context"),
    EngineSymbol(
        "srt/layers/attention/intel_amx_backend.py",
        "IntelAMXAttnBackend.init_forward_metadata",
        contains=("max_extend_len = self.num_draft_tokens",),
    ),
    EngineSymbol(_POOL, "MHATokenToKVPool"),
    EngineSymbol(_POOL, "MLATokenToKVPool"),
)
