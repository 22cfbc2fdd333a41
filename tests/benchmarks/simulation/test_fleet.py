"""A fleet, event by event: times that can be worked out by hand, laws that hold for any stream, routers' rules."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

from benchmarks.report.command import RESULTS
from benchmarks.report.rows import FILE_OF, BenchRow, read_rows
from benchmarks.report.tables import AUTO, SPEED, load_of
from benchmarks.simulation.fleet import command
from benchmarks.simulation.fleet.arrivals import PATTERNS, Request, Work, recorded
from benchmarks.simulation.fleet.fleet import Fleet, Limits, Run, figures
from benchmarks.simulation.fleet.learning import ALONE, TOGETHER, drafts_per_s, learning_rows, states_needed
from benchmarks.simulation.fleet.replicas import Prefixes, Served
from benchmarks.simulation.fleet.routers import MORE_THAN, ROUTERS, CacheAware, LeastLoad
from benchmarks.simulation.fleet.speeds import Reading, Speeds, speeds_of
from benchmarks.simulation.roofline import GPUS, MODELS, Machine, draft_of
from c2t_plugin.errors import C2TError

TARGET = MODELS["llama-3.1-8b"]
READING = Reading(Machine(GPUS["L40"]), TARGET, draft_of("eagle3", TARGET))
# ten tokens a second of one request, eight of each of two, five of each of four
SPEEDS = Speeds([0.0, 10.0, 8.0, 6.0, 5.0], True, [0.0, 1.0, 1.0, 1.0, 1.0])


class Slow(Reading):
    """A prompt takes a second for every 100 tokens, and its cache a tenth of a second."""

    def prefill_s(self, tokens: int, drafted: bool) -> float:
        return tokens / 100

    def transfer_s(self, tokens: int) -> float:
        return 0.1

    def cached_tokens(self, requests: int) -> int:
        return 1000


ALONE_SERVER = Fleet(1, "round robin")
SLOW = Slow(READING.machine, READING.target, READING.draft)


def request(at: float, output: int = 11, own: int = 100, group: int = 0, prefix: int = 0) -> Request:
    return Request(at, own, output, group, prefix)


def serve(*requests: Request, fleet: Fleet = ALONE_SERVER) -> list[Served]:
    return Run(fleet, SPEEDS, SLOW).serve(requests)


def test_one_request_by_hand() -> None:
    (served,) = serve(request(2.0))
    assert (served.first, served.last) == (pytest.approx(3.0), pytest.approx(4.0))
    assert (served.ttft, served.tpot) == (pytest.approx(1.0), pytest.approx(0.1))


def test_reading_a_prompt_stops_decoding() -> None:
    """The first has 5 of its 10 tokens at 1.5, stands still until 2.5, and then shares its server."""
    one, other = serve(request(0.0), request(1.5))
    assert one.last == pytest.approx(2.5 + 5 / 8)
    assert other.first == pytest.approx(2.5) and other.last == pytest.approx(2.5 + 5 / 8 + 5 / 10)


def test_who_finds_no_place_waits_for_one() -> None:
    """Four places: the fifth begins to be read when one of the others has ended."""
    served = serve(*(request(0.0, own=1, output=51) for _ in range(5)))
    assert served[4].first > min(each.last for each in served[:4])
    assert all(each.last < inf for each in served)


def test_an_answer_of_one_token_ends_with_its_prompt() -> None:
    (served,) = serve(request(0.0, output=1))
    assert served.last == served.first == pytest.approx(1.0) and served.tpot is None


def test_figures_are_of_requests_between_the_warm_up_and_the_end() -> None:
    """Of ten seconds, 2.5 to 9 count: one request of two has its tokens within .11 s each."""
    served = serve(request(1.0), request(3.0), request(4.5, output=21), request(9.5))
    found = figures(served, 10.0, 1, Limits(2.0, 0.11))
    assert (found["requests"], found["good_share"]) == (2.0, 0.5)
    assert found["goodput_tokens_per_s"] == pytest.approx(21 / 6.5)
    # the first one's tokens came in that time as well
    assert found["tokens_per_s"] == pytest.approx((11 + 11 + 21) / 6.5)
    assert found["ttft_p50_ms"] == pytest.approx(1000.0)
    with pytest.raises(C2TError, match="no request arrives"):
        figures(served, 1.0, 1, Limits())


def test_a_prefix_is_read_once_where_it_is_held() -> None:
    one, other = serve(request(0.0, prefix=300), request(10.0, prefix=300))
    assert (one.ttft, other.ttft) == (pytest.approx(4.0), pytest.approx(1.0))
    assert (one.cached, other.cached) == (0, 300)


def test_the_prefix_that_was_used_longest_ago_makes_room() -> None:
    held = Prefixes(room=600)
    assert [held.use(group, 300) for group in (0, 1, 0, 2, 0, 1)] == [0, 0, 300, 0, 300, 0]


def test_a_prefix_larger_than_the_cache_is_not_held() -> None:
    held = Prefixes(room=100)
    assert [held.use(0, 300), held.use(0, 300), held.tokens] == [0, 0, 0]


def test_what_is_read_apart_is_decoded_elsewhere() -> None:
    one, other = serve(request(0.0), request(1.5), fleet=Fleet(2, "round robin", readers=1))
    # nothing stops the first one's decoding
    assert one.last == pytest.approx(1.0 + 0.1 + 10 / 10)
    assert other.first == pytest.approx(2.5) and other.last == pytest.approx(2.5 + 0.1 + 1.0)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_request_ends_once_and_none_before_it_can(router: str, readers: int, pattern: str) -> None:
    rng = np.random.default_rng(1)
    work = Work(groups=10)
    requests = work.draw(PATTERNS[pattern](6.0, 60.0, rng), rng)
    run = Run(Fleet(5, router, readers), SPEEDS, READING)
    served = run.serve(requests)
    assert [each.request for each in served] == requests
    assert all(replica.load == 0 for replica in run.replicas) and set(run.router.loads) == {0}
    fastest = max(SPEEDS.rates)
    for each in served:
        assert each.request.at < each.first <= each.last < inf
        # the clock rounds
        assert each.last - each.first >= (each.request.output - 1) / fastest * (1 - 1e-9) - 1e-9


def test_what_is_due_at_the_very_same_time_happens_too() -> None:
    """The third comes so little later that it ends when the two others do, as far as a float can tell."""
    speeds = Speeds([0.0, 100.0, 1.0, 0.5, 0.5], True, [0.0] * 5)
    at = 1e7
    asked = [request(each, own=0) for each in (at, at, at + 4 * float(np.spacing(at)))]
    served = Run(ALONE_SERVER, speeds, SLOW).serve(asked)
    assert served[0].last == served[2].last < inf


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_seed_gives_the_same_run(router: str) -> None:
    def ends() -> list[float]:
        rng = np.random.default_rng(3)
        requests = Work(groups=10).draw(PATTERNS["bursts"](4.0, 40.0, rng), rng)
        return [each.last for each in Run(Fleet(4, router), SPEEDS, READING, seed=5).serve(requests)]

    assert ends() == ends()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_have_the_rate_that_they_are_given(pattern: str) -> None:
    times = PATTERNS[pattern](50.0, 600.0, np.random.default_rng(0))
    # a Poisson process of 30,000 has a deviation of 173
    assert len(times) == pytest.approx(30_000, abs=6 * 173)
    assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < 600.0


def test_busy_times_are_busy() -> None:
    times = PATTERNS["bursts"](50.0, 600.0, np.random.default_rng(0))
    busy = (times % 30.0) >= 25.0
    assert busy.mean() == pytest.approx(2.8 / 6, abs=0.02)


def test_the_least_loaded_is_found_whatever_changed() -> None:
    rng = np.random.default_rng(0)
    router = LeastLoad(7, rng)
    for _ in range(500):
        place = int(rng.integers(7))
        router.change(place, -1 if router.loads[place] and rng.random() < 0.5 else 1)
        assert router.least == router.loads.index(min(router.loads)) and router.most == max(router.loads)


def test_a_group_stays_until_its_replica_has_too_many() -> None:
    router = CacheAware(2, np.random.default_rng(0))
    places = []
    for _ in range(MORE_THAN + 2):
        places.append(router.choose(7))
        router.change(places[-1], 1)
    assert places == [0] * (MORE_THAN + 1) + [1]
    assert router.choose(7) == 1 and router.choose(8) == 1


def test_a_recording_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,2000,44\n2023-11-16 18:15:48.6805900,30,0\n"
    )
    one, other = recorded(path, Work(prefix=1024), 1, np.random.default_rng(0))
    assert other.at - one.at == pytest.approx(2.0)
    assert (one.own, one.prefix, one.output) == (976, 1024, 44) and (other.own, other.prefix, other.output) == (
        1,
        30,
        1,
    )
    assert len(recorded(path, Work(), 3, np.random.default_rng(0))) == 6


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", ""])
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(C2TError, match=r"trace\.csv"):
        recorded(path, Work(), 1, np.random.default_rng(0))


@pytest.fixture(scope="module")
def published() -> list[BenchRow]:
    return read_rows(RESULTS / FILE_OF["simulated"], BenchRow)


def test_speeds_are_those_of_the_rows(published: list[BenchRow]) -> None:
    found = speeds_of(published, command.SETTING)
    assert set(command.ARMS) <= set(found)
    wanted = dict(command.SETTING)
    rows = [row for row in published if (row.scenario, row.arm) == ("simulated", AUTO)]
    rows = [row for row in rows if wanted.items() <= row.setting.items()]
    assert rows
    for row in rows:
        load = load_of(row)
        assert load * found[AUTO].rates[load] == pytest.approx(row.metrics[SPEED])
    assert found[AUTO].draft and not found["plain"].draft
    with pytest.raises(C2TError, match="no simulated rows"):
        speeds_of(published, {**wanted, "gpu": "none"})


def test_together_replicas_learn_as_many_times_sooner(published: list[BenchRow]) -> None:
    speeds = speeds_of(published, command.SETTING)[AUTO]
    needed = states_needed(published, command.STREAM, "from nothing")
    assert needed > 0
    run = published[0].run
    rows = list(learning_rows(published, speeds, command.STREAM, (1, 10), (8,), {}, run))
    seconds = {(row.arm, row.setting["replicas"]): row.metrics["seconds"] for row in rows}
    assert seconds[ALONE, 1] == seconds[ALONE, 10] == seconds[TOGETHER, 1] == needed / drafts_per_s(speeds, 8)
    assert seconds[TOGETHER, 10] == pytest.approx(seconds[ALONE, 1] / 10)


@pytest.mark.slow
def test_the_command_writes_rows_of_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    small = ["--replicas", "1", "2", "--fleet", "2", "--seconds", "20", "--out", str(out)]
    assert command.main([*small, "--parts", "routers", "planning", "learning"]) == 0
    rows = read_rows(out, BenchRow)
    assert {row.kind for row in rows} == {"simulated"} and not any(row.error for row in rows)
    parts = [row.setting.get("part", "learning") for row in rows]
    assert parts.count("routers") == 2 * len(ROUTERS) * len(command.FEW)
    assert parts.count("planning") == len(PATTERNS) * len(command.ARMS)
    assert parts.count("learning") == 2 * 2 * len(command.LOADS)
    planned = [row for row in rows if row.setting.get("part") == "planning"]
    rooms = {(row.arm, row.setting["arrivals"]): row.metrics["room_per_s"] for row in planned}
    assert rooms[AUTO, "poisson"] > rooms["plain", "poisson"] > 0
    assert command.main([*small, "--parts", "routers", "--arrivals", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err
