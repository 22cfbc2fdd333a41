"""What the tests of both engines' Grafana dashboards look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def dashboard_of(root: Path, name: str) -> dict[str, Any]:
    """A dashboard of docs/."""
    found: dict[str, Any] = json.loads((root / "docs" / name).read_text(encoding="utf-8"))
    return found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """All that it asks Prometheus."""
    asked = [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return asked + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def check_panels(dashboard: dict[str, Any]) -> None:
    """Each has a place and a number of its own, and what it asks is closed."""
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(places)) == len(set(numbers)) == len(dashboard["panels"])
    assert all(text.count("(") == text.count(")") for text in expressions(dashboard))
