"""In the interpreter a launch that leaves its tensors is seen: kernel tests are under that watch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.support.kernels.bounds import OutOfBoundsError
from tests.support.kernels.interpreted import INTERPRET

pytestmark = pytest.mark.skipif(not INTERPRET, reason="on a GPU memory outside may be mapped")


@triton.jit
def shift(p_from, p_to, n, OFFSET: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr):
    b_at = tl.arange(0, BLOCK)
    b_x = tl.load(p_from + b_at + (0 if STORE else OFFSET), mask=b_at < n, other=0.0)
    tl.store(p_to + b_at + (OFFSET if STORE else 0), b_x, mask=b_at < n)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("offset", [-1, 1])
def test_one_element_outside_is_seen(offset: int, store: bool):
    """Of views within larger storages, whose neighbours are there to be read."""
    source, target = torch.arange(10.0)[1:6], torch.zeros(10)[1:6]
    shift[(1,)](source, target, 5, 0, store, 8)
    assert torch.equal(source, target)
    with pytest.raises(Exception, match="1 of 5 addresses lie in no argument") as error:
        shift[(1,)](source, target, 5, offset, store, 8)
    assert isinstance(error.value, OutOfBoundsError) or isinstance(error.value.__cause__, OutOfBoundsError)
