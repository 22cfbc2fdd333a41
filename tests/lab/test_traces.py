"""The trace file: what was written is what is read, and nothing else is."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from c2t_plugin.errors import C2TError
from c2t_plugin.forest import TABLES
from c2t_plugin.traces import FORMAT, STATES, VERSION, checksum, load_traces, save_traces


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
    assert again.header == traces.header


def test_nothing_but_the_file_is_left(saved) -> None:
    _, path = saved
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_interrupted_write_leaves_the_old_file(saved, monkeypatch) -> None:
    traces, path = saved
    before = path.read_bytes()

    def half(tensors, filename, metadata):
        filename.write_bytes(before[: len(before) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr("c2t_plugin.traces.save_file", half)
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


def test_the_rewriting_above_is_not_what_is_refused(saved) -> None:
    rewrite(saved[1])
    assert len(load_traces(saved[1])) == len(saved[0])


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(C2TError, match="c2t collect"):
        load_traces(tmp_path / "none.traces")


def test_rows_are_taken_from_everything(make_traces) -> None:
    traces = make_traces()
    some = traces[traces.prompt == 2]
    assert len(some) == len(some.tree) == len(some.chain) == len(some.novel) == 5
    assert torch.equal(some.tree.token_ids, traces.tree.token_ids[10:15])
