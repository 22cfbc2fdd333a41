"""The contract: what counts as broken, that the message names it, and that both supported releases keep it."""

from __future__ import annotations

from pathlib import Path

import pytest

from c2t_plugin.engines.contract import EngineSymbol, broken_symbols, check_contract, package_root, symbols_of
from c2t_plugin.engines.sglang.contract import SUPPORTED, SYMBOLS, check
from c2t_plugin.errors import ConfigError, ContractError
from tests.support.engines.drift import drifted

SOURCE = """
LIMIT = 3

class Worker:
    size: int = 1

    def run(self, batch, *, steps=1):
        return self.inner.forward(batch)

async def serve(port):
    pass
"""
ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".venv" / "wheels"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    "symbol",
    [
        EngineSymbol("worker.py", "LIMIT"),
        EngineSymbol("worker.py", "Worker"),
        EngineSymbol("worker.py", "Worker.size"),
        EngineSymbol("worker.py", "Worker.run", ("self", "batch", "steps"), ("self.inner.forward(",)),
        EngineSymbol("worker.py", "serve", ("port",)),
    ],
    ids=lambda symbol: symbol.name,
)
def test_what_is_kept(engine: Path, symbol: EngineSymbol):
    assert broken_symbols(engine, [symbol]) == []


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        (EngineSymbol("other.py", "Worker"), "other.py: Worker (no such file)"),
        (EngineSymbol("worker.py", "Engine"), "worker.py: Engine (not found)"),
        (EngineSymbol("worker.py", "Worker.stop"), "worker.py: Worker.stop (not found)"),
        (EngineSymbol("worker.py", "Worker.run", ("batch", "width")), "the adapter passes ['batch', 'width']"),
        (EngineSymbol("worker.py", "Worker.run", ("steps", "batch")), "the adapter passes ['steps', 'batch']"),
        (EngineSymbol("worker.py", "Worker.run", (), ("self.inner.draft(",)), "its body lacks ['self.inner.draft(']"),
    ],
    ids=["file", "name", "method", "parameter", "order", "body"],
)
def test_what_is_broken(engine: Path, symbol: EngineSymbol, message: str):
    (problem,) = broken_symbols(engine, [symbol])
    assert message in problem


def test_an_absent_engine_is_named():
    with pytest.raises(ContractError, match="no_such_engine is not installed"):
        check_contract("no_such_engine", SYMBOLS, SUPPORTED)


@pytest.mark.sglang
def test_the_installed_sglang_keeps_the_contract():
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    check_contract("sglang", SYMBOLS, SUPPORTED)


@pytest.mark.sglang
@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.5.24.dev3+g1", "0.6.0", "0.0.0.dev1", "1", None])
def test_a_release_that_was_not_tested_is_refused_unless_asked_for(
    version: str | None, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    monkeypatch.delenv("C2T_UNTESTED_RELEASE", raising=False)
    with pytest.raises(ContractError, match=r"was tested with SGLang 0\.5\.17 to 0\.5\.23: .*C2T_UNTESTED_RELEASE=1"):
        check(version)
    monkeypatch.setenv("C2T_UNTESTED_RELEASE", "1")
    check(version)
    monkeypatch.setattr("c2t_plugin.engines.sglang.contract.SYMBOLS", (EngineSymbol("srt/a.py", "dream"),))
    with pytest.raises(ContractError, match="dream"):
        check(version)


@pytest.mark.sglang
@pytest.mark.parametrize("version", ["0.5.17", "0.5.23", "0.5.20.post1"])
def test_a_tested_release_is_taken(version: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    monkeypatch.delenv("C2T_UNTESTED_RELEASE", raising=False)
    check(version)
    monkeypatch.setenv("C2T_UNTESTED_RELEASE", "yes")
    with pytest.raises(ConfigError, match="C2T_UNTESTED_RELEASE must be 0 or 1, got 'yes'"):
        check(version)


@pytest.mark.sglang
def test_the_error_names_symbol_and_version():
    pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
    moved = EngineSymbol("srt/speculative/eagle_worker_v2.py", "EagleDraftWorker.dream")
    with pytest.raises(ContractError, match=r"sglang \d+\.\d+\.\d+.*EagleDraftWorker\.dream \(not found\)"):
        check_contract("sglang", [*SYMBOLS, moved], SUPPORTED)


def test_sglang_0_5_17_keeps_the_contract():
    """Against the wheel itself, which cannot be installed beside 0.5.23. `make` puts it there."""
    wheels = sorted(WHEELS.glob("sglang-0.5.17-*.whl"))
    if not wheels:
        pytest.skip("the SGLang 0.5.17 wheel is not in .venv/wheels; `make test` downloads it")
    assert drifted(wheels[0], "sglang", symbols_of("sglang")) == []
    assert len(symbols_of("sglang")) > len(SYMBOLS), "those of trees are missing"


def test_package_root_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "explosive"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_root("explosive") == package
