"""A fuzzer over the files that people pass on: classifiers, traces, cost curves. A reader refuses them with one line of
ours, or what it returns can be used; in a few seconds each, and without the memory that a file only declares."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as tensors_in
from safetensors.torch import save as bytes_of

from c2t_kernels.network import NodeStats
from c2t_plugin.classifier import ClassifierSpec, NodeClassifier, load_classifier, save_classifier
from c2t_plugin.errors import C2TError
from c2t_plugin.planner import CostCurve
from c2t_plugin.planner.curve_file import read_curve, write_curve
from c2t_plugin.traces.file import Traces, load_traces, save_traces
from c2t_plugin.traces.stored import VERSION, checksum

# The same examples in each run. What hangs is told from what is slow.
FUZZED = settings(
    derandomize=True,
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Of the process, over all examples of one test; files have some 10 KB.
MOST_KB = 300_000
CURVE = CostCurve(verify=((1, 1.0), (4, 1.2), (64, 16.0)), draft=((1, 0.05), (64, 0.1)), fixed=0.1, draft_extend=0.1)


def use_classifier(path: Path) -> None:
    classifier = load_classifier(path)
    classifier.network("cpu")
    signs = {name: -100 if name.endswith("log_prob") else 100 for name in FIELDS}
    stats = NodeStats(**{name: sign * torch.rand(7) for name, sign in signs.items()})
    assert classifier.confidence(stats).isfinite().all()


FIELDS = NodeStats._fields


def use_traces(path: Path) -> None:
    traces = load_traces(path)
    for forest in (traces.chain, traces.tree):
        assert forest.stats().path_entropy.shape == forest.accepted.shape
    rows = torch.arange(len(traces))
    assert (traces.following(rows, torch.zeros_like(rows)) > rows).all()
    assert len(traces.groups) == len(traces.first)
    assert isinstance(traces.header["pair"], dict) and traces.header["top_m"] >= 1


def use_curve(path: Path) -> None:
    curve = read_curve(path)
    assert curve.verify_s(torch.tensor([1, 7, 2**31])).isfinite().all() and curve.draft_s(3) > 0


USES: dict[str, Callable[[Path], None]] = {
    "classifier": use_classifier,
    "traces": use_traces,
    "grouped": use_traces,
    "served": use_traces,
    "curve": use_curve,
}


@pytest.fixture
def files(tmp_path: Path, make_traces: Callable[..., Traces]) -> dict[str, bytes]:
    """A good file of each kind."""
    torch.manual_seed(0)
    spec = ClassifierSpec(pair={"draft": "d"}, training={"run": {"seed": 3}})
    save_classifier(NodeClassifier(spec), tmp_path / "classifier")
    traces = make_traces(prompts=3, steps=2)
    save_traces(traces, tmp_path / "traces")
    save_traces(replace(traces, group=traces.prompt.clone()), tmp_path / "grouped")
    save_traces(make_traces(prompts=3, steps=2, k=1), tmp_path / "served", coarsely=True)
    write_curve(CURVE, tmp_path / "curve")
    return {name: (tmp_path / name).read_bytes() for name in USES}


@pytest.fixture(autouse=True)
def in_little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KB


def read(kind: str, content: bytes, folder: Path) -> bool:
    """Whether it was read. What it raises else is ours, in one line."""
    path = folder / f"{kind}.fuzzed"
    path.write_bytes(content)
    try:
        USES[kind](path)
    except C2TError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("kind", USES)
def test_good_files_are_read(files: dict[str, bytes], kind: str, tmp_path: Path) -> None:
    assert read(kind, files[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", USES)
@FUZZED
@given(data=st.data())
def test_changed_bytes(files: dict[str, bytes], kind: str, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(files[kind])
    # most of a file are weights, and most of what can go wrong is before them
    places = st.one_of(st.integers(0, 400), st.integers(0, len(content))).map(lambda place: min(place, len(content)))
    for _ in range(data.draw(st.integers(1, 4))):
        place, length = data.draw(places), data.draw(st.sampled_from([0, 1, 1, 8, 100_000]))
        content[place : place + length] = data.draw(st.binary(max_size=9))
    read(kind, bytes(content), tmp_path)


DEEP = "[" * 50_000
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from([10**400, -(10**400), 1e308, 5e-324]),
    st.sampled_from([2**31, 2**63, 10**9, "x" * 1000, "\ud800", "a\nb", "3", "2"]),
    st.sampled_from([[], {}, [[]], {"a": []}, [0] * 100, ["a"], {"": None}, [[1, 1], [2, 2]]]),
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places_in(each, (*path, name))


def changed(value: Any, data: st.DataObject) -> Any:
    """With one value in it replaced, left out, or put under another name."""
    path = data.draw(st.sampled_from(list(places_in(value))))
    if not path:
        return data.draw(ODD)
    value = json.loads(json.dumps(value))
    holder = value
    for name in path[:-1]:
        holder = holder[name]
    how = data.draw(st.sampled_from(["replace", "replace", "replace", "leave out", "rename"]))
    if how == "replace":
        holder[path[-1]] = data.draw(ODD)
    else:
        found = holder.pop(path[-1])
        if how == "rename" and isinstance(holder, dict):
            holder[data.draw(st.text(max_size=4))] = found
    return value


def changed_text(value: Any, data: st.DataObject) -> str:
    """JSON of a changed value, at times with a name twice, or deep, or no JSON at all."""
    for _ in range(data.draw(st.integers(1, 2))):
        value = changed(value, data)
    text = json.dumps(value)
    how = data.draw(st.sampled_from(["as it is"] * 6 + ["twice", "deep", "digits", "cut"]))
    if how == "twice":
        return text.replace("{", '{"format": 1, "format": 1, ', 1)
    broken = {"deep": DEEP, "digits": "1" * 5_000, "cut": text[: len(text) // 2]}
    return broken.get(how, text)


def parts_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def whole(header: str, body: bytes) -> bytes:
    encoded = header.encode(errors="surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + body


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in USES if kind != "curve"])
@FUZZED
@given(data=st.data())
def test_changed_headers(files: dict[str, bytes], kind: str, tmp_path: Path, data: st.DataObject) -> None:
    """Of safetensors: types, shapes and places of tensors, and the metadata."""
    header, body = parts_of(files[kind])
    read(kind, whole(changed_text(header, data), body), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in USES if kind != "curve"])
@FUZZED
@given(data=st.data())
def test_changed_metadata_under_a_right_checksum(
    files: dict[str, bytes], kind: str, tmp_path: Path, data: st.DataObject
) -> None:
    """A checksum keeps accidents out, and nobody who wants in."""
    metadata, tensors = parts_of(files[kind])[0]["__metadata__"], tensors_in(files[kind])
    inner = data.draw(st.sampled_from(sorted({"spec", "shape", "header"} & metadata.keys())))
    metadata[inner] = changed_text(json.loads(metadata[inner]), data).encode(errors="replace").decode()
    read(kind, sealed(kind, tensors, metadata, data), tmp_path)


TYPES = [torch.float64, torch.int64, torch.float16, torch.bool]


def sealed(kind: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str], data: st.DataObject) -> bytes:
    if kind != "classifier":
        metadata["version"] = data.draw(st.sampled_from(["1", "2", VERSION, VERSION]))
        metadata["checksum"] = checksum(tensors, metadata if metadata["version"] == VERSION else None)
    return bytes_of(tensors, metadata)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in USES if kind != "curve"])
@FUZZED
@given(data=st.data())
def test_changed_tensors_under_a_right_checksum(
    files: dict[str, bytes], kind: str, tmp_path: Path, data: st.DataObject
) -> None:
    metadata, tensors = parts_of(files[kind])[0]["__metadata__"], tensors_in(files[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        value = tensors[name]
        how = data.draw(st.sampled_from(["bytes", "bytes", "large", "shape", "type", "less", "empty", "gone"]))
        if how == "bytes" and value.numel():
            raw = value.flatten().view(torch.uint8)
            most = 1 if value.dtype == torch.bool else 255
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, most))
        elif how == "large" and value.dtype == torch.float32:
            # finite each, and not their product
            value.flatten()[:: data.draw(st.integers(1, 3))] = data.draw(st.sampled_from([3e38, -3e38, 1e-40]))
        elif how == "shape":
            tensors[name] = value.flatten()
        elif how == "type":
            tensors[name] = value.to(
                data.draw(st.sampled_from([torch.float64, torch.int64, torch.float16, torch.bool]))
            )
        elif how in ("less", "empty"):
            tensors[name] = value[: 0 if how == "empty" else -1].clone()
        elif len(tensors) > 1:
            del tensors[name]
    read(kind, sealed(kind, tensors, metadata, data), tmp_path)


@pytest.mark.slow
@FUZZED
@given(data=st.data())
def test_changed_curves(files: dict[str, bytes], tmp_path: Path, data: st.DataObject) -> None:
    read("curve", changed_text(json.loads(files["curve"]), data).encode(errors="replace"), tmp_path)


@settings(FUZZED, max_examples=20)
@given(size=st.integers(10**7, 10**12))
@example(size=2 * 10**8)
def test_what_is_only_declared_takes_no_memory(files: dict[str, bytes], tmp_path: Path, size: int) -> None:
    metadata, tensors = parts_of(files["classifier"])[0]["__metadata__"], tensors_in(files["classifier"])
    metadata["spec"] = json.dumps({**json.loads(metadata["spec"]), "hidden": size})
    assert not read("classifier", bytes_of(tensors, metadata), tmp_path)
