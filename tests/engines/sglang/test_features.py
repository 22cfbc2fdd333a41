"""What a server does besides decoding: with C2T every feature answers as it does on a plain server.

Greedy, float32, so that answers can be compared token by token. The C2T servers prefill in small chunks and retract a
request every few steps: both happen here all the time, while the plain server does neither.

Longer than 300 lines because everything here shares three running servers, whose start is what takes time.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

import jsonschema  # noqa: E402
import openai  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, load_prompts, pair_dir  # noqa: E402
from benchmarks.serving.process import ServerError  # noqa: E402
from c2t_plugin.config import C2TConfig  # noqa: E402
from tests.support.sglang.verify_counts import DRAFTS, save_hand_made_classifier  # noqa: E402

BETA, TREE_BETA = 0.45, 0.15
D_MAX = 6
CHUNK = 64
CONTEXT = 2048
# Whenever the scheduler has counted so many steps, it takes a request out of the batch and prefills it again later.
RETRACT_EVERY = 7
NEW_TOKENS = 32
# Of a request that is aborted, so that it still runs when those beside it have begun.
ENDLESS = 1500
# A log probability is computed in a batch of another shape than plain decoding's, so sums are rounded elsewhere:
# float32 over some hundred terms, a few 1e-6 relative.
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    """The same target without speculation."""
    with CpuServer(pair_dir() / "target", log=tmp_path_factory.mktemp("plain") / "server.log") as server:
        yield server


def c2t_flags(draft: Path, classifier: Path, beta: float = BETA) -> list[str]:
    return [
        *("--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(D_MAX)),
        *("--speculative-c2t-classifier", str(classifier), "--speculative-c2t-beta", str(beta)),
    ]


@pytest.fixture(
    scope="module",
    params=[("standalone", 1), ("eagle3", 1), ("eagle3", 4)],
    ids=lambda param: f"{param[0]}-{'tree' if param[1] > 1 else 'chain'}",
)
def c2t(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    """C2T over the pair's draft; beta is such that chains of most lengths, and trees of many sizes, are verified."""
    base, topk = request.param
    folder = tmp_path_factory.mktemp(base)
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    beta = BETA if topk == 1 else TREE_BETA
    tree = () if topk == 1 else ("--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(topk))
    with CpuServer(
        pair_dir() / "target",
        *c2t_flags(pair_dir() / DRAFTS[base], classifier, beta),
        *tree,
        *("--chunked-prefill-size", str(CHUNK), "--enable-metrics"),
        log=folder / "server.log",
        env={**os.environ, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(RETRACT_EVERY)},
    ) as server:
        # topk: nodes per layer of a draft in which nothing is cut
        server.base, server.topk, server.beta = base, topk, beta  # type: ignore[attr-defined]
        yield server


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return held_out_prompts(8, seed=3)


def long_prompt(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    joined = [token for prompt in prompts for token in prompt]
    return (joined * (length // len(joined) + 1))[:length]


def outputs(answers: Sequence[dict[str, Any]]) -> list[tuple]:
    return [(a["output_ids"], a["text"], a["meta_info"]["finish_reason"]) for a in answers]


def draft_lengths(answer: dict[str, Any]) -> dict[int, int]:
    """Verify steps by how many drafts were verified."""
    return {n - 1: steps for n, steps in enumerate(answer["meta_info"]["spec_cap_lens_histogram"]) if steps}


def set_state(server: CpuServer, **values: Any) -> Any:
    return server.request("/set_internal_state", {"server_args": values})


def c2t_state(server: CpuServer) -> dict[str, Any]:
    return server.request("/get_server_info")["internal_states"][0]["c2t"]


# --- decoding, and what is reported about it


def test_drafts_are_cut_and_output_is_plain_decodings(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    found = c2t.generate_all(prompts, max_new_tokens=NEW_TOKENS)
    assert outputs(found) == outputs(plain.generate_all(prompts, max_new_tokens=NEW_TOKENS))
    lengths = {length for answer in found for length in draft_lengths(answer)}
    assert 0 in lengths or 1 in lengths, "nothing is cut early"
    assert len(lengths) >= 4, f"beta leaves only drafts of {sorted(lengths)}"
    assert max(lengths) <= D_MAX * c2t.topk  # type: ignore[attr-defined]


def test_what_is_reported_adds_up(c2t: CpuServer, prompts: list[list[int]]):
    for answer in c2t.generate_all(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True):
        meta, lengths = answer["meta_info"], draft_lengths(answer)
        assert sum(lengths.values()) == meta["spec_verify_ct"]
        drafts = sum(length * steps for length, steps in lengths.items())
        assert meta["spec_cap_length"] == pytest.approx(1 + drafts / meta["spec_verify_ct"])
        # one token from each prefill, one bonus per step, and the last step may overshoot max_new_tokens
        accepted = meta["spec_num_correct_drafts"]
        assert 0 <= 1 + meta["num_retractions"] + meta["spec_verify_ct"] + accepted - NEW_TOKENS <= D_MAX
        assert accepted <= drafts
        assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]


def test_prometheus_reports_verified_lengths(c2t: CpuServer, prompts: list[list[int]]):
    c2t.generate_all(prompts, max_new_tokens=48, ignore_eos=True)
    # gauges are written once in some decode steps, and nothing was said about when they are read
    deadline = time.monotonic() + 60
    while not (value := metric(c2t, "sglang:spec_cap_length")) and time.monotonic() < deadline:
        c2t.generate_all(prompts, max_new_tokens=48, ignore_eos=True)
    assert value is not None
    assert 1.0 < value < D_MAX * c2t.topk + 1  # type: ignore[attr-defined]
    assert metric(c2t, "sglang:spec_accept_length") > 1.0


def metric(server: CpuServer, name: str) -> float | None:
    """Value of a metric of the first scheduler, None if it is not there."""
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", server.request("/metrics"), re.MULTILINE)
    return float(found[1]) if found else None


def test_server_info_and_prometheus_count_what_the_answers_say(c2t: CpuServer, prompts: list[list[int]]):
    before, exported = c2t_state(c2t), scraped(c2t)
    found = c2t.generate_all(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    after = c2t_state(c2t)
    by_length = Counter[int]()
    for answer in found:
        by_length.update(draft_lengths(answer))
    accepted = Counter[int]()
    for answer in found:
        accepted.update(dict(enumerate(answer["meta_info"]["spec_correct_drafts_histogram"])))
    for name, expected in (("verified", by_length), ("accepted", accepted)):
        new = [now - then for now, then in zip(after[name], before[name], strict=True)]
        assert new == [expected[length] for length in range(len(new))]
        assert max(expected) < len(new)
    times = [answer["meta_info"]["c2t"][0]["classifier_s"] for answer in found]
    # a request's first step has the time since the step before it too, when it was not there yet
    assert all(0 < seconds <= after["classifier_s"] for seconds in times)
    assert after["verified_tokens"] == sum(n * count for n, count in enumerate(after["verified"])) / sum(
        after["verified"]
    )
    scrape = {name: value - exported.get(name, 0.0) for name, value in scraped(c2t).items()}
    assert {length: scrape[f"chains_total {length}"] for length in by_length} == by_length
    assert scrape["draft_tokens_verified_total"] == sum(n * count for n, count in by_length.items())
    assert scrape["draft_tokens_accepted_total"] == sum(n * count for n, count in accepted.items())
    assert scrape["rows_computed_total"] == after["rows_computed"] - before["rows_computed"]
    assert scraped(c2t)["beta"] == pytest.approx(c2t.beta)  # type: ignore[attr-defined]


def scraped(server: CpuServer) -> dict[str, float]:
    """C2T's own metrics, by name and number of draft tokens."""
    lines = re.findall(r"^c2t:(\w+)\{([^}]*)\} (\S+)$", server.request("/metrics"), re.MULTILINE)
    lengths = [re.search(r'verified="(\d+)"', labels) for _, labels, _ in lines]
    return {
        name + (f" {length[1]}" if length else ""): float(value)
        for (name, _, value), length in zip(lines, lengths, strict=True)
    }


def test_metrics_name_the_model_as_sglangs_own_do(c2t: CpuServer):
    found = re.findall(r'^(c2t|sglang):\w+\{[^}]*model_name="([^"]*)"', c2t.request("/metrics"), re.MULTILINE)
    names = {prefix: {name for each, name in found if each == prefix} for prefix in ("c2t", "sglang")}
    assert names["c2t"] == names["sglang"] == {str(c2t.model)}


def test_the_log_and_server_info_state_the_whole_configuration(c2t: CpuServer):
    line = re.search(r"C2T: configuration (\{.*\})", c2t.log.read_text(errors="replace"))
    assert line is not None
    stated = json.loads(line[1])
    assert stated == c2t_state(c2t)["configuration"]
    assert set(stated) >= {field.name for field in dataclasses.fields(C2TConfig)}
    assert (stated["d_max"], stated["beta"], stated["base"]) == (D_MAX, c2t.beta, c2t.base.upper())  # type: ignore[attr-defined]
    assert stated["classifier"].endswith("hand.safetensors")


def test_the_log_reports_verified_lengths(c2t: CpuServer, prompts: list[list[int]]):
    # a line of the log sums up as many steps as --decode-log-interval says, 40
    c2t.generate_all(prompts, max_new_tokens=64, ignore_eos=True)
    lengths = [float(n) for n in re.findall(r"Decode batch.* cap len: ([\d.]+)", c2t.log.read_text(errors="replace"))]
    assert lengths
    assert all(1.0 <= length <= D_MAX + 1 for length in lengths)


# --- features of a request


def stream(server: CpuServer, payload: dict[str, Any], timeout: float = 600) -> Iterator[dict[str, Any]]:
    """Events of /generate; closing the iterator closes the connection."""
    body = json.dumps({**payload, "stream": True}).encode()
    request = urllib.request.Request(server.base_url + "/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if event and event != "[DONE]":
                yield json.loads(event)


def test_streaming(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    expected = plain.generate(prompts[0], max_new_tokens=NEW_TOKENS)
    sampling_params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    events = list(stream(c2t, {"input_ids": prompts[0], "sampling_params": sampling_params}))
    texts = [event["text"] for event in events]
    assert len(events) > 2
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == expected["text"]
    assert events[-1]["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


@pytest.mark.parametrize("keep", [False, True], ids=["trimmed", "kept"])
def test_stop_strings(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]], keep: bool):
    text = plain.generate(prompts[1], max_new_tokens=NEW_TOKENS)["text"]
    # from the middle of the output, and across a token's edge more often than not
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    assert len(stop) == 5
    options = {"max_new_tokens": NEW_TOKENS, "stop": [stop], "no_stop_trim": keep}
    expected, found = plain.generate(prompts[1], **options), c2t.generate(prompts[1], **options)
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert outputs([found]) == outputs([expected])


def test_stop_tokens(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    ids = plain.generate(prompts[2], max_new_tokens=NEW_TOKENS)["output_ids"]
    options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [ids[NEW_TOKENS // 2]]}
    expected, found = plain.generate(prompts[2], **options), c2t.generate(prompts[2], **options)
    assert found["meta_info"]["finish_reason"]["type"] == "stop"
    assert outputs([found]) == outputs([expected])


def with_logprobs(server: CpuServer, prompt: list[int]) -> dict[str, Any]:
    payload = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS},
        "return_logprob": True,
        "top_logprobs_num": 3,
        "logprob_start_len": 0,
        "token_ids_logprob": [5, 6],
    }
    return server.request("/generate", payload)["meta_info"]


@pytest.mark.parametrize("part", ["input", "output"])
def test_logprobs(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]], part: str):
    # flushed, because log probabilities of cached prompt tokens are not computed
    for server in (plain, c2t):
        server.flush_cache()
    expected, found = with_logprobs(plain, prompts[3]), with_logprobs(c2t, prompts[3])
    for name in (f"{part}_token_logprobs", f"{part}_top_logprobs", f"{part}_token_ids_logprobs"):
        assert_same_logprobs(found[name], expected[name])
    wanted = NEW_TOKENS if part == "output" else len(prompts[3])
    assert len(found[f"{part}_token_logprobs"]) == wanted


def assert_same_logprobs(found: Any, expected: Any) -> None:
    """Same nesting and tokens; values within LOGPROB_TOLERANCE."""
    if isinstance(expected, list) and len(expected) == 3 and isinstance(expected[0], float):
        assert found[0] == pytest.approx(expected[0], abs=LOGPROB_TOLERANCE)
        assert found[1:] == expected[1:]
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same_logprobs(mine, theirs)
    else:
        assert found == expected


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class", "module"]},
        "public": {"type": "boolean"},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "public", "lines"],
    "additionalProperties": False,
}


def test_json_schema(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    options = {"max_new_tokens": 96, "json_schema": json.dumps(SCHEMA)}
    expected = plain.generate_all(prompts[:4], **options)
    found = c2t.generate_all(prompts[:4], **options)
    assert outputs(found) == outputs(expected)
    finished = [a for a in found if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert finished, "no answer came to its end: allow more tokens"
    for answer in finished:
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)


def test_regex(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    options = {"max_new_tokens": 64, "regex": r"(def|class) [a-z_]{3,12}\([a-z]{1,4}(, [a-z]{1,4}){0,2}\):"}
    found = c2t.generate_all(prompts[:4], **options)
    assert outputs(found) == outputs(plain.generate_all(prompts[:4], **options))
    assert all(re.fullmatch(options["regex"], answer["text"]) for answer in found)


# --- the scheduler


def test_chunked_prefill(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    prompt = long_prompt(prompts[::-1], 5 * CHUNK + 7)
    c2t.flush_cache()
    before = c2t.log.read_text(errors="replace").count(f"#new-token: {CHUNK},")
    found = c2t.generate(prompt, max_new_tokens=NEW_TOKENS)
    chunks = c2t.log.read_text(errors="replace").count(f"#new-token: {CHUNK},") - before
    assert outputs([found]) == outputs([plain.generate(prompt, max_new_tokens=NEW_TOKENS)])
    assert chunks == 5


def test_radix_cache_hits(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    prompt = long_prompt(prompts, 200)
    c2t.flush_cache()
    first, second = (c2t.generate(prompt, max_new_tokens=NEW_TOKENS) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] >= 190
    expected = outputs([plain.generate(prompt, max_new_tokens=NEW_TOKENS)])
    assert outputs([first]) == expected
    assert outputs([second]) == expected
    # SGLang keys the cache by token pairs for EAGLE only; a stand-alone draft reads one wrong entry at the edge
    if c2t.base == "eagle3":  # type: ignore[attr-defined]
        assert draft_lengths(second) == draft_lengths(first)
        assert second["meta_info"]["spec_verify_ct"] == first["meta_info"]["spec_verify_ct"]


def test_a_second_turn_reads_what_the_first_generated(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    """The cache then holds keys of accepted drafts, and of no refused one."""
    prompt = long_prompt(prompts, 100)
    c2t.flush_cache()
    said = c2t.generate(prompt, max_new_tokens=40, ignore_eos=True)["output_ids"]
    turn = [*prompt, *said, *prompts[5][:7]]
    found = c2t.generate(turn, max_new_tokens=NEW_TOKENS)
    assert found["meta_info"]["cached_tokens"] >= len(prompt) + 30
    assert outputs([found]) == outputs([plain.generate(turn, max_new_tokens=NEW_TOKENS)])


def test_two_ends_of_one_cached_prefix(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    prefix = long_prompt(prompts, 150)
    ends = [prefix + prompts[5][:9], prefix + prompts[6][:20]]
    c2t.generate(prefix, max_new_tokens=1)
    found = c2t.generate_all(ends, max_new_tokens=NEW_TOKENS)
    assert all(answer["meta_info"]["cached_tokens"] > 100 for answer in found)
    assert outputs(found) == outputs(plain.generate_all(ends, max_new_tokens=NEW_TOKENS))


def test_requests_of_many_lengths_at_many_times(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    jobs = [(long_prompt(prompts[i:], 3 + 29 * i), 6 + 9 * (7 - i)) for i in range(8)]

    def ask(server: CpuServer, i: int, wait_s: float) -> dict[str, Any]:
        time.sleep(wait_s * i)
        return server.generate(jobs[i][0], max_new_tokens=jobs[i][1])

    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda i: ask(c2t, i, 0.15), range(len(jobs))))
        expected = list(pool.map(lambda i: ask(plain, i, 0.0), range(len(jobs))))
    assert outputs(found) == outputs(expected)


def test_retracted_requests_answer_the_same(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    found = c2t.generate_all(prompts, max_new_tokens=64, ignore_eos=True)
    assert sum(answer["meta_info"]["num_retractions"] for answer in found) > 0
    assert outputs(found) == outputs(plain.generate_all(prompts, max_new_tokens=64, ignore_eos=True))


@pytest.mark.parametrize("how", ["abort_request", "closed_connection"])
def test_aborted_requests_leave_nothing_behind(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]], how: str):
    started = threading.Barrier(4, timeout=300)

    def abort(i: int) -> None:
        rid = f"{how}-{c2t.base}-{c2t.topk}-{i}"  # type: ignore[attr-defined]
        params = {"temperature": 0.0, "max_new_tokens": ENDLESS, "ignore_eos": True}
        events = stream(c2t, {"input_ids": prompts[i], "rid": rid, "sampling_params": params})
        next(events)
        started.wait()
        if how == "abort_request":
            c2t.request("/abort_request", {"rid": rid})
            last = list(events)[-1]["meta_info"]
            assert last["finish_reason"]["type"] == "abort"
            assert last["completion_tokens"] < ENDLESS
        else:
            events.close()

    def stay(i: int) -> dict[str, Any]:
        if i == 3:
            started.wait()
        return c2t.generate(prompts[i], max_new_tokens=100)

    with ThreadPoolExecutor(6) as pool:
        aborted = [pool.submit(abort, i) for i in range(3)]
        found = list(pool.map(stay, range(3, 6)))
        for future in aborted:
            future.result()
    assert outputs(found) == outputs([plain.generate(prompts[i], max_new_tokens=100) for i in range(3, 6)])
    assert_idle(c2t)


def assert_idle(server: CpuServer) -> None:
    """No request runs, and no KV slot is taken once the cache is flushed."""
    deadline = time.monotonic() + 60
    while True:
        try:
            # refused while a request runs; the scheduler ends itself if slots are missing when it is idle
            server.flush_cache()
            break
        except ServerError:
            assert time.monotonic() < deadline, "a request still runs"
            time.sleep(0.5)
    server.request("/health")
    assert server.generate([5, 6, 7], max_new_tokens=2)["meta_info"]["cached_tokens"] == 0


# --- run-time control


@pytest.fixture
def controlled(c2t: CpuServer) -> Iterator[CpuServer]:
    yield c2t
    beta = c2t.beta  # type: ignore[attr-defined]
    assert set_state(c2t, speculative_c2t_beta=beta, speculative_c2t_max_depth=D_MAX) == [True]


def test_server_info_shows_the_settings(c2t: CpuServer):
    state = c2t_state(c2t)
    assert state["beta"] == pytest.approx(c2t.beta)  # type: ignore[attr-defined]
    assert (state["max_depth"], state["d_max"], state["non_finite"]) == (D_MAX, D_MAX, 0)


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        ({"speculative_c2t_beta": 0.0}, {D_MAX}),
        ({"speculative_c2t_beta": 1}, {0}),
        ({"speculative_c2t_max_depth": 0}, {0}),
        ({"speculative_c2t_beta": 0, "speculative_c2t_max_depth": 2}, {2}),
        ({"speculative_c2t_beta": 0.0, "speculative_c2t_max_depth": 3.0}, {3}),
    ],
)
def test_settings_take_effect(
    plain: CpuServer, controlled: CpuServer, prompts: list[list[int]], values: dict[str, float], lengths: set[int]
):
    assert set_state(controlled, **values) == [True]
    state = c2t_state(controlled)
    assert {f"speculative_c2t_{name}": state[name] for name in ("beta", "max_depth")}.items() >= values.items()
    found = controlled.generate(prompts[4], max_new_tokens=NEW_TOKENS)
    topk = controlled.topk  # type: ignore[attr-defined]
    assert set(draft_lengths(found)) == {length * topk for length in lengths}
    assert outputs([found]) == outputs([plain.generate(prompts[4], max_new_tokens=NEW_TOKENS)])


@pytest.mark.parametrize(
    "body",
    [
        '{"speculative_c2t_beta": 1.01}',
        '{"speculative_c2t_beta": -0.1}',
        '{"speculative_c2t_beta": NaN}',
        '{"speculative_c2t_beta": 1e400}',
        '{"speculative_c2t_max_depth": 7}',
        '{"speculative_c2t_max_depth": -1}',
        '{"speculative_c2t_max_depth": 2.5}',
        '{"speculative_c2t_max_depth": NaN}',
        '{"speculative_c2t_max_depth": 1e400}',
        '{"speculative_c2t_max_depth": 123456789012345678901234567890}',
        '{"speculative_c2t_beta": 0.2, "speculative_c2t_max_depth": 99}',
        '{"speculative_c2t_beta": 0.2, "pp_max_micro_batch_size": 1}',
        '{"speculative_c2t_beta": null}',
        '{"speculative_c2t_beta": [0.2]}',
        '{"speculative_c2t_gamma": 0.2}',
    ],
)
def test_impossible_settings_are_refused(c2t: CpuServer, body: str):
    # to be asked for its health takes a prompt, and its first token's statistics time
    before = c2t_state(c2t) | {"classifier_s": None}
    status, text = post(c2t, "/set_internal_state", f'{{"server_args": {body}}}')
    assert (status, text) == (200, "[false]") or 400 <= status < 500
    c2t.request("/health_generate")
    assert c2t_state(c2t) | {"classifier_s": None} == before


def post(server: CpuServer, path: str, body: str) -> tuple[int, str]:
    """Status and text of the answer, whatever they are."""
    request = urllib.request.Request(server.base_url + path, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# --- the OpenAI API


def client(server: CpuServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", timeout=600, max_retries=0)


def completion(server: CpuServer) -> Any:
    made = client(server).completions.create(
        model="any",
        prompt=["def read(self", "import os\n"],
        max_tokens=NEW_TOKENS,
        temperature=0,
        logprobs=2,
        echo=True,
    )
    return [(choice.text, choice.finish_reason, choice.logprobs.tokens) for choice in made.choices]


def several(server: CpuServer) -> Any:
    made = client(server).completions.create(model="any", prompt="class Node:", max_tokens=9, temperature=0, n=3)
    return [choice.text for choice in made.choices], made.usage.completion_tokens


MESSAGES: Any = [{"role": "user", "content": "Write a function that reads a file."}]


def chat(server: CpuServer) -> Any:
    made = client(server).chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=NEW_TOKENS, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = made.choices[0]
    return choice.message.content, choice.finish_reason, [token.token for token in choice.logprobs.content]


def streamed_chat(server: CpuServer) -> Any:
    parts = client(server).chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_tokens=NEW_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    seen = list(parts)
    text = "".join(part.choices[0].delta.content or "" for part in seen if part.choices)
    return text, seen[-1].usage.completion_tokens


def chat_in_json(server: CpuServer) -> Any:
    made = client(server).chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_tokens=96,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
    )
    return made.choices[0].message.content


@pytest.mark.parametrize("ask", [completion, several, chat, streamed_chat, chat_in_json])
def test_openai_api(plain: CpuServer, c2t: CpuServer, ask: Any):
    found = ask(c2t)
    assert found == ask(plain)
    assert found[0], "an empty answer shows nothing"


# --- odd requests: whatever plain decoding says, C2T says, and never 500


def odd(prompt: Any = (574, 3433), payload: dict[str, Any] | None = None, **sampling_params: Any) -> dict[str, Any]:
    key = "text" if isinstance(prompt, str) or (prompt and isinstance(prompt[0], str)) else "input_ids"
    params = {"temperature": 0.0, "max_new_tokens": 6, **sampling_params}
    return {key: prompt, "sampling_params": params, **(payload or {})}


ODD_REQUESTS: dict[str, dict[str, Any]] = {
    "one_new_token": odd(max_new_tokens=1),
    "no_new_token": odd(max_new_tokens=0),
    "negative_new_tokens": odd(max_new_tokens=-1),
    "no_sampling_params": {"text": "def f(x):", "sampling_params": {"temperature": 0.0}},
    "one_token_prompt": odd([7]),
    "first_token_of_the_vocabulary": odd([0]),
    "empty_ids": odd([]),
    "one_space": odd(" "),
    "other_scripts": odd("\u65e5\u672c\u8a9e \U0001f600 \u0416\x00"),
    "prompt_at_the_limit": odd([9, 8, 7, 6] * (CONTEXT // 4 - 1), max_new_tokens=500),
    "prompt_over_the_limit": odd([9, 8, 7, 6] * (CONTEXT // 4 + 10)),
    "prompt_of_exactly_the_limit": odd([9, 8, 7, 6] * (CONTEXT // 4)),
    "four_answers": odd([574, 3433, 560], n=4),
    "batch_of_lengths": odd([[5], [6, 7, 8], [9] * 40, [10, 11]]),
    "temperature_not_a_number": odd(temperature="hot"),
    "temperature_negative": odd(temperature=-1.0),
    "top_k_zero": odd(top_k=0),
    "top_p_zero": odd(temperature=1.0, top_p=0.0),
    "top_k_one_is_greedy": odd(temperature=1.0, top_k=1),
    "penalties": odd([5, 6, 7], max_new_tokens=1, frequency_penalty=1.0, presence_penalty=0.5),
    "stop_at_once": odd([574, 3433, 560], stop=["e", " ", "\n", "a", "("], max_new_tokens=20),
    "bad_regex": odd([574, 3433, 560], regex="(["),
    "bad_schema": odd([574, 3433, 560], json_schema="{not json"),
    "logit_bias": odd([574, 3433, 560], logit_bias={"7": 50.0}, max_new_tokens=4),
    "logprobs_of_the_last_token": odd([574, 3433, 560], {"return_logprob": True, "logprob_start_len": 2}),
    "hidden_states": odd([574, 3433, 560], {"return_hidden_states": False}),
}


@pytest.mark.parametrize("name", ODD_REQUESTS)
def test_odd_requests(plain: CpuServer, c2t: CpuServer, name: str):
    body = json.dumps(ODD_REQUESTS[name])
    status, text = post(c2t, "/generate", body)
    expected_status, expected_text = post(plain, "/generate", body)
    assert status == expected_status, text
    assert status < 500, text
    if status == 200:
        mine, theirs = ([a] if isinstance(a, dict) else a for a in (json.loads(text), json.loads(expected_text)))
        assert outputs(mine) == outputs(theirs)
    c2t.request("/health")


def test_a_prompt_without_tokens_is_refused(c2t: CpuServer):
    """SGLang's scheduler ends at some of them."""
    status, text = post(c2t, "/generate", json.dumps(odd([[5, 6], []])))
    assert status == 400 and "token" in text
    c2t.request("/health")


def test_greedy_and_sampled_in_one_batch(plain: CpuServer, c2t: CpuServer, prompts: list[list[int]]):
    temperatures = [0.0, 0.8, 0.0, 1.5, 0.0, 0.3, 0.0, 1.0]
    params = [{"temperature": t, "max_new_tokens": NEW_TOKENS, "ignore_eos": True} for t in temperatures]
    found = c2t.request("/generate", {"input_ids": prompts, "sampling_params": params})
    expected = plain.generate_all(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert outputs(found[::2]) == outputs(expected[::2])
    assert all(len(answer["output_ids"]) == NEW_TOKENS for answer in found)
    assert [a["output_ids"] for a in found[1::2]] != [a["output_ids"] for a in expected[1::2]]


def test_the_server_is_still_whole(c2t: CpuServer):
    """After all of the above: idle, healthy, no slot lost, every confidence finite, no error in the log."""
    assert_idle(c2t)
    assert c2t_state(c2t)["non_finite"] == 0
    log = c2t.log.read_text(errors="replace")
    assert "Scheduler hit an exception" not in log
    assert "leak" not in log.lower()


# --- a head with a vocabulary of its own


# Fewer words than the classifier's top-M of 1,000, so that the entropy has to sum over all there are.
DRAFT_WORDS = 512


@pytest.fixture(scope="module")
def reduced_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's EAGLE-3 head with the LM head rows of frequent words only, and the maps between both vocabularies."""
    stock, folder = pair_dir() / DRAFTS["eagle3"], tmp_path_factory.mktemp("reduced") / "head"
    shutil.copytree(stock, folder, copy_function=shutil.copyfile)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": DRAFT_WORDS}))
    counts = Counter(token for prompt in load_prompts() for token in prompt["ids"])
    kept = torch.tensor(sorted(word for word, _ in counts.most_common(DRAFT_WORDS)))
    tensors = load_file(stock / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].clone()
    tensors["d2t"] = kept - torch.arange(DRAFT_WORDS)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).scatter_(0, kept, True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_head_with_a_reduced_vocabulary(
    plain: CpuServer, reduced_head: Path, prompts: list[list[int]], tmp_path: Path
):
    classifier = save_hand_made_classifier(tmp_path / "hand.safetensors")
    with CpuServer(pair_dir() / "target", *c2t_flags(reduced_head, classifier), log=tmp_path / "server.log") as server:
        found = server.generate_all(prompts, max_new_tokens=NEW_TOKENS)
        state = c2t_state(server)
    assert outputs(found) == outputs(plain.generate_all(prompts, max_new_tokens=NEW_TOKENS))
    assert state["non_finite"] == 0
    assert len({length for answer in found for length in draft_lengths(answer)}) >= 3
    # words of the draft taken for the target's of the same number would all be refused
    accepted, steps = (
        sum(a["meta_info"][name] for a in found) for name in ("spec_num_correct_drafts", "spec_verify_ct")
    )
    assert accepted > steps / 4
