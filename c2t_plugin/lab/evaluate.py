"""`c2t evaluate`: classifiers and their rivals on recorded traces: AUC, calibration, and candidates at equal tau."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from c2t_plugin.errors import C2TError
from c2t_plugin.lab.pair_files import file_hash
from c2t_plugin.lab.plans import EvaluatePlan
from c2t_plugin.output import check_file, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from c2t_plugin.classifier import NodeClassifier
    from c2t_plugin.lab.judging import Evaluation
    from c2t_plugin.lab.unfinished import Unfinished
    from c2t_plugin.traces.file import Traces

FORMAT = "c2t-evaluation"
# 2 brought the bins of the calibration.
VERSION = 2


def plan_for(traces: Traces, replicates: int = EvaluatePlan.replicates, seed: int = EvaluatePlan.seed) -> EvaluatePlan:
    """The default plan, as far as the traces are deep."""
    depth = min(EvaluatePlan.d_max, traces.chain.layers)
    return EvaluatePlan(d_max=depth, tree_depth=min(depth, traces.tree.layers), replicates=replicates, seed=seed)


def _taus(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t evaluate", description=__doc__)
    parser.add_argument("classifiers", nargs="*", metavar="[NAME=]FILE", help="classifier files; without: rivals only")
    parser.add_argument("--traces", type=Path, required=True, help="traces of held-out prompts, from `c2t collect`")
    parser.add_argument("--rivals-from", type=Path, help="training traces that vLLM's estimator learns from")
    parser.add_argument("--d-max", type=int, default=EvaluatePlan.d_max, help="longest chain")
    parser.add_argument("--tree-depth", type=int, default=EvaluatePlan.tree_depth, help="deepest node of a tree")
    parser.add_argument("--taus", type=_taus, default=None, help="accept lengths to compare trees at, comma-separated")
    parser.add_argument("--second-top-k", type=int, default=None, help="also trees that keep so many nodes per layer")
    parser.add_argument(
        "--starts", type=int, default=EvaluatePlan.starts, help="replays per prompt, from its first states on"
    )
    parser.add_argument("--every-state", action="store_true", help="every recorded state once, not the visited ones")
    parser.add_argument("--replicates", type=int, default=EvaluatePlan.replicates, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=EvaluatePlan.seed, help="of the bootstrap")
    parser.add_argument("--json", type=Path, help="write all figures, with provenance, to this file")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.json:
        check_file(arguments.json)
    plan = EvaluatePlan(
        d_max=arguments.d_max,
        tree_depth=arguments.tree_depth,
        taus=arguments.taus,
        second_top_k=arguments.second_top_k,
        starts=arguments.starts,
        every_state=arguments.every_state,
        replicates=arguments.replicates,
        seed=arguments.seed,
    )
    from c2t_plugin.lab.evaluate_tables import print_chains, print_trees
    from c2t_plugin.lab.judging import evaluate_chains, evaluate_trees
    from c2t_plugin.traces.file import load_traces

    traces = load_traces(arguments.traces)
    training = load_traces(arguments.rivals_from) if arguments.rivals_from else None
    if training is not None and training.header["pair"] != traces.header["pair"]:
        raise C2TError(f"{arguments.rivals_from} and {arguments.traces} are of different drafts; collect again")
    classifiers = named_classifiers(arguments.classifiers, traces)
    unfinished = _unfinished(arguments, list(classifiers), plan) if arguments.json else None
    chains = _kept(unfinished, "chains.json", lambda: evaluate_chains(classifiers, traces, training, plan))
    print_chains(chains, traces, plan)
    trees = _kept(unfinished, "trees.json", lambda: evaluate_trees(classifiers, traces, plan))
    print_trees(trees, traces, plan)
    if unfinished is not None:
        files = dict(zip(classifiers, map(_path, arguments.classifiers), strict=True))
        write_json(arguments.json, to_json(chains, trees, traces, plan, unfinished.run, files))
        unfinished.finish()
    return 0


def _unfinished(arguments: argparse.Namespace, names: list[str], plan: EvaluatePlan) -> Unfinished:
    """What an interrupted run has left beside --json. names: of the classifiers."""
    from c2t_plugin.lab.unfinished import Unfinished, checksum

    files = [_path(text) for text in arguments.classifiers]
    settings = {
        "plan": asdict(plan),
        "traces": checksum(arguments.traces),
        "rivals": arguments.rivals_from and checksum(arguments.rivals_from),
        "classifiers": dict(zip(names, map(checksum, files), strict=True)),
    }
    return Unfinished.of(arguments.json, settings, plan.seed)


def _path(text: str) -> Path:
    """Of NAME=FILE or FILE."""
    return Path(text.partition("=")[2] or text)


def _kept(unfinished: Unfinished | None, name: str, judge: Callable[[], Evaluation]) -> Evaluation:
    """One half of the evaluation, from an interrupted run if that had finished it."""
    from c2t_plugin.lab.judging import Evaluation, RuleResult

    if unfinished is not None and unfinished.file(name).is_file():
        fields = json.loads(unfinished.file(name).read_text(encoding="utf-8"))
        return Evaluation(**{**fields, "rules": [RuleResult(**rule) for rule in fields["rules"]]})
    found = judge()
    if unfinished is not None:
        # NaN, unlike in the output, stays what it is
        unfinished.keep(name, lambda path: write_text(path, json.dumps(asdict(found))))
    return found


def named_classifiers(texts: list[str], traces: Traces) -> dict[str, NodeClassifier]:
    """NAME=FILE or FILE, named after the file, or after its folder if the file has the shipped name.

    C2TError if a name comes twice or a file was fitted on entropies over another top_m.
    """
    from c2t_plugin.classifier import FILE_NAME, load_classifier

    found: dict[str, NodeClassifier] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        path = Path(file if equals else text)
        if not equals:
            name = path.resolve().parent.name if path.name == FILE_NAME else path.stem
        if name in found:
            raise C2TError(f"two classifiers are named {name}; give names: NAME=FILE")
        found[name] = load_classifier(path)
        if found[name].spec.top_m != traces.header["top_m"]:
            raise C2TError(f"{path} has top_m {found[name].spec.top_m}, the traces {traces.header['top_m']}")
    return found


def to_json(
    chains: Evaluation,
    trees: Evaluation,
    traces: Traces,
    plan: EvaluatePlan,
    run: Mapping[str, Any] | None = None,
    files: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """All figures with what they were made from. run: record of the run that began; this one's if None. files: of the
    classifiers by name, whose hashes are kept."""
    from c2t_plugin.lab.curves import bootstrap_unit
    from c2t_plugin.provenance import RunRecord

    return {
        "format": FORMAT,
        "version": VERSION,
        "run": RunRecord.capture(seed=plan.seed).to_json() if run is None else dict(run),
        "plan": asdict(plan),
        "traces": {
            "prompts": len(traces.first),
            "states": len(traces),
            "header": dict(traces.header),
        },
        "classifiers": {name: file_hash(path) for name, path in (files or {}).items()},
        "intervals": f"95%, bootstrap over {bootstrap_unit(traces)}",
        "chains": asdict(chains),
        "trees": asdict(trees),
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all; NaN, which JSON has no word for, becomes null."""
    write_text(path, json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and value != value else value
