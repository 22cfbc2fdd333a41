"""Greedy decoding through real servers in tree mode: plain decoding's output, and a simulation's counts and tree sizes.

Output alone is blind, as in chain mode: a tree that grows from the wrong keys changes only the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

CONCURRENCIES = (1, 8)
PROMPTS, NEW_TOKENS = 8, 18
BETA = 0.15
# base, top-k, depth, most nodes (None: no limit but the shape's)
SERVERS = [
    ("standalone", 4, 4, None),
    ("eagle3", 4, 8, None),
    ("eagle", 8, 3, 11),
    ("eagle3", 1, 5, None),
    ("standalone", 8, 1, None),
]
CAPS = (1, 2, 3, 5, 6, 7)


def tree_server(
    base: str, topk: int, depth: int, max_nodes: int | None, classifier: Any, log: Any, *flags: str, **options: Any
):
    """A server in tree mode, without prefix cache: see verify_counts.server."""
    limit = () if max_nodes is None else ("--speculative-num-draft-tokens", str(max_nodes + 1))
    shape = ("--speculative-c2t-mode", "tree", "--speculative-eagle-topk", str(topk), *limit, *flags)
    return vc.server(pair_dir(), base, depth, classifier, log, *shape, **options)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("trees")
    lengths = [2, 3, 9, 17, 33, 48, 64, 64]
    prompts = [ids[:n] for ids, n in zip(held_out_prompts(PROMPTS, min_tokens=64, seed=7), lengths, strict=True)]
    return SimpleNamespace(
        folder=folder,
        prompts=prompts,
        classifier=vc.save_hand_made_classifier(folder / "hand.safetensors"),
        forest=ts.Forest(pair_dir(), Target(pair_dir() / "target"), NEW_TOKENS),
    )


@pytest.fixture(scope="module", params=SERVERS, ids=lambda server: "-".join(map(str, server)))
def served(request: pytest.FixtureRequest, setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """All answers of one server, by (mode, concurrency): C2T, beta 0, everything cut, and caps on the depth."""
    base, topk, depth, max_nodes = request.param
    modes = {"c2t": (BETA, depth), "unpruned": (0.0, depth), "nothing": (1.0, depth)}
    if depth > max(CAPS):
        modes |= {f"cap-{cap}": (BETA, cap) for cap in CAPS}
    found: dict[tuple[str, int], list[vc.Counts]] = {}
    log = setting.folder / f"{base}-{topk}-{depth}.log"
    with tree_server(base, topk, depth, max_nodes, setting.classifier, log) as running:
        for mode, (beta, cap) in modes.items():
            vc.control(running, beta=beta, max_depth=cap)
            # a cap changes nothing about how requests share a batch
            for concurrency in CONCURRENCIES if not mode.startswith("cap") else CONCURRENCIES[-1:]:
                answers = vc.answers(running, setting.prompts, concurrency, NEW_TOKENS)
                found[mode, concurrency] = [vc.Counts.of_answer(answer) for answer in answers]
    limit = topk * depth if max_nodes is None else max_nodes
    yield SimpleNamespace(base=base, topk=topk, depth=depth, max_nodes=limit, counts=found, log=log)


def simulated(served: SimpleNamespace, setting: SimpleNamespace, beta: float, depth: int) -> list[vc.Counts | None]:
    shape = (served.topk, depth, served.max_nodes)
    return [setting.forest.counts(served.base, p, setting.classifier, beta, *shape) for p in setting.prompts]


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
@pytest.mark.parametrize("mode", ["c2t", "unpruned", "nothing"])
def test_output_is_plain_decodings(served: SimpleNamespace, setting: SimpleNamespace, mode: str, concurrency: int):
    plain = [setting.forest.plain(prompt) for prompt in setting.prompts]
    assert [found.output_ids for found in served.counts[mode, concurrency]] == plain


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_each_tree_is_what_the_classifier_says(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    found = served.counts["c2t", concurrency]
    ts.assert_as_simulated(found, simulated(served, setting, BETA, served.depth))
    sizes = {size for counts in found for size, _ in counts.draft_lengths}
    assert len(sizes) >= min(4, served.max_nodes), f"only sizes {sizes}: beta cuts too little or too much to tell"


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_beta_zero_is_the_unpruned_tree(served: SimpleNamespace, setting: SimpleNamespace, concurrency: int):
    found = served.counts["unpruned", concurrency]
    assert {size for counts in found for size, _ in counts.draft_lengths} == {served.max_nodes}
    ts.assert_as_simulated(found, simulated(served, setting, 0.0, served.depth))


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_everything_cut_is_one_token_a_step(served: SimpleNamespace, concurrency: int):
    # the first token comes from the prefill
    steps = NEW_TOKENS - 1
    for found in served.counts["nothing", concurrency]:
        assert (found.verify_count, found.draft_lengths) == (steps, ((0, steps),))


def test_a_cap_makes_a_shallower_tree(served: SimpleNamespace, setting: SimpleNamespace):
    for cap in CAPS if served.depth > max(CAPS) else ():
        ts.assert_as_simulated(served.counts[f"cap-{cap}", CONCURRENCIES[-1]], simulated(served, setting, BETA, cap))


def test_the_log_says_what_runs(served: SimpleNamespace):
    log = served.log.read_text(encoding="utf-8", errors="replace")
    shape = f"trees of at most {served.max_nodes} nodes and depth {served.depth}, top-k {served.topk}"
    assert f"C2T: base {served.base.upper()}, {shape}, policy c2t, beta {vc.BETA}" in log
