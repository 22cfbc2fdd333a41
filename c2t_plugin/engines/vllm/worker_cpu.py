"""vLLM's CPU worker with C2T."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from c2t_plugin.engines.vllm import cpu_guard
from c2t_plugin.engines.vllm.worker import WorkerMixin


class C2TWorker(WorkerMixin, CPUWorker):
    """Named by `parallel_config.worker_cls`."""

    def init_device(self) -> None:
        cpu_guard.install()
        super().init_device()
