"""The contestants' rules, and rows of the simulation on toy traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.report.rows import BenchRow, read_rows
from benchmarks.serving.arms import ARMS
from benchmarks.simulation import command as simulate
from benchmarks.simulation import recorded, table3
from benchmarks.simulation.recorded import Replay, play, replayed, requests_of
from benchmarks.simulation.replays import CHAINS, TREES, chain_arms, tree_arms
from benchmarks.simulation.roofline import GPUS, MODELS, Assumptions, Machine, Measured, draft_of
from benchmarks.simulation.setting import Setting
from benchmarks.simulation.sglang_adaptive import SglangAdaptive
from benchmarks.simulation.steps import Simulated, plain, serve
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab.sweeps import path_minimum
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.curve_file import write_curve
from c2t_plugin.traces.file import Traces, save_traces

pytestmark = pytest.mark.slow

L40 = Machine(GPUS["L40"])
LLAMA = MODELS["llama-3.1-8b"]
RUN = {
    "command": "simulate",
    "git_sha": "0" * 40,
    "dirty": False,
    "versions": {"torch": "2"},
    "machine": "a CPU, no GPU",
    "seed": None,
    "utc": "2026-01-02T03:04:05+00:00",
}


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to see every arm run."""
    monkeypatch.setattr(simulate, "LEAST", 8)
    monkeypatch.setattr(simulate, "WAVES", 1)
    monkeypatch.setattr(simulate, "TUNING", {"probe_every": (16, 64), "forget": (0.1,)})


@pytest.fixture
def replay(make_traces: Callable[..., Traces]) -> Replay:
    traces = make_traces(prompts=6, steps=8)
    header = {**traces.header, "pair": {**traces.header["pair"], "kind": "draft"}, "new_tokens": 8}
    torch.manual_seed(0)
    classifier = NodeClassifier(ClassifierSpec(top_m=traces.header["top_m"])).eval().requires_grad_(False)
    return Replay(replace(traces, header=header), classifier, None)


def setting(requests: int = 2, machine: Machine | Measured = L40) -> Setting:
    return Setting(machine, LLAMA, draft_of("draft", LLAMA), requests, d_max=4)


def test_arms_beyond_a_measured_curve_have_a_reason_and_no_figures(replay: Replay):
    """Two requests with chains of at most 2: nothing that drafts deeper, and no ratio to it."""
    curve = CostCurve(verify=((2, 0.5), (6, 0.6)), draft=((1, 0.1), (2, 0.12)), draft_extend=0.1)
    rows = {row.arm: row for row in simulate.matrix(replay, setting(2, Measured(curve)), {}, RUN)}
    assert {arm for arm, row in rows.items() if not row.error} == {"plain", "static 1", "static 2"}
    assert "up to 6, this would take 10" in rows["static 4"].error and not rows["static 4"].metrics
    assert rows["static 2"].metrics["ratio_to_plain"] and rows["static 2"].metrics["ratio_to_best"] is None


def test_the_planner_is_not_tuned_beyond_a_measured_curve(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Replay, "load", lambda *_: replay)
    write_curve(
        CostCurve(verify=((1, 0.5), (9, 2.0)), draft=((1, 0.1), (9, 0.5)), draft_extend=0.2), tmp_path / "curve.json"
    )
    command = ["--traces", "x", "--tune", "--curve", str(tmp_path / "curve.json"), "--out", str(tmp_path / "rows")]
    assert simulate.main([*command, "--batch", "2"]) == 2
    assert "name a smaller --batch" in capsys.readouterr().err


@pytest.mark.parametrize(("requests", "tokens"), [(1, 8), (7, 56), (8, 56), (31, 124), (63, 126), (256, 256)])
def test_the_largest_step_of_sglangs_adaptive_mode(requests: int, tokens: int):
    assert SglangAdaptive.tokens(requests) == tokens


def steps_of(arm: SglangAdaptive, requests: int, accepted: Callable[[int], int], batches: int) -> int:
    for _ in range(batches):
        drafted = arm.depth(requests)
        arm.keep((torch.arange(drafted) < accepted(drafted)).float().expand(requests, -1))
    return arm.depth(requests)


