"""`c2t calibrate`: make a finished classifier's confidences probabilities on chains, or on trees, by recorded ones."""

from __future__ import annotations

import argparse
from pathlib import Path

from c2t_plugin.output import check_file

KINDS = ("chain", "tree")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="c2t calibrate", description=main.__doc__)
    parser.add_argument("classifier", type=Path, help="classifier file")
    parser.add_argument("traces", type=Path, help="trace file of its draft, from `c2t collect`; of training prompts")
    parser.add_argument("--on", choices=KINDS, default=KINDS[0], help="what is drafted")
    parser.add_argument("--depth", type=int, default=6, help="longest chain, or depth of the trees")
    parser.add_argument("--out", type=Path, required=True, help="classifier file to write")
    return parser


def main(argv: list[str]) -> int:
    """Make the running minimum of a classifier's confidences the chance of acceptance, which is how a planner reads it.
    The order of nodes stays, and the suggested beta moves along, so that it cuts what it cut before."""
    arguments = _parser().parse_args(argv)
    check_file(arguments.out)
    from dataclasses import replace

    from c2t_plugin.classifier import load_classifier, save_classifier
    from c2t_plugin.lab.calibration import calibrated, mapped
    from c2t_plugin.lab.sweeps import truncate
    from c2t_plugin.provenance import RunRecord
    from c2t_plugin.traces.file import load_traces

    classifier, traces = load_classifier(arguments.classifier), load_traces(arguments.traces)
    traces.check_top_m(classifier)
    forest = truncate(getattr(traces, arguments.on), arguments.depth)
    found, slope, shift = calibrated(classifier, forest)
    spec = classifier.spec
    record = {
        **spec.training,
        "calibrated": arguments.on,
        "calibration": {"slope": slope, "shift": shift, "trees": len(forest), "depth": arguments.depth},
        "calibration_run": RunRecord.capture().to_json(),
    }
    found.spec = replace(spec, suggested_beta=mapped(spec.suggested_beta, slope, shift), training=record)
    save_classifier(found, arguments.out)
    print(f"logit times {slope:.3f} plus {shift:+.3f}; suggested beta {found.spec.suggested_beta:.3f}")
    return 0
