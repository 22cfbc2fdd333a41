"""config.json of a checkpoint, which may be anybody's: one line for whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from c2t_plugin.classifier import load_classifier
from c2t_plugin.config import C2TConfig
from c2t_plugin.engines.checkpoints import find_classifier, read_config
from c2t_plugin.errors import C2TError, ConfigError
from c2t_plugin.planner.curve_file import read_curve
from c2t_plugin.traces.file import load_traces

HOSTILE = {
    "deep": (b"[" * 100_000, "maximum recursion"),
    "many digits": (b'{"vocab_size": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    "no text": (b"\xff\xfe", "not readable"),
    "a list": (b"[]", "must hold a JSON object"),
    "empty": (b"", "not valid JSON"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_config(str(tmp_path))
    assert "\n" not in str(error.value)


def test_what_an_engine_reads_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "vocab_size": 2}')
    assert read_config(str(tmp_path)) == {"vocab_size": 2}


# The system refuses it, and Path raises.
LONG = "x" * 300
READERS: dict[str, Callable[[], object]] = {
    "classifier": lambda: load_classifier(LONG),
    "traces": lambda: load_traces(LONG),
    "cost curve": lambda: read_curve(Path(LONG)),
    "checkpoint": lambda: read_config(f"./{LONG}"),
    "named classifier": lambda: find_classifier(C2TConfig(classifier=LONG), "eagle3", None),
    "draft": lambda: find_classifier(C2TConfig(), "eagle3", f"/{LONG}/y"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_is_too_long_is_one_line(reader: str) -> None:
    with pytest.raises(C2TError) as error:
        READERS[reader]()
    assert "\n" not in str(error.value)