@pytest.mark.parametrize(("requests", "most", "least"), [(1, 7, 1), (8, 3, 0), (40, 1, 0), (64, 0, 0), (300, 0, 0)])
def test_sglangs_own_adaptive_mode_climbs_and_falls(requests: int, most: int, least: int):
    assert steps_of(SglangAdaptive(3), requests, lambda drafted: drafted, 200) == most
    fallen = {steps_of(SglangAdaptive(3), requests, lambda drafted: 0, batches) for batches in range(200, 210)}
    assert least in fallen and max(fallen) <= max(least, 1)


def test_plain_decoding_takes_as_long_as_the_simulation_says(replay: Replay):
    """The fast sum that lengths are fitted with, against the simulation step by step."""
    lengths = [3, 8, 1, 5, 13, 2, 2]
    machine = Machine(GPUS["L40"], assumed=Assumptions(context=0))
    rows, request = requests_of(replay.traces, lengths)
    traces = replayed(replay.traces, rows, request)
    found = serve(traces, torch.ones(len(rows), 1), machine.curve(LLAMA, None, 3), plain(), slots=3)
    prefill = table3.prefill_seconds(machine, LLAMA)
    assert found.tokens == sum(lengths)
    assert table3.plain_seconds(lengths, machine, LLAMA.name, 3) - prefill == pytest.approx(found.seconds)


def test_requests_longer_than_the_record_go_on_in_the_next_prompt(replay: Replay):
    rows, request = requests_of(replay.traces, [10, 3])
    assert rows.tolist() == [*range(10), 8, 9, 10]
    assert request.tolist() == [0] * 10 + [1] * 3


def test_keys_and_values_are_paid_for_running_requests_only(replay: Replay):
    """One request in a batch of 64 costs what one request costs."""
    rows, request = requests_of(replay.traces, [8])
    alone, sparse = (
        play(next(chain_arms(replay, each)), replay.chains(), rows, request, each) for each in (setting(1), setting(64))
    )
    assert sparse.seconds == pytest.approx(alone.seconds)


def rows_of(replay: Replay, requests: int, machine: Machine = L40) -> dict[str, BenchRow]:
    labels = {"gpu": "L40", "tp": 1, "target": LLAMA.name, "context": 512}
    return {row.arm: row for row in simulate.matrix(replay, setting(requests, machine), labels, RUN)}


def test_every_arm_has_a_row(replay: Replay):
    rows = rows_of(replay, 2)
    assert {"plain", "static 4", "SGLang adaptive", "P >= 0.3", "C2T beta 0.5", "C2T auto (planned)"} <= set(rows)
    assert {"planned, P (D-Cut)", "closed form >= 0.3", "closed form tree >= 0.3"} <= set(rows)
    assert any(name.startswith("EAGLE-2 tree") for name in rows) and "C2T tree, beta 0.3" in rows
    assert {f"static {length}" for length in (1, 2, 3, 4, 6, 8)} <= set(rows)
    assert rows["plain"].metrics["ratio_to_plain"] == 1.0
    assert max(rows[f"static {n}"].metrics["ratio_to_best_static"] or 0 for n in simulate.STATIC) == 1.0
    assert max(rows[name].metrics["ratio_to_best"] or 0 for name in simulate.RIVALS) == 1.0
    assert all(row.kind == "simulated" and not row.error for row in rows.values())


def test_replayed_arms_are_those_of_the_table(replay: Replay):
    assert {*CHAINS, *TREES} <= set(ARMS)
    # this one has learnt nothing that vLLM's estimator could be
    assert {each.arm for each in chain_arms(replay, setting())} == set(CHAINS) - {"vLLM adaptive"}
    assert {each.arm for each in tree_arms(replay, setting())} == set(TREES) - {"C2T tree auto"}
    assert {each.arm for each in tree_arms(on_trees(replay), setting())} == set(TREES)


