"""One request as SGLang's Python front end checks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from c2t_plugin.engines.sglang import requests

VOCABULARY, WIDTH = 100, 4


def at_the_front(
    custom_params: Any = None,
    tokens: list[int] | None = None,
    *,
    processor: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> None:
    """Check a request of these tokens. processor: of images. dtype: the model's. changes: of SGLang's
    GenerateReqInput."""
    found = [1, 2] if tokens is None else tokens
    fields = {"input_ids": found, "input_embeds": None, "contains_mm_input": lambda: False}
    obj = SimpleNamespace(**{**fields, "sampling_params": {"custom_params": custom_params}, **changes})
    model = SimpleNamespace(vocab_size=VOCABULARY, hidden_size=WIDTH, dtype=dtype)
    manager = SimpleNamespace(model_config=model, mm_processor=processor)
    requests.check(None, manager, obj, found)
