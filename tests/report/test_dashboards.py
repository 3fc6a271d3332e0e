"""Grafana's dashboards of the examples ask for metrics that a run and a gateway have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"libra_[a-z_]+")
_ENDS = ("_total", "_sum", "_count", "_bucket")


def metrics(dashboard: dict[str, Any]) -> set[str]:
    """Names in the queries, without what Prometheus adds to them."""
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in _NAME.findall(query)}
    return {next((name.removesuffix(end) for end in _ENDS if name.endswith(end)), name) for name in names}


@pytest.mark.parametrize(
    ("name", "sources"),
    [("run", "loop/metrics.py"), ("gateway", "serve/gateway/*.py")],
)
def test_each_metric_of_a_dashboard_exists(name: str, sources: str) -> None:
    dashboard = json.loads((ROOT / "examples" / f"grafana_{name}.json").read_text())
    text = "".join(source.read_text() for source in sorted((ROOT / "src" / "libra").glob(sources)))
    asked = metrics(dashboard)
    assert len(asked) > 4
    for metric in asked:
        short = re.sub(r"libra_gateway_(engine_)?", "", metric)
        assert metric in text or (name == "gateway" and re.search(rf'\b{short}\b["\s:]', text)), metric


@pytest.mark.parametrize("name", ["run", "gateway"])
def test_panels_have_a_place_of_their_own(name: str) -> None:
    dashboard = json.loads((ROOT / "examples" / f"grafana_{name}.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
