"""Servers that learn their paces together."""

from __future__ import annotations

import pytest

from libra.live.pace import Pace
from libra.live.server import LiveServer, ServerPaces
from libra.live.work import Took


def test_servers_of_two_paces_are_told_apart_after_some_turns() -> None:
    paces = ServerPaces()
    servers = [LiveServer(id, 0, 1000, Pace(like=paces.of_kind(0))) for id in ("quick", "slow", "new")]
    changes = [
        paces.observe(server, 100, Took(seconds, 500.0), servers)
        for _ in range(64)
        for server, seconds in ((servers[0], 1.0), (servers[1], 3.0))
    ]
    assert sum(changes) == 1 and changes[63]
    quick, slow, new = (it.pace_class for it in servers)
    assert quick == 0 < new < slow  # a server without turns is in between
    assert paces.of_kind(1).token_seconds(500.0) == pytest.approx(0.02, rel=0.01)  # a bucket without turns: as all
