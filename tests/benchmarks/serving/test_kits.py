"""What is said of SGLang's own kits, and that each that is named is there."""

from __future__ import annotations

import ast
import importlib.util
import unittest
from pathlib import Path

import pytest

from benchmarks.serving import kits_inside
from benchmarks.serving.kits import listed, worse
from benchmarks.serving.kits_inside import KITS, _Result, main, outcomes_in

FOUND = {
    "plain": {("A", "test_one"): ("passed", ""), ("A", "test_two"): ("failed", "AssertionError: 3 != 4")},
    "chains": {("A", "test_one"): ("failed", "KeyError: 'x'"), ("A", "test_two"): ("failed", "AssertionError: 3 != 4")},
}


def test_each_arm_has_its_share_and_each_failure_its_reason():
    lines = listed(FOUND).splitlines()
    assert "| A | 1 of 2 | 0 of 2 |" in lines
    assert "- chains: `A.test_one` failed: KeyError: 'x'" in lines
    assert sum(line.startswith("- ") for line in lines) == 3


def test_only_what_plain_decoding_passes_is_held_against_an_arm():
    assert worse(FOUND) == ["chains: A.test_one"]
    # without plain decoding nobody knows, so that all counts
    assert worse({"chains": FOUND["chains"]}) == ["chains: A.test_one", "chains: A.test_two"]


def test_every_end_of_a_test_is_written(tmp_path: Path):
    class Kit(unittest.TestCase):
        def test_fails(self) -> None:
            self.assertEqual(1, 2)

        def test_passes(self) -> None:
            pass

        def test_raises(self) -> None:
            raise KeyError("x")

        def test_tries_again(self) -> None:
            try:
                self.fail("no answer")
            except Exception:
                raise Exception("too many tries")  # noqa: B904

        def test_skips(self) -> None:
            self.skipTest("no")

        def test_of_parts(self) -> None:
            for n in (1, 2):
                with self.subTest(n=n):
                    self.assertEqual(n, 1)

    result = _Result(tmp_path / "out")
    for test in unittest.defaultTestLoader.loadTestsFromTestCase(Kit):
        test.run(result)
    found = outcomes_in(tmp_path / "out")
    assert found["Kit", "test_raises"] == ("failed", "KeyError: 'x'")
    assert found["Kit", "test_tries_again"] == ("failed", "AssertionError: no answer")
    assert {test: outcome for (_, test), (outcome, _) in found.items()} == {
        "test_fails": "failed",
        "test_of_parts": "failed",
        "test_passes": "passed",
        "test_raises": "failed",
        "test_tries_again": "failed",
        "test_skips": "skipped",
    }


def test_what_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran = []

    class Kit(unittest.TestCase):
        def test_one(self) -> None:
            ran.append("one")

        def test_two(self) -> None:
            ran.append("two")

    monkeypatch.setattr(kits_inside, "cases", lambda *_: [Kit])
    out = tmp_path / "out"
    assert outcomes_in(out) == {}
    for named, expected in ((["Kit.test_one"], ["one"]), ([], ["one", "two"]), ([], ["one", "two"])):
        assert main(["url", "1", "target", str(out), *named]) == 0
        assert ran == expected
    assert list(outcomes_in(out)) == [("Kit", "test_one"), ("Kit", "test_two")]


@pytest.mark.sglang
@pytest.mark.parametrize("file", KITS)
def test_sglang_has_the_kits(file: str):
    """Read, not imported: that takes what a server has."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed in this environment")
    source = Path(spec.submodule_search_locations[0]) / "test" / "kits" / f"{file}.py"
    classes = {
        node.name for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    }
    assert set(KITS[file]) <= classes
