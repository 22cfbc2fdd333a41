"""What a server has measured of its steps, and the next one begins with: one folder, and servers that tests make up."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from c2t_plugin import envs
from c2t_plugin.engines import curve_cache
from c2t_plugin.planner.profile import REPEATS, WARM_UP
from c2t_plugin.planner.step_planner import StepPlanner

D_MAX = 4
DEPTHS = (0, 1, 2, 4)
FACTS = {"engine": "E 1.0", "target": "T 0123", "page_size": 1, "quantization": None}
# Seconds of a step: of its passes, and of all that is beside them.
PASS, TOKEN, DRAFT, EXTEND, OTHER = 1.0, 0.01, 0.01, 0.02, 0.1


class Server:
    """Steps of requests whose drafts are all as likely, on a clock of its own."""

    def __init__(self, facts: dict[str, Any] = FACTS, *, writes: bool = True) -> None:
        self.now, self.draft, self.forced = 0.0, DRAFT, list[bool]()
        shape: dict[str, Any] = {"steps": D_MAX, "most": D_MAX, "device": torch.device("cpu"), "depths": DEPTHS}
        self.planner = StepPlanner(None, None, **shape, clock=lambda: self.now)
        # parts of a step are measured on the same clock
        self.planner._profile.clock = lambda: self.now
        self.planner.packed = True
        curve_cache.start(self.planner, torch.device("cpu"), facts, writes=writes)

    def step(self, requests: int, chance: float = 0.9) -> int:
        depth = self.planner.begin(requests)
        self.forced.append(self.planner._forced is not None)
        kept = 0
        with self.planner.timed("draft", lambda: requests):
            self.now += max(0, depth - 1) * self.draft
        if depth:
            sure = torch.full((requests, depth), chance).cumprod(1)
            whole, own = torch.full((requests,), depth, dtype=torch.int32), torch.zeros(requests, dtype=torch.bool)
            kept = int(self.planner.keep(whole, own, sure).sum())
        with self.planner.timed("verify", lambda: requests + kept):
            self.now += PASS + TOKEN * (requests + kept)
        with self.planner.timed("draft_extend", lambda: requests):
            self.now += EXTEND
        self.now += OTHER
        return depth

    def run(self, requests: int, steps: int = WARM_UP + REPEATS * len(DEPTHS) + 1, **how: Any) -> list[int]:
        return [self.step(requests, **how) for _ in range(steps)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is there before something is kept."""
    monkeypatch.setenv("C2T_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def told(caplog: pytest.LogCaptureFixture, *words: str) -> int:
    return sum(all(word in record.getMessage() for word in words) for record in caplog.records)


def test_a_restart_decides_from_its_first_step_on_by_what_was_measured(folder: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    first = Server()
    assert first.planner.curve is None and not files(folder)
    first.run(2)
    assert all(first.forced[:-1]) and not first.forced[-1]
    (kept,) = files(folder)
    again = Server()
    assert again.planner.curve == first.planner.curve and again.planner.state()["curve"]
    assert told(caplog, "as it was measured before", str(kept)) == 1
    again.run(2)
    assert not any(again.forced)
    # nothing was measured, and nothing is written
    assert json.loads(kept.read_text())["passes"] == first.planner._profile.measured()


def test_a_size_that_is_not_kept_is_measured_beside_and_kept_with_the_others(folder: Path):
    Server().run(2)
    again = Server()
    again.run(2, 3)
    again.run(16)
    assert again.forced[:3] == [False] * 3 and sum(again.forced) == WARM_UP + REPEATS * len(DEPTHS)
    third = Server()
    assert third.planner.curve == again.planner.curve
    third.run(2, 3)
    third.run(16, 3)
    # between two that are known
    third.run(4, 3)
    assert not any(third.forced)
    assert len(files(folder)) == 1


def test_traffic_corrects_what_was_kept():
    """Drafting was cheap where it was measured; here each pass takes twice as long as the target's. A draft's first
    token takes none."""
    Server().run(1)
    again = Server()
    again.draft = 2 * PASS
    first = again.run(1, 8)
    assert min(first) > 0
    later = again.run(1, 800)
    assert not any(again.forced)
    # for good: what few steps have seen is forgotten in time, and learnt again
    assert later[100:].count(1) > 0.9 * 700


@pytest.mark.parametrize(
    "changed",
    [{"engine": "E 1.1"}, {"target": "T 4567"}, {"page_size": 16}, {"quantization": "fp8"}, {"another": 1}],
    ids=lambda changed: next(iter(changed)),
)
def test_other_facts_have_another_curve(folder: Path, changed: dict[str, Any]):
    Server().run(1)
    other = Server({**FACTS, **changed})
    assert other.planner.curve is None
    other.run(1)
    assert len(files(folder)) == 2
    assert Server().planner.curve is not None


@pytest.mark.parametrize(
    "machine",
    [
        (curve_cache, "cpu_model", lambda: "another processor"),
        (torch, "get_num_threads", lambda: 77),
        (torch, "__version__", "0.1"),
        (os, "sched_getaffinity", lambda _: range(99)),
    ],
    ids=lambda machine: machine[1],
)
def test_so_has_another_machine(machine: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch):
    Server().run(1)
    monkeypatch.setattr(*machine)
    assert Server().planner.curve is None


def test_the_file_says_what_it_depends_on(folder: Path):
    Server().run(1)
    (kept,) = files(folder)
    found = json.loads(kept.read_text())
    told = {name: str(value) for name, value in FACTS.items()}
    assert {name: found["facts"][name] for name in told} == told
    assert found["facts"]["device"] and found["facts"]["torch"] == torch.__version__
    assert (found["format"], found["version"]) == (curve_cache.FORMAT, curve_cache.VERSION)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: {each: value for each, value in found.items() if each != name}


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of a newer version": lambda found: {**found, "version": curve_cache.VERSION + 1},
    "of another format": lambda found: {**found, "format": "c2t-cost-curve"},
    "of another server": lambda found: {**found, "facts": {**found["facts"], "engine": "E 2.0"}},
    "of fewer facts": lambda found: {**found, "facts": {}},
    "without passes": without("passes"),
    "without a format": without("format"),
    "of no seconds": lambda found: {**found, "passes": {**found["passes"], "verify": [[1, -1.0, 0, 0, 0]]}},
    "of one kind of pass": lambda found: {**found, "passes": {**found["passes"], "draft": []}},
    "of a list": lambda found: [found],
    "of a number": lambda found: 7,
    "cut": lambda found: json.dumps(found)[:-9],
    "empty": lambda found: "",
    "bytes": lambda found: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_of_something_else_is_said_once_and_measured_over(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    Server().run(1)
    (kept,) = files(folder)
    good = json.loads(kept.read_text())
    found = DAMAGE[damage](good)
    kept.write_bytes(
        found if isinstance(found, bytes) else (found if isinstance(found, str) else json.dumps(found)).encode()
    )
    again = Server()
    assert again.planner.curve is None
    (said,) = [record for record in caplog.records if "is not used" in record.getMessage()]
    assert str(kept) in said.getMessage() and "\n" not in said.getMessage() and said.levelno == logging.WARNING
    again.run(1)
    assert sum(again.forced) == WARM_UP + REPEATS * len(DEPTHS)
    assert json.loads(kept.read_text())["facts"] == good["facts"]
    assert Server().planner.curve == again.planner.curve


@pytest.mark.parametrize("kind", ["directory", "link to nowhere", "unreadable"])
def test_what_is_no_file_stops_nothing(folder: Path, caplog: pytest.LogCaptureFixture, kind: str):
    Server().run(1)
    (kept,) = files(folder)
    kept.unlink()
    if kind == "directory":
        kept.mkdir()
    elif kind == "link to nowhere":
        kept.symlink_to(folder / "nowhere")
    else:
        kept.symlink_to("/proc/1/mem")
    again = Server()
    again.run(1)
    assert again.planner.curve is not None and not (folder / "nowhere").exists()
    assert told(caplog, "is not kept", str(kept)) == 1


@pytest.mark.parametrize("place", ["a file", "/proc/c2t", "x" * 300])
def test_a_folder_that_cannot_be_made_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("C2T_CACHE_DIR", str(tmp_path / place))
    one = Server()
    one.run(1)
    one.run(4)
    assert one.planner.curve is not None
    assert told(caplog, "the next server measures anew") == 1


def test_ranks_that_do_not_lead_begin_with_it_and_write_nothing(folder: Path):
    other = Server(writes=False)
    other.run(1)
    assert other.planner.curve is not None and not files(folder)
    Server().run(1)
    assert Server(writes=False).planner.curve is not None


def test_the_step_that_writes_is_no_steps_price(monkeypatch: pytest.MonkeyPatch):
    one = Server()

    def slow(path: Path, text: str) -> None:
        one.now += 100.0

    monkeypatch.setattr(curve_cache, "write_text", slow)
    one.run(1, 40)
    assert one.now > 100.0
    assert max(max(of.values()) for of in one.planner.state()["step_seconds"].values()) < 10.0
    assert all(step.seconds < 10.0 for seen in one.planner.pace._seen.values() for step in seen)


def test_off_keeps_and_reads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    Server().run(1)
    monkeypatch.setenv("C2T_CACHE_DIR", "off")
    one = Server()
    assert one.planner.curve is None
    one.run(4)
    assert len(files(folder)) == 1 and not Path("off").exists()


@pytest.mark.parametrize(
    ("own", "xdg", "home", "expected"),
    [
        ("/mine", "/xdg", "/mine/own", "/mine"),
        ("", "/xdg", "/mine/own", "/xdg/c2t"),
        (None, "/xdg", "/mine/own", "/xdg/c2t"),
        (None, "", "/mine/own", "/mine/own/.cache/c2t"),
        (None, "relative", "/mine/own", "/mine/own/.cache/c2t"),
        (None, None, "/mine/own", "/mine/own/.cache/c2t"),
        (None, None, "nowhere", None),
        ("off", "/xdg", "/mine/own", None),
    ],
)
def test_where_it_is(
    monkeypatch: pytest.MonkeyPatch, own: str | None, xdg: str | None, home: str, expected: str | None
):
    for name, value in (("C2T_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg), ("HOME", home)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert envs.cache_dir() == (None if expected is None else Path(expected))


def config(folder: Path, **values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def test_a_checkpoint_is_told_by_its_name_and_its_shape(tmp_path: Path):
    one = curve_cache.checkpoint(config(tmp_path / "model", layers=2, heads=4), None)
    assert one.startswith("model ")
    (tmp_path / "elsewhere").mkdir()
    assert curve_cache.checkpoint(config(tmp_path / "elsewhere" / "model", heads=4, layers=2), None) == one
    assert curve_cache.checkpoint(config(tmp_path / "model", layers=3, heads=4), None) != one
    assert curve_cache.checkpoint(config(tmp_path / "other", layers=2, heads=4), None) != one
    assert curve_cache.checkpoint(None, None) == "none"
    # nobody can say what is in it
    (tmp_path / "bare").mkdir()
    assert curve_cache.checkpoint(str(tmp_path / "bare"), None) == str(tmp_path / "bare")
