"""C2T beside what else vLLM does: mixed requests answered as without it, under chunked prefill and preemption."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

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
from tests.engines.vllm.conftest import DRAFTS, Engine, plan_anew  # noqa: E402
from tests.support.sglang.planned_rule import Plan  # noqa: E402
from tests.support.sglang.simulate import Target, Text  # noqa: E402
from tests.support.sglang.verify_counts import Rule  # noqa: E402
from tests.support.vllm.grammar import Grammar  # noqa: E402
from tests.support.vllm.planned_counts import UNDECIDED, Request, decode  # noqa: E402
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
# Served one at a time, so that none is preempted: the slice of a prompt, further sampling parameters, how often.
EXACT: dict[str, tuple[slice, dict[str, Any], int]] = {
    "read whole": (slice(40), {}, 1),
    "logprobs": (slice(56), {"logprobs": 3}, 1),
    # whose grammar refuses nothing
    "structured": (slice(56), {"structured_outputs": {"regex": r"[\s\S]*"}}, 1),
    # whose grammar refuses most drafts; nobody ends it
    "lower-case words": (slice(40), {"structured_outputs": {"regex": r"[a-z_]+( [a-z_]+)*~"}}, 1),
    # a chunk and a little, so that the head still attends to where the chunk ended
    "in chunks": (slice(68), {}, 1),
    "a prefix that is cached": (slice(98), {}, 2),
}
EXACT_PROMPTS = 4
# vLLM refuses n > 1 of greedy requests; the most probable token alone is the same output
TWICE = {"temperature": 1.0, "top_k": 1, "n": 2}
# steps after which one of two requests is aborted
LEAVES = 6
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
    generate = generation(llm, ids, {}, new_tokens)
    return [Steps.of_output(generate()[0]) for _ in range(2)]


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


class Turn(NamedTuple):
    """What vLLM says of requests that were served together.

    steps: of each output. cached: tokens of their prompts that were. drafts: begun ones. draft_steps: their tokens.
    """

    steps: list[Steps]
    cached: int
    drafts: int
    draft_steps: int

    @classmethod
    def of(cls, llm: Any, serve: Callable[[], list[Any]]) -> Turn:
        """serve: returns vLLM's outputs."""
        (before,) = llm.collective_rpc("c2t_control")
        outputs = serve()
        (after,) = llm.collective_rpc("c2t_control")
        steps = [Steps.of_text(text) for output in outputs for text in output.outputs]
        new = (after[name] - before[name] for name in ("drafts", "draft_steps"))
        return cls(steps, sum(output.num_cached_tokens for output in outputs), *new)


def exactly(llm: Any, planned: bool) -> dict[str, list[Turn]]:
    """By EXACT, turn by turn; of a planner that begins anew, and then of two requests at once."""
    if planned:
        plan_anew(llm)
    found = {
        name: [Turn.of(llm, generation(llm, ids, more)) for ids, _ in exact_turns(name)]
        for name, (_, more, _) in EXACT.items()
    }
    if planned:
        ids, _ = two_prompts()
        found["two samples"] = [Turn.of(llm, generation(llm, ids, TWICE))]
        found["one of two is aborted"] = [Turn.of(llm, partial(one_aborted, llm))]
    return found


def alone(llm: Any, lengths: Mapping[str, int], prompts: int, new_tokens: int) -> dict[str, list[Steps]]:
    """By names of EXACT, of so many of its prompts, one at a time. lengths: tokens of each prompt."""
    return {
        name: [
            Steps.of_output(generation(llm, ids[:length], EXACT[name][1], new_tokens)()[0])
            for ids in exact_prompts(name)[-prompts:]
        ]
        for name, length in lengths.items()
    }


def generation(llm: Any, ids: list[int], more: dict[str, Any], new_tokens: int = NEW_TOKENS) -> Callable[[], list[Any]]:
    """One prompt's turn, alone."""
    return partial(llm.generate, [{"prompt_token_ids": ids}], sampling_of(new_tokens, more), use_tqdm=False)


def one_aborted(llm: Any) -> list[Any]:
    """Answers to two requests, of which the first one is aborted after some steps."""
    engine, found, steps = llm.llm_engine, dict[str, Any](), 0
    for name, ids in zip("ab", two_prompts(), strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling_of(NEW_TOKENS, {}))
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
        steps += 1
        if steps == LEAVES:
            engine.abort_request(["a"])
    return [found["a"], found["b"]]


def exact_turns(name: str) -> list[tuple[list[int], int]]:
    """Prompts in the order in which they are served, and how often each was before; nothing evicts its blocks in
    between."""
    part, _, turns = EXACT[name]
    return [(ids[part], turn) for ids in exact_prompts(name) for turn in range(turns)]


def two_prompts() -> list[list[int]]:
    """Longer together than a chunk: the second one is still read when the first one has its first token. The prompt
    between them is answered by what every draft foresees."""
    return [ids[EXACT["read whole"][0]] for ids in exact_prompts("read whole")[::2]]


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
        # in the place of a message to a worker
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        asked = executor.take_draft_token_ids = Mock(wraps=executor.take_draft_token_ids)
        found = answers(llm, all_prompts(), NEW_TOKENS)
        again = twice(llm, all_prompts()[0], NEW_TOKENS)
        counts = {
            name: counter(llm, f"vllm:{name}")
            for name in ("num_preemptions", "prefix_cache_hits", "c2t_verify_steps", "c2t_accepted_tokens")
        }
        steps, seconds = steps_by_length(llm), classifier_seconds()
        (state,) = llm.collective_rpc("c2t_control")
        settings = Settings.of(llm.llm_engine.vllm_config)
        known = begun_again(llm) if planner == "on" else None
        exact = exactly(llm, planner == "on")
    own = {"base": base, "exact": exact, "settings": settings, "mimo": mimo, "cache": cache, "known": known}
    told = {"counts": counts, "steps": steps, "seconds": seconds, "state": state, "asked": asked}
    yield SimpleNamespace(found=found, again=again, planner=planner, **told, **own)


