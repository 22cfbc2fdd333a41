"""Numbers of the device, on the host so late that nobody waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Steps later a step's numbers are read. An engine prepares a step while the one before may still run, but has the
# results of the one before that.
LAG = 2
# A step's results come one step after it was begun. Until then what was copied for it stands.
ROOM = LAG + 1


class Readback:
    """Tensors of one dtype, in the order in which they were written, of which LAG may be unread.

    They are read at a fixed distance and not when they happen to be there: ranks would see different ones.
    """

    def __init__(self, device: torch.device | str, capacity: int = 1, dtype: torch.dtype = torch.int64) -> None:
        """device: of the tensors. capacity: elements of the largest one."""
        device = torch.device(device)
        waits = device.type != "cpu"
        self._host = torch.zeros((ROOM, capacity), dtype=dtype, pin_memory=waits)
        self._copied: list[Any] = [torch.get_device_module(device).Event() for _ in range(ROOM)] if waits else []
        self._shapes: list[torch.Size] = [torch.Size()] * ROOM
        self._written = self._read = 0

    @property
    def full(self) -> bool:
        """Whether the oldest has to be read before another is written."""
        return self._written - self._read == LAG

    def write(self, values: Tensor) -> Tensor:
        """Starts a copy, and returns it. It means nothing before what the device is told by now has been done, and what
        is written ROOM times later takes its place."""
        place = self._written % ROOM
        copied = self._host[place, : values.numel()]
        copied.copy_(values.reshape(-1), non_blocking=True)
        self._shapes[place] = values.shape
        if self._copied:
            self._copied[place].record()
        self._written += 1
        return copied.view(values.shape)

    def read(self) -> Tensor:
        """The oldest unread one."""
        place = self._read % ROOM
        if self._copied:
            # Not `query`: ranks would see different answers. LAG steps later there is nothing left to wait for.
            self._copied[place].synchronize()
        self._read += 1
        shape = self._shapes[place]
        return self._host[place, : shape.numel()].view(shape).clone()
