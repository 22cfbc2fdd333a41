"""What the self-check's made-up requests leave in SGLang's own pools of keys and values, of one kind of layers and of
two."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")
pytestmark = pytest.mark.sglang

REQUESTS, WIDTH, SIZE = 3, 5, 512
# layers, the second with sliding windows where there are two pools
KINDS = ("one", "sliding", "linear")
PAGES = (1, 16)


class Served:
    """A worker whose target has pools and no model."""

    def __init__(self, kind: str, page: int, dtype: torch.dtype = torch.float32, modules: tuple[Any, ...] = ()) -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        shape: dict[str, Any] = {"dtype": dtype, "head_num": 2, "head_dim": 8, "device": "cpu"}
        if kind == "sliding":
            layers = {"swa_attention_layer_ids": [1], "full_attention_layer_ids": [0]}
            self.pool: Any = SWAKVPool(
                SIZE, SIZE // 2, page, **shape, **layers, token_to_kv_pool_class=MHATokenToKVPool
            )
            allocator: Any = SWATokenToKVPoolAllocator(SIZE, SIZE // 2, page, dtype, "cpu", self.pool, False)
            # so that slots of the two are not the same
            allocator.swa_attn_allocator.alloc(2 * page)
        else:
            self.pool = MHATokenToKVPool(SIZE, page, **shape, layer_num=2, enable_memory_saver=False)
            of = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator
            sizes = (SIZE,) if page == 1 else (SIZE, page)
            allocator = of(*sizes, dtype, "cpu", self.pool, False)
        self.allocator, self.table = allocator, torch.zeros(REQUESTS + 1, 128, dtype=torch.int32)
        self.speculative_num_draft_tokens = WIDTH
        self.c2t = SimpleNamespace(packing=SimpleNamespace(backend="fa3"))
        runner = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(full_kv_pool=self.pool) if kind == "linear" else self.pool,
            token_to_kv_pool_allocator=allocator,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            page_size=page,
            max_running_requests=None,
            model_config=SimpleNamespace(vocab_size=64),
            model=SimpleNamespace(modules=lambda: modules),
        )
        self.target_worker = SimpleNamespace(model_runner=runner)

    def places(self, layer: int, slots: Tensor) -> Tensor:
        """Where SGLang's layer has these slots."""
        slots = slots.long()
        sliding = layer == 1 and hasattr(self.pool, "swa_kv_pool")
        return self.allocator.translate_loc_from_full_to_swa(slots) if sliding else slots

    def room(self) -> tuple[int, ...]:
        parts = [getattr(self.allocator, f"{name}_attn_allocator", self.allocator) for name in ("full", "swa")]
        return tuple(part.available_size() for part in parts)

    def keys(self, layer: int) -> Tensor:
        """Every number of a layer, by slot."""
        both = self.pool.get_kv_buffer(layer)
        return torch.cat([each.float().flatten(1) for each in both], dim=1)


@pytest.fixture
def made_up(proof: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; the requests' tokens are not computed."""
    module = proof.made_up
    monkeypatch.setattr(module.MadeUp, "_compute_prefixes", lambda _: None)
    return module


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_no_packed_row_may_read_is_poisoned_in_each_layer(made_up: Any, kind: str, page: int):
    served = Served(kind, page)
    made, length = made_up.MadeUp(served, REQUESTS), 0
    assert made.requests == REQUESTS and made.poison(math.nan)
    for layer in range(2):
        found = served.keys(layer)
        expected = torch.zeros(len(found), dtype=torch.bool)
        expected[:page] = True
        for request, prefix in enumerate(made.prefixes.tolist()):
            row = served.table[request + 1]
            length = int((row > 0).sum())
            assert length >= max(made_up.PREFIXES) + 2 * WIDTH
            expected[served.places(layer, row[prefix:length])] = True
        # the same in all numbers of a slot: NaN, or what was there before
        assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == expected.tolist()
        assert int(expected.sum()) == page + REQUESTS * length - int(made.prefixes.sum())
    assert made.poison(0.0) and not any(bool(served.keys(layer).any()) for layer in range(2))
    made.close()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_it_is_left(made_up: Any, kind: str, page: int):
    served = Served(kind, page)
    before = served.room()
    made = made_up.MadeUp(served, REQUESTS)
    assert served.room() < before
    made.poison(math.nan)
    made.close()
    assert served.room() == before and not served.table.any()
    assert not any(bool(served.keys(layer).any()) for layer in range(2))
    if kind == "sliding":
        assert not served.pool.full_to_swa_index_mapping[:-1].any()


def test_a_ring_of_each_request_is_not_made_up(made_up: Any):
    served = Served("sliding", 1)
    served.allocator._swa_req_ring = True
    with pytest.raises(MemoryError, match="ring of each request"):
        made_up.MadeUp(served, REQUESTS)


class FusedMoE:
    """A layer of experts, by name."""


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("modules", "finite"), [((), False), ((FusedMoE(),), True)])
def test_a_router_gets_numbers_from_a_cache_of_8_bits_too(
    made_up: Any, dtype: torch.dtype, modules: tuple[Any, ...], finite: bool
):
    """And every other model NaN."""
    served = Served("sliding", 1, dtype, modules)
    made = made_up.MadeUp(served, REQUESTS)
    assert made.poison(made.poisons()[0])
    for layer in range(2):
        page_0 = served.keys(layer)[0]
        assert bool(page_0.isfinite().all()) == finite and page_0.isnan().all().item() != finite
        assert not finite or bool((page_0 > 100).all())
    made.close()
