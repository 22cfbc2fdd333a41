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
    from c2t_plugin.engines.sglang.proof import drafted, linear, made_up, packed, report

    parts = {"drafted": drafted, "linear": linear, "made_up": made_up, "packed": packed, "report": report}
    return SimpleNamespace(**parts, ranks=ranks, startup=startup)
