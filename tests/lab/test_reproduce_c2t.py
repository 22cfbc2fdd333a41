"""C2T's tables and figures on toy traces: rows have their columns, and one number of each kind is computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.lab.curves import Sweep
from c2t_plugin.lab.reproduce import c2t_v1_common as common
from c2t_plugin.lab.reproduce.c2t_v1_common import Brought, Curve, Ground
from c2t_plugin.lab.reproduce.c2t_v1_pictures import by_entropy_and_rank
from c2t_plugin.lab.reproduce.c2t_v2_tables import accepted_by_depth, candidates
from c2t_plugin.lab.reproduce.catalogue import REGISTRY
from c2t_plugin.lab.reproduce.experiment import QUICK_TREES, Bench
from c2t_plugin.lab.traces import Traces, save_traces
from c2t_plugin.policies.c2t import C2TTree

TABLES = [name for name in REGISTRY.experiments if name.startswith("c2t-")]


@dataclass
class ToyBench:
    """Stands for a Bench: random traces of trees 4 wide and 5 deep, untrained classifiers."""

    make: Callable[..., Traces]
    traces_dir: Path
    seed: int = 0
    quick: bool = True
    known: dict[tuple[str, str], Traces] = field(default_factory=dict)

    def traces(self, draft: str, prompts: str = "held-out") -> Traces:
        key = (draft, prompts)
        if key not in self.known:
            self.known[key] = self.make(prompts=4, steps=6, k=4, layers=5, seed=sum(map(ord, draft + prompts)))
        return self.known[key]

    def classifier(self, draft: str) -> NodeClassifier:
        torch.manual_seed(len(draft))
        features = ("joint_log_prob", "entropy", "depth")
        spec = ClassifierSpec(features=features, top_m=4, hidden=8, training={"recipe": "default"})
        return NodeClassifier(spec).eval().requires_grad_(False)


@pytest.fixture
def bench(make_traces: Callable[..., Traces], tmp_path: Path) -> Bench:
    found = ToyBench(make_traces, tmp_path)
    # table 6 would collect these from the pair's models
    for top_m in (4, 6):
        save_traces(found.traces("eagle3"), tmp_path / f"eagle3-held-out-top-{top_m}-{QUICK_TREES}.traces")
    return cast(Bench, found)


@pytest.mark.parametrize("name", TABLES)
def test_rows_have_their_columns(bench: Bench, name: str) -> None:
    found = REGISTRY.experiments[name].findings(bench)
    assert len(found.rows) >= 2
    # a page of JSON has no NaN
    assert all(cell == cell for row in found.rows for cell in row.values())


def test_every_table_and_figure_of_c2t_is_there() -> None:
    sources = " ".join(REGISTRY.experiments[name].source for name in TABLES)
    for wanted in ("v1 table 1", "v1 table 2", "v1 table 3", "v1 table 4", "v1 table 5", "v2 table 1", "v1 figure 2"):
        assert wanted in sources, wanted


def test_threshold_is_the_cheapest_that_accepts_as_much() -> None:
    curve = Curve(np.array([3.0, 2.0, 1.0, 0.0]), np.array([1.0, 2.0, 2.0, 2.5]), np.array([2.0, 6.0, 5.0, 9.0]))
    assert curve.cheapest(1.5) == (1.0, 2.0, 5.0)
    assert curve.cheapest(2.6) is None and curve.gamma_at(2.6) is None
    # halfway between (1, 2) and (2, 5), which is cheaper than (2, 6)
    assert curve.gamma_at(1.5) == pytest.approx(3.5)
    # 5 candidates for 2 drafted tokens and the bonus
    assert common.Point(1.0, 2.0, 5.0).per_token == pytest.approx(5 / 3)


def test_eagle2s_point_counts_the_root_as_the_paper_does(bench: Bench) -> None:
    ground = Ground.of(bench.traces("draft"), 3)
    point = ground.eagle2_at(5)
    assert point.gamma == point.setting == 4
    best = ground.forest.joint_log_prob.topk(4, dim=1).indices
    hits = ground.forest.accepted.gather(1, best).sum(1)
    # one start per prompt, by hand, must agree where every state is visited from every start
    sweep = Sweep(torch.tensor([4.0]), torch.full((1, len(hits)), 4).short(), hits[None].short())
    assert point.tau == pytest.approx(float(Curve.of(ground.traces, sweep).tau[0]))
    assert ground.eagle2_at(10_000).gamma == ground.forest.accepted.shape[1]


def test_a_threshold_on_p_is_compared_at_equal_tau(bench: Bench) -> None:
    ground = Ground.of(bench.traces("draft"), 4)
    base = ground.eagle2_at(10)
    cells = ground.against(ground.forest.joint_log_prob.exp(), base)
    assert set(cells) == {"setting", "tau", "gamma / EAGLE-2", "missing"}
    beta = cells["setting"]
    assert beta is not None and cells["tau"] is not None and cells["tau"] >= base.tau
    kept = ground.forest.joint_log_prob.exp() >= beta
    sweep = Sweep(torch.tensor([beta]), kept.sum(1)[None].short(), (kept & ground.forest.accepted).sum(1)[None].short())
    by_hand = Curve.of(ground.traces, sweep)
    share = float(by_hand.gamma[0] / (by_hand.tau[0] + 1)) / base.per_token
    assert cells["gamma / EAGLE-2"] == pytest.approx(share)


def test_beta_is_the_largest_that_accepts_enough(bench: Bench) -> None:
    classifier, traces = bench.classifier("draft"), bench.traces("draft")

    def at(beta: float) -> Brought:
        return common.served(traces, C2TTree(classifier=classifier, beta=beta, first_k=4, second_k=4, d_max=4))

    wanted = at(0.0).tau / 2
    beta, found = common.beta_at(at, wanted, rounds=12)
    assert found.tau >= wanted > at(beta + 2**-11).tau
    assert common.beta_at(at, 100.0)[0] == 0.0


def test_probability_and_acceptance_by_entropy_and_rank(bench: Bench) -> None:
    forest = bench.traces("draft").tree
    found = by_entropy_and_rank(forest)
    inside = (forest.entropy[:, 0] >= 1) & (forest.entropy[:, 0] < 2)
    assert int(found.states[1]) == int(inside.sum()) > 0
    assert int(found.states.sum()) == len(forest)
    assert found.prob[1, 2] == pytest.approx(float(forest.log_prob[inside, 2].exp().mean()))
    assert found.accepted[1, 0] == pytest.approx(float(forest.accepted[inside, 0].float().mean()))


def test_acceptance_by_depth_counts_what_eagle2_verifies(bench: Bench) -> None:
    forest = bench.traces("draft").tree
    verified = candidates(forest, 6)
    assert (verified.sum(1) == 5).all()
    found = accepted_by_depth(forest, verified, 0.2, 0.6)
    prob = forest.joint_log_prob.exp()
    nodes = [
        (row, column)
        for row in range(len(forest))
        for column in range(4)
        if verified[row, column] and 0.2 < prob[row, column] <= 0.6
    ]
    assert found[1] == (len(nodes), sum(bool(forest.accepted[node]) for node in nodes))
    assert found[1][0] > 0
