"""The report on another release of the engine: the installed and the newest have not drifted, a planted copy has."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.engines.contract import EngineSymbol, package_root  # noqa: E402
from tests.support.engines import drift  # noqa: E402

PROPOSER = "v1/spec_decode/llm_base_proposer.py"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A directory with the files of the installed vLLM that the contract names."""
    installed = package_root("vllm")
    assert installed is not None
    for file in {"__init__.py", *(symbol.file for symbol in drift.needed("vllm")[0])}:
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
    assert capsys.readouterr().out == f"no drift: all {len(drift.needed('vllm')[0])} symbols are as C2T needs them\n"


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


def test_an_abstract_method_that_a_subclass_of_ours_lacks_is_named(copy: Path, capsys: pytest.CaptureFixture[str]):
    """Of the release alone, without an older one to compare with; of methods that ours has nothing is said."""
    path, at = copy / "vllm" / "v1/outputs.py", "    def get_output("
    source = path.read_text()
    new = "".join(f"    @abstractmethod\n    def {name}(self): ...\n\n" for name in ("get_kv_connector_output", "wait"))
    path.write_text(source.replace(at, new + at, 1))
    assert drift.main(["vllm", str(copy)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "v1/outputs.py: AsyncModelRunnerOutput has the abstract method wait, which VerifiedOutput lacks"


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


# --- since an older release

OUTPUTS = "v1/outputs.py"


def test_a_release_has_not_changed_since_itself(copy: Path, capsys: pytest.CaptureFixture[str]):
    assert drift.main(["vllm", str(copy), "--since", str(package_root("vllm"))]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "no class of the contract is another one"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "    def get_output(",
            "    @abstractmethod\n    def get_some_other_output(self): ...\n\n    def get_output(",
            "AsyncModelRunnerOutput has a new abstract method get_some_other_output",
        ),
        ("class AsyncModelRunnerOutput(ABC)", "class AsyncModelRunnerOutput(Base)", "has the bases Base, not ABC"),
        ("def get_output(self)", "def get_output(self, wait)", "takes get_output(self, wait), not (self)"),
    ],
    ids=["abstract", "bases", "signature"],
)
def test_what_a_subclass_of_ours_would_lack_is_named(
    copy: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
):
    """As vLLM 0.33 made a method abstract while every name of the contract stayed."""
    path = copy / "vllm" / OUTPUTS
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))
    assert drift.main(["vllm", str(wheel_of(copy)), "--since", str(package_root("vllm"))]) == 1
    assert any(line.startswith(f"{OUTPUTS}: ") and said in line for line in capsys.readouterr().out.splitlines())


def test_other_numbers_of_returned_values_are_named(tmp_path: Path):
    symbol = EngineSymbol("a.py", "Manager.reallocate")
    for name, returned in (("old", "a, b, c"), ("new", "a, b, c, d")):
        (tmp_path / name / "engine").mkdir(parents=True)
        (tmp_path / name / "engine" / "__init__.py").write_text("")
        body = f"    def reallocate(self):\n        def within():\n            return 1, 2\n        return {returned}\n"
        (tmp_path / name / "engine" / "a.py").write_text(f"class Manager:\n{body}")
    assert drift.changed(tmp_path / "old", tmp_path / "new", "engine", [symbol]) == [
        "a.py: Manager returns [4] values from reallocate, not [3]"
    ]


def test_a_wheel_that_unpacks_to_too_much_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(drift, "MOST_BYTES", 1 << 10)
    assert drift.main(["vllm", str(wheel_of(copy))]) == 2
    assert "unpacks to more than" in capsys.readouterr().err
