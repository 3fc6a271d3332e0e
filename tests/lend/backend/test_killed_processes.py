"""kill -9 of the processes that share a device, in each of their states: the others go on, and a new one takes over.

The server, the agent and the borrower are processes here, and so is the page between them; they have no models.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.device_page import DevicePage, EngineFacts, LendingError
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.serving_token import ServingToken
from libra.lend.gate import ServingView
from libra.lend.quota import KVView

CHAT = EngineFacts("chat", 2048, 64, 128)
GRANT = 0.5  # seconds

# Each comes to its state, says so and stays there.
SCRIPTS = {
    "server": """
import math, sys, time
from pathlib import Path
from libra.lend.backend.device_page import EngineFacts
from libra.lend.backend.serving_token import ServingToken
from libra.lend.gate import IDLE, ServingView
from libra.lend.quota import KVView
state, path = sys.argv[1], Path(sys.argv[2])
token = ServingToken(path, EngineFacts("chat", 2048, 64, 128))
busy = ServingView(live=3, waiting=1, due=time.monotonic() + 0.05)
if state != "idle":
    token.publish(busy, KVView(4096, 64, 512, 1024), token.pace)
if state == "stepping":
    token.acquire()
if state == "writing":
    print("there", flush=True)
    while True:
        token.publish(busy, KVView(), 0.1)
print("there", flush=True)
if state == "waiting":
    token.acquire()
time.sleep(600)
""",
    "borrower": """
import sys, time
from pathlib import Path
from libra.lend.backend.borrower_token import BorrowerToken
state, path, grant = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
if state == "starting":
    print("there", flush=True)
    time.sleep(600)
token = BorrowerToken(path, 0.1)
token.wish(0.02)
if state in ("memory", "granted"):
    token.say_kv(asked=4096, held=2048)
if state in ("granted", "overstaying"):
    assert token.try_take(time.monotonic() + (grant if state == "granted" else 0.0))
print("there", flush=True)
time.sleep(600)
""",
    "agent": """
import sys, time
from pathlib import Path
from libra.lend.backend.lender_token import LenderToken
state, path, lease = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
token = LenderToken(path)
if state == "lending":
    token.extend(time.monotonic() + lease)
print("there", flush=True)
time.sleep(600)
""",
}


@contextmanager
def process(who: str, state: str, device: Path) -> Iterator[subprocess.Popen[str]]:
    """It is in that state."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPTS[who], state, str(device), str(GRANT)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize("state", ["idle", "stepping", "waiting", "writing"])
def test_a_server_that_is_killed_leaves_the_device_to_its_borrower_and_to_the_next_server(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.lend.backend.device_page._PATIENCE", 0.05)
    device = tmp_path / "device"
    ServingToken(device, CHAT).close()
    borrower = BorrowerToken(device, 0.1)
    if state == "waiting":
        assert borrower.try_take(time.monotonic() + 600)
    with process("server", state, device) as server:
        while state == "waiting" and not borrower.look().wants:
            pass
        taken = state != "waiting" and borrower.try_take(time.monotonic() + GRANT)
        assert taken == (state in ("idle", "writing"))
        if taken:
            borrower.release()
        kill(server)
    try:
        seen = borrower.look().view
        assert seen.live == (0 if state == "idle" else 3)  # what it said last: its agent knows that it is gone
    except LendingError as error:
        assert state == "writing" and "ended while it wrote; start the server again" in str(error)
    assert state == "waiting" or borrower.try_take(time.monotonic() + GRANT)  # nobody waits for the dead
    borrower.release()
    again = ServingToken(device, CHAT)
    assert borrower.look().view.live == 0 and not borrower.look().wants
    again.publish(ServingView(1, 1, math.inf), KVView(), again.pace)
    assert again.acquire() and not again.lent and again.fenced == 0 and again.pace == 0.1
    assert not borrower.try_take(time.monotonic() + GRANT)
    again.release()
    borrower.close()


@pytest.mark.parametrize("state", ["starting", "idle", "memory", "granted", "overstaying"])
def test_a_borrower_that_is_killed_is_not_waited_for_and_another_one_borrows(tmp_path: Path, state: str) -> None:
    device = tmp_path / "device"
    serving, lender = ServingToken(device, CHAT), LenderToken(device)
    lender.extend(math.inf)
    with process("borrower", state, device) as borrower:
        if state != "starting":
            with pytest.raises(LendingError, match="another borrower has this device"):
                BorrowerToken(device, 0.1)
        kill(borrower)
        serving.publish(ServingView(2, 1, math.inf), KVView(), 0.1)
        assert serving.acquire() and serving.fenced == 0
        serving.release()
    lender.borrower_gone()
    assert (serving.kv_asked, serving.kv_held) == (0, 0)
    another = BorrowerToken(device, 0.1)
    assert another.try_take(time.monotonic() + GRANT)
    another.release()
    another.close()


@pytest.mark.parametrize("state", ["starting", "lending"])
def test_a_loan_ends_by_itself_after_its_agent_was_killed_and_another_agent_lends(tmp_path: Path, state: str) -> None:
    device = tmp_path / "device"
    serving, borrower = ServingToken(device, CHAT), BorrowerToken(device, 0.1)
    with process("agent", state, device) as agent:
        with pytest.raises(LendingError, match="another agent lends this device"):
            LenderToken(device)
        kill(agent)
        assert borrower.lease <= time.monotonic() + GRANT
        while serving.leased:
            pass
    another = LenderToken(device)
    another.extend(time.monotonic() + 600)
    assert serving.leased
    another.close()
    borrower.close()


def test_memory_that_nobody_has_any_more_is_servings_again_without_an_agent(tmp_path: Path) -> None:
    """Agent and borrower are killed: nobody is left to say so."""
    device = tmp_path / "device"
    serving = ServingToken(device, CHAT)
    with process("agent", "lending", device) as agent, process("borrower", "memory", device) as borrower:
        assert (serving.kv_asked, serving.kv_held) == (4096, 2048)
        kill(agent)
        while serving.leased:
            pass
        assert (serving.kv_asked, serving.kv_held) == (4096, 2048)  # it is there, and has its pages
        kill(borrower)
        assert (serving.kv_asked, serving.kv_held) == (0, 0)


def test_what_a_page_says_from_before_the_machine_was_started_is_forgotten(tmp_path: Path) -> None:
    """Its times are of a clock that began again: a loan of then would be one for days."""
    device = tmp_path / "device"
    ServingToken(device, CHAT).close()
    lender, borrower = LenderToken(device), BorrowerToken(device, 0.1)
    lender.extend(1e9)
    borrower.wish(0.02)
    page = DevicePage(device, create=False)
    page.bytes[16:24] = b"\x00" * 8  # as another start of the machine would have left it
    for kind in (LenderToken, lambda path: BorrowerToken(path, 0.1)):
        with pytest.raises(LendingError, match="no server has run since this machine was started; start the server"):
            kind(device)
    serving = ServingToken(device, CHAT)
    assert not serving.leased and serving.pace == 0.0 and not serving.can_spare()
