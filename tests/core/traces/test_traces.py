"""The trace file: what was written is what is read, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from c2t_plugin.errors import C2TError
from c2t_plugin.traces.file import FORMAT, STATES, VERSION, Traces, checksum, load_traces, save_traces
from c2t_plugin.traces.forest import TABLES


@pytest.fixture
def saved(make_traces, tmp_path):
    traces = make_traces()
    path = tmp_path / "sub" / "toy.traces"
    save_traces(traces, path)
    return traces, path


def test_round_trip_is_exact(saved) -> None:
    traces, path = saved
    again = load_traces(path)
    for part in ("tree", "chain"):
        one, other = getattr(traces, part), getattr(again, part)
        assert (one.k, one.layers) == (other.k, other.layers)
        for name in TABLES:
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert torch.equal(getattr(one, name), getattr(other, name))
    for name in STATES:
        assert torch.equal(getattr(traces, name), getattr(again, name))
    assert again.header == traces.header and again.group is None


def test_groups_travel_with_their_prompts(make_traces, tmp_path) -> None:
    traces = grouped(make_traces())
    save_traces(traces, tmp_path / "toy.traces")
    again = load_traces(tmp_path / "toy.traces")
    assert again.group is not None and again.group.dtype == torch.int32
    assert again.group.tolist() == [4] * 5 + [0] * 5 + [4] * 5 + [2] * 5
    assert again.groups.tolist() == [2, 0, 2, 1]
    assert again[again.prompt != 1].groups.tolist() == [1, 1, 0]


def test_without_groups_each_prompt_is_its_own(make_traces) -> None:
    assert make_traces().groups.tolist() == [0, 1, 2, 3]


def grouped(traces: Traces) -> Traces:
    return replace(traces, group=torch.tensor([4, 0, 4, 2], dtype=torch.int32).repeat_interleave(5))


def test_chains_can_stand_for_trees(make_traces, tmp_path) -> None:
    traces = make_traces()
    chains = replace(traces, tree=traces.chain)
    save_traces(chains, tmp_path / "toy.traces")
    again = load_traces(tmp_path / "toy.traces")
    assert again.tree.k == again.chain.k == 1
    assert torch.equal(again.tree.joint_log_prob, again.chain.joint_log_prob)


def test_serving_goes_on_at_the_next_recorded_state(make_traces) -> None:
    traces = make_traces(prompts=2, steps=5)
    rows = torch.arange(10)
    assert traces.following(rows, torch.zeros(10, dtype=torch.int64)).tolist() == [*range(1, 11)]
    # past its last state a prompt has ended, whatever is accepted
    assert traces.following(torch.tensor([0, 3, 7]), torch.tensor([2, 9, 400])).tolist() == [3, 5, 10]
    gaps = traces[torch.tensor([0, 3, 4, 5, 9])]
    assert gaps.following(torch.tensor([0, 0, 1, 3]), torch.tensor([0, 3, 0, 3])).tolist() == [1, 2, 2, 4]
    assert gaps.first.tolist() == [0, 3] and gaps.owner.tolist() == [0, 0, 0, 1, 1]


MIXED_UP = {
    "some prompt comes twice": {"prompt": torch.tensor([0] * 5 + [1] * 5 + [0] * 5 + [2] * 5)},
    "in the order of their steps": {"step": torch.tensor([0, 1, 1, 3, 4] * 4)},
    "the same group": {"group": torch.arange(20)},
    "the same number": {"novel": torch.ones(19, dtype=torch.bool)},
}


@pytest.mark.parametrize(("message", "change"), MIXED_UP.items())
def test_states_out_of_order_are_refused(make_traces, message, change) -> None:
    with pytest.raises(C2TError, match=message):
        replace(make_traces(), **change)


def test_nothing_but_the_file_is_left(saved) -> None:
    _, path = saved
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_interrupted_write_leaves_the_old_file(saved, monkeypatch) -> None:
    traces, path = saved
    before = path.read_bytes()

    def half(tensors, filename, metadata):
        filename.write_bytes(before[: len(before) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr("c2t_plugin.traces.file.save_file", half)
    with pytest.raises(OSError, match="no space"):
        save_traces(traces, path)
    assert path.read_bytes() == before


def cut_short(path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def overwritten(path) -> None:
    path.write_text("not a trace file", encoding="utf-8")


def flip_a_byte(path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def rewrite(path, drop=(), change=None, **metadata) -> None:
    tensors = {name: value for name, value in load_file(path).items() if name not in drop} | (change or {})
    shape = {"tree": {"k": 2, "layers": 4}, "chain": {"k": 1, "layers": 4}}
    known = {"format": FORMAT, "version": VERSION, "shape": json.dumps(shape), "header": "{}"}
    save_file(tensors, path, metadata={**known, "checksum": checksum(tensors), **metadata})


def older_version(path) -> None:
    rewrite(path, version="0")


def group_of_another_type(path) -> None:
    rewrite(path, change={"group": load_file(path)["prompt"].long()})


def group_before_there_were_any(path) -> None:
    rewrite(path, change={"group": load_file(path)["prompt"]}, version="1")


def another_format(path) -> None:
    rewrite(path, format="c2t-classifier")


def table_missing(path) -> None:
    rewrite(path, drop=("tree.entropy",))


def table_of_another_type(path) -> None:
    rewrite(path, change={"tree.entropy": load_file(path)["tree.entropy"].half()})


def table_too_short(path) -> None:
    rewrite(path, change={"tree.entropy": load_file(path)["tree.entropy"][:, 1:].contiguous()})


DAMAGE = {
    cut_short: "not a readable safetensors file",
    overwritten: "not a readable safetensors file",
    flip_a_byte: "does not match|do not match",
    older_version: "version '0'",
    group_of_another_type: "another type, group",
    group_before_there_were_any: "another type, group",
    another_format: "format 'c2t-classifier'",
    table_missing: "tree.entropy",
    table_of_another_type: "tree.entropy",
    table_too_short: "entropy has shape",
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_damaged_file_is_refused(saved, damage, message) -> None:
    damage(saved[1])
    with pytest.raises(C2TError, match=message):
        load_traces(saved[1])


@pytest.mark.parametrize("version", ["1", VERSION])
def test_the_rewriting_above_is_not_what_is_refused(saved, version) -> None:
    rewrite(saved[1], version=version)
    assert len(load_traces(saved[1])) == len(saved[0])


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(C2TError, match="c2t collect"):
        load_traces(tmp_path / "none.traces")


def test_rows_are_taken_from_everything(make_traces) -> None:
    traces = make_traces()
    some = traces[traces.prompt == 2]
    assert len(some) == len(some.tree) == len(some.chain) == len(some.novel) == 5
    assert torch.equal(some.tree.token_ids, traces.tree.token_ids[10:15])
