"""Every name of vLLM's that C2T binds anew, why, and until when. See engines/patching.py for how.

Two things beside names: on a CPU without Triton, `cpu_guard` registers a kernel with vLLM's own registry, and what a
planner has learnt travels to the metrics as LoRA's statistics (`metrics.CARRIER`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from c2t_plugin.engines.patching import Patch, Table

# Occasions. Every process loads plugins; an engine that asks for C2T is made, and its scheduler; a worker on a CPU is.
LOAD, ENGINE, CORE, CPU = "load", "engine", "core", "cpu"

_NAMED = "the model runner's constructor names the class of its drafter"
_BLOCK = "the end of the block"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu"
_OURS = "c2t_plugin.engines.vllm"
_LOGGER = "vllm.v1.metrics.loggers:PrometheusStatLogger"

# By the name of what stands in its place while a model runner is made.
DRAFTERS = {
    patch.name: patch
    for patch in (
        Patch(f"{_RUNNER}:EagleProposer", why=_NAMED, until=_BLOCK),
        Patch(f"{_RUNNER}:DraftModelProposer", why=_NAMED, until=_BLOCK),
        Patch(f"{_V2}.spec_decode.eagle.speculator:EagleSpeculator", why=_NAMED, until=_BLOCK),
        Patch(f"{_V2}.spec_decode.mtp.speculator:MTPSpeculator", why=_NAMED, until=_BLOCK),
        Patch(f"{_V2}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator", why=_NAMED, until=_BLOCK),
        Patch(f"{_V2}.model_runner:DraftTokensHandler", why="the same: drafts are cut on their way", until=_BLOCK),
    )
}
WEIGHT_FILES = Patch(
    "vllm.model_executor.model_loader.default_loader:filter_duplicate_safetensors_files",
    why="vLLM loads every safetensors file of a checkpoint, and a classifier beside the draft is no part of it",
    until=_BLOCK,
)
COMPUTE_LOGITS = Patch(
    "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration.compute_logits",
    why="model runner V1 shows a draft step's logits nowhere else",
    until="model runner V1 is gone",
)
SAMPLE = Patch(
    f"{_RUNNER}:GPUModelRunner._sample",
    why="steps without a draft, and greedy ones, go through a sampler that copies their logits up to three times",
    until="vLLM's rejection sampler copies none of them",
)

_MIXED = "chains of unequal length are decoded in whole graphs, which vLLM captures under adaptive verification alone"
_CAPTURED = "vLLM captures them wherever drafts may be cut"
KV_CACHE = Patch(f"{_V2}.model_runner:GPUModelRunner.initialize_kv_cache", why=_MIXED, until=_CAPTURED)
MODEL_GRAPHS = Patch(f"{_V2}.model_runner:ModelCudaGraphManager", why=_MIXED, until=_CAPTURED)

PATCHES = Table(
    "vllm",
    logging.getLogger("vllm.c2t"),
    (
        Patch(
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            why='the method "c2t" becomes a stock one, and C2T\'s options its own',
            until="vLLM lets a plugin register a speculative method",
            when=LOAD,
            ours=f"{_OURS}.options:creating",
        ),
        Patch(
            "vllm.engine.arg_utils:EngineArgs.from_cli_args",
            why="errors of a command line are one line",
            until="the same",
            when=LOAD,
            ours=f"{_OURS}.options:marking",
        ),
        Patch(
            f"{_LOGGER}.__init__",
            why="C2T's counters beside vLLM's on /metrics",
            until="vLLM takes stat loggers of plugins in every front end",
            when=ENGINE,
            ours=f"{_OURS}.metrics:creating",
        ),
        Patch(
            f"{_LOGGER}.record",
            why="the same",
            until="the same",
            when=ENGINE,
            ours=f"{_OURS}.metrics:recording",
        ),
        Patch(
            "vllm.sampling_params:SamplingParams._verify_extra_args",
            why="a request's own settings are checked before an answer begins, so that a bad one is status 400",
            until="vLLM lets a plugin check requests before a stream begins",
            when=ENGINE,
            ours=f"{_OURS}.requests:checking",
        ),
        Patch(
            "vllm.v1.engine.core:EngineCore.post_step",
            why="workers are asked for drafts after each step, and have handed them over with its tokens",
            until="vLLM's own output of a step has the drafts",
            when=CORE,
            ours=f"{_OURS}.handed:posting",
        ),
        Patch(
            "vllm.v1.sample.rejection_sampler:apply_top_k_top_p",
            why="top-k of a batch without a draft takes the maximum of nothing, which ends the engine",
            until="vLLM takes an empty batch there",
            when=CPU,
            ours=f"{_OURS}.cpu_guard:unless_empty",
        ),
        *DRAFTERS.values(),
        WEIGHT_FILES,
        COMPUTE_LOGITS,
        SAMPLE,
        KV_CACHE,
        MODEL_GRAPHS,
    ),
)


@contextlib.contextmanager
def drafting_by(classes: Iterable[type]) -> Iterator[None]:
    """Within it vLLM's drafters are ours, each in the place of its last base."""
    with contextlib.ExitStack() as stack:
        for ours in classes:
            stack.enter_context(PATCHES.during(DRAFTERS[ours.__bases__[-1].__name__], ours))
        yield
