"""Temperature 0.8 in tree mode: samples have the target's joint distribution, and a planted bias is seen.

See test_sampled, whose enumeration and chi-square test these are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

from tests.engines.sglang.test_sampled import outcomes, sample  # noqa: E402
from tests.engines.sglang.test_tree_counts import tree_server  # noqa: E402
from tests.support.engines.distribution import (  # noqa: E402
    ALPHA,
    SAMPLES,
    SHORT,
    Outcome,
    most_varied_prompt,
    p_value,
)
from tests.support.sglang import faults, tree_faults  # noqa: E402
from tests.support.sglang.verify_counts import control, save_hand_made_classifier  # noqa: E402

BETA = 0.05
TOPK, DEPTH = 3, 3


@pytest.fixture(scope="module")
def enumerated() -> tuple[list[int], dict[Outcome, float]]:
    return most_varied_prompt(SHORT)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("tree-sampled")
    plugin = faults.install(folder, tree_faults.__file__)
    switch = folder / "fault"
    switch.write_text("")
    env = {**os.environ, "PLANTED_FAULT": str(switch), "PYTHONPATH": str(plugin)}
    classifier = save_hand_made_classifier(folder / "hand.safetensors")
    flags = ("--max-running-requests", "48", "--random-seed", "20251")
    with tree_server("standalone", TOPK, DEPTH, None, classifier, folder / "log", *flags, env=env) as running:
        control(running, beta=BETA)
        yield SimpleNamespace(running=running, switch=switch)


def answers(served: SimpleNamespace, prompt: list[int], fault: str) -> list[dict[str, Any]]:
    served.switch.write_text(fault)
    found = sample(served.running, prompt)
    assert len(found) == SAMPLES
    metas = [answer["meta_info"] for answer in found]
    sizes = [size - 1 for meta in metas for size, n in enumerate(meta["spec_cap_lens_histogram"]) for _ in range(n)]
    assert sum(size > 1 for size in sizes) > SAMPLES / 10, "next to no tree has branches"
    assert sum(size < TOPK * DEPTH for size in sizes) > SAMPLES / 10, "next to nothing is cut"
    accepted = sum(meta["spec_num_correct_drafts"] for meta in metas)
    assert SAMPLES / 10 < accepted < sum(sizes) - SAMPLES / 10, "too few drafts are kept, or too few are refused"
    return found


@pytest.mark.parametrize("rows", ["", tree_faults.graphs_of_24_rows.__name__], ids=["as many", "with spare ones"])
def test_samples_have_the_targets_distribution(
    served: SimpleNamespace, enumerated: tuple[list[int], dict[Outcome, float]], rows: str
):
    """Spare rows too, which the next-best nodes of all requests get."""
    prompt, probs = enumerated
    assert p_value(outcomes(answers(served, prompt, rows)), probs) >= ALPHA


def test_a_planted_bias_is_seen(served: SimpleNamespace, enumerated: tuple[list[int], dict[Outcome, float]]):
    prompt, probs = enumerated
    fault = tree_faults.refused_drafts_drawn_again.__name__
    assert p_value(outcomes(answers(served, prompt, fault)), probs) < ALPHA
