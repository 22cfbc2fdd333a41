"""Every name of SGLang's that C2T binds anew, why, and until when. See engines/patching.py for how.

Four things beside names, all as long as the server lives: `SGLANG_RAGGED_VERIFY_MODE` is set where rows are packed
(verify/choice.py), a log line of SGLang's per change of depth is filtered (drafters/depths.py), its list of such
changes is kept short (states.py), and attention backends that it has made become ours (`become`: verify/backends.py,
fa3.py, flashinfer.py).
"""

from __future__ import annotations

import logging

from c2t_plugin.engines.patching import Patch, Table

_SPEC = "sglang.srt.speculative"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_RUNNER = "sglang.srt.model_executor"
_OURS = "c2t_plugin.engines.sglang"

# Occasions. Every process of a server loads plugins; those that have a model choose a worker; some pack rows.
# Some, of a release that has what that takes, let the draft read plain steps later. Some verify by an attention apart.
LOAD, WORKER, PACKING, PLAIN, APART = "load", "worker", "packing", "plain", "apart"

_OPTIONS = "SGLang lets a plugin add options to its command line"
_BLOCK = "the end of the block"

# --- while a draft worker is made, captures or drafts

EAGLE_DRAFT_WORKER, STANDALONE_DRAFT_WORKER = (
    Patch(f"{_SPEC}.{name}", why="the worker's constructor names the class of its draft worker", until=_BLOCK)
    for name in ("eagle_worker_v2:EagleDraftWorker", "standalone_worker_v2:StandaloneDraftWorker")
)
RESOLVE_DRAFT_GRAPHS = Patch(
    f"{_SPEC}.eagle_draft_cuda_graph_runner:resolve_decode_backend",
    why="small batches' draft loops are captured in segments, so that a tree can end early",
    until=_BLOCK,
)
CAPTURE_ONE = Patch(
    f"{_RUNNER}.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend.capture_one",
    why="the same: one recording becomes several graphs",
    until="the end of that backend",
)
DEVICE_MODULE = Patch(
    f"{_RUNNER}.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend._device_module",
    why="the same: what records is named by it",
    until=_BLOCK,
)
EXTEND_WIDTH = Patch(
    f"{_SPEC}.eagle_draft_extend_cuda_graph_runner:resolve_num_tokens_per_req",
    why="0.5.17 reads the width off the arguments, where it stays the widest: no step of a state would fit the graph",
    until="0.5.17 is not supported any more",
)
DRAFT_FORWARD = Patch(
    f"{_RUNNER}.model_runner:ModelRunner.forward",
    why="the draft's logits pass here, in the loop for scores and in draft extend for the next draft's seeds",
    until=_BLOCK,
)
EXTEND_GRAPH = Patch(
    f"{_SPEC}.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner.execute",
    why="the same where draft extend is a graph",
    until=_BLOCK,
)
BUILD_VERIFY_INPUT = Patch(
    f"{_SPEC}.eagle_worker_v2:build_eagle_verify_input",
    why="SGLang's verify input is of trees of one shape; ours is built when it is decided what is verified",
    until=_BLOCK,
)

# --- while the target verifies

TARGET_FORWARD = Patch(
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
    why="the target's pass gets packed rows, and its output is put back into the window",
    until=_BLOCK,
)
CAN_RUN_GRAPH = Patch(
    f"{_RUNNER}.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.can_run_graph",
    why="an idle rank under DP attention takes the others' packed rows, not the graph of a uniform window",
    until=_BLOCK,
)
PLAN_CAPTURED = Patch(
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.begin_forward",
    why="FlashInfer reads three tensors back to plan a captured pass whose numbers the host has",
    until="the end of that wrapper",
)
STEP_DEPTH = Patch(
    f"{_SPEC}.eagle_worker_v2:EAGLEWorkerV2.speculative_num_steps",
    why="0.5.17 shapes log probabilities by the worker's depth, which a narrower window's is not",
    until="0.5.17 is not supported any more",
)


# What kind of attention has factories of ours, and why.
_ATTENTION = {
    "triton": "its kernel takes requests of different lengths, its metadata does not",
    "flashinfer": "it plans for requests of different lengths, SGLang fills in one",
    "fa3": "it verifies trees of different sizes, SGLang fills in one",
    "flashmla": "its kernel takes one length, around which packed rows can be padded",
}


