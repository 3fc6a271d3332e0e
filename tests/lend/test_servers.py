"""What is told of servers when a run ends, and on which terms their devices are lent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fakes.workers import MadeLauncher

from libra.backends.transport.engine_messages import LoanState, StartServer
from libra.backends.transport.messages import Stop
from libra.lend.backend.borrowing import Borrowing
from libra.lend.backend.lenders import LenderLauncher
from libra.lend.backend.servers import TracedServers
from libra.lend.backend.terms import terms_of
from libra.lend.lending_config import LendingConfig
from libra.lend.records.served import ServedRequest

CONFIG = LendingConfig.model_validate(
    {
        "servers": 2,
        "server": {"traffic": "traffic.csv"},
        "ttft": 1.0,
        "tpot": 0.1,
        "use": 0.8,
        "quiet": 2.0,
        "engine": {"max_model_len": 64, "max_num_seqs": 4, "kv_tokens": 256},
    }
)


@pytest.fixture
def servers(tmp_path: Path) -> TracedServers:
    return TracedServers(MadeLauncher(), CONFIG, tmp_path, (4, 5), 0.3, "float32", 0, lambda line: None)


def test_terms_are_those_of_the_configuration(servers: TracedServers, tmp_path: Path) -> None:
    loan = servers.loan(1, "agent")
    assert (Path(loan.device), loan.record) == (tmp_path / "device-1", str(tmp_path / "lending-1.jsonl"))
    terms = terms_of(loan)
    assert (terms.pace, terms.ttft, terms.sharing) == (pytest.approx(0.08), pytest.approx(0.8), "gate")
    assert (terms.recall.quiet, terms.recall.most_quiet, terms.envelope.rate) == (2.0, 32.0, 100.0)


async def test_what_lending_gave_and_cost(servers: TracedServers, tmp_path: Path) -> None:
    """Of both servers together; an engine that never reported counts for nothing. Of agents' users nobody tells."""
    for number, ttft in enumerate((0.5, 1.5)):
        row = ServedRequest(0, 0.0, 10, 5, ttft, 0.05)
        (tmp_path / f"served-{number}.jsonl").write_text(row.to_json() + "\n")
        (tmp_path / f"device-{number}").touch()
    loans = [LoanState("", 4.0, 3.0, 10, 1), None, LoanState("", 6.0, 3.0, 20, 0)]
    found = await Borrowing("gate", servers, None).end(loans, recalls=7)
    assert found is not None and found.users is not None
    assert (found.rule, found.share, found.grants, found.overstayed, found.recalls) == ("gate", 0.6, 30, 1, 7)
    assert (found.users.requests, found.users.missed) == (2, 1)
    assert "had the lent devices for 60 % of the time it wanted them; 1 of 2 users' requests missed" in found.words
    told = await Borrowing("gate", None, cast(LenderLauncher, object())).end(loans, recalls=7)
    assert told == replace(found, users=None)
    assert told.words == "lending (gate): rollout had the lent devices for 60 % of the time it wanted them"
    assert await Borrowing("off", None, None).end([], recalls=0) is None
    assert not list(tmp_path.glob("device-*"))


async def test_a_server_is_begun_and_ended_and_told_nothing_else(servers: TracedServers) -> None:
    """It is its owner's: one that goes away is not started again, and its weights are its own."""
    told: list[str] = []
    servers.say = told.append
    launcher = servers.launcher
    assert isinstance(launcher, MadeLauncher)
    await servers.start()
    first, second = (launcher.workers[f"server-{number}"] for number in range(2))
    first.die()
    while not told:
        await asyncio.sleep(0)
    assert told[0].startswith("server-0 is gone, and its device is not lent: ")
    await servers.end()
    assert launcher.workers == {"server-0": first, "server-1": second}
    assert [type(order) for order in first.orders] == [StartServer]
    assert [type(order) for order in second.orders] == [StartServer, Stop]


async def test_without_requests_there_is_nothing_to_tell(servers: TracedServers) -> None:
    assert await servers.end() is None


async def test_a_resumed_run_goes_on_with_the_traffic_where_its_servers_left_it(
    servers: TracedServers, tmp_path: Path
) -> None:
    rows = [ServedRequest(number, 0.0, 10, 5, 0.1, 0.05) for number in (0, 7, 3)]
    (tmp_path / "served-1.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    launcher = servers.launcher
    assert isinstance(launcher, MadeLauncher)
    await servers.start()
    [first], [second] = (launcher.workers[f"server-{number}"].orders for number in range(2))
    assert isinstance(first, StartServer) and isinstance(second, StartServer)
    assert (first.first, second.first) == (0, 8)
    await servers.end()
