"""The shapes of both attention kernels, by hand; and that the page has what the program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

from benchmarks.operations.attention_shapes import DIM, HEADS, KV_HEADS, ours, printed, stock  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "internals.md"


@pytest.mark.parametrize(("capability", "tile"), [((9, 0), 128), ((10, 0), 64)])
def test_sglangs_kernel_asks_for_the_prefix_once_for_each_query_head(capability: tuple[int, int], tile: int):
    found = stock(capability, 64, 2048, 5)
    assert (found.programs, found.tile, found.used) == (64 * HEADS, tile, 5)
    assert found.keys == 64 * HEADS * 2053 and found.keys == HEADS // KV_HEADS * found.least
    assert found.megabytes == pytest.approx(64 * HEADS * 2053 * 2 * DIM * 2 / 1e6)


def test_ours_asks_for_it_once_for_each_key_value_head():
    found = ours(64, 2048, 5)
    assert (found.programs, found.tile, found.used, found.keys) == (64 * KV_HEADS, 32, 20, found.least)
    # four tiles of one request's 256 rows
    assert (ours(64, 2048, 64).programs, ours(64, 2048, 64).keys) == (64 * KV_HEADS * 4, 4 * ours(64, 2048, 64).least)


def test_a_share_of_the_prefix_is_a_program_if_it_has_a_key():
    # 32 shares of at least 128 keys: 16 have some
    assert ours(1, 2048, 5).programs == KV_HEADS * 16


def test_the_page_has_the_table():
    assert printed() in PAGE.read_text(encoding="utf-8")