def on_trees(replay: Replay) -> Replay:
    return replace(replay, on_trees=replay.classifier)


def test_planned_trees_are_told_their_nodes_in_the_order_in_which_they_are_verified(replay: Replay):
    found, by_step = (each for each in tree_arms(on_trees(replay), setting(2)) if each.arm == "C2T tree auto")
    forest = replay.traces.tree
    assert found.acceptance.shape == found.accepted.shape == (len(forest), forest.k * forest.layers)
    assert (found.acceptance[:, 1:] <= found.acceptance[:, :-1]).all()
    # no more nodes than are accepted, and of these the path from the root first
    assert (found.accepted.sum(1) <= forest.accepted.sum(1)).all() and found.accepted.any()
    assert found.curve == setting(2).curve(scored=True, width=forest.k)
    kept = found.policy.keep(found.acceptance[:2])
    assert ((kept >= 0) & (kept <= found.acceptance.shape[1])).all()
    # where the shape is chosen by step, the first one is a whole tree, of the same nodes
    assert found.step is None and by_step.step is not None and by_step.name != found.name
    assert by_step.step(torch.tensor([0, 1])).kept.tolist() == kept.tolist()


def test_the_closed_form_plans_by_what_it_turned_out_to_mean(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With training traces alone, whose acceptance its probabilities have on average."""
    monkeypatch.setattr(recorded, "load_classifier", lambda path: replay.classifier)
    monkeypatch.setattr(recorded.OnlineLogistic, "fit", lambda self, *_: self)
    # this one's confidences are chance
    monkeypatch.setattr(recorded, "on_trees", lambda *_: None)
    save_traces(replay.traces, tmp_path / "traces")
    found = Replay.load(tmp_path / "traces", tmp_path / "traces")
    assert {"planned, closed form", "planned, vLLM's estimator"} <= {e.name for e in chain_arms(found, setting())}
    assert not any(each.name == "planned, closed form" for each in chain_arms(replay, setting()))
    chain = replay.traces.chain
    lowest = path_minimum(chain, found.closed_form.confidence(chain.stats()))
    assert float(lowest.mean()) == pytest.approx(float(chain.accepted.float().mean()), abs=0.02)


def test_long_static_chains_lose_where_the_batch_is_large(replay: Replay):
    few, many = (rows_of(replay, requests)["static 4"].metrics["ratio_to_plain"] for requests in (1, 256))
    assert few is not None and many is not None and many < few


def test_a_model_too_large_is_one_row_that_says_so(replay: Replay):
    big = replace(setting(2), target=MODELS["llama-3-70b"])
    (row,) = simulate.matrix(replay, big, {}, RUN)
    assert "do not fit" in row.error and not row.metrics


@pytest.mark.slow
def test_the_papers_table_has_both_columns(
    replay: Replay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(table3, "MEANS", (20,))
    monkeypatch.setattr(table3, "SPREADS", (0.4,))
    rows = list(table3.table3(replay, RUN))
    assert len(rows) == 2 * 3 * len(table3.ARMS)
    eagle = [row.metrics["paper_ratio"] for row in rows if row.arm == "static 4"]
    assert eagle == [1.13, 1.01, 0.98, 1.40, 1.23, 1.22]
    table3.show_table(rows, Console(width=200))
    shown = capsys.readouterr().out
    assert "the best fixed beta gains" in shown and "the paper's C2T 1.05, 1.11, 1.12." in shown
    plain = next(row for row in rows if row.arm == "plain")
    share = (plain.metrics["seconds"] or 0.0) / 38.05
    assert f"Plain decoding takes {share:.2f}, " in shown


def test_the_papers_table_counts_both_models_prefill(replay: Replay, monkeypatch: pytest.MonkeyPatch):
    """84,000 tokens of prompts through all layers, the last of each of 240 through the LM head; the head's likewise."""
    monkeypatch.setattr(table3, "MEANS", (20,))
    monkeypatch.setattr(table3, "SPREADS", (0.4,))
    monkeypatch.setattr(table3, "play", lambda *_: Simulated(5.0, 1, 1, 0.0, 0.0, 1.0))
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    target = 2 * (32 * layer * 84_000 + 4096 * 128_256 * 240) / (181.05e12 * 0.6)
    head = 2 * ((layer + 2 * 4096**2) * 84_000 + 4096 * 128_256 * 240) / (181.05e12 * 0.6)
    rows = {row.arm: row for row in table3.table3(replay, RUN) if row.setting["column"] == "1 x L40"}
    assert rows["plain"].metrics["seconds"] == pytest.approx(5.0 + target)
    assert rows["static 4"].metrics["seconds"] == pytest.approx(5.0 + target + head)


def test_a_tree_takes_a_pass_a_layer_over_all_its_branches(replay: Replay):
    """Trees of the toy traces are 4 deep with 2 branches a layer."""
    each = setting(2)
    eagle, ours = list(tree_arms(replay, each))[:2]
    assert (eagle.policy.depth(2), ours.policy.depth(2), eagle.width) == (4, 4, 2)
    assert eagle.curve == each.curve(scored=False, width=2)
    assert ours.curve == each.curve(scored=True, width=2)
    nodes = int(eagle.name.split()[-1])
    assert eagle.policy.keep(eagle.acceptance[:3]).tolist() == [nodes] * 3
    assert eagle.tokens == 2 * (1 + nodes)


def test_output_lengths_have_the_mean_that_was_asked_for():
    lengths = table3.output_lengths(100.0, 0.5)
    assert len(lengths) == 240
    assert sum(lengths) / 240 == pytest.approx(100.0, abs=1.0)  # each is rounded down


def test_the_command_writes_rows(replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Replay, "load", lambda *_: replay)
    out = tmp_path / "rows.jsonl"
    assert simulate.main(["--traces", "x", "--gpu", "L40", "--batch", "1", "2", "--out", str(out)]) == 0
    assert {row.setting["requests_in_flight"] for row in read_rows(out, BenchRow)} == {1, 2}
    assert simulate.main(["--traces", "x", "--tune", "--batch", "2", "--out", str(out)]) == 0
    assert any(row.scenario == "planner" for row in read_rows(out, BenchRow))


def test_the_command_reckons_with_a_measured_curve(replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Replay, "load", lambda *_: replay)
    path, out = tmp_path / "half-a-second.json", tmp_path / "rows.jsonl"
    write_curve(CostCurve(verify=((1, 0.5), (9, 2.0)), draft=((1, 0.1), (9, 0.5)), draft_extend=0.2), path)
    assert simulate.main(["--traces", "x", "--curve", str(path), "--batch", "1", "--out", str(out)]) == 0
    rows = read_rows(out, BenchRow)
    assert {row.setting["gpu"] for row in rows} == {"half-a-second"}
    assert {row.setting[name] for row in rows for name in ("tp", "target", "context")} == {None}
    assert rows[0].arm == "plain" and rows[0].metrics["output_tokens_per_s"] == pytest.approx(2.0)


def test_a_missing_trace_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert simulate.main(["--traces", str(tmp_path / "none"), "--out", str(tmp_path / "rows")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "rows").exists()


def test_traces_of_another_draft_are_refused(replay: Replay, tmp_path: Path):
    other = replace(replay.traces, header={**replay.traces.header, "pair": {"kind": "draft", "draft": "other"}})
    save_traces(replay.traces, tmp_path / "a")
    save_traces(other, tmp_path / "b")
    with pytest.raises(C2TError, match="different drafts"):
        Replay.load(tmp_path / "a", tmp_path / "b")


def test_a_recording_of_served_requests_is_one_line(replay: Replay, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Their answers had all lengths, and the header names none."""
    served = replace(replay.traces, header={**replay.traces.header, "prompts": "served", "new_tokens": None})
    save_traces(served, tmp_path / "served")
    assert simulate.main(["--traces", str(tmp_path / "served"), "--out", str(tmp_path / "rows")]) == 2
    error = capsys.readouterr().err
    assert "new_tokens is None" in error and error.count("\n") == 1