def begun_again(llm: Any) -> SimpleNamespace:
    """Of an engine whose planner has measured its steps, and of the next such one: what their planners know."""
    first = llm.llm_engine.engine_core.engine_core.scheduler.planning.planner
    later = Planning(None, None, D_MAX, ends=first.draft_end is not None, skips=first.skips).planner
    remember(later, llm.llm_engine.vllm_config, "eagle3")
    contexts = {step.context for seen in first.pace._seen.values() for step in seen}
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


def test_no_worker_is_asked_for_its_drafts(served: SimpleNamespace):
    assert not served.asked.called


def test_chains_of_several_lengths_were_verified(served: SimpleNamespace):
    assert sum(count > 0 for length, count in served.steps.items() if 0 < length < D_MAX) >= 2, served.steps


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(pair_dir(), Target(pair_dir() / "target"))


def grammar_of(name: str) -> Grammar | None:
    more = EXACT[name][1].get("structured_outputs")
    return None if more is None else Grammar(pair_dir() / "target", more["regex"])


def planned(served: SimpleNamespace, oracle: Oracle) -> dict[str, list[Turn]]:
    """What a simulation of the planner says of `exactly`."""
    draft, rule = oracle.draft(served.base), Rule(Path(served.settings.classifier), 0.0)
    plan, found = Plan(packed=True, ends=True, skips=True), dict[str, list[Turn]]()

    def turn(target: Target | Text, requests: list[Request], grammar: Grammar | None = None) -> Turn:
        before, cached = len(plan.depths), sum(request.read for request in requests)
        decode(target, draft, rule, requests, plan, budget=CHUNK, grammar=grammar)
        depths = plan.depths[before:]
        return Turn([each.counts() for each in requests], cached, sum(depth > 0 for depth in depths), sum(depths))

    for name in EXACT:
        grammar = grammar_of(name)
        found[name] = [
            # the second time two blocks are cached, and of the third, the last one, a head reads all anew
            turn(
                oracle.text(ids, NEW_TOKENS, grammar),
                [Request(ids, NEW_TOKENS, read=known * CHUNK, ends=known * [CHUNK])],
                grammar,
            )
            for ids, known in exact_turns(name)
        ]
    one, other = two_prompts()
    found["two samples"] = [turn(oracle.target, [Request(one, NEW_TOKENS) for _ in range(2)])]
    aborted = Request(one, NEW_TOKENS, leaves=LEAVES)
    found["one of two is aborted"] = [turn(oracle.target, [aborted, Request(other, NEW_TOKENS)])]
    assert plan.margin > UNDECIDED, "a decision is too near to call: choose other prompts"
    assert set(plan.depths) == set(range(D_MAX + 1)), "there was less to decide"
    return found


def test_under_each_feature_requests_are_cut_where_the_classifier_says(served: SimpleNamespace, oracle: Oracle):
    assert all(turn.cached >= CHUNK for turn in served.exact["a prefix that is cached"][1::2])
    if served.planner == "on":
        assert served.exact == planned(served, oracle)
        return
    if served.base == "mtp":
        oracle.drafts["mtp"] = UnnormedMtpDraft(served.mimo, oracle.target)
    path, compared = Path(served.settings.classifier), 0
    assert served.settings.beta == load_classifier(path).spec.suggested_beta
    for name in EXACT:
        grammar = grammar_of(name)
        for (ids, _), turn in zip(exact_turns(name), served.exact[name], strict=True):
            given = served.base, ids, NEW_TOKENS, D_MAX, path, served.settings.beta
            expected = oracle.steps(*given, chunk=CHUNK, grammar=grammar)
            compared += expected is not None
            assert expected is None or [expected] == turn.steps, name
    assert compared > sum(map(len, served.exact.values())) // 2


def test_what_a_grammar_refuses_changes_outputs_and_counts(oracle: Oracle, monkeypatch: pytest.MonkeyPatch):
    """So that the counts above would differ, were a draft not cut where its grammar refuses it."""
    path, grammar = shipped_classifier("eagle3"), grammar_of("lower-case words")
    beta = load_classifier(path).spec.suggested_beta
    given = [("eagle3", ids, NEW_TOKENS, D_MAX, path, beta) for ids, _ in exact_turns("lower-case words")]
    found = [oracle.steps(*each, grammar=grammar) for each in given]
    plain = [tuple(oracle.target.greedy(each[1], NEW_TOKENS)) for each in given]
    assert all(each is None or each.output_ids != other for each, other in zip(found, plain, strict=True))
    monkeypatch.setattr(grammar, "valid", lambda output, drafted: drafted)
    assert found != [oracle.steps(*each, grammar=grammar) for each in given]


@pytest.mark.parametrize("base", ["eagle3", "eagle"])
def test_where_a_chunk_ends_changes_the_counts_of_a_head(oracle: Oracle, base: str):
    """So that the counts above would differ, were a head told the token that follows."""
    path = shipped_classifier(base)
    (part, _, _), beta = EXACT["in chunks"], load_classifier(path).spec.suggested_beta
    given = [(base, ids[part], NEW_TOKENS, D_MAX, path, beta) for ids in exact_prompts("in chunks")]
    assert any(oracle.steps(*each) != oracle.steps(*each, chunk=CHUNK) for each in given)


def test_a_prompt_found_in_the_prefix_cache_is_answered_the_same(served: SimpleNamespace, plain: list[SimpleNamespace]):
    assert [list(each.output_ids) for each in served.again] == [plain[0].ids] * 2
