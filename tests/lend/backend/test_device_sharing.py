"""The token between two real processes: one waits for the other, but never longer than its grant."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libra.lend.backend.borrower_token import BorrowerToken, FencedError
from libra.lend.backend.device_page import LendingError, ServingStep
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.serving_token import ServingToken
from libra.lend.gate import ServingView
from libra.lend.quota import KVView

BORROWER = """
import sys, time
from pathlib import Path
from libra.lend.backend.borrower_token import BorrowerToken
token = BorrowerToken(Path(sys.argv[1]), 0.1)
expires = time.monotonic() + float(sys.argv[2])
assert token.try_take(expires)
print(expires, flush=True)
time.sleep(600)
"""


@contextmanager
def borrower_that_holds(path: Path, seconds: float) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """A process that has taken the device; and when its grant expires."""
    process = subprocess.Popen(
        [sys.executable, "-c", BORROWER, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, float(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_both_sides_see_what_the_other_says(tmp_path: Path) -> None:
    serving = ServingToken(tmp_path / "device")
    borrower = BorrowerToken(tmp_path / "device", 0.1)
    assert borrower.look().view == ServingView(0, 0, math.inf)
    view = ServingView(live=7, waiting=2, due=3.5, oldest=1.25, queued=900, context=4000, steps=5, came=70)
    assert serving.pace == 0.1
    kv = KVView(capacity=900, reserve=100, need=300, ceded=200)
    serving.publish(view, kv, 0.1)
    said = borrower.look()
    assert (said.view, said.kv, said.pace, said.wants, said.pid) == (view, kv, 0.1, False, os.getpid())
    borrower.say_kv(asked=250, held=200)
    assert (serving.kv_asked, serving.kv_held) == (250, 200)
    serving.acquire()
    assert not borrower.try_take(time.monotonic() + 1)
    for number in range(3):
        serving.note(ServingStep(number, 10, 100, 0.5))
        serving.release()
    assert borrower.steps() == [ServingStep(number, 10, 100, 0.5) for number in range(3)]
    serving.note(step := ServingStep(4, 0, 90, 0.25, ended=12.5, margin=-0.125))
    serving.release()
    assert borrower.steps() == [step]
    assert serving.due == 3.5
    serving.publish(view, kv, 0.0)
    assert serving.due == math.inf  # nobody asks for a pace
    assert borrower.steps() == []
    for number in range(200):
        serving.note(ServingStep(number, 0, 0, 0.1))
        serving.release()
    assert [step.sequences for step in borrower.steps()] == list(range(137, 200))  # what was overwritten is not told
    assert borrower.try_take(time.monotonic() + 1)
    borrower.release()
    serving.acquire()
    assert not serving.lent
    serving.release()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP, None])
def test_serving_waits_until_the_grant_is_over_and_no_longer(tmp_path: Path, fate: signal.Signals | None) -> None:
    serving = ServingToken(tmp_path / "device")
    with borrower_that_holds(tmp_path / "device", 2.0) as (process, expires):
        if fate is not None:
            process.send_signal(fate)
        serving.acquire()
        now = time.monotonic()
        if fate is signal.SIGKILL:
            assert serving.fenced == 0 and now < expires  # its lock ends with it
        else:
            assert serving.fenced == 1 and now >= expires
            began = time.monotonic()
            serving.release()
            serving.acquire()  # not waited for again
            assert serving.fenced == 2 and time.monotonic() - began < 1.0
        serving.release()


def test_serving_goes_on_in_the_moment_in_which_the_grant_is_over(tmp_path: Path) -> None:
    """On a clock of its own, of a millisecond a look: how long the machine takes does not count."""
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    serving = ServingToken(tmp_path / "device", clock=clock)
    borrower = BorrowerToken(tmp_path / "device", 0.1)
    for length in (0.05, 0.2):
        expires = now + length
        assert borrower.try_take(expires)
        assert serving.acquire() and serving.lent
        assert expires <= now < expires + 0.003
        serving.release()
        with pytest.raises(FencedError):
            borrower.release()
    assert serving.fenced == 2


def test_serving_leaves_what_it_can_spare_to_a_borrower_that_wishes_for_it(tmp_path: Path) -> None:
    """A step follows upon the other, so a borrower must be left time to take its turn."""
    serving, borrower = ServingToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 0.1)
    taken: list[bool] = []

    def borrow() -> None:
        while not taken:
            if borrower.try_take(time.monotonic() + 5):
                taken.append(borrower.look().wants or True)
                time.sleep(0.01)
                borrower.release()

    def serve(until: float) -> None:
        while not taken and time.monotonic() < until:
            serving.publish(ServingView(2, 0, time.monotonic() + 10), KVView(), 0.1)
            serving.acquire()
            serving.release()

    borrower.wish(0.5)
    thread = threading.Thread(target=borrow)
    thread.start()
    try:
        serve(time.monotonic() + 30)
    finally:
        taken.append(False)
        thread.join()
    assert taken[0] and serving.fenced == 0
    # Nothing is left to one that does not wish, nor while serving has nothing to spare.
    for wish, view in (
        (0.0, ServingView(2, 0, math.inf)),
        (0.5, ServingView(2, 1, math.inf)),
        (0.5, ServingView(2, 0, 0.0)),
    ):
        borrower.wish(wish)
        serving.publish(view, KVView(), 0.1)
        assert not serving.can_spare()


def test_a_step_that_can_wait_is_put_off_after_one_grant(tmp_path: Path) -> None:
    """Who came meanwhile has to be said before another grant may follow."""
    serving, borrower = ServingToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 0.1)
    lender = LenderToken(tmp_path / "device")

    def borrow() -> None:
        while not borrower.look().wants:
            time.sleep(0.001)
        borrower.release()

    for lease, spare, put_off in ((math.inf, 100.0, True), (math.inf, 0.1, False), (0.0, 100.0, False)):
        lender.extend(lease)
        borrower.wish(10.0)
        serving.publish(ServingView(2, 0, time.monotonic() + spare), KVView(), 0.1)
        assert borrower.try_take(time.monotonic() + 60)
        thread = threading.Thread(target=borrow)
        thread.start()
        assert serving.acquire() is not put_off
        thread.join()
        assert serving.lent and serving.fenced == 0
        serving.release()
    lender.close()


def test_a_borrower_that_overstays_learns_it(tmp_path: Path) -> None:
    serving, borrower = ServingToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 0.1)
    assert borrower.try_take(time.monotonic() + 5)
    borrower.shorten(time.monotonic() - 1)
    serving.acquire()
    with pytest.raises(FencedError, match="the grant was over"):
        borrower.release()
    serving.release()
    assert borrower.try_take(time.monotonic() + 1)
    borrower.release()  # within its grant


def test_the_agent_says_that_a_borrower_which_was_killed_has_no_memory(tmp_path: Path) -> None:
    serving, borrower = ServingToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 0.1)
    lender = LenderToken(tmp_path / "device")
    borrower.say_kv(asked=250, held=200)
    lender.borrower_gone()
    assert (serving.kv_asked, serving.kv_held) == (0, 0)


def test_a_server_that_comes_back_goes_on_with_the_same_borrower(tmp_path: Path) -> None:
    first = ServingToken(tmp_path / "device")
    borrower = BorrowerToken(tmp_path / "device", 0.1)
    first.publish(ServingView(3, 1, 9.0), KVView(), 0.1)
    first.close()
    again = ServingToken(tmp_path / "device")
    assert borrower.look().view.live == 0
    again.publish(ServingView(1, 1, math.inf), KVView(), 0.1)
    assert borrower.look().view.live == 1


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LendingError, match="start the serving engine with LendingScheduler"):
        BorrowerToken(tmp_path / "device", 0.1)
    serving = ServingToken(tmp_path / "device")
    first = BorrowerToken(tmp_path / "device", 0.1)
    with pytest.raises(LendingError, match="another borrower has this device"):
        BorrowerToken(tmp_path / "device", 0.1)
    first.close()
    BorrowerToken(tmp_path / "device", 0.1).close()
    serving.close()
    write_own(tmp_path / "other", b"not a page")
    with pytest.raises(LendingError, match="10 bytes, but a device's page has 4096"):
        BorrowerToken(tmp_path / "other", 0.1)
    with pytest.raises(LendingError, match="10 bytes, but a device's page has 4096"):
        ServingToken(tmp_path / "other")
    with pytest.raises(ValueError, match="a pace of 0 s"):
        BorrowerToken(tmp_path / "device", 0.0)
    write_own(tmp_path / "zeros", b"x" * 4096)
    with pytest.raises(LendingError, match="not a device's page"):
        ServingToken(tmp_path / "zeros")


def write_own(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def strangers(path: Path) -> None:
    os.chown(path, 65_534, -1)


def by_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def by_two_names(path: Path) -> None:
    path.with_name("another").hardlink_to(path)


def as_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("prepared", "why"),
    [
        (strangers, "it belongs to user 65534; use a file in a directory of your own"),
        (by_a_link, "is a symbolic link; name the file itself"),
        (by_two_names, "it has 2 names; use a file in a directory of your own"),
        (as_a_fifo, "it is not a regular file; use a file in"),
        (lambda path: path.chmod(0o666), r"other users may open it \(mode 0666\); use a file in"),
    ],
)
def test_a_page_that_another_user_prepared_is_not_taken(
    tmp_path: Path, prepared: Callable[[Path], None], why: str
) -> None:
    if prepared is strangers and os.geteuid():
        pytest.skip("only root can give files away")
    device = tmp_path / "device"
    ServingToken(device).close()
    prepared(device)
    for kind in (ServingToken, LenderToken, lambda path: BorrowerToken(path, 0.1)):
        with pytest.raises(LendingError, match=why):
            kind(device)


def test_a_device_is_lent_once_and_nothing_is_made_beside_its_page(tmp_path: Path) -> None:
    device, victim = tmp_path / "device", tmp_path / "victim"
    serving = ServingToken(device)
    (tmp_path / "device.lender").symlink_to(victim)  # a stranger's
    lender = LenderToken(device)
    assert not victim.exists()
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(LendingError, match="another agent lends this device; end that agent first"):
        LenderToken(tmp_path / "again" / "device")
    lender.close()
    LenderToken(device).close()
    serving.close()


@pytest.mark.parametrize("expires", [math.inf, math.nan, 1e18])
def test_serving_waits_seconds_at_most_whatever_the_page_says(tmp_path: Path, expires: float) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.1
        return now

    serving = ServingToken(tmp_path / "device", clock=clock)
    borrower = BorrowerToken(tmp_path / "device", 0.1)
    assert borrower.try_take(expires)
    assert serving.acquire() and serving.fenced == 1
    assert now < 7


FULL = """
import sys
from pathlib import Path
from libra.lend.backend.device_page import LendingError
from libra.lend.backend.serving_token import ServingToken
try:
    ServingToken(Path(sys.argv[1])).acquire()
except LendingError as error:
    print(error)
"""


def test_a_full_disk_is_told_before_anything_is_shared(tmp_path: Path) -> None:
    """Not by a page that cannot be written to when it is first touched."""
    unshare = [shutil.which("unshare") or "false", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let its users mount a small disk")
    fill = 'mount -t tmpfs -o size=4k full "$0" && head -c 4096 /dev/zero > "$0/all" && exec "$@"'
    command = [sys.executable, "-c", FULL, str(tmp_path / "device")]
    made = subprocess.run([*unshare, "sh", "-c", fill, str(tmp_path), *command], capture_output=True, text=True)
    said = f"{tmp_path / 'device'}: No space left on device; give a file on a disk with 4096 bytes free\n"
    assert (made.returncode, made.stdout, made.stderr) == (0, said, "")
