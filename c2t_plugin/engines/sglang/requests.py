"""What one request may ask of C2T: `"custom_params": {"c2t": {"enabled": false, "beta": 0.3, "max_depth": 2}}`.

SGLang carries `custom_params` of every route to the scheduler as it is. A bad value is answered with status 400 where
SGLang's Python front end checks a request. Not every front end does, so it is looked at again where it is used: there
nothing raises, and a bad value means "as the server is set".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from c2t_plugin.config import LOWER, NONE, THRESHOLDS
from c2t_plugin.engines.sglang import args
from c2t_plugin.engines.sglang.metrics import Counts
from c2t_plugin.engines.sglang.parts import Parts
from c2t_plugin.engines.sglang.step import record_of
from c2t_plugin.errors import ConfigError
from c2t_plugin.planner import OwnLimits
from c2t_plugin.request_options import KEYS, MOST, RequestOptions, is_number, shown

KEY = "c2t"


def options_of(custom_params: Any) -> RequestOptions:
    """The options in a request's custom_params, which may be None. Raises ConfigError, naming the key."""
    if not isinstance(custom_params, Mapping | None):
        raise ConfigError(f"custom_params must be an object, got {shown(custom_params)}")
    options = (custom_params or {}).get(KEY)
    if options is None:
        return RequestOptions()
    if not isinstance(options, Mapping):
        raise ConfigError(f"custom_params.c2t must be an object with some of {', '.join(KEYS)}, got {shown(options)}")
    unknown = [shown(name) for name in options if name not in KEYS]
    if unknown:
        raise ConfigError(f"custom_params.c2t has no {', '.join(unknown[:9])}; it takes {', '.join(KEYS)}")
    return RequestOptions.of(options, f"{KEY}.")


def granted(custom_params: Any, settings: str, policy: str) -> RequestOptions:
    """What a request gets of what it asks for; ConfigError for what it may not. settings, policy: of C2TConfig."""
    asked = options_of(custom_params)
    if asked in (RequestOptions(), RequestOptions(learn=False)):
        return asked
    refusal = f"this server was started with --speculative-c2t-request-settings {settings}; leave it out"
    if settings == NONE:
        raise ConfigError(f"custom_params.c2t cannot be set: {refusal}")
    if settings == LOWER and not asked.enabled:
        raise ConfigError(f"c2t.enabled false verifies more than the server does: {refusal}")
    if asked.beta is not None and policy not in THRESHOLDS:
        raise ConfigError("c2t.beta has no meaning here: this server's trees are not cut by a threshold")
    return asked


def set_options(parts: Parts, slots: Tensor, reqs: Sequence[Any]) -> None:
    """Give the scorer what SGLang's requests in these slots ((n,) int64, on its device) ask for."""
    options = [_used(parts, req) for req in reqs]
    parts.scorer.set_requests(slots, [each.threshold for each in options], [each.longest for each in options])


def limits_of(reqs: Sequence[Any]) -> list[OwnLimits | None]:
    """Of each of SGLang's requests what it has set for itself, as a planner counts it."""
    return [record_of(req).limits for req in reqs]


def _used(parts: Parts, req: Any) -> RequestOptions:
    """Read once for each request, whose prompt may come in several chunks."""
    record = record_of(req)
    if record.options is None:
        record.options = RequestOptions()
        try:
            found = parts.configuration
            record.options = granted(req.sampling_params.custom_params, found["request_settings"], found["policy"])
        except Exception as error:
            # in a scheduler, which no client's value may end
            parts.counts.ignore(error)
        record.limits = OwnLimits.of(record.options, lower=parts.scorer.lower)
    return record.options


def all_by_their_own(parts: Parts, reqs: Sequence[Any]) -> bool:
    """Whether each of these is cut by its own threshold alone, so that no planner has a say."""
    return all(record_of(req).own_beta for req in reqs) and not parts.scorer.lower


