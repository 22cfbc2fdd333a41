"""What every benchmark of arms asks for: models, what fills in arms, and where servers run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pairs.toy import pair_dir
from benchmarks.serving.arms import BASES, Speculation
from benchmarks.serving.closed_forms import beta_of, write_closed_forms
from benchmarks.serving.engines import Device, Engine
from benchmarks.serving.server import Runner
from c2t_plugin.classifier import FILE_NAME

PAIR_DRAFTS = {"eagle3": "eagle3", "eagle": "eagle1", "standalone": "draft"}
# of rows, where --classifier names none
OWN_CLASSIFIER = "the draft's own"


@dataclass(frozen=True)
class Models:
    """Directories of target and draft as an engine loads them, and the classifier to name, None to let C2T find it."""

    target: Path
    draft: Path
    classifier: Path | None


def shipped(engine: Engine, base: str, out: Path) -> Models:
    """The shipped pair. out: where an engine that needs it in a layout of its own has it made."""
    pair, kind = pair_dir(), PAIR_DRAFTS[base]
    layout = engine.layout(pair, out)
    classifier = None if engine.layout_has_classifiers else pair / kind / FILE_NAME
    return Models(layout / "target", layout / kind, classifier)


def add_arm_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """out: the default directory of what a run leaves."""
    parser.add_argument("--target", type=Path, help="directory of the target (default: the shipped pair's)")
    parser.add_argument("--draft", type=Path, help="directory of the draft (default: the shipped pair's)")
    parser.add_argument("--base", choices=BASES, default=BASES[0], help="what kind of draft it is")
    parser.add_argument("--classifier", type=Path, help="of the arms C2T (default: the one beside the draft)")
    parser.add_argument(
        "--d-max", type=int, default=Speculation.d_max, help="C2T's longest chain, where no scenario says it"
    )
    parser.add_argument("--beta", type=float, default=0.5, help="of the arm C2T")
    parser.add_argument("--threshold", type=float, default=0.3, help="of the arms threshold on P and closed form")
    parser.add_argument("--cpu", action="store_true", help="start servers on the engine's CPU device")
    parser.add_argument("--server-args", default="", help="further flags of every server, one string")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds until a server must answer")
    parser.add_argument("--out", type=Path, default=out, help="directory of rows, logs and other files")


def dtype_of(options: argparse.Namespace) -> str:
    """The --dtype of the servers: the one in --server-args, else what --cpu or the engine takes by itself."""
    words = options.server_args.replace("=", " ").split()
    if "--dtype" in words[:-1]:
        return words[words.index("--dtype") + 1]
    return "float32" if options.cpu else "auto"


def models(options: argparse.Namespace, engine: Engine) -> Models:
    """The models that were named, of the shipped pair what was not."""
    found = shipped(engine, options.base, options.out)
    own = None if options.draft else found.classifier
    return Models(options.target or found.target, options.draft or found.draft, options.classifier or own)


def speculation(options: argparse.Namespace, found: Models) -> Speculation:
    """What fills in arms; writes the files of the arms threshold on P and closed form into --out."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    on_p, closed_form = write_closed_forms(out)
    return Speculation(
        draft=found.draft,
        base=options.base,
        d_max=options.d_max,
        beta=options.beta,
        classifier=found.classifier,
        threshold_classifier=on_p,
        closed_form=closed_form,
        threshold=beta_of(options.threshold),
    )


def runner(options: argparse.Namespace, engine: Engine, target: Path) -> Runner:
    """Starts the servers that were asked for."""
    return Runner(
        engine=engine,
        device=Device.CPU if options.cpu else Device.GPU,
        target=target,
        out=options.out,
        flags=tuple(options.server_args.split()),
        start_timeout=options.start_timeout,
    )


def kind_of(run: Mapping[str, Any], cpu: bool) -> str:
    """Of a run's rows: functional without a GPU, and on the CPU beside one."""
    return "functional" if cpu or "no GPU" in run["machine"] else "measured"
