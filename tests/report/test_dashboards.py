"""Grafana's dashboards of the examples. That their metrics exist is in the tests of /metrics of a run and a gateway."""

from __future__ import annotations

import pytest
from fakes.dashboards import asked_by_dashboard, dashboard


@pytest.mark.parametrize("name", ["run", "gateway"])
def test_panels_ask_and_have_a_place_of_their_own(name: str) -> None:
    panels = dashboard(name)["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels}) == len(places)
    assert len(asked_by_dashboard(name)) > 4
