"""C2T's rivals through a server: eagle2 has SGLang's own trees, request by request; each of the others has the verify
counts and tree sizes of an independent simulation, and all the output of plain decoding.

One server grows them all, one policy after the other (swapped_policies.py), as it takes as long to start as to answer;
a few answers of each come from a server of its own, started as a user starts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.cpu_engine.server import CpuServer  # noqa: E402
from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from c2t_plugin.lab.policies.presets import EAGLE1_PATHS  # noqa: E402
from tests.support.sglang import faults, swapped_policies  # noqa: E402
from tests.support.sglang import rival_simulate as rivals  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

BASE, TOPK, STEPS = "eagle3", 4, 5
# Most nodes of a tree. All that can be grown are entropy's, whose trees would have one size otherwise.
NODES = {"prob": 20, "dyspec": 25, "entropy": TOPK + (STEPS - 1) * TOPK**2, "static": len(EAGLE1_PATHS)}
# Of eagle2's trees: draft steps and nodes.
SHAPES = ((5, 25), (4, 11))
PROMPTS, NEW_TOKENS = 8, 16
# how many at a time -> of how many prompts
CONCURRENCIES = {1: 2, 8: PROMPTS}
BETA = 0.06
RULES: dict[str, Callable[[int, int, int], ts.PathRule]] = {
    "prob": lambda *shape: rivals.prob(*shape, beta=BETA),
    "dyspec": rivals.dyspec,
    "entropy": rivals.entropy,
    "static": lambda *shape: rivals.static(*shape, paths=frozenset(EAGLE1_PATHS)),
}
EAGLE2 = "eagle2"

Answers = list[dict[str, Any]]


def server(log: Path, steps: int, nodes: int, *algorithm: str, **options: Any) -> CpuServer:
    shape = ("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(TOPK))
    draft = ("--speculative-draft-model-path", str(pair_dir() / vc.DRAFTS[BASE]))
    width = ("--speculative-num-draft-tokens", str(nodes + 1), "--disable-radix-cache")
    return CpuServer(pair_dir() / "target", *algorithm, *draft, *shape, *width, log=log, **options)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    lengths = [2, 3, 9, 17, 33, 50, 64, 64]
    prompts = [ids[:n] for ids, n in zip(held_out_prompts(PROMPTS, min_tokens=64, seed=5), lengths, strict=True)]
    forest = ts.Forest(pair_dir(), Target(pair_dir() / "target"), NEW_TOKENS)
    return SimpleNamespace(folder=tmp_path_factory.mktemp("rivals"), prompts=prompts, forest=forest)


@pytest.fixture(scope="module")
def served(setting: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Answers of the rivals, by (policy, concurrency), and of eagle2 at 8 by its shape."""
    widest = max(NODES.values())
    folder, switch, log = setting.folder, setting.folder / "policy", setting.folder / "ours.log"
    env = {
        **os.environ,
        "TREE_POLICY": str(switch),
        "PYTHONPATH": str(faults.install(folder, swapped_policies.__file__)),
    }
    found: dict[tuple[Any, ...], Answers] = {}

    def ask(running: CpuServer, concurrency: int) -> Answers:
        return vc.answers(running, setting.prompts[: CONCURRENCIES[concurrency]], concurrency, NEW_TOKENS)

    mode = ("--speculative-c2t-mode", "tree", "--speculative-c2t-policy", EAGLE2)
    switch.write_text(f"{EAGLE2} {widest}")
    with server(log, STEPS, widest, "--speculative-algorithm", "C2T", *mode, env=env) as running:
        for shape in SHAPES:
            switch.write_text(f"{EAGLE2} {shape[1]}")
            vc.control(running, max_depth=shape[0])
            found[EAGLE2, shape] = ask(running, PROMPTS)
        vc.control(running, max_depth=STEPS)
        for name in RULES:
            switch.write_text(f"{name} {NODES[name]}")
            vc.control(running, beta=BETA if name == "prob" else 0.0)
            for concurrency in CONCURRENCIES:
                found[name, concurrency] = ask(running, concurrency)
    yield SimpleNamespace(answers=found, log=log.read_text(errors="replace"))


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
@pytest.mark.parametrize("name", RULES)
def test_a_rivals_trees_are_as_simulated(
    served: SimpleNamespace, setting: SimpleNamespace, name: str, concurrency: int
):
    prompts, shape = setting.prompts[: CONCURRENCIES[concurrency]], (TOPK, STEPS, NODES[name])
    found = [vc.Counts.of_answer(answer) for answer in served.answers[name, concurrency]]
    simulated = [setting.forest.simulated(BASE, p, RULES[name](*shape)) for p in prompts]
    assert [counts.output_ids for counts in found] == [setting.forest.plain(prompt) for prompt in prompts]
    ts.assert_as_simulated(found, simulated)
    sizes = {size for counts in found for size, _ in counts.draft_lengths}
    assert len(sizes) > 3 if name in ("prob", "entropy") else sizes == {NODES[name]}


@pytest.mark.parametrize("name", RULES)
def test_a_server_started_for_one_rival_grows_its_trees(served: SimpleNamespace, setting: SimpleNamespace, name: str):
    flags = ["--speculative-algorithm", "C2T", "--speculative-c2t-mode", "tree", "--speculative-c2t-policy", name]
    if name == "prob":
        flags += ["--speculative-c2t-beta", str(BETA)]
    log = setting.folder / f"{name}.log"
    with server(log, STEPS, NODES[name], *flags) as running:
        found = vc.answers(running, setting.prompts[: CONCURRENCIES[1]], 1, NEW_TOKENS)
    assert [summary(answer) for answer in found] == [summary(answer) for answer in served.answers[name, 1]]
    assert f"policy {name}" in log.read_text(errors="replace")


def test_no_two_policies_grow_the_same_trees(served: SimpleNamespace):
    """Three of them have trees of one size, 25: what tells those apart is what was accepted."""
    told = [
        [vc.Counts.of_answer(answer) for answer in served.answers[key]]
        for key in ((EAGLE2, SHAPES[0]), *((name, PROMPTS) for name in RULES))
    ]
    assert all(mine != theirs for i, mine in enumerate(told) for theirs in told[:i])


def summary(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return answer["output_ids"], meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_eagle2_has_sglangs_own_trees(served: SimpleNamespace, setting: SimpleNamespace, shape: tuple[int, int]):
    with server(setting.folder / f"stock-{shape[0]}.log", *shape, "--speculative-algorithm", "EAGLE3") as running:
        stock = vc.answers(running, setting.prompts, PROMPTS, NEW_TOKENS)
    ours = served.answers[EAGLE2, shape]
    assert [summary(answer) for answer in ours] == [summary(answer) for answer in stock]
    # every tree is as large as it may be, the root included
    lengths = [vc.Counts.of_answer(answer).draft_lengths for answer in ours]
    assert {size for counts in lengths for size, _ in counts} == {shape[1]}
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in ours) > PROMPTS
    assert "policy eagle2" in served.log
