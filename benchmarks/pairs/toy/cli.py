"""`python -m benchmarks.pairs.toy`: train, evaluate and export the project's own targets and drafts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pairs.toy.recipe import PRESETS

# what `export` writes -> its function in export.py, which imports PyTorch
EXPORTS = {"mimo": "write_mimo", "small-pair": "write_small_pair"}


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommands; each sets `func`, which takes the parsed arguments and returns an exit status."""
    train = subparsers.add_parser("train", help="train the targets, the stand-alone draft and the heads")
    train.add_argument("--out", type=Path, required=True, help="pair directory to write")
    train.add_argument("--work", type=Path, help="directory of saved state (default: OUT.work)")
    train.add_argument("--preset", choices=sorted(PRESETS), default="cpu", help="budgets (default: cpu)")
    train.add_argument("--steps-scale", type=float, default=1.0, help="multiplies the steps of every stage")
    train.add_argument("--stages", default="", help="comma-separated subset of the stages (default: all)")
    train.add_argument("--resume", action="store_true", help="continue from saved state")
    train.set_defaults(func=_train)
    evaluate = subparsers.add_parser("evaluate", help="measure acceptance and write provenance.json")
    evaluate.add_argument("--pair", type=Path, help="pair directory (default: the one in use)")
    evaluate.add_argument("--work", type=Path, help="directory with the training's records, if any")
    evaluate.add_argument("--prompts", type=int, default=128, help="held-out prompts (default: 128)")
    evaluate.add_argument("--seed", type=int, default=0, help="choice of prompts and samples")
    evaluate.set_defaults(func=_evaluate)
    export = subparsers.add_parser("export", help="write a directory that an engine or the lab reads, from a pair")
    export.add_argument("kind", choices=EXPORTS, help="MiMo-style checkpoint with the MTP head; pair of small target")
    export.add_argument("--pair", type=Path, help="pair directory (default: the one in use)")
    export.add_argument("--out", type=Path, required=True, help="directory to write")
    export.set_defaults(func=_export)
    for parser in (train, evaluate):
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: PyTorch's choice)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.toy", description=__doc__)
    register(parser.add_subparsers(dest="subcommand", required=True))
    arguments = parser.parse_args(argv)
    return int(arguments.func(arguments))


def _train(arguments: argparse.Namespace) -> int:
    from benchmarks.pairs.toy.train import ALL_STAGES, Training

    _set_threads(arguments.threads)
    recipe = PRESETS[arguments.preset]()
    if arguments.steps_scale != 1.0:
        recipe = recipe.scaled(arguments.steps_scale)
    work = arguments.work or arguments.out.with_name(arguments.out.name + ".work")
    training = Training.on_standard_library(recipe, arguments.out, work, arguments.device, arguments.resume)
    training.run([stage for stage in arguments.stages.split(",") if stage] or ALL_STAGES)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from benchmarks.pairs.toy import export, pair_dir

    export.export(getattr(export, EXPORTS[arguments.kind]), arguments.pair or pair_dir(), arguments.out)
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from benchmarks.pairs.toy import pair_dir
    from benchmarks.pairs.toy.evaluate import evaluate

    _set_threads(arguments.threads)
    directory = arguments.pair or pair_dir()
    evaluate(directory, arguments.work, arguments.prompts, arguments.seed, arguments.device)
    return 0


def _set_threads(threads: int) -> None:
    if threads > 0:
        import torch

        torch.set_num_threads(threads)
