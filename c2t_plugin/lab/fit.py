"""`c2t fit`: train the classifier on recorded trees, report what it is worth, and write the classifier file."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.plans import CALIBRATIONS, RECIPES, FitPlan
from c2t_plugin.output import check_file

if TYPE_CHECKING:
    from c2t_plugin.classifier import NodeClassifier
    from c2t_plugin.lab.training import Epoch, FitRecipe
    from c2t_plugin.lab.unfinished import Unfinished
    from c2t_plugin.traces.file import Traces
    from c2t_plugin.traces.forest import Forest


def _ratio(text: str) -> float | None:
    return None if text == "all" else float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t fit", description=__doc__)
    parser.add_argument("traces", type=Path, help="trace file of `c2t collect`, or a directory of a server's")
    parser.add_argument("--out", type=Path, required=True, help="classifier file to write")
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0], help="features, scaling, negatives")
    parser.add_argument("--features", help="comma-separated, instead of the recipe's")
    parser.add_argument(
        "--negatives-per-positive", type=_ratio, default=argparse.SUPPRESS, metavar="N", help="a number, or all"
    )
    parser.add_argument("--hidden", type=int, default=argparse.SUPPRESS, help="hidden units, instead of the recipe's")
    parser.add_argument(
        "--chains", type=int, default=argparse.SUPPRESS, metavar="N", help="train on every chain node N times"
    )
    parser.add_argument(
        "--prior",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="make confidences probabilities again after sampling negatives or weighting, or not",
    )
    parser.add_argument(
        "--positive-weight", type=float, default=argparse.SUPPRESS, metavar="W", help="an accepted row counts W times"
    )
    parser.add_argument(
        "--monotone", type=float, default=argparse.SUPPRESS, metavar="W", help="weight of a penalty on rising paths"
    )
    parser.add_argument("--init", type=Path, help="fine-tune this classifier file; features and scaling are its own")
    parser.add_argument(
        "--share", type=float, default=None, help="of the training prompts to use (1; 0.1 when fine-tuning)"
    )
    parser.add_argument("--learning-rate", type=float, default=None, help="at the start (1e-3; 1e-4 when fine-tuning)")
    parser.add_argument(
        "--calibrate",
        choices=CALIBRATIONS,
        default=FitPlan.calibrate,
        help="make confidences probabilities on these training nodes, by a monotone map inside the network",
    )
    parser.add_argument(
        "--depth-origin", type=int, default=FitPlan.depth_origin, help="depth of a root's child, 0 or 1"
    )
    parser.add_argument("--d-max", type=int, default=FitPlan.d_max, help="longest chain that the report looks at")
    parser.add_argument(
        "--static", type=int, default=FitPlan.static, help="suggest the beta that accepts as much as these"
    )
    parser.add_argument("--beta", type=float, default=FitPlan.beta, help="suggested beta, instead of a chosen one")
    parser.add_argument("--evaluate", type=Path, help="report on these traces too, e.g. of held-out prompts")
    parser.add_argument("--seed", type=int, default=FitPlan.seed, help="split, negatives, first weights, order of rows")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    check_file(arguments.out)
    plan = plan_of(arguments)
    from c2t_plugin.classifier import load_classifier, save_classifier
    from c2t_plugin.lab.report import Evaluation, print_epochs, print_evaluation
    from c2t_plugin.lab.rows import split_by_prompt
    from c2t_plugin.lab.unfinished import Unfinished, checksum
    from c2t_plugin.traces.file import load_traces

    traces = load_traces(arguments.traces)
    judged = {"prompts split off": traces[split_by_prompt(traces.prompt, plan.seed)]}
    if arguments.evaluate:
        judged[arguments.evaluate.name] = further = load_traces(arguments.evaluate)
        _check_same_draft(arguments, traces, further)
    init = load_classifier(arguments.init) if arguments.init else None
    recipe = recipe_of(arguments)
    inputs = {"traces": arguments.traces, "init": arguments.init}
    checksums = {name: path and checksum(path) for name, path in inputs.items()}
    settings = {"recipe": asdict(recipe), "plan": asdict(plan), **checksums}
    unfinished = Unfinished.of(arguments.out, settings, plan.seed)
    classifier, epochs, chosen = fit(traces, recipe, plan, init, unfinished)
    print_epochs(epochs, chosen)
    evaluations = {title: Evaluation.of(classifier, some, plan.d_max) for title, some in judged.items()}
    for title, evaluation in evaluations.items():
        print_evaluation(title, evaluation, classifier.spec.suggested_beta)
    record = {
        **classifier.spec.training,
        "recipe": arguments.recipe if init is None else f"{init.spec.training.get('recipe', 'unknown')}, fine-tuned",
        "evaluations": {title: evaluation.to_json() for title, evaluation in evaluations.items()},
    }
    classifier.spec = replace(classifier.spec, training=record)
    save_classifier(classifier, arguments.out)
    unfinished.finish()
    spec = classifier.spec
    print(f"{arguments.out}: {', '.join(spec.features)}; epoch {chosen.number}; suggested beta {spec.suggested_beta}")
    return 0


def plan_of(arguments: argparse.Namespace) -> FitPlan:
    """The plan that was asked for; fine-tuning has its own share and learning rate (C2T B.4)."""
    from c2t_plugin.lab.training import FINE_TUNING_RATE, FINE_TUNING_SHARE

    share, rate = (FINE_TUNING_SHARE, FINE_TUNING_RATE) if arguments.init else (1.0, None)
    return FitPlan(
        depth_origin=arguments.depth_origin,
        d_max=arguments.d_max,
        static=arguments.static,
        beta=arguments.beta,
        seed=arguments.seed,
        share=share if arguments.share is None else arguments.share,
        learning_rate=rate if arguments.learning_rate is None else arguments.learning_rate,
        calibrate=arguments.calibrate,
    )


def recipe_of(arguments: argparse.Namespace) -> FitRecipe:
    """The named recipe with the parts that were asked for instead."""
    from c2t_plugin.lab.training import FIT_RECIPES

    recipe = FIT_RECIPES[arguments.recipe]
    if arguments.features is not None:
        recipe = replace(recipe, features=tuple(arguments.features.split(",")))
    changes = ("negatives_per_positive", "hidden", "chains", "prior", "positive_weight", "monotone")
    return replace(recipe, **{name: getattr(arguments, name) for name in changes if hasattr(arguments, name)})


def _check_same_draft(arguments: argparse.Namespace, traces: Traces, further: Traces) -> None:
    if any(traces.header[name] != further.header[name] for name in ("pair", "top_m")):
        raise C2TError(f"{arguments.evaluate} and {arguments.traces} are of different drafts or top_m; collect again")


def fit(
    traces: Traces,
    recipe: FitRecipe,
    plan: FitPlan,
    init: NodeClassifier | None = None,
    unfinished: Unfinished | None = None,
) -> tuple[NodeClassifier, list[Epoch], Epoch]:
    """Train on all prompts but the ones split off, with a progress bar.

    init: fine-tune a copy of this classifier: its features, scaling, hidden size and depth origin stay.
    unfinished: where finished epochs are kept and, after an interruption, taken from.
    Returns the classifier with the weights of the chosen epoch, all epochs and the chosen one. C2TError if the traces'
    chains are shorter than plan.d_max, or of another draft or top_m than init's.
    """
    from c2t_plugin.lab.rows import share_of_prompts, split_by_prompt
    from c2t_plugin.lab.scores import ChainReplay, suggest_beta
    from c2t_plugin.lab.training import choose_epoch
    from c2t_plugin.provenance import RunRecord

    if plan.d_max > traces.chain.layers:
        raise C2TError(
            f"d-max is {plan.d_max}, the traces' chains have {traces.chain.layers} tokens; collect deeper ones"
        )
    if init is not None:
        traces.check_top_m(init)
        recipe = replace(recipe, features=init.spec.features, hidden=init.spec.hidden)
        plan = replace(plan, depth_origin=init.spec.depth_origin)
    aside = split_by_prompt(traces.prompt, plan.seed)
    training = traces[~aside]
    if plan.share < 1.0:
        training = training[share_of_prompts(training.prompt, plan.share, plan.seed)]
    classifier, epochs = _train(training, traces[aside], recipe, plan, init, unfinished)
    chosen = choose_epoch(epochs, recipe.choose)
    classifier.load_state_dict(chosen.weights)
    classifier.eval().requires_grad_(False)
    if plan.calibrate != "none":
        classifier = _calibrated(classifier, training.chain if plan.calibrate == "chain" else training.tree)
    beta = plan.beta
    if beta is None:
        confidence = classifier.confidence(training.chain.stats())
        beta = suggest_beta(ChainReplay(training, plan.d_max), confidence, plan.static)
    record = {
        "epoch": chosen.number,
        "trees": len(training) + int(aside.sum()),
        "k": traces.tree.k,
        "layers": traces.tree.layers,
        "chains": recipe.chains,
        "positive_weight": recipe.positive_weight,
        "monotone": recipe.monotone,
        "calibrated": plan.calibrate,
        "suggested_beta": "given" if plan.beta is not None else f"accepts what chains of {plan.static} do",
        "d_max": plan.d_max,
        "traces": {name: traces.header.get(name) for name in ("prompts", "new_tokens", "run")},
        "run": RunRecord.capture(seed=plan.seed).to_json() if unfinished is None else dict(unfinished.run),
    }
    classifier.spec = replace(classifier.spec, suggested_beta=beta, training=record)
    return classifier, epochs, chosen


def _train(
    training: Traces,
    evaluation: Traces,
    recipe: FitRecipe,
    plan: FitPlan,
    init: NodeClassifier | None,
    unfinished: Unfinished | None,
) -> tuple[NodeClassifier, list[Epoch]]:
    import torch
    from rich.progress import Progress

    from c2t_plugin.lab.report import score_trees
    from c2t_plugin.lab.rows import parent_rows, training_rows
    from c2t_plugin.lab.training import LEARNING_RATE, new_classifier, sample_negatives, train

    generator = torch.Generator().manual_seed(plan.seed)
    features, accepted = training_rows(training, recipe, plan.depth_origin)
    parents = parent_rows(training, recipe) if recipe.monotone else None
    if parents is not None and len(parents) != len(features):
        raise C2TError("monotone needs the parents of all nodes, and some statistics are not finite; collect again")
    negatives = int((~accepted).sum())
    if recipe.negatives_per_positive is not None:
        rows = sample_negatives(accepted, recipe.negatives_per_positive, generator)
        features, accepted = features[rows], accepted[rows]
    header = training.header
    spec: dict[str, Any] = {"depth_origin": plan.depth_origin, "top_m": header["top_m"], "pair": header["pair"]}
    classifier = new_classifier(recipe, features, spec, plan.seed) if init is None else _copy(init, recipe, spec)
    prior = math.log(int((~accepted).sum()) / max(negatives, 1) / recipe.positive_weight) if recipe.prior else 0.0
    with Progress() as progress:
        bar = progress.add_task(f"fitting on {len(features)} nodes")
        epochs = train(
            classifier,
            features,
            accepted,
            evaluate=lambda: score_trees(classifier, evaluation.tree, shift=prior),
            generator=generator,
            report=lambda done, total: progress.update(bar, completed=done, total=total),
            learning_rate=plan.learning_rate or LEARNING_RATE,
            decay=recipe.decay,
            positive_weight=recipe.positive_weight,
            monotone=recipe.monotone,
            parents=parents,
            unfinished=unfinished,
        )
    for epoch in epochs:
        epoch.weights["out.bias"] += prior
    return classifier, epochs


def _calibrated(classifier: NodeClassifier, forest: Forest) -> NodeClassifier:
    from c2t_plugin.lab.calibration import calibrated

    return calibrated(classifier, forest)[0]


def _copy(init: NodeClassifier, recipe: FitRecipe, spec: dict[str, Any]) -> NodeClassifier:
    """An independent, trainable copy, its spec that of the new training."""
    from c2t_plugin.classifier import NodeClassifier

    classifier = NodeClassifier(replace(init.spec, negatives_per_positive=recipe.negatives_per_positive, **spec))
    classifier.load_state_dict(init.state_dict())
    return classifier
