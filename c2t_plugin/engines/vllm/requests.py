"""What one request may ask of C2T: `"vllm_xargs": {"c2t_enabled": false, "c2t_max_depth": 2}`, or `c2t_beta`.

vLLM carries `vllm_xargs` of its routes, and `extra_args` of SamplingParams, to scheduler and workers as they are. A bad
value is answered with status 400 where a request's parameters are made, in each API server, all of which make an
engine's configuration. vLLM's Rust front end does not make them in Python, so they are looked at again where they are
used: there nothing raises, and a bad value means "as the server is set" and is counted.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from c2t_plugin.config import LOWER, NONE
from c2t_plugin.engines.vllm.config import PREFIX
from c2t_plugin.errors import ConfigError
from c2t_plugin.request_options import KEYS, RequestOptions, shown

logger = logging.getLogger("vllm.c2t")

OWN_OF_NONE = RequestOptions()
# The process that makes requests' parameters, and what its newest engine lets them set. A process forked off it has
# another number, and must not raise.
_front: tuple[int, str] | None = None


def allow(settings: str) -> None:
    """From now on requests that are made in this process are checked. settings: of C2TConfig.request_settings."""
    global _front
    _front = os.getpid(), settings


def granted(extra_args: Any, settings: str) -> RequestOptions:
    """What a request gets of what it asks for. Raises ConfigError for what it may not."""
    if not isinstance(extra_args, Mapping):
        return OWN_OF_NONE
    own = {name: value for name, value in extra_args.items() if isinstance(name, str) and name.startswith(PREFIX)}
    if not own:
        return OWN_OF_NONE
    values = {name.removeprefix(PREFIX): value for name, value in own.items()}
    unknown = [shown(PREFIX + name) for name in values if name not in KEYS]
    if unknown:
        takes = ", ".join(PREFIX + name for name in KEYS)
        raise ConfigError(f"there is no {', '.join(unknown[:9])}; a request takes {takes}")
    # vLLM's routes make numbers of true and false
    for name in ("enabled", "learn"):
        if isinstance(values.get(name), int) and values[name] in (0, 1):
            values[name] = bool(values[name])
    asked = RequestOptions.of(values, PREFIX)
    if asked == RequestOptions(learn=False):
        return asked
    refusal = f"this server lets requests set {settings} (c2t_request_settings); leave it out"
    if settings == NONE:
        raise ConfigError(f"{', '.join(sorted(own))} cannot be set: {refusal}")
    if settings == LOWER and not asked.enabled:
        raise ConfigError(f"{PREFIX}enabled false verifies more than the server does: {refusal}")
    return asked


def checking(stock: Callable[..., None]) -> Callable[..., None]:
    """SamplingParams._verify_extra_args, which its constructor calls where there are any."""

    @functools.wraps(stock)
    def _verify_extra_args(self: Any) -> None:
        stock(self)
        if _front is None or _front[0] != os.getpid():
            return
        try:
            granted(self.extra_args, _front[1])
        except ConfigError as error:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(str(error), parameter="vllm_xargs") from error

    return _verify_extra_args


class OwnSettings:
    """What running requests have set, read once for each; nothing here raises, whatever a client sends."""

    def __init__(self, settings: str, most: int) -> None:
        """settings: of C2TConfig.request_settings. most: requests that run at once."""
        self._settings, self._most = settings, most
        # by name, what a request asked for, and what it got
        self._known: dict[str, tuple[Any, RequestOptions]] = {}
        # requests whose own settings did not hold
        self.ignored = 0

    def of(self, names: Iterable[str], requests: Mapping[str, Any]) -> list[RequestOptions]:
        """Of these requests. requests: vLLM's own, with sampling_params, by name."""
        if len(self._known) > 2 * self._most:
            self._known = {name: found for name, found in self._known.items() if name in requests}
        return [self._one(name, requests.get(name)) for name in names]

    def _one(self, name: str, request: Any) -> RequestOptions:
        extra_args = getattr(getattr(request, "sampling_params", None), "extra_args", None)
        if not extra_args:
            return OWN_OF_NONE
        asked, found = self._known.get(name, (None, OWN_OF_NONE))
        # a name may come again
        if asked is not extra_args:
            found = OWN_OF_NONE
            try:
                found = granted(extra_args, self._settings)
            except Exception as error:
                self._ignore(error)
            self._known[name] = extra_args, found
        return found

    def _ignore(self, error: Exception) -> None:
        # the first one is said in the log: clients decide how many
        if not self.ignored:
            logger.warning("C2T: a request's settings are ignored, here and from now on: %s", error)
        self.ignored += 1
