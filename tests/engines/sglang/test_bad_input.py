"""Bad input on real command lines: one clear line, a non-zero exit, and never an open port.

Most are tried in forks of one process that has imported SGLang and loaded no plugin yet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = [pytest.mark.sglang, pytest.mark.server]

import sglang  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.cpu_engine import cpu_engine_env  # noqa: E402
from benchmarks.cpu_engine.preloaded import preloaded_for  # noqa: E402
from benchmarks.cpu_engine.server import SMALL_MODEL_FLAGS  # noqa: E402
from benchmarks.pairs.toy import pair_dir  # noqa: E402
from benchmarks.serving.process import Launched, free_port  # noqa: E402
from benchmarks.serving.sessions import kill_session  # noqa: E402
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, save_classifier  # noqa: E402
from tests.support.sglang import faults  # noqa: E402

LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")
# Much longer than any start on a busy machine: a refusal takes seconds, so only a hang reaches it.
TIMEOUT_S = 300.0


class Outcome(NamedTuple):
    """How a command line ended. code is None if it had to be killed."""

    code: int | None
    opened: bool
    output: str


def command_line_env() -> dict[str, str]:
    """The CPU engine's, without options of C2T that the person who runs the tests may have set."""
    kept = ("C2T_PAIR",)
    return {name: value for name, value in cpu_engine_env(os.environ).items() if name in kept or name[:4] != "C2T_"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Classifier files, good and bad, and a draft of another vocabulary."""
    folder = tmp_path_factory.mktemp("files")
    names = ("good", "missing", "truncated", "text", "features", "nan")
    made = {name: folder / f"{name}.safetensors" for name in names}
    save_classifier(NodeClassifier(ClassifierSpec()), made["good"])
    made["truncated"].write_bytes(made["good"].read_bytes()[:-100])
    made["text"].write_text("weights: none\n" * 50)
    spec = json.loads(ClassifierSpec().to_json()) | {"features": ["joint_prob", "entropy", "phase_of_the_moon"]}
    metadata = {"format": "c2t-classifier", "version": "1", "spec": json.dumps(spec)}
    save_file(NodeClassifier(ClassifierSpec()).state_dict(), made["features"], metadata=metadata)
    broken = NodeClassifier(ClassifierSpec())
    torch.nn.init.constant_(broken.out.bias, torch.nan)
    save_classifier(broken, made["nan"])
    made["vocabulary"] = folder / "other_vocabulary"
    made["vocabulary"].mkdir()
    config = json.loads((pair_dir() / "draft" / "config.json").read_text())
    (made["vocabulary"] / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    return made


def c2t_flags(classifier: Path, draft: str | Path) -> list[str]:
    flags = ["--speculative-algorithm", "C2T", "--speculative-draft-model-path", str(draft)]
    return [*flags, "--speculative-c2t-classifier", str(classifier)]


def server_flags(port: int) -> list[str]:
    flags = ["--model-path", str(pair_dir() / "target"), *SMALL_MODEL_FLAGS]
    return [*flags, "--host", "127.0.0.1", "--port", str(port)]


TREE = ("--speculative-c2t-mode", "tree")

# name: more flags, environment, what our line says
CASES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "classifier_missing": (["classifier=missing"], {}, "neither a file nor a directory or hub repository"),
    "classifier_truncated": (["classifier=truncated"], {}, "truncated.safetensors is not a readable safetensors file"),
    "classifier_of_text": (["classifier=text"], {}, "text.safetensors is not a readable safetensors file"),
    "classifier_of_other_features": (["classifier=features"], {}, "phase_of_the_moon.* this build computes"),
    "classifier_with_nan": (["classifier=nan"], {}, r"nan.safetensors holds NaN or infinity in out\.bias"),
    "beta_above_1": (["--speculative-c2t-beta", "1.5"], {}, r"beta must be a number in \[0, 1\], got 1\.5"),
    "beta_negative": (["--speculative-c2t-beta=-1"], {}, r"beta must be a number in \[0, 1\], got -1"),
    "beta_nan": (["--speculative-c2t-beta", "nan"], {}, r"beta must be a number in \[0, 1\], got nan"),
    "beta_of_text": (["--speculative-c2t-beta", "much"], {}, "beta must be a number, got 'much'"),
    "beta_by_environment": ([], {"C2T_BETA": "2"}, r"beta must be a number in \[0, 1\], got 2"),
    "unknown_option_in_json": ([], {"C2T_CONFIG": '{"bata": 0.5}'}, "unknown option bata; known: attention, base"),
    "cost_curve_of_a_number": (
        ["--speculative-c2t-cost-curve", "c.json"],
        {},
        "cost_curve is what a planner decides by",
    ),
    "cost_curve_that_is_none": (
        ["--speculative-c2t-beta", "auto", "--speculative-c2t-cost-curve", __file__],
        {},
        "test_bad_input.py is not valid JSON",
    ),
    "learned_of_text": (
        ["--speculative-c2t-learned", __file__],
        {},
        "test_bad_input.py is not a readable safetensors file",
    ),
    "trace_share_of_nothing": (["--speculative-c2t-trace-share", "0"], {}, "trace_share must be a number above 0"),
    "trace_dir_that_is_a_file": (["--speculative-c2t-trace-dir", __file__], {}, "trace_dir .* cannot be made"),
    "unknown_mode": (["--speculative-c2t-mode", "star"], {}, "mode must be one of .*, got 'star'"),
    "unknown_packing": (["--speculative-c2t-packing", "fast"], {}, "packing must be one of .*, got 'fast'"),
    "ragged_fa3_on_a_cpu": (
        ["--speculative-c2t-packing", "fa3"],
        {},
        "--speculative-c2t-packing fa3 cannot be had: attention_backend is intel_amx; use auto, or start with",
    ),
    "ragged_flashinfer_on_a_cpu": (
        ["--speculative-c2t-packing", "flashinfer"],
        {},
        "packing flashinfer cannot be had: .* or start with --attention-backend flashinfer",
    ),
    "ragged_trees_on_flashmla": (
        [*TREE, "--speculative-c2t-packing", "flashmla"],
        {},
        "flashmla packs chains only; .* in mode tree",
    ),
    "tree_attention_on_a_cpu": (
        ["--speculative-c2t-attention", "tree"],
        {},
        "--speculative-c2t-attention tree cannot be had: attention_backend is intel_amx; leave it out, or start with",
    ),
    "unknown_rows": ([], {"C2T_ROWS": "late"}, "rows must be one of auto, sync, lagged, got 'late'"),
    "lagged_trees": ([*TREE, "--speculative-c2t-rows", "lagged"], {}, "rows lagged clips chains"),
    "unknown_base": (["--speculative-c2t-base", "medusa"], {}, "base must be one of .*, got 'medusa'"),
    "rejection_sampling": (["--speculative-use-rejection-sampling"], {}, "--speculative-use-rejection-sampling .*bias"),
    "adaptive": (["--speculative-adaptive"], {}, "--speculative-adaptive cannot be combined"),
    "lora": (["--enable-lora", "--max-lora-rank", "8"], {}, r"--enable-lora cannot be combined .*lora_hook\.py:253"),
    "pipeline": (["--pp-size", "2"], {}, "--pp-size above 1 cannot be combined"),
    "tree": (["--speculative-eagle-topk", "4"], {}, "--speculative-eagle-topk is 4"),
    "tree_of_no_children": (
        [*TREE, "--speculative-eagle-topk", "0"],
        {},
        "--speculative-eagle-topk is 0; in tree mode",
    ),
    "tree_of_no_steps": ([*TREE, "--speculative-num-steps", "0"], {}, "--speculative-num-steps is 0"),
    "tree_of_too_many_nodes": (
        [*TREE, "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "64"],
        {},
        "--speculative-num-draft-tokens is 64; .* must be from 2 to 13",
    ),
    "tree_without_a_mask": (
        [*TREE, "--attention-backend", "torch_native"],
        {},
        "torch_native, which takes no trees",
    ),
    "tree_on_larger_pages": ([*TREE, "--page-size", "16"], {}, "--page-size is 16; on intel_amx trees need pages of"),
    "tokenizer_workers_of_another_app": (
        ["--tokenizer-worker-num", "2"],
        {"SGLANG_HTTP_SERVER_APP_PATH": "mine:app"},
        "--tokenizer-worker-num above 1 cannot be combined with C2T while SGLANG_HTTP_SERVER_APP_PATH is mine:app",
    ),
    "unknown_request_settings": (
        ["--speculative-c2t-request-settings", "few"],
        {},
        "request_settings must be one of all, lower, none, got 'few'",
    ),
    "unreadable_wish_for_any_release": ([], {"C2T_UNTESTED_RELEASE": "yes"}, "C2T_UNTESTED_RELEASE must be 0 or 1"),
    "draft_of_another_vocabulary": (["draft=vocabulary"], {}, r"vocabulary of \d+, the target .* of \d+"),
}


@pytest.fixture(scope="module")
def outcomes(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every command line of CASES, one after another."""
    folder = tmp_path_factory.mktemp("command_lines")
    preloaded = preloaded_for(command_line_env())
    assert preloaded is not None
    found = {}
    for name, (flags, env, _) in CASES.items():
        chosen = dict(flag.split("=") for flag in flags if not flag.startswith("--") and "=" in flag)
        more = [flag for flag in flags if flag.partition("=")[0] not in chosen]
        draft = files[chosen["draft"]] if "draft" in chosen else pair_dir() / "draft"
        port, log = free_port(), folder / f"{name}.txt"
        argv = [*server_flags(port), *c2t_flags(files[chosen.get("classifier", "good")], draft), *more]
        process = preloaded.start([*LAUNCH_SERVER, *argv], command_line_env() | env, log, niceness=0)
        found[name] = ended(process, port, log)
        assert kill_session(process) == []
    return found


def ended(process: Launched, port: int, log: Path) -> Outcome:
    """Once it has ended, or its port is open, or the time is up."""
    deadline = time.monotonic() + TIMEOUT_S
    opened = False
    while process.poll() is None and not opened and time.monotonic() < deadline:
        with socket.socket() as connection:
            opened = connection.connect_ex(("127.0.0.1", port)) == 0
        time.sleep(0.05)
    return Outcome(process.poll(), opened, log.read_text(errors="replace"))


def assert_one_clear_line(outcome: Outcome, says: str) -> None:
    assert not outcome.opened, "the port opened"
    assert outcome.code not in (0, None), outcome.output
    assert "Traceback" not in outcome.output, outcome.output
    ours = [line for line in outcome.output.splitlines() if line.startswith("C2T: ")]
    assert len(ours) == 1, outcome.output
    assert re.search(says, ours[0]), ours[0]


@pytest.mark.parametrize("name", CASES)
def test_refused_with_one_clear_line(outcomes: dict[str, Outcome], name: str):
    assert_one_clear_line(outcomes[name], CASES[name][2])


# --- whole processes, with nothing shared


@pytest.fixture
def run_command_line(tmp_path: Path) -> Iterator[Callable[..., Outcome]]:
    """Runs a command line until it ends or its port opens; whatever is left of it is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(launcher: tuple[str, ...], flags: list[str], env: dict[str, str] | None = None) -> Outcome:
        port, log = free_port(), tmp_path / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*launcher, *server_flags(port), *flags],
                env=command_line_env() | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return ended(process, port, log)

    yield run
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()


def in_front(folder: Path) -> dict[str, str]:
    """A PYTHONPATH with this folder before all others."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), command_line_env()["PYTHONPATH"]])}


def test_a_good_command_line_opens_its_port(files: dict[str, Path], run_command_line: Callable[..., Outcome]):
    outcome = run_command_line(SGLANG_SERVE, c2t_flags(files["good"], pair_dir() / "draft"))
    assert outcome.opened, outcome.output
    assert "C2T: base STANDALONE, chains of at most 6" in outcome.output


@pytest.mark.parametrize(
    ("launcher", "more", "says"),
    [
        (LAUNCH_SERVER, ["--speculative-c2t-beta", "nan"], r"beta must be a number in \[0, 1\], got nan"),
        (SGLANG_SERVE, ["--speculative-use-rejection-sampling"], "--speculative-use-rejection-sampling .*bias"),
    ],
    ids=["launch_server", "sglang_serve"],
)
def test_both_launchers_refuse(
    files: dict[str, Path],
    run_command_line: Callable[..., Outcome],
    launcher: tuple[str, ...],
    more: list[str],
    says: str,
):
    outcome = run_command_line(launcher, [*c2t_flags(files["good"], pair_dir() / "draft"), *more])
    assert_one_clear_line(outcome, says)


def test_an_engine_that_breaks_the_contract(
    files: dict[str, Path], run_command_line: Callable[..., Outcome], tmp_path: Path
):
    changed = "speculative/eagle_worker_v2.py"
    stock = Path(sglang.__file__).parent
    copy = tmp_path / "engine" / "sglang"
    (copy / "srt" / "speculative").mkdir(parents=True)
    for folder in ("", "srt", "srt/speculative"):
        for entry in (stock / folder).iterdir():
            if not (copy / folder / entry.name).exists():
                (copy / folder / entry.name).symlink_to(entry)
    (copy / "srt" / changed).unlink()
    source = (stock / "srt" / changed).read_text()
    assert "def draft_forward(" in source
    (copy / "srt" / changed).write_text(source.replace("draft_forward", "draft_loop"))

    flags = c2t_flags(files["good"], pair_dir() / "draft")
    outcome = run_command_line(LAUNCH_SERVER, flags, in_front(tmp_path / "engine"))
    assert_one_clear_line(
        outcome, r"sglang \S+ is not as C2T needs it: .*EagleDraftWorker\.draft_forward \(not found\)"
    )


# Of a plugin that has hooked one of our targets before, which SGLang then passes over.
HOOKED = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry
    HookRegistry._patched.add("sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request")
"""


def test_a_hook_that_is_not_in_its_place(
    files: dict[str, Path], run_command_line: Callable[..., Outcome], tmp_path: Path
):
    (tmp_path / "hooked.py").write_text(HOOKED)
    (tmp_path / "installed").mkdir()
    env = in_front(faults.install(tmp_path / "installed", str(tmp_path / "hooked.py")))
    outcome = run_command_line(LAUNCH_SERVER, c2t_flags(files["good"], pair_dir() / "draft"), env)
    assert_one_clear_line(outcome, r"sglang has not put C2T's hook over sglang\.srt\.managers\.tokenizer_manager\.")


# Fails on import wherever this module is asked for, as a half-copied installation would.
BROKEN_IMPORT = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ImportError("planted: this file is broken")

sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize("module", ["algo", "worker"])
def test_a_broken_plugin_leaves_no_server_running(
    files: dict[str, Path], run_command_line: Callable[..., Outcome], tmp_path: Path, module: str
):
    """algo breaks when the plugin loads, in the launcher; worker only later, in the scheduler's process."""
    code = BROKEN_IMPORT.format(name=f"c2t_plugin.engines.sglang.{module}")
    (tmp_path / "sitecustomize.py").write_text(code)
    outcome = run_command_line(LAUNCH_SERVER, c2t_flags(files["good"], pair_dir() / "draft"), in_front(tmp_path))
    assert not outcome.opened, "a server without C2T answers on the port"
    assert outcome.code not in (0, None), outcome.output
    assert "planted: this file is broken" in outcome.output
