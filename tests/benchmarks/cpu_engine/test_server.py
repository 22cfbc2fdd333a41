"""Stock SGLang on the CPU engine: its output is the model's, and it verifies exactly as often as a simulation says.

The counts are the sharper test. A draft that reads wrong slots, or keys of a rejected token, still gives the right
output, only later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the simulation needs transformers")

from benchmarks.cpu_engine.server import CpuServer
from benchmarks.pairs.toy import held_out_prompts, pair_dir
from benchmarks.serving.process import ServerError
from tests.support.sglang.simulate import Simulation, Target, load_draft, simulate

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.slow]

NEW_TOKENS = 40
STEPS = 4
# With the radix cache, a STANDALONE draft finds keys made after another first token (SGLang caches by token, the draft
# is shifted by one): lossless, but the count then depends on what ran before.
NO_SHARING = "--disable-radix-cache"


def chain_flags(algorithm: str, draft: str) -> list[str]:
    return [
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(pair_dir() / draft)),
        *("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(STEPS + 1), NO_SHARING),
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six held-out prompts of different lengths, the shortest of two tokens."""
    lengths = (2, 9, 33, 64, 80, 100)
    return [ids[:length] for ids, length in zip(held_out_prompts(6, min_tokens=100), lengths, strict=True)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(pair_dir() / "target")


@pytest.fixture(scope="module")
def expected(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [target.greedy(prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    with CpuServer(pair_dir() / "target", log=tmp_path_factory.mktemp("plain") / "log") as server:
        yield server


def greedy(server: CpuServer, prompts: list[list[int]]) -> list[dict[str, Any]]:
    return server.generate_all(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def output_ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_plain_output_is_the_models_argmax(
    plain: CpuServer, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert output_ids(greedy(plain, prompts)) == expected
    # again, now from the radix cache
    answers = greedy(plain, prompts)
    assert output_ids(answers) == expected
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 0


def test_one_by_one_and_from_text(plain: CpuServer, prompts: list[list[int]], expected: list[list[int]]) -> None:
    answer = plain.generate(prompts[1], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert answer["output_ids"] == expected[1]
    assert plain.generate("def main(", max_new_tokens=4)["meta_info"]["completion_tokens"] == 4


def test_a_refused_request_says_why(plain: CpuServer) -> None:
    with pytest.raises(ServerError, match="/generate was answered with 400"):
        plain.generate([1, 2, 3], max_new_tokens=-1)


@pytest.fixture(scope="module")
def simulations(target: Target, prompts: list[list[int]]) -> list[Simulation]:
    draft = load_draft(pair_dir(), "draft", target)
    return [simulate(target, draft, prompt, NEW_TOKENS, STEPS) for prompt in prompts]


def test_the_simulation_is_lossless(simulations: list[Simulation], expected: list[list[int]]) -> None:
    assert [simulation.output_ids for simulation in simulations] == expected


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    log = tmp_path_factory.mktemp("standalone") / "log"
    with CpuServer(pair_dir() / "target", *chain_flags("STANDALONE", "draft"), log=log) as server:
        yield server


@pytest.mark.parametrize("together", [True, False], ids=["concurrent", "one-by-one"])
def test_standalone_chain(
    standalone: CpuServer, prompts: list[list[int]], simulations: list[Simulation], together: bool
) -> None:
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    answers = [answer for batch in batches for answer in greedy(standalone, batch)]
    assert output_ids(answers) == [simulation.output_ids for simulation in simulations]
    meta = [answer["meta_info"] for answer in answers]
    assert [m["spec_verify_ct"] for m in meta] == [simulation.verify_count for simulation in simulations]
    # the server counts accepted drafts before it drops those past max_new_tokens, and so does the simulation
    accepted = [sum(simulation.accept_lengths) for simulation in simulations]
    assert [m["spec_num_correct_drafts"] for m in meta] == accepted


def test_a_blind_draft_changes_the_counts(
    target: Target, prompts: list[list[int]], simulations: list[Simulation]
) -> None:
    """The check above can fail: a draft that misses the newest token still gives the right output."""
    draft = load_draft(pair_dir(), "draft", target)
    chain = draft.chain
    draft.chain = lambda tokens, features, length: chain(tokens[:-1], features, length)  # type: ignore[method-assign]
    blind = [simulate(target, draft, prompt, NEW_TOKENS, STEPS) for prompt in prompts[:3]]
    for found, right in zip(blind, simulations, strict=False):
        assert found.output_ids == right.output_ids
        assert found.verify_count > right.verify_count


def test_sampled_verification_is_sampled(standalone: CpuServer, prompts: list[list[int]]) -> None:
    """Stock SGLang on a CPU commits the argmax for all tokens but the first, at any temperature."""
    answers = standalone.generate_all(
        [prompts[2]] * 64, max_new_tokens=8, temperature=1.0, top_k=20, top_p=0.95, ignore_eos=True
    )
    behind: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in output_ids(answers):
        behind.setdefault(first, set()).add(tuple(rest))
    assert max(len(rests) for rests in behind.values()) > 1


def test_eagle3_tree(tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Trees use the mask, the links, the moves of accepted KV slots and the branch tables."""
    flags = [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(pair_dir() / "eagle3")),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"),
    ]
    with CpuServer(pair_dir() / "target", *flags, log=tmp_path / "log") as server:
        answers = greedy(server, prompts)
    assert output_ids(answers) == expected
    # a step without any accepted draft commits one token
    assert all(answer["meta_info"]["spec_verify_ct"] < NEW_TOKENS - 1 for answer in answers)
