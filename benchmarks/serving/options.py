"""What every benchmark of arms asks for: models, the values that fill in arms, and where servers run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pairs.toy import pair_dir
from benchmarks.pairs.toy.vllm_layout import write_vllm_layout
from benchmarks.serving.arms import threshold_beta, write_threshold_classifier
from c2t_plugin.classifier import FILE_NAME

BASES = ("eagle3", "eagle", "standalone")
PAIR_DRAFTS = {"eagle3": "eagle3", "eagle": "eagle1", "standalone": "draft"}
VLLM_METHODS = {"eagle3": "eagle3", "eagle": "eagle", "standalone": "draft_model"}
TOP_M = 1000
# of rows, where --classifier names none
OWN_CLASSIFIER = "the draft's own"


def add_arm_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """out: the default directory of what a run leaves."""
    parser.add_argument("--target", type=Path, help="directory of the target (default: the shipped pair's)")
    parser.add_argument("--draft", type=Path, help="directory of the draft (default: the shipped pair's)")
    parser.add_argument("--base", choices=BASES, default=BASES[0], help="what kind of draft it is")
    parser.add_argument("--classifier", type=Path, help="of the arms C2T (default: the one beside the draft)")
    parser.add_argument("--d-max", type=int, default=6, help="C2T's longest chain, where no scenario says it")
    parser.add_argument("--beta", type=float, default=0.5, help="of the arm C2T")
    parser.add_argument("--threshold", type=float, default=0.3, help="of the arm threshold on P")
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


def models(options: argparse.Namespace, engine: str) -> tuple[Path, Path, Path | None]:
    """Directories of target and draft as the engine loads them, and the classifier to name, None to let C2T find it.

    vLLM needs the shipped pair in a layout of its own, made in --out, which has no classifier beside the draft.
    """
    pair, kind = pair_dir(), PAIR_DRAFTS[options.base]
    layout = write_vllm_layout(pair, options.out / "pair") if engine == "vllm" else pair
    shipped = pair / kind / FILE_NAME if engine == "vllm" and options.draft is None else None
    return options.target or layout / "target", options.draft or layout / kind, options.classifier or shipped


def arm_values(options: argparse.Namespace, engine: str) -> dict[str, object]:
    """What flags of arms are filled in with; writes the classifier of the arm threshold on P into --out."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    threshold = out / "threshold-on-p.safetensors"
    write_threshold_classifier(threshold, TOP_M)
    target, draft, classifier = models(options, engine)
    return {
        "target": target,
        "draft": draft,
        "classifier": classifier,
        "base": options.base.upper(),
        "method": VLLM_METHODS[options.base],
        "d_max": options.d_max,
        "beta": options.beta,
        "threshold_classifier": threshold,
        "threshold": threshold_beta(options.threshold),
    }


def kind_of(run: Mapping[str, Any], cpu: bool) -> str:
    """Of a run's rows: functional without a GPU, and on the CPU beside one."""
    return "functional" if cpu or "no GPU" in run["machine"] else "measured"
