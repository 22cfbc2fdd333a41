"""config.json of a checkpoint, which may be anybody's: one line for whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from c2t_plugin.engines.checkpoints import read_config
from c2t_plugin.errors import ConfigError

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
