"""vLLM's CUDA worker with C2T. Never run on a GPU."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from c2t_plugin.engines.vllm.worker import WorkerMixin


class C2TWorker(WorkerMixin, Worker):
    """Named by `parallel_config.worker_cls`."""
