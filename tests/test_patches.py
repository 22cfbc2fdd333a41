"""The ledger of engine patches and the patch files say the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

REQUIRED = {"file", "why", "remove_when"}


def mismatches(entries: list[dict[str, str]], files: set[str]) -> list[str]:
    listed = [entry.get("file", "") for entry in entries]
    found = [f"{name}: no file" for name in listed if name not in files]
    found += [f"{name}: not in the ledger" for name in sorted(files - set(listed))]
    found += [f"{name}: listed twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    found += [f"{entry.get('file')}: keys {sorted(entry)}" for entry in entries if set(entry) != REQUIRED]
    found += [f"{entry.get('file')}: empty value" for entry in entries if not all(entry.values())]
    return found


def test_ledger_equals_files(root: Path) -> None:
    entries = tomllib.loads((root / "patches/ledger.toml").read_text(encoding="utf-8")).get("patch", [])
    files = {str(path.relative_to(root / "patches")) for path in (root / "patches").rglob("*.patch")}
    assert mismatches(entries, files) == []


ENTRY = {"file": "sglang/0.5.23/0001-x.patch", "why": "because", "remove_when": "then"}


@pytest.mark.parametrize(
    ("entries", "files"),
    [
        ([], {ENTRY["file"]}),
        ([ENTRY], set()),
        ([ENTRY, ENTRY], {ENTRY["file"]}),
        ([{**ENTRY, "why": ""}], {ENTRY["file"]}),
        ([{"file": ENTRY["file"]}], {ENTRY["file"]}),
    ],
    ids=["file without entry", "entry without file", "twice", "no reason", "no end date"],
)
def test_a_mismatch_is_seen(entries: list[dict[str, str]], files: set[str]) -> None:
    assert mismatches(entries, files)


def test_a_matching_ledger_passes() -> None:
    assert mismatches([ENTRY], {ENTRY["file"]}) == []
