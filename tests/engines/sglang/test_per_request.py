"""One request's own C2T settings: each is followed exactly beside others in one batch; a bad one gets status 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang]

import openai  # noqa: E402

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from benchmarks.serving.process import ServerError  # noqa: E402
from c2t_plugin.engines.sglang.requests import options_of  # noqa: E402
from c2t_plugin.errors import ConfigError  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.hostile_clients import BAD_SETTINGS as BAD  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

D_MAX = 4
OWN_BETA = 0.7


@pytest.mark.parametrize(
    ("custom_params", "threshold", "longest"),
    [
        (None, None, None),
        ({}, None, None),
        ({"thinking_budget": 3}, None, None),
        ({"c2t": None}, None, None),
        ({"c2t": {}}, None, None),
        ({"c2t": {"enabled": True}}, None, None),
        ({"c2t": {"enabled": False}}, 0.0, None),
        ({"c2t": {"enabled": False, "max_depth": 0}}, 0.0, 0),
        ({"c2t": {"beta": 0.25}}, 0.25, None),
        ({"c2t": {"beta": 1}}, 1, None),
        ({"c2t": {"max_depth": 2.0}}, None, 2),
        ({"c2t": {"max_depth": 2**31 - 1}}, None, 2**31 - 1),
    ],
)
def test_options_are_read(custom_params: Any, threshold: float | None, longest: int | None):
    options = options_of(custom_params)
    assert (options.threshold, options.longest) == (threshold, longest)


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused(name: str):
    options, message = BAD[name]
    with pytest.raises(ConfigError) as error:
        options_of({"c2t": options})
    assert message in str(error.value)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("requests")
    target = Target(pair_dir() / "target")
    prompts = [ids[: 40 + 7 * i] for i, ids in enumerate(held_out_prompts(8, min_tokens=96, seed=11))]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    with vc.server(pair_dir(), "eagle3", D_MAX, classifier, folder / "server.log") as running:
        yield SimpleNamespace(
            server=running,
            prompts=prompts,
            plain=[tuple(target.greedy(prompt, vc.NEW_TOKENS)) for prompt in prompts],
            oracle=vc.Oracle(pair_dir(), target),
            classifier=classifier,
        )


# What a request asks for -> what of the simulation it must equal: d_max, whether C2T cuts, beta.
ASKED: list[tuple[dict[str, Any] | None, int, bool, float]] = [
    (None, D_MAX, True, vc.BETA),
    ({"enabled": False}, D_MAX, False, 0.0),
    ({"beta": OWN_BETA}, D_MAX, True, OWN_BETA),
    ({"max_depth": 2}, 2, True, vc.BETA),
    ({"enabled": False, "max_depth": 1}, 1, False, 0.0),
    ({"max_depth": 99}, D_MAX, True, vc.BETA),
    ({"beta": 0.0}, D_MAX, False, 0.0),
    (None, D_MAX, True, vc.BETA),
]


def expected(served: SimpleNamespace, number: int, asked: tuple[dict[str, Any] | None, int, bool, float]) -> Any:
    _, d_max, cuts, beta = asked
    rule = served.classifier if cuts else None
    return served.oracle.counts("eagle3", served.prompts[number], d_max, rule, beta)


def ask(served: SimpleNamespace, prompts: list[list[int]], asked: list[Any]) -> list[vc.Counts]:
    params = [
        {"temperature": 0.0, "max_new_tokens": vc.NEW_TOKENS, "ignore_eos": True}
        | ({} if options is None else {"custom_params": {"c2t": options}})
        for options, *_ in asked
    ]
    answers = served.server.request("/generate", {"input_ids": prompts, "sampling_params": params})
    return [vc.Counts.of_answer(answer) for answer in answers]


@pytest.mark.server
def test_each_request_of_a_batch_gets_its_own(served: SimpleNamespace):
    """Twice, the second time with the settings in another order, so that every slot is used again by another one."""
    for shift in (0, 3):
        asked = ASKED[shift:] + ASKED[:shift]
        found = ask(served, served.prompts, asked)
        assert [each.output_ids for each in found] == served.plain
        wanted = [expected(served, number, each) for number, each in enumerate(asked)]
        decided = [(mine, theirs) for mine, theirs in zip(found, wanted, strict=True) if theirs is not None]
        assert len(decided) >= len(asked) - 1
        assert [mine for mine, _ in decided] == [theirs for _, theirs in decided]
        assert len({each.draft_lengths for each in found}) > 3


@pytest.mark.server
def test_no_draft_token_is_plain_decoding(served: SimpleNamespace):
    found = ask(served, served.prompts[:1], [({"max_depth": 0}, 0, False, 0.0)])[0]
    steps = vc.NEW_TOKENS - 1
    assert (found.output_ids, found.verify_count, found.draft_lengths) == (served.plain[0], steps, ((0, steps),))


@pytest.mark.server
@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["beta_above_one", "unknown_key", "depth_fraction", "beta_text"])
def test_a_bad_value_is_status_400_and_touches_no_other_request(served: SimpleNamespace, route: str, name: str):
    options, message = BAD[name]
    body: dict[str, Any] = {"custom_params": {"c2t": options}, "max_tokens": 4, "model": "m"}
    if route == "/generate":
        body = {"text": "def f", "sampling_params": {"max_new_tokens": 4, "custom_params": {"c2t": options}}}
    elif route == "/v1/completions":
        body["prompt"] = "def f"
    else:
        body["messages"] = [{"role": "user", "content": "def f"}]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, served, served.prompts[:4], ASKED[:4])
        with pytest.raises(ServerError, match="was answered with 400") as error:
            served.server.request(route, body)
        assert message in str(error.value).replace("\\'", "'")
        assert [each.output_ids for each in beside.result()] == served.plain[:4]


@pytest.mark.server
def test_the_openai_client_reaches_it_through_extra_body(served: SimpleNamespace):
    client = openai.OpenAI(base_url=f"{served.server.base_url}/v1", api_key="none", max_retries=0)

    def answer(extra: dict[str, Any]) -> str:
        done = client.completions.create(
            model="m", prompt=served.prompts[0], max_tokens=16, temperature=0.0, extra_body=extra
        )
        return done.choices[0].text

    own = answer({"custom_params": {"c2t": {"beta": 0.9, "max_depth": 1}}})
    assert own and own == answer({})
    with pytest.raises(openai.BadRequestError, match="beta must be a number"):
        answer({"custom_params": {"c2t": {"beta": 7}}})


@pytest.mark.server
def test_the_servers_own_longest_chain_holds_for_all(served: SimpleNamespace):
    """An operator's cap is not undone by a request's."""
    vc.control(served.server, max_depth=1)
    try:
        found = ask(served, served.prompts[:2], [({"max_depth": 3}, 0, True, 0.0), (None, 0, True, 0.0)])
    finally:
        vc.control(served.server, max_depth=D_MAX)
    assert {length for each in found for length, _ in each.draft_lengths} <= {0, 1}
    assert json.loads(json.dumps(served.server.request("/get_server_info")))["internal_states"][0]["c2t"]


HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "no_text": ("/generate", {"text": ""}, "the prompt has no tokens"),
    "no_text_of_two": ("/generate", {"text": ["def f", ""]}, "the prompt has no tokens"),
    "token_above": ("/generate", {"input_ids": [5, 10**8]}, "input_ids has the token 100000000"),
    "token_above_beside_a_picture": (
        "/generate",
        {"input_ids": [5, 10**8], "image_data": "picture.png"},
        "input_ids has the token 100000000",
    ),
    "token_below": ("/generate", {"input_ids": [-1]}, "input_ids has the token -1"),
    "token_above_for_openai": ("/v1/completions", {"model": "m", "prompt": [10**8]}, "input_ids has the token"),
    "params_of_a_list": (
        "/generate",
        {"text": "def f", "sampling_params": {"custom_params": [1]}},
        "custom_params must be an object, got [1]",
    ),
}


@pytest.mark.server
@pytest.mark.parametrize("name", HOSTILE)
def test_what_ends_a_scheduler_is_status_400(served: SimpleNamespace, name: str):
    route, body, message = HOSTILE[name]
    with pytest.raises(ServerError, match="was answered with 400") as error:
        served.server.request(route, body)
    assert message in str(error.value)
    assert [each.output_ids for each in ask(served, served.prompts[:1], ASKED[:1])] == served.plain[:1]


@pytest.mark.server
@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
def test_a_depth_that_is_no_number_changes_nothing(served: SimpleNamespace, value: str):
    assert served.server.request("/set_internal_state", {"server_args": {"speculative_c2t_max_depth": value}}) == [
        False
    ]
    assert served.server.request("/get_server_info")["internal_states"][0]["c2t"]["max_depth"] == D_MAX
