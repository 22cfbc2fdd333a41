"""Faults of tree mode, planted one after another into one running server: output or counts give each of them away.

The same server shows that a batch is verified at the width of its largest tree, and that drafting ends early.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from benchmarks.pairs.toy import held_out_prompts, pair_dir  # noqa: E402
from tests.engines.sglang.test_tree_counts import tree_server  # noqa: E402
from tests.support.sglang import faults, tree_faults  # noqa: E402
from tests.support.sglang import tree_simulate as ts  # noqa: E402
from tests.support.sglang import verify_counts as vc  # noqa: E402
from tests.support.sglang.simulate import Target  # noqa: E402

BASE, TOPK, DEPTH, BETA = "eagle3", 4, 5, 0.1
PROMPTS = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("tree-faults")
    forest = ts.Forest(pair_dir(), Target(pair_dir() / "target"))
    prompts = [ids[:32] for ids in held_out_prompts(PROMPTS, seed=11)]
    classifier = vc.save_hand_made_classifier(folder / "hand.safetensors")
    plugin = faults.install(folder, tree_faults.__file__)
    switch, record = folder / "fault", folder / "record"
    switch.write_text("")
    env = {**os.environ, "PLANTED_FAULT": str(switch), "TREE_RECORD": str(record), "PYTHONPATH": str(plugin)}
    with tree_server(BASE, TOPK, DEPTH, None, classifier, folder / "server.log", env=env) as running:
        vc.control(running, beta=BETA)
        yield SimpleNamespace(running=running, prompts=prompts, switch=switch, record=record, forest=forest)


def answers(served: SimpleNamespace, fault: str, concurrency: int = PROMPTS) -> list[vc.Counts]:
    served.switch.write_text(fault)
    served.record.write_text("")
    return [vc.Counts.of_answer(answer) for answer in vc.answers(served.running, served.prompts, concurrency)]


@pytest.fixture(scope="module")
def right(served: SimpleNamespace) -> list[vc.Counts]:
    return answers(served, "")


def test_without_a_fault_all_is_as_simulated(served: SimpleNamespace, right: list[vc.Counts], tmp_path: Path):
    classifier = vc.save_hand_made_classifier(tmp_path / "hand.safetensors")
    shape = (TOPK, DEPTH, TOPK * DEPTH)
    expected = [served.forest.counts(BASE, p, classifier, BETA, *shape) for p in served.prompts]
    assert [found.output_ids for found in right] == [served.forest.plain(p) for p in served.prompts]
    ts.assert_as_simulated(right, expected)


@pytest.mark.parametrize("fault", [fault.__name__ for fault in tree_faults.FAULTS])
def test_fault_is_caught(served: SimpleNamespace, right: list[vc.Counts], fault: str):
    assert answers(served, fault) != right


@pytest.mark.parametrize("concurrency", [1, PROMPTS])
def test_spare_rows_accept_more_and_change_no_output(served: SimpleNamespace, right: list[vc.Counts], concurrency: int):
    filled = answers(served, tree_faults.graphs_of_24_rows.__name__, concurrency)
    assert [found.output_ids for found in filled] == [found.output_ids for found in right]
    assert sum(found.verify_count for found in filled) < sum(found.verify_count for found in right)
    sizes = {size for found in filled for size, _ in found.draft_lengths}
    if concurrency == 1:
        # there is room for the largest tree, so all that was drafted is verified
        assert max(sizes) > max(size for found in right for size, _ in found.draft_lengths)


def test_keys_of_another_branch_are_caught(served: SimpleNamespace):
    """It changes little, so more prompts are looked at, and larger trees."""
    vc.control(served.running, beta=0.02)
    more = SimpleNamespace(**{**vars(served), "prompts": [ids[:32] for ids in held_out_prompts(24, seed=12)]})
    whole, wrong = (answers(more, fault, 8) for fault in ("", tree_faults.keys_of_another_branch.__name__))
    vc.control(served.running, beta=BETA)
    assert [found.output_ids for found in wrong] == [found.output_ids for found in whole]
    assert wrong != whole


def test_width_and_draft_follow_the_largest_tree(served: SimpleNamespace, right: list[vc.Counts]):
    """One request at a time, so that each verify step has one tree."""
    assert answers(served, "", concurrency=1) == right
    steps = [tuple(map(int, line.split())) for line in served.record.read_text().splitlines()]
    assert {requests for requests, _, _ in steps} == {1}
    sizes = sorted(size for found in right for size, steps in found.draft_lengths for _ in range(steps))
    assert sorted(width for _, width, _ in steps) == sorted(bucket(size + 1) for size in sizes)
    assert len({width for _, width, _ in steps}) > 2, "trees of one size say nothing about buckets"
    # a draft that ends early has had fewer forwards than there are steps, and a root alone none at all
    forwards = [count for _, _, count in steps]
    assert min(forwards) == 0
    assert max(forwards) == DEPTH - 1


def bucket(nodes: int) -> int:
    return min(width for width in (3, 6, 11, TOPK * DEPTH + 1) if width >= nodes)
