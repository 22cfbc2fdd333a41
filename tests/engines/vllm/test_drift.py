"""The report on another release of the engine: the installed and the newest have not drifted, a planted copy has."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.engines import drift  # noqa: E402
from c2t_plugin.engines.contract import package_root  # noqa: E402
from c2t_plugin.engines.vllm.contract import SYMBOLS  # noqa: E402

PROPOSER = "v1/spec_decode/llm_base_proposer.py"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A directory with the files of the installed vLLM that the contract names."""
    installed = package_root("vllm")
    assert installed is not None
    for file in {"__init__.py", *(symbol.file for symbol in SYMBOLS)}:
        path = tmp_path / "vllm" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed / file, path)
    return tmp_path


def plant(copy: Path, old: str, new: str) -> None:
    path = copy / "vllm" / PROPOSER
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))


def wheel_of(copy: Path) -> Path:
    wheel = copy / "vllm-9.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (copy / "vllm").rglob("*.py"):
            archive.write(path, path.relative_to(copy))
    return wheel


def test_the_installed_release_has_not_drifted(capsys: pytest.CaptureFixture[str]):
    assert drift.main(["vllm", str(package_root("vllm"))]) == 0
    assert capsys.readouterr().out == f"no drift: all {len(SYMBOLS)} symbols are as C2T needs them\n"


def test_the_newest_release_has_not_drifted(root: Path, capsys: pytest.CaptureFixture[str]):
    """Its wheel, which is only read."""
    wheels = sorted((root / ".venv/wheels").glob("vllm-*.whl"))
    if not wheels:
        pytest.skip("no wheel of vLLM is in .venv/wheels; `make test` downloads the newest one")
    assert drift.main(["vllm", str(wheels[-1])]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "wheel"])
def test_what_has_drifted_is_named(copy: Path, packed: bool, capsys: pytest.CaptureFixture[str]):
    plant(copy, "def _greedy_sample(", "def _greedy_pick(")
    plant(copy, "self._last_draft_probs = torch.stack(", "self._probs = torch.stack(")
    assert drift.main(["vllm", str(wheel_of(copy) if packed else copy)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{PROPOSER}: SpecDecodeBaseProposer.propose (its body lacks ['self._last_draft_probs")
    assert second == f"{PROPOSER}: SpecDecodeBaseProposer._greedy_sample (not found)"


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "wheel"])
def test_nothing_of_it_is_imported(copy: Path, packed: bool):
    (copy / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert drift.main(["vllm", str(wheel_of(copy) if packed else copy)]) == 0


@pytest.mark.parametrize("name", ["nowhere", "empty", "text"])
def test_what_is_no_release_is_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no wheel")
    assert drift.main(["vllm", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"drift: {tmp_path / name} ")
