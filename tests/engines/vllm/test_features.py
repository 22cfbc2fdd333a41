"""C2T beside what else vLLM does: mixed requests answered as without it, under chunked prefill and preemption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = [pytest.mark.vllm, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.classifier import load_classifier  # noqa: E402
from c2t_plugin.engines.checkpoints import shipped_classifier  # noqa: E402
from c2t_plugin.engines.vllm.config import Settings  # noqa: E402
from c2t_plugin.engines.vllm.planned import remember  # noqa: E402
from c2t_plugin.engines.vllm.planning import Planning  # noqa: E402
from tests.engines.vllm.conftest import DRAFTS, Engine  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402
from tests.support.vllm.verify_counts import Oracle, Steps, UnnormedMtpDraft  # noqa: E402

MAX_MODEL_LEN = 160
# 24 requests, 8 at a time, want about twice the blocks there are; prompts are longer than a prefill chunk.
OPTIONS = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 20,
    "disable_log_stats": False,
}
NEW_TOKENS = 32
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 3},
    "structured": {"structured_outputs": {"regex": r"[a-z_]{3,12}(, [a-z_]{3,12}){2,6}"}},
    "one token": {"max_tokens": 1},
    "to the end": {"max_tokens": MAX_MODEL_LEN},
    "stop": {"stop": ["\n\n"], "ignore_eos": False},
    "minimum": {"min_tokens": 8, "ignore_eos": False},
}
REPEATS = 3
D_MAX = 4
# Served one at a time, so that none is preempted: tokens of a prompt, further sampling parameters, how often.
Exact = Mapping[str, tuple[int, dict[str, Any], int]]
EXACT: Exact = {
    "read whole": (40, {}, 1),
    "logprobs": (56, {"logprobs": 3}, 1),
    # whose grammar refuses nothing
    "structured": (56, {"structured_outputs": {"regex": r"[\s\S]*"}}, 1),
    # a chunk and a little, so that the head still attends to where the chunk ended
    "in chunks": (68, {}, 1),
    "a prefix that is cached": (98, {}, 2),
}
EXACT_PROMPTS = 4
CHUNK = OPTIONS["max_num_batched_tokens"]


def all_prompts() -> list[list[int]]:
    """One for each request; request i is of kind i modulo the number of kinds."""
    return held_out_prompts(REPEATS * len(KINDS), min_tokens=80, max_tokens=120, seed=3)


def sampling_of(new_tokens: int, more: dict[str, Any]) -> Any:
    """vLLM's parameters of a greedy request. more: as in KINDS."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    values = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True, **more}
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    return SamplingParams(**values)


def twice(llm: Any, ids: list[int], new_tokens: int) -> list[Steps]:
    """One prompt's answer, alone, and once more: nothing evicts its blocks in between."""
    sampling, prompt = sampling_of(new_tokens, {}), {"prompt_token_ids": ids}
    return [Steps.of_output(llm.generate([prompt], sampling, use_tqdm=False)[0]) for _ in range(2)]


def answers(llm: Any, prompts: list[list[int]], new_tokens: int) -> list[SimpleNamespace]:
    """Of all requests, in one batch: ids, why it ended, log probabilities of the chosen words."""
    chosen = [sampling_of(new_tokens, kind) for kind in list(KINDS.values()) * REPEATS]
    found = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], chosen, use_tqdm=False):
        (text,) = output.outputs
        words = zip(text.token_ids, text.logprobs or [], strict=False)
        logprobs = [each[token].logprob for token, each in words]
        found.append(
            SimpleNamespace(ids=list(text.token_ids), text=text.text, reason=text.finish_reason, logprobs=logprobs)
        )
    return found


def exactly(llm: Any, exact: Exact, prompts_of_each: int, new_tokens: int) -> dict[str, list[Steps]]:
    """By names: the steps of the last of its turns, of some prompts."""
    found: dict[str, list[Steps]] = {}
    for name, (length, more, turns) in exact.items():
        sampling = sampling_of(new_tokens, more)
        prompts = [{"prompt_token_ids": ids[:length]} for ids in exact_prompts(name)[-prompts_of_each:]]
        for _ in range(turns):
            outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        found[name] = [Steps.of_output(output) for output in outputs]
    return found


