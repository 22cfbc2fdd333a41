"""What is installed, what is not, and that the top-level kernels/ never becomes importable."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

TOP_LEVEL = {"pyproject.toml", "c2t_plugin", "kernels", "patches", "benchmarks", "tests", "docs"} | {
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
}
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
MACHINE_PATH = re.compile(r"(?<![\w.$~])/(?:home|root|work|Users)/\w+")


def repository_files(root: Path) -> list[Path]:
    """Files that are committed or would be."""
    if not (root / ".git").exists():
        pytest.skip("not a git checkout: there is no list of the repository's files")
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [root / name for name in listing.stdout.split("\0") if name and (root / name).is_file()]


@pytest.fixture(scope="module")
def wheel_names(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Members of a wheel built from a copy, so that the build leaves nothing in the checkout."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in sorted(TOP_LEVEL):
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_holds_the_two_packages_and_nothing_else(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name}
    assert tops == {"c2t_plugin", "c2t_kernels"}


def test_wheel_holds_every_module(root: Path, wheel_names: list[str]) -> None:
    modules = {str(path.relative_to(root)) for path in (root / "c2t_plugin").rglob("*.py")}
    modules |= {str(path.relative_to(root / "kernels")) for path in (root / "kernels" / "c2t_kernels").rglob("*.py")}
    assert modules - set(wheel_names) == set()


def test_wheel_holds_the_classifiers_and_no_other_data(root: Path, wheel_names: list[str]) -> None:
    """Models, the papers' experiments, the CPU engine and tests stay in the checkout."""
    data = {name for name in wheel_names if ".dist-info/" not in name and not name.endswith(".py")}
    shipped = {str(path.relative_to(root)) for path in (root / "c2t_plugin/classifiers").rglob("*.safetensors")}
    assert data == shipped
    assert 0 < sum((root / name).stat().st_size for name in shipped) < 100_000


def test_wheel_declares_the_entry_points(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = [*project["scripts"].values(), *(t for group in project["entry-points"].values() for t in group.values())]
    missing = [target for target in targets if not _defines(root, *target.split(":"))]
    assert missing == []


def _defines(root: Path, module: str, function: str) -> bool:
    path = root / (module.replace(".", "/") + ".py")
    return path.is_file() and f"\ndef {function}(" in path.read_text(encoding="utf-8")


def test_bare_install_needs_three_packages(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = dict(dependency.split(">=") for dependency in project["dependencies"])
    assert set(bounds) == {"numpy", "safetensors", "torch"}
    # torch.load reads tensors alone by default from here on, which recorded states rely on
    assert bounds["torch"] == "2.6"
    assert set(project["optional-dependencies"]) == {"sglang", "vllm", "flashinfer", "train", "plot"}


def test_kernels_is_a_container_and_no_package(root: Path) -> None:
    inside = {path.name for path in (root / "kernels").iterdir()} - {"__pycache__"}
    # what is compiled ahead of time is for tests
    assert inside == {"c2t_kernels", "ahead_of_time"}


def test_kernels_from_the_top_directory_is_not_ours(root: Path) -> None:
    """An engine started here has this directory first on its path: `kernels` must stay the distribution so named."""
    probe = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=root, capture_output=True, text=True, check=True)
    assert str(root / "kernels") not in done.stdout


def test_tests_are_no_packages(root: Path) -> None:
    assert list((root / "tests").rglob("__init__.py")) == []


def test_top_level_is_fixed(root: Path) -> None:
    names = {path.relative_to(root).parts[0] for path in repository_files(root)}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_no_path_of_a_machine(root: Path) -> None:
    found = []
    for path in repository_files(root):
        text = path.read_bytes().decode("utf-8", errors="ignore") if path.stat().st_size < 1_000_000 else ""
        found += [f"{path.relative_to(root)}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_one"), [("see /" + "home/ann/x", True), ("http://a.b/" + "home/x", False), ("a/work/b", False)]
)
def test_the_pattern_of_machine_paths(text: str, is_one: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is is_one


def test_the_install_names_no_host(root: Path) -> None:
    files = [root / "Makefile", root / "pyproject.toml", *(root / ".ci").iterdir(), *(root / ".constraints").iterdir()]
    assert [str(path.name) for path in files if "://" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("pins", ["sglang.txt", "vllm.txt", "dev.txt"])
def test_every_pin_is_exact_and_has_its_hashes(root: Path, pins: str) -> None:
    lines = (root / ".constraints" / pins).read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert packages
    exact = re.compile(r"torch==[0-9.]+|[A-Za-z0-9._-]+==[A-Za-z0-9.]+( --hash=sha256:[0-9a-f]{64})+")
    assert [line for line in packages if not exact.fullmatch(line)] == []


def test_what_torch_brings_is_installed_by_its_hash_before_it(root: Path) -> None:
    named = re.search(r'^torch_needs="(.*)"$', (root / ".ci/venv").read_text(encoding="utf-8"), re.MULTILINE)
    assert named is not None
    needs = [
        re.split(r"[^\w.-]", each)[0] for each in importlib.metadata.requires("torch") or () if "extra ==" not in each
    ]
    # NVIDIA's are of CUDA builds
    found = {each.lower().replace("-", "_") for each in needs if not each.startswith(("nvidia", "cuda"))}
    assert found and found <= set(named[1].split("|"))
    for pins in ("sglang.txt", "vllm.txt"):
        lines = "\n".join((root / ".constraints" / name).read_text(encoding="utf-8") for name in (pins, "dev.txt"))
        held = {each.lower().replace("-", "_") for each in re.findall(r"^([\w.-]+)==", lines, re.MULTILINE)}
        assert set(named[1].split("|")) <= held


def test_repository_stays_light(root: Path) -> None:
    """The pair is 30 MB of it; all else is text. A link counts as itself, since what it points to is there once."""
    total = sum(path.lstat().st_size for path in repository_files(root))
    assert total < 38_000_000, f"{total / 1e6:.1f} MB"


def tiny_wheel(folder: Path, name: str, text: str = "") -> Path:
    """A wheel of one module, pure Python, version 1.0."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_a_lock_takes_the_files_that_it_was_made_of_and_no_other(root: Path, tmp_path: Path) -> None:
    wheels, pins, lock = tmp_path / "wheels", tmp_path / "pins.txt", tmp_path / "locks/sglang.txt"
    wheels.mkdir()
    found = {name: tiny_wheel(wheels, name) for name in ("torch", "some_package")}
    pins.write_text("# a comment\ntorch==1.0\nsome_package==1.0\n")
    index = f"--no-index --find-links {wheels}"
    env = {**os.environ, "PYTHON": sys.executable, "PIP_ARGS": index, "PIP_CONFIG_FILE": os.devnull}
    subprocess.run(["bash", root / ".ci/lock", lock, pins], env=env, check=True, capture_output=True)
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
    assert lock.read_text() == "".join(f"{name}==1.0 --hash=sha256:{digests[name]}\n" for name in sorted(found))

    def refusal() -> str:
        flags = ["--dry-run", "--ignore-installed", "--no-deps", "--require-hashes", "-r", str(lock)]
        command = [sys.executable, "-m", "pip", "install", *index.split(), *flags]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert bool(done.returncode) == bool(done.stderr.strip()), done.stderr
        return done.stderr

    assert refusal() == ""
    tiny_wheel(wheels, "some_package", "print('another file')")
    assert "DO NOT MATCH THE HASHES" in refusal()
    assert 'install --no-deps --require-hashes -r "$LOCK"' in (root / ".ci/venv").read_text()
