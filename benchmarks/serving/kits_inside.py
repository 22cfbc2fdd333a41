"""SGLang's shipped test kits against one running server: `kits.py` starts this in the CPU engine's environment.

    python -m benchmarks.serving.kits_inside URL PROCESS_ID TARGET OUT [KIT.TEST ...]

OUT gets a line of JSON a test: its kit, its name, what became of it, the reason in one line, and seconds. Tests that
are in it are not run again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import json
import os
import sys
import time
import types
import unittest
from pathlib import Path
from typing import Any

# Modules of sglang.test.kits, and their kits. Left out: those that download a data set (accuracy, throughput of one
# token), that measure a GPU's speed, that start a server of their own, that need an option or a package of their own.
KITS = {
    "spec_server_kits": ("SpecCorrectnessKit", "SpecLogprobKit", "SpecPenaltyKit", "SpecFeatureKit", "SpecGrammarKit"),
    "basic_api_contract_kit": ("BasicAPIContractMixin",),
    "basic_decode_correctness_kit": ("BasicDecodeCorrectnessMixin",),
    "basic_scheduler_stress_kit": ("BasicSchedulerStressMixin",),
    "matched_stop_kit": ("MatchedStopMixin",),
    "regex_constrained_kit": ("RegexConstrainedMixin",),
    "ebnf_constrained_kit": ("EBNFConstrainedMixin",),
    "json_constrained_kit": ("JSONConstrainedMixin",),
    "json_mode_kit": ("JSONModeMixin",),
    "abort_timeout_kit": ("AbortAllMixin",),
    "pause_generation_kit": ("PauseResumeInPlaceMixin",),
    "streaming_session_kit": ("StreamingSessionKitMixin", "AbortLeakReproKitMixin"),
}
# What the kits ask of a draft of Llama 3.1 8B, and lengths of output that go beyond this model's context.
CHANGES = {"acc_length_thres": 1.0, "batch_accept_len_thres": 1.0, "abort_all_max_new_tokens": 4000}
# Imported by SGLang's kits for the tests that are left out.
ABSENT = {"datasets": ("load_dataset", "Dataset")}
REASON_WIDTH = 200

# By kit and test: what became of it, and why.
Outcomes = dict[tuple[str, str], tuple[str, str]]


def outcomes_in(out: Path) -> Outcomes:
    """What a file of them says; of none nothing."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {(each["kit"], each["test"]): (each["outcome"], each["reason"]) for each in map(json.loads, lines)}


class _Process:
    """The server's, as far as kits ask for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 1
        return None


class _Result(unittest.TestResult):
    """Writes every test's end at once. A test of several parts fails with the first of them."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self._out = out
        self._reason, self._begun = ("passed", ""), 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        self._reason, self._begun = ("passed", ""), time.monotonic()
        super().startTest(test)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note("failed", err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._note("failed", err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._note("failed", err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._reason = ("skipped", reason)

    def stopTest(self, test: unittest.TestCase) -> None:
        outcome, reason = self._reason
        name = {"kit": type(test).__name__, "test": test._testMethodName}
        line = {**name, "outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - self._begun, 1)}
        with self._out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        super().stopTest(test)

    def _note(self, outcome: str, err: Any) -> None:
        if self._reason[0] == "passed":
            # SGLang's tests are tried again, and then fail by an error that says no more than that
            error = err[1].__context__ or err[1]
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._reason = (outcome, text[:REASON_WIDTH])


def _absent() -> None:
    for name, attributes in ABSENT.items():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            sys.modules[name] = module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            for attribute in attributes:
                setattr(module, attribute, None)


def cases(url: str, process: int, target: str) -> list[type[unittest.TestCase]]:
    """A test case for each kit, against the server there."""
    _absent()
    import openai
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

    def nothing(cls: type) -> None:
        """The server runs."""

    common: dict[str, Any] = {
        **{"setUpClass": classmethod(nothing), "tearDownClass": classmethod(nothing)},
        **{"base_url": url, "model": target, "target_model": target, "_tokenizer": None, "process": _Process(process)},
        **{"client": openai.OpenAI(base_url=f"{url}/v1", api_key="none")},
        **CHANGES,
    }
    found = []
    for file, names in KITS.items():
        kits = [getattr(importlib.import_module(f"sglang.test.kits.{file}"), name) for name in names]
        taken = {name for kit in kits for name in common.keys() & vars(kit).keys() if callable(vars(kit)[name])}
        assert not taken, f"these would stand in the place of the kits' own: {taken}"
        found += [type(kit.__name__, (kit, SpecEagleServerBase), dict(common)) for kit in kits]
    return found


def main(argv: list[str]) -> int:
    """Run them all, or those that are named, but for those that are done; 0 whatever becomes of them."""
    url, process, target, out, *only = argv
    result, done = _Result(Path(out)), outcomes_in(Path(out))
    for case in cases(url, int(process), target):
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
            assert isinstance(test, unittest.TestCase)
            name = type(test).__name__, test._testMethodName
            if name in done or (only and ".".join(name) not in only):
                continue
            # what they print is long, and says nothing that their outcome does not
            with contextlib.redirect_stdout(io.StringIO()):
                test.run(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
