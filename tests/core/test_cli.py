"""The c2t command: quick, lazy, and one line for an error that a user can act on."""

from __future__ import annotations

import errno
import subprocess
import sys
from types import SimpleNamespace

import pytest

from c2t_plugin import cli
from c2t_plugin.errors import C2TError


def use(monkeypatch: pytest.MonkeyPatch, main: object) -> None:
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=main))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"c2t {command}" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if name not in text] == []


def test_help_imports_no_library() -> None:
    """In a process of its own: this one has imported torch already."""
    probe = "import sys; from c2t_plugin import cli; cli._parser().format_help(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_arguments_and_status_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    use(monkeypatch, lambda argv: seen.append(argv) or 5)
    assert cli.main(["fit", "--seed", "3", "--", "-x"]) == 5
    assert seen == [["--seed", "3", "--", "-x"]]


def test_our_error_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise C2TError("no traces in x; run `c2t collect`")

    use(monkeypatch, fail)
    assert cli.main(["fit"]) == 2
    assert capsys.readouterr().err == "c2t fit: no traces in x; run `c2t collect`\n"


def test_so_is_what_the_system_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(argv: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "out.traces")

    use(monkeypatch, fail)
    assert cli.main(["collect"]) == 2
    assert capsys.readouterr().err == "c2t collect: [Errno 28] No space left on device: 'out.traces'\n"


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers.models")

    use(monkeypatch, fail)
    assert cli.main(["collect"]) == 2
    assert "pip install 'c2t-plugin[train]'" in capsys.readouterr().err


def test_a_missing_module_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'c2t_plugin.lost'", name="c2t_plugin.lost")

    use(monkeypatch, fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["fit"])


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["fly"])
    assert stop.value.code == 2
