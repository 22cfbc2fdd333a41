"""What the adapter reads off a draft's config.json, where that says nothing sensible."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from c2t_plugin.engines.sglang.checkpoints import check_draft_loop, detect_base
from c2t_plugin.errors import ConfigError


@pytest.mark.parametrize("architectures", ["LlamaForCausalLM", 3, {"a": 1}, [3], [None], [["Llama"]]])
def test_architectures_that_are_no_list_of_names_are_one_line(tmp_path: Path, architectures: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    with pytest.raises(ConfigError, match="no list of names"):
        detect_base(str(tmp_path))
    with pytest.raises(ConfigError, match="no list of names"):
        check_draft_loop(SimpleNamespace(model_path=str(tmp_path)), "EAGLE")


@pytest.mark.parametrize("architectures", [None, [], 0, ""])
def test_none_at_all_are_said(tmp_path: Path, architectures: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    with pytest.raises(ConfigError, match="names no architecture"):
        detect_base(str(tmp_path))
