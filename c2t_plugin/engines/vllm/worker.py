"""The part of our workers that does not depend on the device: drafters that cut, and control of them at run time."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from c2t_plugin.classifier import FILE_NAME
from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.engines.vllm.config import Settings
from c2t_plugin.engines.vllm.handed import hand
from c2t_plugin.engines.vllm.patches import PATCHES, SAMPLE, WEIGHT_FILES, drafting_by
from c2t_plugin.engines.vllm.served import RequestsOfV2, ServedTraces
from c2t_plugin.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _StockWorker
else:
    _StockWorker = object


def _without_classifier_files() -> contextlib.AbstractContextManager[None]:
    """While target and draft are loaded: leave out the files whose names begin as a classifier's does."""
    stock = WEIGHT_FILES.owner.filter_duplicate_safetensors_files

    def needed(files: list[str], *rest: str) -> list[str]:
        return [file for file in stock(files, *rest) if not Path(file).name.startswith(Path(FILE_NAME).stem)]

    return PATCHES.during(WEIGHT_FILES, needed)


class WorkerMixin(_StockWorker):
    """Over a stock worker. Its c2t_ methods are reached by `collective_rpc`."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            from c2t_plugin.engines.vllm.v2 import DRAFTERS
        else:
            from c2t_plugin.engines.vllm.v1 import DRAFTERS
        with drafting_by(DRAFTERS):
            super().init_device()

    def load_model(self, *positional: Any, **keyword: Any) -> None:
        # an MTP head's classifier lies beside the target
        with _without_classifier_files():
            super().load_model(*positional, **keyword)
        runner, config = self.model_runner, self.vllm_config
        if self.use_v2_model_runner and not config.speculative_config.enable_adaptive_verification:
            from c2t_plugin.engines.vllm.graphs import capture_any_lengths

            runner.draft_tokens_handler.scorer = runner.speculator.scorer
            capture_any_lengths(runner)
        elif not self.use_v2_model_runner:
            from c2t_plugin.engines.vllm.sampling import sampling

            PATCHES.on(SAMPLE, runner, functools.partial(sampling, runner))
        settings = Settings.of(config)
        assert settings is not None
        if settings.trace_dir is not None and config.parallel_config.rank == 0:
            requests = RequestsOfV2(runner.req_states) if self.use_v2_model_runner else runner.requests
            self._drafter().traces = ServedTraces(settings, config, requests)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        # On a GPU vLLM lets requests of its own run through all of this first.
        drafter, traces = self._drafter(), self._traces()
        drafter.drafts = drafter.draft_steps = 0
        drafter.scorer.forget()
        if traces is not None:
            traces.forget()
        return times

    def execute_model(self, scheduler_output: Any, *positional: Any, **keyword: Any) -> Any:
        traces = self._traces()
        if traces is not None:
            traces.finish(scheduler_output.finished_req_ids)
        drafter, sent = self._drafter(), getattr(scheduler_output, ATTRIBUTE, None)
        if self.use_v2_model_runner:
            drafter.note(scheduler_output)
        else:
            drafter.ending.sent = sent
        if sent is not None and sent.taken is not None:
            drafter.scorer.take([torch.from_numpy(each) for each in sent.taken])
        return super().execute_model(scheduler_output, *positional, **keyword)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if not self.use_v2_model_runner:
            return hand(output, self.take_draft_token_ids)
        if not self.vllm_config.speculative_config.enable_adaptive_verification:
            return output
        from c2t_plugin.engines.vllm.verified import AsyncOutput, VerifiedOutput

        runner = self.model_runner
        # ranks without a sampler have no such output
        is_sampled = isinstance(output, AsyncOutput)
        return VerifiedOutput(output, runner.output_copy_stream, runner.main_stream) if is_sampled else output

    def take_draft_token_ids(self) -> Any:
        traces = self._traces()
        if traces is not None:
            traces.settle()
        drafts = super().take_draft_token_ids()
        if drafts is not None and (drafted := self._drafter().tell(drafts)) is not None:
            setattr(drafts, ATTRIBUTE, drafted)
        return drafts

    def shutdown(self) -> None:
        # also called on a worker whose start has failed
        traces = self._traces() if self.model_runner is not None else None
        try:
            if traces is not None:
                traces.close()
        finally:
            super().shutdown()

    def _traces(self) -> ServedTraces | None:
        return self._drafter().traces

    def _drafter(self) -> Any:
        return self.model_runner.speculator if self.use_v2_model_runner else self.model_runner.drafter

    def c2t_control(self, beta: float | None = None, max_depth: int | None = None) -> dict[str, Any]:
        """Change threshold and longest chain from the next draft on, both or, with ConfigError, neither.

        Returns the state: beta, max_depth, d_max, how many tokens were kept for want of finite statistics (non_finite),
        what the runner counted since the start, drafts begun and draft steps taken, and requests whose own settings did
        not hold. On V1 seconds of drafts, and of those seconds what statistics, confidences and cuts took (None on a
        GPU); on V2 requests by number of drafts verified, draft tokens accepted, and what is learnt, if anything.
        """
        drafter = self._drafter()
        scorer = drafter.scorer
        previous = int(scorer.max_depth)
        if max_depth is not None:
            scorer.set_max_depth(max_depth)
        try:
            if beta is not None:
                scorer.set_beta(beta)
        except ConfigError:
            scorer.set_max_depth(previous)
            raise
        counts = (
            {**dict(zip(("verified", "accepted"), scorer.outcomes(), strict=True)), "learnt": scorer.learnt()}
            if self.use_v2_model_runner
            else {"draft_s": drafter.draft_s, "classifier_s": drafter.classifier_s}
        )
        return {
            "beta": float(scorer.beta),
            "max_depth": int(scorer.max_depth),
            "d_max": scorer.d_max,
            "non_finite": int(scorer.non_finite),
            "drafts": drafter.drafts,
            "draft_steps": drafter.draft_steps,
            "settings_ignored": drafter.own.ignored,
            **counts,
        }
