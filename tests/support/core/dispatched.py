"""What torch is asked for within a block."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Of these nothing is computed.
VIEWS = {"aten.detach.default", "aten.lift_fresh.default"}


class Dispatched(TorchDispatchMode):
    """Keeps the names of operations, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @property
    def computed(self) -> list[str]:
        return [each for each in self.found if each not in VIEWS]

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keyword: Any = None) -> Any:
        self.found.append(str(function))
        return function(*arguments, **(keyword or {}))
