"""One request as SGLang's Python front end checks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from c2t_plugin.engines.sglang import requests

VOCABULARY = 100


def at_the_front(
    custom_params: Any = None, tokens: list[int] | None = None, *, processor: Any = None, **changes: Any
) -> None:
    """Check a request of these tokens. processor: of images. changes: of SGLang's GenerateReqInput."""
    found = [1, 2] if tokens is None else tokens
    fields = {"input_ids": found, "input_embeds": None, "contains_mm_input": lambda: False}
    obj = SimpleNamespace(**{**fields, "sampling_params": {"custom_params": custom_params}, **changes})
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY), mm_processor=processor)
    requests.check(None, manager, obj, found)
