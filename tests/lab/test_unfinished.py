"""Interrupted runs: what goes on is what would have been, bit for bit, and nothing else goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, load_classifier, save_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.lab import collect as module
from c2t_plugin.lab import evaluate, fit, judging, sweeps, training, tune
from c2t_plugin.lab.collect import collect_to
from c2t_plugin.lab.plans import CollectPlan, TreeShape
from c2t_plugin.lab.unfinished import SETTINGS, Unfinished
from c2t_plugin.provenance import RunRecord
from c2t_plugin.tensor_file import read_tensors
from c2t_plugin.traces.file import FORMAT, VERSION, save_traces

PLAN = CollectPlan("eagle3", TreeShape(k=3, layers=3, top_m=20), trees=15, prompts="held-out", new_tokens=3)


@pytest.fixture
def same_run(monkeypatch) -> RunRecord:
    """The record of a run without its time, which no two runs share."""
    record = RunRecord.capture(seed=0)
    monkeypatch.setattr(RunRecord, "capture", classmethod(lambda cls, seed=None: record))
    return record


@pytest.fixture
def batches(monkeypatch) -> dict[str, int]:
    """Counts the batches that collect() works on; it ends as by a signal before the one numbered `limit`."""
    count = {"worked": 0, "limit": 99}
    record = module._record

    def counted(*arguments):
        if count["worked"] == count["limit"]:
            raise KeyboardInterrupt
        count["worked"] += 1
        return record(*arguments)

    monkeypatch.setattr(module, "_record", counted)
    monkeypatch.setattr(module, "TEXTS_PER_BATCH", 2)
    return count


def test_a_collection_goes_on_bit_for_bit(tiny_pair, tmp_path, same_run, batches) -> None:
    whole, out = tmp_path / "whole" / "x.traces", tmp_path / "x.traces"
    collect_to(whole, tiny_pair, PLAN)
    total = batches["worked"]
    assert total >= 3
    for limit in (total + 1, total + 2):
        batches["limit"] = limit
        with pytest.raises(KeyboardInterrupt):
            collect_to(out, tiny_pair, PLAN)
        assert not out.exists()
    # what a killed process was just writing
    (tmp_path / "x.traces.unfinished" / "00002.traces.part").write_bytes(b"half")
    batches["limit"] = 99
    collect_to(out, tiny_pair, PLAN)
    assert batches["worked"] == 2 * total, "what was finished is not done again"
    # safetensors writes its metadata in any order; the checksum in it is over all tensors
    (one, about), (other, also) = (read_tensors(path, FORMAT, (VERSION,), "") for path in (out, whole))
    assert about == also
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("x.")] == ["x.traces"]


@pytest.mark.slow
def test_a_fit_goes_on_bit_for_bit(make_traces, tmp_path, same_run, monkeypatch) -> None:
    save_traces(make_traces(prompts=20), tmp_path / "t")
    whole, out = tmp_path / "whole", tmp_path / "c"
    command = [str(tmp_path / "t"), "--d-max", "4", "--recipe", "extended", "--out"]
    assert fit.main([*command, str(whole)]) == 0
    keep = training._keep
    for stop in (3, 7):

        def interrupted(unfinished, epochs, *rest, stop=stop):
            keep(unfinished, epochs, *rest)
            if len(epochs) == stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(training, "_keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit.main([*command, str(out)])
        assert not out.exists()
    with pytest.raises(C2TError, match="interrupted run with another recipe, plan; run"):
        fit.main([*command, str(out), "--hidden", "5", "--seed", "4"])
    save_traces(make_traces(prompts=21), tmp_path / "t2")
    with pytest.raises(C2TError, match="another traces"):
        fit.main([str(tmp_path / "t2"), *command[1:], str(out)])
    worked: list[int] = []
    monkeypatch.setattr(training, "_keep", lambda unfinished, epochs, *rest: worked.append(len(epochs)))
    assert fit.main([*command, str(out)]) == 0
    assert worked == [8, 9, 10]
    one, other = load_classifier(out), load_classifier(whole)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert one.spec == other.spec
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "t", "t2", "whole"]


def test_an_evaluation_goes_on_with_its_second_half(make_traces, tmp_path, same_run, monkeypatch, capsys) -> None:
    save_traces(make_traces(prompts=8), tmp_path / "t")
    save_classifier(NodeClassifier(ClassifierSpec(top_m=4)).eval(), tmp_path / "c")
    command = [f"ours={tmp_path / 'c'}", "--traces", str(tmp_path / "t"), "--d-max", "4", "--tree-depth", "3"]
    command += ["--replicates", "5", "--json"]
    assert evaluate.main([*command, str(tmp_path / "whole")]) == 0
    printed, trees = capsys.readouterr().out, judging.evaluate_trees
    monkeypatch.setattr(judging, "evaluate_trees", interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main([*command, str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(judging, "evaluate_trees", trees)
    monkeypatch.setattr(judging, "evaluate_chains", interrupt)
    with pytest.raises(C2TError, match="another plan"):
        evaluate.main([*command[:-1], "--seed", "1", "--json", str(tmp_path / "out")])
    save_traces(make_traces(prompts=8, seed=1), tmp_path / "t2")
    with pytest.raises(C2TError, match="another traces"):
        evaluate.main([*command, str(tmp_path / "out"), "--traces", str(tmp_path / "t2")])
    capsys.readouterr()
    assert evaluate.main([*command, str(tmp_path / "out")]) == 0
    whole, out = (json.loads((tmp_path / name).read_text()) for name in ("whole", "out"))
    for rule in (*whole["trees"]["rules"], *out["trees"]["rules"]):
        assert rule.pop("nodes_per_second") > 0
    assert out == whole
    assert of_chains(capsys.readouterr().out) == of_chains(printed)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "out", "t", "t2", "whole"]


def test_tuning_goes_on_with_the_states_that_are_left(make_traces, tmp_path, same_run, monkeypatch) -> None:
    monkeypatch.setattr(tune, "STATES_AT_A_TIME", 7)
    save_traces(make_traces(prompts=20), tmp_path / "t")
    save_classifier(NodeClassifier(ClassifierSpec(top_m=4)).eval(), tmp_path / "c")
    command = [str(tmp_path / "c"), str(tmp_path / "t"), "--depth", "4", "--tau", "0.01", "--replicates", "5", "--out"]
    calls, sweep = {"done": 0, "limit": 99}, sweeps.threshold_sweep

    def counted(*arguments):
        if calls["done"] == calls["limit"]:
            raise KeyboardInterrupt
        calls["done"] += 1
        return sweep(*arguments)

    monkeypatch.setattr(sweeps, "threshold_sweep", counted)
    assert tune.main([*command, str(tmp_path / "whole")]) == 0
    parts, calls["limit"] = calls["done"], calls["done"] + 2
    assert parts >= 4
    with pytest.raises(KeyboardInterrupt):
        tune.main([*command, str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with pytest.raises(C2TError, match="another plan"):
        tune.main([*command, str(tmp_path / "out"), "--seed", "1"])
    calls["limit"] = 99
    assert tune.main([*command, str(tmp_path / "out")]) == 0
    assert calls["done"] == 2 * parts, "what was scored is not scored again"
    assert load_classifier(tmp_path / "out").spec == load_classifier(tmp_path / "whole").spec
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "out", "t", "whole"]


def interrupt(*arguments, **named) -> None:
    raise KeyboardInterrupt


def of_chains(printed: str) -> str:
    """The tables of chains, without progress bars."""
    return printed[printed.index("chains of at most") : printed.index("trees, served")]


CHANGES = {
    "plan": replace(PLAN, trees=16),
    "plan, of the shape": replace(PLAN, shape=TreeShape(k=3, layers=3, top_m=21)),
    "plan, pair": replace(PLAN, draft="eagle1"),
}


@pytest.mark.parametrize(("name", "plan"), CHANGES.items())
def test_other_settings_do_not_go_on(tiny_pair, tmp_path, batches, name, plan) -> None:
    out = tmp_path / "x.traces"
    batches["limit"] = 1
    with pytest.raises(KeyboardInterrupt):
        collect_to(out, tiny_pair, PLAN)
    with pytest.raises(
        C2TError, match=f"interrupted run with another {name.split(', of')[0]}; .* or remove it"
    ) as error:
        collect_to(out, tiny_pair, plan)
    assert "\n" not in str(error.value) and batches["worked"] == 1 and not out.exists()


def test_other_prompts_under_the_same_name_do_not_go_on(tiny_pair, tmp_path, batches) -> None:
    path, out = tmp_path / "own.jsonl", tmp_path / "x.traces"
    lines = [json.dumps({"text": "return x\n" * length}) + "\n" for length in (4, 5, 6)]
    path.write_text("".join(lines), encoding="utf-8")
    plan = replace(PLAN, prompts=str(path), trees=9)
    batches["limit"] = 1
    with pytest.raises(KeyboardInterrupt):
        collect_to(out, tiny_pair, plan)
    path.write_text("".join(reversed(lines)), encoding="utf-8")
    with pytest.raises(C2TError, match="another prompt file"):
        collect_to(out, tiny_pair, plan)


def begun(tmp_path: Path, settings: dict) -> Unfinished:
    found = Unfinished.of(tmp_path / "x", settings, seed=3)
    found.keep("part", lambda path: path.write_bytes(b"one"))
    return found


@pytest.mark.parametrize("name", ["git_sha", "versions"])
def test_another_version_does_not_go_on(tmp_path, name) -> None:
    path = begun(tmp_path, {"plan": 1}).file(SETTINGS)
    record = json.loads(path.read_text(encoding="utf-8"))
    record["run"][name] = {"torch": "0"} if name == "versions" else "0" * 40
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(C2TError, match=f"another {name}"):
        Unfinished.of(tmp_path / "x", {"plan": 1}, seed=3)


def test_the_record_is_that_of_the_run_that_began(tmp_path) -> None:
    first = begun(tmp_path, {"plan": (1, 2)})
    path = first.file(SETTINGS)
    path.write_text(path.read_text(encoding="utf-8").replace(first.run["utc"], "2026-01-01T00:00:00+00:00"))
    for _ in range(2):
        again = begun(tmp_path, {"plan": (1, 2)})
        assert again.run == {**first.run, "utc": "2026-01-01T00:00:00+00:00"}
        assert again.file("part").read_bytes() == b"one"
    again.finish()
    assert not list(tmp_path.iterdir())


def test_unreadable_settings_are_named(tmp_path) -> None:
    begun(tmp_path, {}).file(SETTINGS).write_text("{", encoding="utf-8")
    with pytest.raises(C2TError, match=r"settings\.json is not valid JSON: .*; remove"):
        Unfinished.of(tmp_path / "x", {}, seed=3)


def test_a_refused_command_leaves_nothing(tiny_pair, make_traces, tmp_path) -> None:
    out = tmp_path / "out" / "x"
    with pytest.raises(C2TError, match="held-out prompts are needed"):
        collect_to(out, tiny_pair, replace(PLAN, trees=1000))
    save_traces(make_traces(), tmp_path / "t")
    with pytest.raises(C2TError, match="collect deeper"):
        fit.main([str(tmp_path / "t"), "--d-max", "5", "--out", str(out)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def test_only_what_it_wrote_is_removed(tmp_path) -> None:
    first = begun(tmp_path, {"plan": 1})
    (first.folder / "part.0123456789ab.part").write_bytes(b"half")
    (first.folder / "notes.txt").write_text("mine", encoding="utf-8")
    Unfinished.of(tmp_path / "x", {"plan": 1}, seed=3).finish()
    assert [path.name for path in first.folder.iterdir()] == ["notes.txt"]


SETTINGS_OF_OTHERS = {
    "a list": ("[]", "it needs settings, run, files"),
    "no run": ('{"settings": {}, "files": []}', "it needs settings, run, files"),
    "a deep one": ("[" * 100_000, "not valid JSON: maximum recursion"),
    "files elsewhere": ('{"settings": {}, "run": {}, "files": ["../t"]}', "files outside of its folder"),
    "files that are numbers": ('{"settings": {}, "run": {}, "files": [3]}', "files outside of its folder"),
}


@pytest.mark.parametrize(("text", "message"), SETTINGS_OF_OTHERS.values(), ids=SETTINGS_OF_OTHERS)
def test_settings_that_are_none_are_named(tmp_path, text: str, message: str) -> None:
    begun(tmp_path, {}).file(SETTINGS).write_text(text, encoding="utf-8")
    with pytest.raises(C2TError, match=message) as error:
        Unfinished.of(tmp_path / "x", {}, seed=3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to(path.parent)])
def test_a_folder_of_parts_is_a_folder(tmp_path, make) -> None:
    make(tmp_path / "x.unfinished")
    with pytest.raises(C2TError, match="is no folder"):
        Unfinished.of(tmp_path / "x", {}, seed=3)
