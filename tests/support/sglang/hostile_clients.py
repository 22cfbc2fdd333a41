"""What strangers send to a server that serves others, and how each of it has to be answered."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

from benchmarks.cpu_engine.server import CpuServer
from benchmarks.serving.process import ServerError

# A request's own settings, and what the answer says of them.
BAD_SETTINGS: dict[str, tuple[Any, str]] = {
    "beta_above_one": ({"beta": 1.5}, "beta must be a number in [0, 1], got 1.5"),
    "beta_negative": ({"beta": -0.1}, "beta must be a number in [0, 1]"),
    "beta_not_a_number": ({"beta": math.nan}, "beta must be a number in [0, 1]"),
    "beta_text": ({"beta": "0.3"}, "beta must be a number in [0, 1], got '0.3'"),
    "beta_bool": ({"beta": True}, "beta must be a number in [0, 1]"),
    "depth_negative": ({"max_depth": -1}, "max_depth must be a whole number from 0 to 2147483647"),
    "depth_fraction": ({"max_depth": 1.5}, "max_depth must be a whole number"),
    "depth_bool": ({"max_depth": False}, "max_depth must be a whole number"),
    "depth_list": ({"max_depth": [1]}, "max_depth must be a whole number"),
    "depth_beyond_any": ({"max_depth": 10**400}, "max_depth must be a whole number from 0"),
    "depth_infinite": ({"max_depth": math.inf}, "max_depth must be a whole number from 0"),
    "enabled_number": ({"enabled": 1}, "enabled must be true or false"),
    "unknown_key": ({"betta": 0.3}, "has no 'betta'; it takes enabled, beta, max_depth"),
    "not_an_object": (0.3, "must be an object"),
    "off_with_a_beta": ({"enabled": False, "beta": 0.3}, "no meaning"),
}
LOGPROBS = {"text": "def f", "return_logprob": True}
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


class Sent(NamedTuple):
    """status: of the answer; 200 is a control message that is refused, with [false]."""

    route: str
    body: dict[str, Any]
    status: tuple[int, ...] = (400,)


def _with_params(route: str, custom_params: Any) -> dict[str, Any]:
    if route == "/generate":
        return {"text": "def f", "sampling_params": {"max_new_tokens": 4, "custom_params": custom_params}}
    text = {"prompt": "def f"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "def f"}]}
    return {"model": "m", "max_tokens": 4, "custom_params": custom_params, **text}


def _cases() -> dict[str, Sent]:
    found = {}
    for route in ROUTES:
        for name, (options, _) in BAD_SETTINGS.items():
            found[f"{name} of {route}"] = Sent(route, _with_params(route, {"c2t": options}))
        for params in ([1], "c2t", 7):
            found[f"params {params!r} of {route}"] = Sent(route, _with_params(route, params))
    for name, ids in {
        "below": [-1],
        "above": [5, 10**8],
        "far above": [10**30],
        "none": [],
        "words": ["a"],
        "nested": [[[1]]],
        "fraction": [0.5],
    }.items():
        found[f"ids {name}"] = Sent("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}})
    found |= {
        "no text": Sent("/generate", {"text": ""}),
        "no text among others": Sent("/generate", {"text": ["def f", ""]}),
        "too long": Sent("/generate", {"input_ids": [7] * 5000, "sampling_params": {"max_new_tokens": 4}}),
        "too long for OpenAI": Sent("/v1/completions", {"model": "m", "prompt": [7] * 5000, "max_tokens": 4}),
        "too long by what is asked for": Sent("/v1/completions", {"model": "m", "prompt": [7], "max_tokens": 10**9}),
        "id that is no text": Sent("/generate", {"text": "def f", "rid": {"a": 1}}),
        "no body": Sent("/generate", {}),
        "hidden states of a list": Sent("/generate", {"text": "def f", "return_hidden_states": []}),
        "overrides of a number": Sent("/generate", {"text": "def f", "positional_embed_overrides": 7}),
        "more logprobs than tokens": Sent("/generate", {**LOGPROBS, "top_logprobs_num": 10**6}),
        "more logprobs for OpenAI": Sent("/v1/completions", {"model": "m", "prompt": "def f", "logprobs": 10**6}),
        "logprobs from before the text": Sent("/generate", {**LOGPROBS, "logprob_start_len": -5}),
        "embeddings of another width": Sent("/generate", {"input_embeds": [[0.0] * 3]}),
    }
    depth, beta = "speculative_c2t_max_depth", "speculative_c2t_beta"
    for value in ("nan", "inf", "1e999", 99, -1, 1.5, None, [], {}):
        found[f"depth {value!r}"] = Sent("/set_internal_state", {"server_args": {depth: value}}, (200, 400))
    for value in ("nan", -0.5, 2, "x", None, []):
        found[f"beta {value!r}"] = Sent("/set_internal_state", {"server_args": {beta: value}}, (200, 400))
    found["both, one of them good"] = Sent("/set_internal_state", {"server_args": {beta: 0.9, depth: -1}}, (200,))
    found["a planner where none is"] = Sent("/set_internal_state", {"server_args": {"speculative_c2t_auto": 1}}, (200,))
    found["a state that is a list"] = Sent("/set_internal_state", {"server_args": [1]})
    return found


CASES = _cases()


def send(server: CpuServer, name: str) -> str:
    """Nothing if this one is answered as it has to be, else what came."""
    route, body, status = CASES[name]
    try:
        answer = server.request(route, body)
    except ServerError as error:
        told = [f"{route} was answered with {each}:" for each in status if each != 200]
        return "" if str(error).startswith(tuple(told)) else f"{name}: {error}"
    return "" if 200 in status and answer == [False] else f"{name}: {answer}"


def one_of_them(chance: random.Random) -> str:
    """The name of a case."""
    return chance.choice(list(CASES))
