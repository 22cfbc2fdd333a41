"""`c2t plot`: draw traces, the figures of `c2t evaluate --json` or the rows of `python -m benchmarks.papers` as PNG."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from c2t_plugin import json_text
from c2t_plugin.errors import C2TError
from c2t_plugin.output import check_file
from c2t_plugin.request_options import is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCEPTS = "trace files, the JSON of `c2t evaluate --json`, and the rows.jsonl of `python -m benchmarks.papers`"

Drawn = TypeVar("Drawn")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t plot", description=__doc__)
    parser.add_argument("file", type=Path, help=f"one of {ACCEPTS}")
    parser.add_argument(
        "--classifier", action="append", default=[], metavar="[NAME=]FILE", help="judge it too, on traces; repeatable"
    )
    parser.add_argument("--experiment", help="of rows: the one to draw (default: each that can be, into its own file)")
    parser.add_argument("--out", type=Path, help="PNG file; for rows without --experiment a folder (default: beside)")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    drawn = figures(arguments)
    from c2t_plugin.lab.pictures import save_png
    from c2t_plugin.provenance import RunRecord

    run = RunRecord.capture()
    for path, figure in drawn.items():
        # some of what a file lacks turns up here
        _drawn(arguments.file, partial(save_png, figure, path, run))
        print(path)
    return 0


def figures(arguments: argparse.Namespace) -> dict[Path, Figure]:
    """Every picture that a file holds, by the path that it goes to. C2TError if there is none."""
    from c2t_plugin.lab.pictures import evaluation_figure

    file: Path = arguments.file
    if not file.is_file():
        raise C2TError(f"{file} not found; c2t plot draws {ACCEPTS}")
    out: Path = arguments.out or file.with_suffix(".png")
    text = _text(file)
    if text is None:
        check_file(out)
        return {out: evaluation_figure(_judged(file, arguments.classifier))}
    if arguments.classifier:
        raise C2TError(f"{file} holds no traces, so a classifier cannot be judged on it; leave --classifier out")
    if (evaluation := _evaluation(text)) is not None:
        check_file(out)
        return {out: _drawn(file, lambda: evaluation_figure(evaluation))}
    return _drawn(file, lambda: _of_rows(file, arguments.experiment, arguments.out))


def _drawn(file: Path, draw: Callable[[], Drawn]) -> Drawn:
    """What it draws. C2TError for a file that lacks something, or has it in another shape."""
    try:
        return draw()
    except C2TError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise C2TError(f"{file} does not hold what is drawn ({type(error).__name__}: {said}); make it again") from error


def _text(file: Path) -> str | None:
    """The file's text, None if it is binary, as traces are."""
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def _judged(file: Path, classifiers: list[str]) -> Mapping[str, Any]:
    """What `c2t evaluate` finds on traces, as its JSON has it."""
    from c2t_plugin.lab.evaluate import named_classifiers, plan_for, to_json
    from c2t_plugin.lab.judging import evaluate_chains, evaluate_trees
    from c2t_plugin.traces.file import load_traces

    traces = load_traces(file)
    plan = plan_for(traces)
    chosen = named_classifiers(classifiers, traces)
    chains = evaluate_chains(chosen, traces, None, plan)
    return to_json(chains, evaluate_trees(chosen, traces, plan), traces, plan)


def _evaluation(text: str) -> Mapping[str, Any] | None:
    """The record of `c2t evaluate`, None if the text is none. C2TError if it is of another version."""
    from c2t_plugin.lab.evaluate import FORMAT, VERSION

    try:
        record = json_text.parse(text, "the file")
    except C2TError:
        return None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return None
    if record.get("version") != VERSION:
        raise C2TError(f"the evaluation has version {record.get('version')}, {VERSION} is drawn; evaluate again")
    return record


def _of_rows(file: Path, experiment: str | None, out: Path | None) -> dict[Path, Figure]:
    from c2t_plugin.lab.experiment_rows import latest
    from c2t_plugin.lab.pictures import rows_figure

    try:
        records = latest(file)
    except C2TError as error:
        raise C2TError(f"{file} is none of {ACCEPTS}") from error
    if experiment is not None and experiment not in records:
        raise C2TError(f"{file} has no rows of {experiment}; it has {', '.join(records) or 'none'}")
    found = {}
    for name, record in records.items():
        gamma = _gamma_column(record["rows"])
        if gamma is not None and experiment in (None, name):
            drawn = [row for row in record["rows"] if row["tau"] is not None and row[gamma] is not None]
            if not all(is_number(row[column]) for row in drawn for column in ("tau", gamma)):
                raise TypeError(f"{name} has something else than numbers as tau or {gamma}")
            path = out if experiment and out else (out or file.parent) / f"{name}-rows.png"
            check_file(path)
            found[path] = rows_figure(name, drawn, gamma)
    if not found:
        wanted = experiment or str(file)
        raise C2TError(f"{wanted} has no rows to plot: they need a column tau and one that starts with gamma")
    return found


def _gamma_column(rows: list[Mapping[str, Any]]) -> str | None:
    """The first column of gamma in rows that have tau too."""
    if not any(row.get("tau") is not None for row in rows):
        return None
    return next(
        (name for name in rows[0] if name.startswith("gamma") and any(row[name] is not None for row in rows)), None
    )
