"""The series that Grafana's dashboards of the examples ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_EXAMPLES = Path(__file__).parents[2] / "examples"


def dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_EXAMPLES / f"grafana_{name}.json").read_text(encoding="utf-8"))
    return found


def asked_by_dashboard(name: str) -> set[str]:
    """Names in its queries, as a scrape must have them."""
    queries = [target["expr"] for panel in dashboard(name)["panels"] for target in panel["targets"]]
    return {series for query in queries for series in re.findall(r"libra_[a-z_]+", query)}