def _hook(patch: Patch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(patch.dotted, patch.handler, HookType(patch.hook))


PATCHES = Table(
    "sglang",
    logging.getLogger(__name__),
    (
        Patch(
            "sglang.srt.server_args:ServerArgs.add_cli_args",
            why="--speculative-c2t-*",
            until=_OPTIONS,
            when=LOAD,
            ours=f"{_OURS}.args:add_cli_args",
            hook="after",
        ),
        Patch(
            "sglang.srt.server_args:ServerArgs.from_cli_args",
            why="the parsed options have to reach every process",
            until=_OPTIONS,
            when=LOAD,
            ours=f"{_OURS}.args:from_cli_args",
            hook="around",
        ),
        Patch(
            "sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request",
            why="what no batch may meet is refused with status 400: bad options and tokens",
            until="SGLang lets an algorithm check custom_params",
            when=LOAD,
            ours=f"{_OURS}.requests:check",
            hook="after",
        ),
        Patch(
            f"{_SCHEDULER}.handle_generate_request",
            why="SGLang's Rust front end checks no log probabilities of a request, of which a scheduler dies",
            until="that front end, or the scheduler, refuses them",
            when=WORKER,
            ours=f"{_OURS}.requests:bounding",
        ),
        Patch(
            f"{_SCHEDULER}.set_internal_state",
            why="beta and the longest chain change while a server runs",
            until="SGLang passes what it does not know to the worker",
            when=WORKER,
            ours=f"{_OURS}.control:setter",
        ),
        Patch(
            f"{_SCHEDULER}.get_internal_state",
            why="settings and counts in /get_server_info",
            until="SGLang asks the worker for its state",
            when=WORKER,
            ours=f"{_OURS}.control:getter",
        ),
        Patch(
            "sglang.srt.managers.utils:GenerationBatchResult.copy_to_cpu",
            why="a step's record travels with the copy that SGLang makes of its result",
            until="a worker can add tensors to a result",
            when=WORKER,
            ours=f"{_OURS}.results:with_step",
        ),
        Patch(
            f"{_COMPONENTS}.batch_result_processor:SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            why="a step is counted when its result has arrived, before a request has ended of it",
            until="SGLang hands verified lengths to the worker",
            when=WORKER,
            ours=f"{_OURS}.results:counting",
        ),
        Patch(
            f"{_COMPONENTS}.output_streamer:_GenerationStreamAccumulator.accept",
            why="each answer says what C2T did for its request",
            until="a worker can add to customized_info",
            when=WORKER,
            ours=f"{_OURS}.results:telling",
        ),
        Patch(
            f"{_SCHEDULER}.process_batch_result",
            why="a recorded request's text is complete here",
            until="SGLang tells the worker which requests have ended",
            when=WORKER,
            ours=f"{_OURS}.results:finishing",
        ),
        *(
            Patch(
                f"sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS.{name}",
                why=why,
                until="SGLang's backend of that name reads a verify input's layout",
                when=WORKER,
                ours=f"{_OURS}.verify.backends:packing_{name}",
            )
            for name, why in _ATTENTION.items()
        ),
        Patch(
            f"{_RUNNER}.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.get_spec_info",
            why="target graphs are captured with a layout for SGLang's own algorithms only",
            until="SGLang asks supports_ragged_verify here too",
            when=PACKING,
            ours=f"{_OURS}.verify.backends:with_capture_layout",
        ),
        Patch(
            f"{_RUNNER}.model_runner:ModelRunner._get_attention_backend",
            why="each depth and width has backends of its own, of which one is to verify where that is asked for",
            until="SGLang has an option for the attention that verifies alone",
            when=APART,
            ours=f"{_OURS}.verify.apart:verifying_apart",
        ),
        Patch(
            "sglang.srt.managers.schedule_batch:Req.owned_kv_len",
            why="what the draft has not read of a text that has ended is no prefix for others",
            until="SGLang's own skipped draft extend leaves no holes in the draft's keys",
            when=PLAIN,
            ours=f"{_OURS}.results:read_by_the_draft",
        ),
        *(EAGLE_DRAFT_WORKER, STANDALONE_DRAFT_WORKER, RESOLVE_DRAFT_GRAPHS, CAPTURE_ONE, DEVICE_MODULE, EXTEND_WIDTH),
        *(DRAFT_FORWARD, EXTEND_GRAPH, BUILD_VERIFY_INPUT, TARGET_FORWARD, CAN_RUN_GRAPH, PLAN_CAPTURED, STEP_DEPTH),
    ),
    hook=_hook,
)
