"""The stub's slot bookkeeping, seed hash and import guard, on examples worked out by hand."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from benchmarks.cpu_engine import SITE, cpu_engine_env


def table() -> torch.Tensor:
    """Cell (r, c) holds 100 r + c."""
    return (torch.arange(4)[:, None] * 100 + torch.arange(12)).to(torch.int32)


def test_assign_req_to_token_pool(sgl_kernel: ModuleType) -> None:
    cells, start, end = table(), torch.tensor([3, 0, 10]), torch.tensor([5, 0, 12])
    new = torch.tensor([7, 8, 9, 6])
    sgl_kernel.assign_req_to_token_pool_cpu(torch.tensor([2, 1, 0]), cells, start.int(), end.int(), new, 12)
    expected = table()
    expected[2, 3:5] = torch.tensor([7, 8], dtype=torch.int32)
    expected[0, 10:12] = torch.tensor([9, 6], dtype=torch.int32)
    assert torch.equal(cells, expected)


def test_assign_extend_cache_locs(sgl_kernel: ModuleType) -> None:
    out = torch.full((7,), -1)
    rows, start, end = torch.tensor([3, 0]), torch.tensor([2, 0]), torch.tensor([5, 2])
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table(), start, end, out, 12)
    assert out.tolist() == [302, 303, 304, 0, 1, -1, -1]


def test_assign_draft_cache_locs(sgl_kernel: ModuleType) -> None:
    out = torch.empty(8, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([1, 3]), table(), torch.tensor([5, 2]), out, 12, topk=2, num_steps=2
    )
    assert out.tolist() == [105, 106, 107, 108, 302, 303, 304, 305]


def test_draft_metadata_of_branches(sgl_kernel: ModuleType) -> None:
    """Row b * topk + t is the prefix and then the branch's own slots."""
    rows = sgl_kernel.build_draft_decode_metadata_cpu(
        table(), torch.tensor([1, 3]), torch.tensor([4, 1]), topk=2, num_steps=3, pool_len=12
    )
    assert rows.shape == (4, 12)
    assert rows[0, :7].tolist() == [100, 101, 102, 103, 104, 105, 106]
    assert rows[1, :7].tolist() == [100, 101, 102, 103, 107, 108, 109]
    assert rows[2, :4].tolist() == [300, 301, 302, 303]
    assert rows[3, :4].tolist() == [300, 304, 305, 306]


def test_draft_metadata_of_a_chain(sgl_kernel: ModuleType) -> None:
    rows = sgl_kernel.build_draft_decode_metadata_cpu(
        table(), torch.tensor([2]), torch.tensor([3]), topk=1, num_steps=4, pool_len=12
    )
    assert rows[0, :7].tolist() == [200, 201, 202, 203, 204, 205, 206]


@pytest.mark.parametrize(("target", "source"), [([5, 2], [1, 5]), ([1, 2, 3], [0, 1, 2])])
def test_copy_of_kv_slots_may_overlap(sgl_kernel: ModuleType, target: list[int], source: list[int]) -> None:
    buffers = [torch.randn(8, 2, 4), torch.randn(8, 3).to(torch.bfloat16)]
    expected = [buffer.clone() for buffer in buffers]
    for buffer in expected:
        buffer[target] = buffer[source]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers]),
        torch.tensor(target),
        torch.tensor(source),
    )
    assert all(torch.equal(got, wanted) for got, wanted in zip(buffers, expected, strict=True))


def test_slots_refuse_wrong_types(sgl_kernel: ModuleType) -> None:
    wide = table().to(torch.int64)
    with pytest.raises(RuntimeError, match=r"req_to_token: got dtype torch\.int64, expected torch\.int32"):
        sgl_kernel.assign_extend_cache_locs_cpu(
            torch.tensor([0]), wide, torch.tensor([0]), torch.tensor([1]), torch.zeros(1, dtype=torch.int64), 12
        )


def test_slots_refuse_a_short_output(sgl_kernel: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="got 1 elements for 3 cells"):
        sgl_kernel.assign_extend_cache_locs_cpu(
            torch.tensor([0]), table(), torch.tensor([0]), torch.tensor([3]), torch.zeros(1, dtype=torch.int64), 12
        )


def murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3 (x86, 32 bit) over whole 4-byte blocks."""
    h = seed
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        h ^= k * 0x1B873593 & 0xFFFFFFFF
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


@pytest.mark.parametrize(
    ("data", "seed", "known"), [(b"", 1, 0x514E28B7), (b"\0\0\0\0", 0, 0x2362F9DE), (b"test", 0, 0xBA6BD213)]
)
def test_the_reference_hash_has_the_published_values(data: bytes, seed: int, known: int) -> None:
    assert murmur3(data, seed) == known


def test_seed_hash(sgl_kernel: ModuleType) -> None:
    seeds, positions, columns = [3, 2**40 + 11], [7, 123456], [0, 1, 9]
    got = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions, dtype=torch.uint64), torch.tensor(columns)
    )
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert got.dtype == torch.uint32
    assert got.tolist() == expected


@pytest.mark.slow
def test_stub_refuses_unless_asked_for() -> None:
    env = cpu_engine_env({**os.environ, "PYTHONPATH": ""}) | {"SGLANG_USE_CPU_ENGINE": "0"}
    done = subprocess.run([sys.executable, "-c", "import sgl_kernel"], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: this sgl_kernel is C2T's stub" in done.stderr.splitlines()[-1]


def test_stub_refuses_beside_cuda(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ImportError, match="CUDA is available here"):
        sys.modules["sgl_kernel._guard"].refuse_unless_asked_for()


def test_environment_of_the_cpu_engine() -> None:
    given = {"HOME": "/h", "PYTHONPATH": os.pathsep.join(["/a", str(SITE), "/b"]), "OMP_NUM_THREADS": "3"}
    env = cpu_engine_env(given)
    assert env["PYTHONPATH"] == os.pathsep.join([str(SITE), "/a", "/b"])
    assert (env["HOME"], env["OMP_NUM_THREADS"]) == ("/h", "3")
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert cpu_engine_env(env) == env
    bare = cpu_engine_env({})
    assert (bare["OMP_NUM_THREADS"], bare["TORCH_COMPILE_DISABLE"]) == ("1", "1")
