"""What `c2t fit` prints and stores about a classifier: scores on nodes, yield of chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from c2t_kernels.network import counted_features
from c2t_plugin.classifier import NodeClassifier
from c2t_plugin.lab.scores import BETAS, ChainReplay, ChainYield, NodeScores, auc, node_scores
from c2t_plugin.lab.training import Epoch
from c2t_plugin.traces.file import Traces
from c2t_plugin.traces.forest import Forest


def forest_features(forest: Forest, features: tuple[str, ...], depth_origin: int) -> Tensor:
    """(trees, nodes, F) float32, as NodeClassifier.confidence computes them."""
    return counted_features(features, forest.stats(), depth_origin)


@torch.no_grad()
def score_trees(classifier: NodeClassifier, forest: Forest, shift: float = 0.0) -> NodeScores:
    """Judge a classifier on all nodes of whole trees, pooled. shift: added to its logits."""
    spec = classifier.spec
    logits = classifier(forest_features(forest, spec.features, spec.depth_origin)) + shift
    return node_scores(logits.flatten(), forest.joint_log_prob.flatten(), forest.accepted.flatten())


@dataclass(frozen=True)
class Evaluation:
    """A classifier judged on some traces.

    nodes, novel_nodes: on whole trees of all states, and of novel ones. auc, auc_joint_prob: on chain nodes down to
    d_max, of the confidence and of P. confidence, accepted: means over these nodes; equal if the confidence is a
    probability there. static: chains of 1..d_max. cut: chains cut at each of BETAS. gamma, gamma_joint: gamma at the
    accept lengths of the static chains, by confidence and by P.
    """

    prompts: int
    states: int
    novel: float
    nodes: NodeScores
    novel_nodes: NodeScores
    auc: float
    auc_joint_prob: float
    confidence: float
    accepted: float
    static: list[ChainYield]
    cut: list[ChainYield]
    gamma: list[float]
    gamma_joint: list[float]

    @classmethod
    def of(cls, classifier: NodeClassifier, traces: Traces, d_max: int) -> Evaluation:
        """d_max: longest chain."""
        replay = ChainReplay(traces, d_max)
        confidence = classifier.confidence(traces.chain.stats())
        joint = traces.chain.joint_log_prob
        accepted = traces.chain.accepted[:, :d_max].flatten()
        static = [replay.static(length) for length in range(1, d_max + 1)]
        return cls(
            prompts=len(traces.prompt.unique()),
            states=len(traces),
            novel=float(traces.novel.float().mean()),
            nodes=score_trees(classifier, traces.tree),
            novel_nodes=score_trees(classifier, traces.tree[traces.novel]),
            auc=auc(confidence[:, :d_max].flatten(), accepted),
            auc_joint_prob=auc(joint[:, :d_max].flatten(), accepted),
            confidence=float(confidence[:, :d_max].mean()),
            accepted=float(accepted.float().mean()),
            static=static,
            cut=[replay.cut(confidence, beta) for beta in BETAS],
            gamma=[replay.gamma_at(confidence, chain.tau) for chain in static],
            gamma_joint=[replay.gamma_at(joint, chain.tau) for chain in static],
        )

    def to_json(self) -> dict[str, Any]:
        """The scores that travel in a classifier file; the chain tables are printed only."""
        return {
            "prompts": self.prompts,
            "states": self.states,
            "novel_states": round(self.novel, 4),
            "nodes": self.nodes.to_json(),
            "novel_nodes": self.novel_nodes.to_json(),
            "chain_auc": round(self.auc, 5),
            "chain_auc_joint_prob": round(self.auc_joint_prob, 5),
            "chain_confidence": round(self.confidence, 4),
            "chain_accepted": round(self.accepted, 4),
        }


def print_epochs(epochs: list[Epoch], chosen: Epoch) -> None:
    """One line per epoch; the chosen one is marked."""
    table = Table(title="epochs, on the prompts split off")
    for name in ("epoch", "recall at 0.5", "theta", "AUC", "BCE", ""):
        table.add_column(name, justify="right")
    for epoch in epochs:
        s = epoch.scores
        mark = "chosen" if epoch is chosen else ""
        table.add_row(str(epoch.number), f"{s.recall:.4f}", f"{s.theta:.5f}", f"{s.auc:.5f}", f"{s.bce:.6f}", mark)
    Console().print(table)


def print_evaluation(title: str, found: Evaluation, suggested_beta: float) -> None:
    """Three tables: nodes of whole trees, static chains and rules at their accept lengths, chains over beta."""
    console = Console()
    console.print(
        f"\n[bold]{title}[/bold]: {found.prompts} prompts, {found.states} states, {found.novel:.1%} of them novel; "
        f"AUC on chain nodes {found.auc:.4f}, of P alone {found.auc_joint_prob:.4f}; of them {found.accepted:.1%} are "
        f"accepted, the mean confidence is {found.confidence:.1%}"
    )
    console.print(_node_table(found))
    console.print(_static_table(found))
    console.print(_beta_table(found, suggested_beta))


def _node_table(found: Evaluation) -> Table:
    table = Table(title="nodes of whole trees")
    for name in ("states", "recall at 0.5", "theta", "P's recall at that theta", "AUC", "P's AUC", "BCE"):
        table.add_column(name, justify="right")
    for name, s in (("all", found.nodes), ("novel", found.novel_nodes)):
        figures = (s.recall, s.theta, s.recall_joint_prob, s.auc, s.auc_joint_prob, s.bce)
        table.add_row(name, *(f"{figure:.4f}" for figure in figures))
    return table


def _static_table(found: Evaluation) -> Table:
    table = Table(title="gamma (draft tokens verified per step) at the tau (accepted, no bonus) of static chains")
    for name in ("static length", "tau", "gamma, static", "gamma, C2T", "gamma, P alone"):
        table.add_column(name, justify="right")
    for chain, gamma, joint in zip(found.static, found.gamma, found.gamma_joint, strict=True):
        table.add_row(f"{chain.gamma:.0f}", *(f"{x:.3f}" for x in (chain.tau, chain.gamma, gamma, joint)))
    return table


def _beta_table(found: Evaluation, suggested_beta: float) -> Table:
    table = Table(title=f"chains of at most {len(found.static)}, cut by confidence")
    for name in ("beta", "tau, no bonus", "gamma", "gamma per output token", ""):
        table.add_column(name, justify="right")
    for beta, chain in zip(BETAS, found.cut, strict=True):
        mark = "suggested" if beta == suggested_beta else ""
        figures = (chain.tau, chain.gamma, chain.gamma_per_token)
        table.add_row(f"{beta:.2f}", *(f"{figure:.3f}" for figure in figures), mark)
    return table
