"""A feature that no paper has: how much of a request's drafts was accepted lately, beside those of the extended set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.papers.c2t_v1_common import TITLES
from benchmarks.papers.experiment import Bench, Experiment, Findings, Row
from c2t_plugin.classifier import EXTENDED_FEATURES
from c2t_plugin.lab.calibration import calibration
from c2t_plugin.lab.curves import bootstrap_unit, bootstrap_weights, interval
from c2t_plugin.lab.report import forest_features
from c2t_plugin.lab.scores import NodeScores, auc, weighted_auc
from c2t_plugin.lab.sweeps import truncate
from c2t_plugin.lab.training import train
from c2t_plugin.traces.file import Traces

D_MAX = 6
HIDDEN = 48
# Verifications that "lately" reaches back, and what a request counts as before its first one.
WINDOW, PRIOR = 8, 2.0
# Fits per set of features; their confidences are averaged.
SEEDS = 3
SETS = {"extended": len(EXTENDED_FEATURES), "and recent acceptance": len(EXTENDED_FEATURES) + 1}


def recent_acceptance(traces: Traces, d_max: int) -> Tensor:
    """(states,) float32: mean accept length of the last verifications that were over when the state began.

    Verifications are those of chains of d_max, served from the prompt's first state on; PRIOR counts as one more.
    """
    hits = truncate(traces.chain, d_max).accepted.sum(1).tolist()
    ends = [*traces.first[1:].tolist(), len(traces)]
    found = torch.empty(len(traces))
    for start, end in zip(traces.first.tolist(), ends, strict=True):
        over, lengths, at = [], [], start
        while at < end:
            lengths.append(hits[at])
            at = int(traces.following(torch.tensor(at), torch.tensor(hits[at])))
            over.append(at)
        for row in range(start, end):
            known = [length for length, when in zip(lengths, over, strict=True) if when <= row][-WINDOW:]
            found[row] = (sum(known) + PRIOR) / (len(known) + 1)
    return found


def chain_rows(traces: Traces) -> tuple[Tensor, Tensor]:
    """Features (nodes, F + 1), the last of them recent_acceptance, and labels (nodes,), of all chain nodes."""
    depth = min(D_MAX, traces.chain.layers)
    chain = truncate(traces.chain, depth)
    recent = recent_acceptance(traces, depth)[:, None, None].expand(-1, depth, 1)
    features = torch.cat([forest_features(chain, EXTENDED_FEATURES, 1), recent], dim=-1)
    return features.flatten(0, 1), chain.accepted.flatten()


def confidences(training: tuple[Tensor, Tensor], features: Tensor, seed: int) -> Tensor:
    """(nodes,) mean confidence of SEEDS networks of the paper's shape, fitted on chain nodes alone."""
    known, accepted = training
    shift, scale = known.mean(0), known.std(0).clamp_min(1e-6)
    total = torch.zeros(len(features))
    for number in range(SEEDS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + number)
            network = nn.Sequential(nn.Linear(known.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1), nn.Flatten(0))
        generator = torch.Generator().manual_seed(seed + number)
        train(network, (known - shift) / scale, accepted, _unjudged, generator, decay=True)
        with torch.no_grad():
            total += torch.sigmoid(network((features - shift) / scale))
    return total / SEEDS


def _unjudged() -> NodeScores:
    # the last epoch is used, whatever the ones before were worth
    return NodeScores(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def recent(bench: Bench) -> Findings:
    rows: list[Row] = []
    unit = ""
    for draft, title in TITLES.items():
        held = bench.traces(draft)
        unit = bootstrap_unit(held)
        known, labels = chain_rows(bench.traces(draft, "train"))
        features, accepted = chain_rows(held)
        owner, weights = held.owner.repeat_interleave(len(accepted) // len(held)), bootstrap_weights(held.groups)
        drawn: list[np.ndarray] = []
        for name, columns in SETS.items():
            found = confidences((known[:, :columns], labels), features[:, :columns], bench.seed)
            drawn.append(weighted_auc(found, accepted, owner, weights))
            low, high = interval(np.subtract(drawn[-1], drawn[0]))
            rows.append(
                {
                    "draft": title,
                    "features": name,
                    "auc": auc(found, accepted),
                    "gain from": low if len(drawn) > 1 else None,
                    "gain to": high if len(drawn) > 1 else None,
                    "calibration error": calibration(found, accepted).error,
                }
            )
    gains = [f"{row['draft']} {row['gain from']:+.4f} to {row['gain to']:+.4f}" for row in rows[1::2]]
    return Findings(
        rows,
        f"Chain nodes down to depth {D_MAX}, fitted on the training chains, judged on held-out ones. Recent acceptance "
        f"is the mean accept length of a request's last {WINDOW} verifications. Its gain of AUC, 95% over {unit}: "
        f"{'; '.join(gains)}. No adapter computes it.",
    )


EXPERIMENTS = (
    Experiment(
        name="c2t-recent-acceptance",
        title="A request's recent acceptance as a further feature, in chains",
        source="C2T v1 4.1 names three features; the extended ones and this one are in no paper",
        columns=("draft", "features", "auc", "gain from", "gain to", "calibration error"),
        run=recent,
    ),
)