def check(_result: None, manager: Any, obj: Any, input_ids: Any, *_: Any, **__: Any) -> None:
    """AFTER hook over the Python front end's check of a request. Raises ConfigError: SGLang answers with status 400."""
    from sglang.srt.runtime_context import get_server_args

    # Read here and not once: an extra tokenizer worker has its plugins before it knows its server's arguments.
    server_args = get_server_args()
    # Of another algorithm's requests the key may be somebody else's.
    if not args.asks_for_c2t(server_args):
        return
    # with images or sound the tokens are SGLang's own, some of them outside; a model of text takes no notice of either
    if not (manager.mm_processor and obj.contains_mm_input()):
        _check_prompt(obj, input_ids, manager.model_config)
    for found in _unfit(obj, manager.model_config.vocab_size):
        raise found[2]
    custom_params = obj.sampling_params.get("custom_params")
    if options_of(custom_params) != RequestOptions():
        config = args.config_of(server_args)
        granted(custom_params, config.request_settings, config.policy)


def bounding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scheduler.handle_generate_request, which a front end that checks nothing sends requests to."""

    @functools.wraps(original)
    def handle_generate_request(self: Any, recv_req: Any, *positional: Any, **keyword: Any) -> Any:
        _bound(self.draft_worker.c2t.counts, recv_req, self.model_config.vocab_size)
        return original(self, recv_req, *positional, **keyword)

    return handle_generate_request


def _bound(counts: Counts, recv_req: Any, vocabulary: int) -> None:
    """Put what a scheduler can serve in the place of what it would die of. Never raises."""
    try:
        found = list(_unfit(recv_req, vocabulary))
        for name, instead, _ in found:
            setattr(recv_req, name, instead)
        if found:
            counts.ignore(found[0][2])
    except Exception as error:
        counts.ignore(error)


def _unfit(obj: Any, vocabulary: int) -> Iterator[tuple[str, Any, ConfigError]]:
    """Of fields that a front end of SGLang's takes as they come, those that a scheduler dies of: name, what can be
    served instead, what is wrong. 0.5.17 has not all of them."""
    hidden = getattr(obj, "return_hidden_states", None)
    if hidden not in (None, True, False, "last"):
        says = f'return_hidden_states must be true, false or "last", got {shown(hidden)}'
        yield "return_hidden_states", False, ConfigError(says)
    overrides = getattr(obj, "positional_embed_overrides", None)
    if overrides is not None and not hasattr(overrides, "reconstruct"):
        says = f"positional_embed_overrides takes what programs make, got {shown(overrides)}; leave it out"
        yield "positional_embed_overrides", None, ConfigError(says)
    for name, least, most in (("top_logprobs_num", 0, vocabulary), ("logprob_start_len", -1, MOST)):
        value = getattr(obj, name, None)
        if value is not None and not (is_number(value) and least <= value <= most):
            instead = most if is_number(value) and value > most else least
            yield name, instead, ConfigError(f"{name} must be from {least} to {most}, got {shown(value)}")


def _check_prompt(obj: Any, input_ids: Any, model: Any) -> None:
    """What plain SGLang's scheduler dies of. model: SGLang's ModelConfig."""
    vocabulary, prompt = model.vocab_size, input_ids if obj.input_embeds is None else obj.input_embeds
    if prompt is not None and not len(prompt):
        raise ConfigError("the prompt has no tokens; send one at least")
    if obj.input_embeds is not None and (model.dtype != torch.bfloat16 or {*map(len, prompt)} != {model.hidden_size}):
        raise ConfigError(
            f"input_embeds takes rows of {model.hidden_size} numbers, of a model in bfloat16, which SGLang makes of "
            f"them (this one is in {model.dtype}); send text or input_ids"
        )
    if obj.input_ids is not None and input_ids and not (min(input_ids) >= 0 and max(input_ids) < vocabulary):
        outside = next(token for token in input_ids if not 0 <= token < vocabulary)
        raise ConfigError(f"input_ids has the token {outside}; expected 0 to {vocabulary - 1}")
