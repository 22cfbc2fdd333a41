"""The numbers of verified draft tokens, on their way from the device with the sampled tokens of the same step."""

from __future__ import annotations

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np, stream

from c2t_plugin.engines.vllm.config import VERIFIED


class VerifiedOutput(AsyncModelRunnerOutput):
    """Around a step's output: its result gets the attribute VERIFIED, {request: draft tokens verified}."""

    def __init__(self, output: AsyncOutput, copy_stream: torch.cuda.Stream, main_stream: torch.cuda.Stream) -> None:
        self._output = output
        # That stream has waited for the sampler already, and must not wait for the drafter, which runs by now.
        with stream(copy_stream, main_stream):
            self._rejected = async_copy_to_np(output.sampler_output.num_rejected)
            output.copy_event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        found = self._output.get_output()
        accepted = (max(len(tokens) - 1, 0) for tokens in found.sampled_token_ids)
        verified = (kept + lost for kept, lost in zip(accepted, self._rejected.tolist(), strict=True))
        setattr(found, VERIFIED, dict(zip(found.req_ids, verified, strict=True)))
        return found
