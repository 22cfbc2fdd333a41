"""Rules without training as classifier files, so that both engines serve them by the code that serves C2T.

    python -m benchmarks.serving.closed_forms --out closed-form.safetensors

A rule that is linear in the table of features passes through two hidden units, one for each sign. Its confidence is the
logistic function of the rule's score: at a score of log x it is x / (1 + x). `c2t calibrate` makes it a probability,
for who plans by it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.rivals import ENTROPY_WEIGHT

TOP_M = 1000
ON_P_FILE, TEMPERED_FILE = "threshold-on-p.safetensors", "closed-form.safetensors"
# by rule: how much of each feature its score is the sum of
ON_P = {"joint_log_prob": 1.0}
TEMPERED = {**ON_P, "path_entropy": ENTROPY_WEIGHT}


def closed_form(weights: Mapping[str, float], top_m: int = TOP_M) -> NodeClassifier:
    """A classifier whose logit is the sum of these features, each times its weight.

    weights: by names from FEATURES. top_m: probabilities that the entropy sums over.
    """
    count = len(weights)
    spec = ClassifierSpec(tuple(weights), (0.0,) * count, (1.0,) * count, hidden=2, top_m=top_m)
    classifier = NodeClassifier(spec)
    row = torch.tensor(list(weights.values()))
    with torch.no_grad():
        classifier.hidden.weight.copy_(torch.stack([row, -row]))
        classifier.hidden.bias.zero_()
        classifier.out.weight.copy_(torch.tensor([[1.0, -1.0]]))
        classifier.out.bias.zero_()
    return classifier.eval().requires_grad_(False)


def beta_of(score: float) -> float:
    """The beta that keeps tokens whose score is at least the logarithm of this; for ON_P, of at least this P."""
    return score / (1.0 + score)


def write_closed_forms(folder: Path, top_m: int = TOP_M) -> tuple[Path, Path]:
    """Write both rules into a folder; their files, the threshold on P first."""
    files = folder / ON_P_FILE, folder / TEMPERED_FILE
    for path, weights in zip(files, (ON_P, TEMPERED), strict=True):
        save_classifier(closed_form(weights, top_m), path)
    return files


def main(argv: list[str]) -> int:
    """Write log P plus a share of the path's entropy as a classifier file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.closed_forms", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="classifier file to write")
    parser.add_argument("--path-entropy", type=float, default=ENTROPY_WEIGHT, help="how much of it")
    parser.add_argument("--top-m", type=int, default=TOP_M, help="probabilities that an entropy sums over")
    options = parser.parse_args(argv)
    try:
        save_classifier(closed_form({**ON_P, "path_entropy": options.path_entropy}, options.top_m), options.out)
    except C2TError as error:
        print(f"closed_forms: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
