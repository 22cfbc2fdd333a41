"""The trace file: what was written is what is read, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from c2t_plugin.errors import C2TError
from c2t_plugin.traces import coarse
from c2t_plugin.traces.file import Traces, load_traces, save_traces
from c2t_plugin.traces.forest import TABLES, Forest
from c2t_plugin.traces.stored import COARSE, FORMAT, STATES, VERSION, checksum
from tests.support.lab.toys import HEADER


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


SHAPE = {"tree": {"k": 2, "layers": 4}, "chain": {"k": 1, "layers": 4}}


def rewrite(path, drop=(), change=None, **metadata) -> None:
    tensors = {name: value for name, value in load_file(path).items() if name not in drop} | (change or {})
    known = {"format": FORMAT, "version": VERSION, "shape": json.dumps(SHAPE), "header": json.dumps(HEADER)}
    known |= metadata
    sealed = checksum(tensors, known if known["version"] == VERSION else None)
    save_file(tensors, path, metadata={"checksum": sealed, **known})


def older_version(path) -> None:
    rewrite(path, version="0")


def group_of_another_type(path) -> None:
    rewrite(path, change={"group": load_file(path)["prompt"].long()})


def group_before_there_were_any(path) -> None:
    rewrite(path, change={"group": load_file(path)["prompt"]}, version="1")


def metadata_changed(path) -> None:
    tensors = load_file(path)
    known = {"format": FORMAT, "version": VERSION, "shape": json.dumps(SHAPE), "header": json.dumps(HEADER)}
    sealed = checksum(tensors, known)
    save_file(tensors, path, metadata={**known, "checksum": sealed, "header": json.dumps({**HEADER, "top_m": 9})})


def tensor_of_another_name(path) -> None:
    tensors = load_file(path)
    tensors["tree.entropy"], tensors["tree.margin"] = tensors["tree.margin"], tensors["tree.entropy"]
    rewrite(path, change=tensors, version="3", checksum="00000000")


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
    metadata_changed: "do not match its checksum",
    tensor_of_another_name: "do not match its checksum",
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_damaged_file_is_refused(saved, damage, message) -> None:
    damage(saved[1])
    with pytest.raises(C2TError, match=message):
        load_traces(saved[1])


@pytest.mark.parametrize("version", ["1", "2", VERSION])
def test_the_rewriting_above_is_not_what_is_refused(saved, version) -> None:
    rewrite(saved[1], version=version)
    assert len(load_traces(saved[1])) == len(saved[0])


@pytest.mark.parametrize("version", ["1", "2", VERSION])
def test_a_shape_is_found_by_its_name(saved, version) -> None:
    rewrite(saved[1], version=version, shape=json.dumps(dict(reversed(SHAPE.items()))))
    again = load_traces(saved[1])
    assert (again.tree.k, again.chain.k) == (2, 1)


DEEP = "[" * 100_000
HOSTILE = {
    "no shape": ({"shape": "{}"}, "no shapes of chain"),
    "an old file without trees": ({"version": "2", "shape": json.dumps({"chain": SHAPE["chain"]})}, "tree and chain"),
    "another part": ({"shape": json.dumps({**SHAPE, "root": SHAPE["chain"]})}, "no shapes of chain"),
    "a shape that is a list": ({"shape": "[2, 4]"}, "no shapes of chain"),
    "a part that is a number": ({"shape": json.dumps({**SHAPE, "tree": 3})}, "k and layers from 1"),
    "k that is no number": ({"shape": json.dumps({**SHAPE, "tree": {"k": "2", "layers": 4}})}, "k and layers from 1"),
    "k that is true": ({"shape": json.dumps({**SHAPE, "chain": {"k": True, "layers": 4}})}, "k and layers from 1"),
    "no layers": ({"shape": json.dumps({**SHAPE, "tree": {"k": 2}})}, "k and layers from 1"),
    "negative layers": ({"shape": json.dumps({**SHAPE, "tree": {"k": 2, "layers": -4}})}, "k and layers from 1"),
    "very many layers": ({"shape": json.dumps({**SHAPE, "tree": {"k": 2, "layers": 10**4000}})}, "k and layers from 1"),
    "more layers than there are": ({"shape": json.dumps({**SHAPE, "tree": {"k": 2, "layers": 30_000}})}, "has shape"),
    "k twice": ({"shape": '{"chain": {"k": 1, "k": 1, "layers": 4}}'}, "the name 'k' comes twice"),
    "a deep shape": ({"shape": DEEP}, "not valid JSON: maximum recursion"),
    "a number of 5,000 digits": ({"shape": "1" * 5000}, "not valid JSON: Exceeds the limit"),
    "a header that is a list": ({"header": "[]"}, "of which pair"),
    "no header": ({"header": ""}, "not valid JSON"),
    "a deep header": ({"header": DEEP}, "not valid JSON: maximum recursion"),
    "no pair": ({"header": json.dumps({"top_m": 4})}, "of which pair"),
    "top_m that is a text": ({"header": json.dumps({**HEADER, "top_m": "4"})}, "and of which top_m"),
    "an unknown way of statistics": ({"statistics": COARSE}, "another type, chain.entropy"),
}


@pytest.mark.parametrize(("metadata", "message"), HOSTILE.values(), ids=HOSTILE)
def test_metadata_that_lie_are_one_line(saved, metadata, message) -> None:
    rewrite(saved[1], **metadata)
    with pytest.raises(C2TError, match=message) as error:
        load_traces(saved[1])
    assert "\n" not in str(error.value) and len(str(error.value)) < 2_000


@pytest.mark.parametrize("parent", [-2, -1, 0, 2**15 - 1])
def test_parents_that_are_no_nodes_above_are_refused(saved, parent) -> None:
    """An index outside of the tree would be a traceback where features are made."""
    parents = load_file(saved[1])["tree.parent_ids"]
    parents[3, -1] = parent
    rewrite(saved[1], change={"tree.parent_ids": parents})
    with pytest.raises(C2TError, match="no nodes of the layer above"):
        load_traces(saved[1])


def test_served_chains_are_stored_coarsely(make_traces, tmp_path) -> None:
    traces = make_traces(k=1)
    save_traces(traces, tmp_path / "fine.traces")
    save_traces(traces, tmp_path / "served.traces", coarsely=True)
    again = load_traces(tmp_path / "served.traces")
    assert again.tree is again.chain
    assert torch.equal(again.chain.accepted, traces.chain.accepted)
    for name, top in coarse.TOP.items():
        found, exact = getattr(again.chain, name), getattr(traces.chain, name)
        assert found.dtype == torch.float32 and (found.sign() * exact.sign() >= 0).all()
        # half a level, where levels are as wide as they get below the value
        steps = (found.abs() / top).sqrt() - (exact.abs().clamp(max=top) / top).sqrt()
        assert steps.abs().max() <= 0.5001 / (coarse.LEVELS - 1)
    torch.testing.assert_close(again.chain.joint_log_prob, again.chain.log_prob.cumsum(1), atol=1e-6, rtol=0)
    save_traces(again, tmp_path / "twice.traces", coarsely=True)
    assert_same(load_traces(tmp_path / "twice.traces").chain, again.chain)
    sizes = [(tmp_path / name).stat().st_size for name in ("served.traces", "fine.traces")]
    assert sizes[0] < sizes[1] / 2


def assert_same(one: Forest, other: Forest) -> None:
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in TABLES)


def test_what_no_byte_can_say_is_its_end(make_traces, tmp_path) -> None:
    traces = make_traces(k=1)
    traces.chain.margin[:] = torch.inf
    traces.chain.log_prob[:] = -99.0
    save_traces(traces, tmp_path / "served.traces", coarsely=True)
    again = load_traces(tmp_path / "served.traces").chain
    assert again.margin.unique().tolist() == [coarse.TOP["margin"]]
    assert again.log_prob.unique().tolist() == [-coarse.TOP["log_prob"]]


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(C2TError, match="c2t collect"):
        load_traces(tmp_path / "none.traces")


def test_rows_are_taken_from_everything(make_traces) -> None:
    traces = make_traces()
    some = traces[traces.prompt == 2]
    assert len(some) == len(some.tree) == len(some.chain) == len(some.novel) == 5
    assert torch.equal(some.tree.token_ids, traces.tree.token_ids[10:15])
