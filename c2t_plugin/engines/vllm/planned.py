"""vLLM's scheduler with a planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import envs
from vllm.platforms import current_platform

from c2t_plugin.classifier import load_classifier
from c2t_plugin.config import LOWER, NETWORK, C2TConfig
from c2t_plugin.engines import curve_cache, learned, learning
from c2t_plugin.engines.patching import ATTRIBUTE
from c2t_plugin.engines.vllm.behind import reads_later
from c2t_plugin.engines.vllm.config import Settings
from c2t_plugin.engines.vllm.early_exit import may_leave
from c2t_plugin.engines.vllm.ending import Sent
from c2t_plugin.engines.vllm.learns import pair_of
from c2t_plugin.engines.vllm.metrics import CARRIER, classified, packed
from c2t_plugin.engines.vllm.planning import Drafted, Planning, cut
from c2t_plugin.engines.vllm.requests import OwnSettings
from c2t_plugin.engines.vllm.verified import CountingScheduler
from c2t_plugin.planner import OwnLimits
from c2t_plugin.planner.curve_file import read_curve

if TYPE_CHECKING:
    from c2t_plugin.planner.calibration import Calibration
    from c2t_plugin.planner.network import Network
    from c2t_plugin.planner.network_learner import NetworkLearner
    from c2t_plugin.planner.step_planner import StepPlanner


class PlanningScheduler(CountingScheduler):
    """Synchronous. Named by `scheduler_config.scheduler_cls`."""

    # of drafts, statistics, confidences and cuts, until the next statistics
    _classifier_s = 0.0

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        settings = Settings.of(self.vllm_config)
        assert settings is not None
        path = None if settings.curve is None else Path(settings.curve)
        curve = read_curve(path) if path is not None and path.exists() else None
        own = C2TConfig(learn=settings.learn, learned=settings.learned)
        classifier, pair = load_classifier(settings.classifier), pair_of(self.vllm_config, settings.base)
        # of a network that is to be in force, until workers are sent it
        self._taken: Network | None = None
        found: Calibration | NetworkLearner | None
        if settings.learn == NETWORK:
            found = learned.network(own, classifier, self.num_spec_tokens, pair)
            found.follow(self._take)
        else:
            found = learning.calibration(own, classifier, self.num_spec_tokens, pair)
        # on V2 a draft is on a device, which would have to be asked where it ends
        few = self.vllm_config.use_v2_model_runner
        ways = {"ends": may_leave(self.vllm_config) and not few, "skips": reads_later(self.vllm_config), "few": few}
        ways["spares"] = found is not None and not few and current_platform.is_cpu()
        self.planning = Planning(curve, path, self.num_spec_tokens, calibration=found, **ways)
        self.planning.own = self._own_limits
        self.planning.drawn = self.vllm_config.speculative_config.draft_sample_method == "probabilistic"
        self.planning.planner.context = lambda: sum(request.num_tokens for request in self.running)
        if path is None:
            remember(self.planning.planner, self.vllm_config, settings.base)
        if found is not None:
            learning.report(self.planning.planner, settings.learned, classifier, pair)
            self.planning.planner.listeners.append(self._tell)
        # what was learnt, for the next statistics
        self._told: dict[str, int] = {}
        self._own = OwnSettings(settings.request_settings, self.scheduler_config.max_num_seqs)
        # whether the planner may drop more
        self._lower = settings.request_settings == LOWER
        # vLLM asks it for nothing but an element
        self.dynamic_sd_lookup: Any = self.planning

    def schedule(self, *positional: Any, **keyword: Any) -> Any:
        decoding = not self.waiting and not any(request.is_prefill_chunk for request in self.running)
        self.planning.begin(decoding=decoding)
        output = super().schedule(*positional, **keyword)
        names = output.num_scheduled_tokens
        reading = [name for name in names if self.requests[name].is_prefill_chunk]
        sent = self.planning.sent(len(names) - len(reading), reading)
        if self._taken is not None:
            sent = (sent or Sent(None))._replace(taken=tuple(self._taken))
            self._taken = None
        if sent is not None:
            setattr(output, ATTRIBUTE, sent)
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        # vLLM asks for it right after it has sent the step off
        self.planning.learn()
        return super().get_grammar_bitmask(scheduler_output)

    def _take(self, network: Network) -> None:
        self._taken = network

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.planning.ran(scheduler_output.num_scheduled_tokens, drafts)
        tokens = self._tokens([*drafts, *self.planning.rest, *self.planning.untold], model_runner_output)
        sampled = {name: len(own) for name, own in tokens.items()}
        teaching = self._teaching(tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # of a text that has ended vLLM has dropped what came behind the end
        self._judge(drafts, sampled, {name: tokens[name] for name in teaching})
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        drafted: Drafted | None = getattr(draft_token_ids, ATTRIBUTE, None)
        self._classifier_s += 0.0 if drafted is None else drafted.classifier_s
        cut(self.planning, draft_token_ids, self._takes, self._limits(draft_token_ids.req_ids))
        super().update_draft_token_ids(draft_token_ids)

    def _limits(self, names: Iterable[str]) -> list[OwnLimits | None]:
        """What each of these requests has set for itself."""
        return [OwnLimits.of(each, lower=self._lower) for each in self._own.of(names, self.requests)]

    def _own_limits(self) -> list[OwnLimits]:
        """Of those running requests that set limits for themselves."""
        found = self._limits([request.request_id for request in self.running])
        return [each for each in found if each is not None]

    def make_stats(self, *positional: Any, **keyword: Any) -> Any:
        stats = super().make_stats(*positional, **keyword)
        if stats is not None:
            getattr(stats, CARRIER).update(self._told | classified(self._classifier_s))
            self._told, self._classifier_s = {}, 0.0
        return stats

    def _tell(self, state: dict[str, Any]) -> None:
        self._told = packed(state)

    def _tokens(self, drafted: Iterable[str], output: Any) -> dict[str, Any]:
        """Of each of these requests, vLLM's list of its tokens of this step."""
        places, tokens = output.req_id_to_index, output.sampled_token_ids
        # a request that failed or was aborted meanwhile has none
        return {name: tokens[places[name]] for name in drafted if name in places and len(tokens[places[name]])}

    def _teaching(self, came: Iterable[str]) -> list[str]:
        """Those whose outcome is learnt from. What a grammar forbids says nothing about drafts without one."""
        names = [name for name in came if (found := self.requests.get(name)) and not found.use_structured_output]
        return [name for name, own in zip(names, self._own.of(names, self.requests), strict=True) if own.learn]

    def _judge(self, drafts: Any, given: Mapping[str, int], tokens: Mapping[str, Sequence[int]]) -> None:
        """given: how many tokens the target gave each request. tokens: of those that teach, what became part of the
        text."""
        # the last one that it gave is its own; where the text ended before, nothing is known of what came after
        accepted = {name: min(given[name] - 1, len(kept)) for name, kept in tokens.items()}
        own = {name: kept[-1] for name, kept in tokens.items() if len(kept) == given[name]}
        verified = {name: len(drafts.get(name, ())) if name in own else accepted[name] for name in tokens}
        self.planning.judged(verified, accepted, own, tokens, self._ended)

    def _takes(self, name: str) -> bool:
        return not self._ended(name) and not self.requests[name].is_prefill_chunk

    def _ended(self, name: str) -> bool:
        request = self.requests.get(name)
        return request is None or request.is_finished()


def remember(planner: StepPlanner, vllm_config: Any, base: str) -> None:
    """Have a planner begin with what was measured of such an engine before, and keep what it measures. base: the kind
    of draft."""
    target, spec = vllm_config.model_config, vllm_config.speculative_config
    facts = {
        "engine": f"vLLM {vllm.__version__}",
        "base": base,
        "depths": planner.depths,
        "ends": planner.draft_end is not None,
        "skips": planner.skips,
        "target": curve_cache.checkpoint(target.model, target.revision),
        "draft": curve_cache.checkpoint(spec.model, target.revision if spec.model == target.model else spec.revision),
        "dtype": target.dtype,
        "quantization": target.quantization,
        "draft_quantization": spec.quantization,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "block_size": vllm_config.cache_config.block_size,
        "attention": vllm_config.attention_config.backend,
        "compilation": vllm_config.compilation_config.mode,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        "batch_invariant": envs.VLLM_BATCH_INVARIANT,
        "threads_bound": envs.VLLM_CPU_OMP_THREADS_BIND,
    }
    curve_cache.start(planner, torch.device("cpu"), facts)
