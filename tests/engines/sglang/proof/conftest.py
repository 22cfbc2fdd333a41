from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.cpu_engine import SITE


@pytest.fixture
def proof(sgl_kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the self-check, which import SGLang's."""
    monkeypatch.syspath_prepend(str(SITE))
    from c2t_plugin.engines.sglang import ranks, startup
    from c2t_plugin.engines.sglang.proof import drafted, linear, packed, report

    return SimpleNamespace(drafted=drafted, linear=linear, packed=packed, report=report, ranks=ranks, startup=startup)