def exact_prompts(name: str) -> list[list[int]]:
    """Others than above, whose blocks were read in chunks that hung on the batch; none finds another name's blocks."""
    found = held_out_prompts(EXACT_PROMPTS * 3, min_tokens=121, max_tokens=128, seed=3)
    first = {"in chunks": EXACT_PROMPTS, "a prefix that is cached": 2 * EXACT_PROMPTS}.get(name, 0)
    return found[first : first + EXACT_PROMPTS]


def counter(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def classifier_seconds() -> float:
    """The counter vllm:c2t_classifier_seconds of this process; an engine's own metrics are whole numbers."""
    samples = [each for metric in prometheus_client.REGISTRY.collect() for each in metric.samples]
    return sum(each.value for each in samples if each.name == "vllm:c2t_classifier_seconds_total")


def steps_by_length(llm: Any) -> dict[int, float]:
    """The counter vllm:c2t_verify_steps, by number of drafts."""
    found = [metric for metric in llm.get_metrics() if metric.name == "vllm:c2t_verify_steps"]
    return {int(metric.labels["length"]): metric.value for metric in found}


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[SimpleNamespace]:
    with engine(None, options=OPTIONS) as llm:
        return answers(llm, all_prompts(), NEW_TOKENS)


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("C2T_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="module", params=[*((base, "off") for base in (*DRAFTS, "mtp")), ("eagle3", "on")], ids="-".join)
def served(
    request: pytest.FixtureRequest, engine: Engine, mimo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    base, planner = request.param
    target, cache = mimo if base == "mtp" else None, tmp_path_factory.mktemp("cache")
    with cached_in(cache), engine(f"c2t:{base}", D_MAX, OPTIONS, target, c2t_planner=planner) as llm:
        found = answers(llm, all_prompts(), NEW_TOKENS)
        again = twice(llm, all_prompts()[0], NEW_TOKENS)
        counts = {
            name: counter(llm, f"vllm:{name}")
            for name in ("num_preemptions", "prefix_cache_hits", "c2t_verify_steps", "c2t_accepted_tokens")
        }
        steps, seconds = steps_by_length(llm), classifier_seconds()
        (state,) = llm.collective_rpc("c2t_control")
        exact = exactly(llm, EXACT, EXACT_PROMPTS, NEW_TOKENS) if planner == "off" else {}
        settings = Settings.of(llm.llm_engine.vllm_config)
        known = begun_again(llm) if planner == "on" else None
    own = {"base": base, "exact": exact, "settings": settings, "mimo": mimo, "cache": cache, "known": known}
    told = {"counts": counts, "steps": steps, "seconds": seconds, "state": state}
    yield SimpleNamespace(found=found, again=again, planner=planner, **told, **own)


def begun_again(llm: Any) -> SimpleNamespace:
    """Of an engine whose planner has measured its steps, and of the next such one: what their planners know."""
    first = llm.llm_engine.engine_core.engine_core.scheduler.planning.planner
    later = Planning(None, None, D_MAX, ends=first.draft_end is not None, skips=first.skips).planner
    remember(later, llm.llm_engine.vllm_config, "eagle3")
    contexts = {step.context for seen in first._pace._seen.values() for step in seen}
    measured = {"first": first._profile.measured(), "later": later._profile.measured()}
    return SimpleNamespace(**measured, curve=later.curve, contexts=contexts)


def test_the_next_engine_begins_with_what_this_one_has_measured(served: SimpleNamespace):
    kept = list(served.cache.rglob("*.json"))
    if served.planner == "off":
        assert kept == []
        return
    (file,) = kept
    found = json.loads(file.read_text())
    assert found["facts"]["dtype"] == "torch.float32" and found["facts"]["engine"].startswith("vLLM 0.")
    # what it has measured of a last size of batch it may not have written yet
    assert served.known.later == found["passes"] and served.known.curve is not None
    assert all(row in served.known.first[part] for part, rows in found["passes"].items() for row in rows)


def test_a_planner_is_told_how_long_contexts_are(served: SimpleNamespace):
    if served.planner == "on":
        # of one request, and of all eight that run
        assert min(served.known.contexts) > min(map(len, all_prompts()))
        assert MAX_MODEL_LEN < max(served.known.contexts) <= 8 * MAX_MODEL_LEN


def of_kind(found: list[Any], kind: str) -> list[Any]:
    return found[list(KINDS).index(kind) :: len(KINDS)]


def penalties_matter(prompts: list[list[int]], found: list[SimpleNamespace]) -> bool:
    """Whether no request with penalties was answered as it would be without."""
    target = Target(pair_dir() / "target")
    pairs = zip(of_kind(prompts, "penalties"), of_kind(found, "penalties"), strict=True)
    return all(target.greedy(ids, len(answer.ids)) != answer.ids for ids, answer in pairs)


def assert_the_same(mine: list[SimpleNamespace], theirs: list[SimpleNamespace]) -> None:
    assert len(mine) == REPEATS
    assert [(each.ids, each.reason) for each in mine] == [(each.ids, each.reason) for each in theirs]
    for one, other in zip(mine, theirs, strict=True):
        # the same sums in batches of another shape
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_is_answered_as_without_c2t(
    served: SimpleNamespace, plain: list[SimpleNamespace], kind: str
):
    assert_the_same(of_kind(served.found, kind), of_kind(plain, kind))


def test_the_requests_are_what_their_names_say(plain: list[SimpleNamespace]):
    assert all(len(each.ids) == 1 for each in of_kind(plain, "one token"))
    assert all(len(each.logprobs) == NEW_TOKENS for each in of_kind(plain, "logprobs"))
    assert all(each.text.count(", ") >= 2 for each in of_kind(plain, "structured"))
    assert all(len(each.ids) > NEW_TOKENS for each in of_kind(plain, "to the end"))
    assert penalties_matter(all_prompts(), plain)


def test_requests_were_preempted_found_their_prefix_and_speculated(served: SimpleNamespace):
    assert all(value > 0 for value in served.counts.values()), served.counts


def test_the_classifiers_time_is_a_part_of_the_drafts(served: SimpleNamespace):
    assert 0 < served.state["classifier_s"] < served.state["draft_s"]
    # what the last step has sent is not told yet
    assert served.planner == "off" or 0 < served.seconds <= served.state["classifier_s"] + 1e-3
    assert served.planner == "on" or served.seconds == 0


def test_chains_of_several_lengths_were_verified(served: SimpleNamespace):
    assert sum(count > 0 for length, count in served.steps.items() if 0 < length < D_MAX) >= 2, served.steps


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(pair_dir(), Target(pair_dir() / "target"))


def test_under_each_feature_requests_are_cut_where_the_classifier_says(served: SimpleNamespace, oracle: Oracle):
    if served.planner == "on":
        pytest.skip("a planner's steps hang on its clock; test_planned_counts.py gives it one")
    if served.base == "mtp":
        oracle.drafts["mtp"] = UnnormedMtpDraft(served.mimo, oracle.target)
    path, compared = Path(served.settings.classifier), 0
    assert served.settings.beta == load_classifier(path).spec.suggested_beta
    for name in EXACT:
        for ids, steps in zip(exact_prompts(name), served.exact[name], strict=True):
            given = served.base, ids[: EXACT[name][0]], NEW_TOKENS, D_MAX, path, served.settings.beta
            expected = oracle.steps(*given, chunk=CHUNK)
            compared += expected is not None
            assert expected in (None, steps), name
    assert compared > len(EXACT) * EXACT_PROMPTS // 2


@pytest.mark.parametrize("base", ["eagle3", "eagle"])
def test_where_a_chunk_ends_changes_the_counts_of_a_head(oracle: Oracle, base: str):
    """So that the counts above would differ, were a head told the token that follows."""
    path = shipped_classifier(base)
    (length, _, _), beta = EXACT["in chunks"], load_classifier(path).spec.suggested_beta
    given = [(base, ids[:length], NEW_TOKENS, D_MAX, path, beta) for ids in exact_prompts("in chunks")]
    assert any(oracle.steps(*each) != oracle.steps(*each, chunk=CHUNK) for each in given)


def test_a_prompt_found_in_the_prefix_cache_is_answered_the_same(served: SimpleNamespace, plain: list[SimpleNamespace]):
    assert [list(each.output_ids) for each in served.again] == [plain[0].ids] * 2
